"""Strict validation of manifests: Kubernetes' own schemas, and condensed ones of custom resources."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

NEWEST = "1.37"
_CUSTOM: dict[str, Any] = json.loads(Path(__file__).with_name("custom_resources.json").read_text())


def validate(each: dict[str, Any], version: str = NEWEST) -> None:
    """Raises at a field that its kind does not have, or a value that it does not take."""
    schema = _CUSTOM["kinds"].get(f"{each['apiVersion']}/{each['kind']}")
    if schema:
        _Validator({"$defs": _CUSTOM["$defs"], **schema}).validate(each)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own dependencies
        import kubernetes_validate

        kubernetes_validate.validate(each, version, strict=True)


def _embeds(validator: Any, what: str, found: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """A template inside a custom resource is as strictly looked at as one of a Job."""
    spec = found["spec"] if what == "job" else {"template": {**found, "spec": _never(found["spec"])}}
    try:
        validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inside"}, "spec": spec})
    except Exception as error:  # of either validator
        yield jsonschema.ValidationError(str(error))


def _never(pod: Any) -> Any:
    return {"restartPolicy": "Never", **pod}  # an operator fills it in


def _container(validator: Any, name: str, found: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if name not in [each["name"] for each in found["spec"]["containers"]]:
        yield jsonschema.ValidationError(f"no container is called {name}")


_Validator: Any = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"x-embeds": _embeds, "x-container": _container}
)


def restricted(pod: dict[str, Any]) -> list[str]:
    """What Pod Security's level `restricted` has against a pod."""
    said = [f"{name} is the host's" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    allowed = {"name", "configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret", "projected"}
    said += [f"volume {volume['name']}" for volume in pod["volumes"] if not set(volume) <= allowed]
    for each in [*pod.get("initContainers", []), *pod["containers"]]:
        own = {**pod.get("securityContext", {}), **each.get("securityContext", {})}
        capabilities = own.get("capabilities", {})
        rules = {
            "may gain privileges": own.get("allowPrivilegeEscalation") is not False,
            "is root": not own.get("runAsNonRoot") or own.get("runAsUser") == 0,
            "has capabilities": capabilities.get("drop") != ["ALL"] or bool(capabilities.get("add")),
            "has no seccomp profile": own.get("seccompProfile", {}).get("type") != "RuntimeDefault",
            "is privileged": bool(own.get("privileged")),
        }
        said += [f"{each['name']} {rule}" for rule, broken in rules.items() if broken]
    return said

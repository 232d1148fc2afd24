"""YAML and JSON files: the one home of PyYAML."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stoker.errors import UsageError, require

# kubectl takes 3e-4 for a number and y for a boolean; to PyYAML, which writes them, both are text.
_TAKEN_FOR_OTHER = re.compile(r"^[-+]?\.?[0-9]|^[yYnN]$")


def read_document(path: Path) -> dict[str, Any]:
    """The object a .yaml, .yml or .json file holds."""
    try:
        text = path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="check its name") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: {error.reason}", hint="see docs/guides/plan.md"
        ) from error
    read = _read_json if path.suffix == ".json" else _read_yaml
    found = read(text, path)
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no keys and values", hint="write lines such as `nodes: 16`")
    return found


def dump_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Documents one after another, keys in their order, text of several lines as a block."""
    yaml = require("yaml", extra="deploy")

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else "'" if _TAKEN_FOR_OTHER.match(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    def indent(dumper: Any, flow: bool = False, indentless: bool = False) -> Any:
        return yaml.SafeDumper.increase_indent(dumper, flow, False)  # lists stand under their key

    dumper_class: Any = type("Dumper", (yaml.SafeDumper,), {"increase_indent": indent})  # PyYAML has no types
    dumper_class.add_representer(str, text)
    dumped = [yaml.dump(dict(one), Dumper=dumper_class, sort_keys=False, width=110) for one in documents]
    return "---\n".join(dumped)


def _read_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint="see docs/guides/plan.md") from error


def _read_yaml(text: str, path: Path) -> Any:
    yaml = require("yaml", extra="deploy")
    try:
        if isinstance(node := yaml.compose(text, Loader=yaml.SafeLoader), yaml.MappingNode):
            _once([(key.value, None) for key, _ in node.value if isinstance(key.value, str)])
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError) as error:  # a date such as 2026-13-01 is a ValueError
        said = " ".join(str(error).split())
        raise UsageError(f"{path} is not YAML: {said}", hint="see docs/guides/plan.md") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Both formats would let the last of two equal names win without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice} stands there twice")
    return found

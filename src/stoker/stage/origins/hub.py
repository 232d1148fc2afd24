"""Hugging Face hub: a repository, `hf://[datasets/|spaces/]ORG/NAME[@REVISION][/SUBPATH]`.

The listing, the token and the endpoint are huggingface_hub's (HF_TOKEN, HF_ENDPOINT as it reads them);
the bytes come over our own wire. A revision is turned into a commit first, so that all files are of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from stoker.errors import AbsentError, StorageError, UsageError, require
from stoker.stage.origins.origin import Collection, RemoteFile
from stoker.stage.wire.http import Address

_KINDS = {"datasets": "dataset", "spaces": "space", "models": "model"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubPath:
    """A place in a hub."""

    kind: str  # "model" | "dataset" | "space"
    repo: str
    revision: str = ""
    path: str = ""

    @property
    def url(self) -> str:
        kind = "" if self.kind == "model" else f"{self.kind}s/"
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"hf://{kind}{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


def parse_hub(url: str) -> HubPath:
    """The place that an `hf://` URL names; a revision with a slash in it is written with %2F."""
    parts = url.removeprefix("hf://").strip("/").split("/")
    kind = _KINDS[parts.pop(0)] if parts[0] in _KINDS else "model"
    if not all(parts[:2]) or not parts:
        raise UsageError(
            f"{url} names no repository",
            hint="write hf://ORG/NAME or hf://datasets/ORG/NAME[@REVISION][/FOLDER]",
        )
    # the oldest repositories have no organisation: hf://gpt2; they are named alone, as a whole
    depth = 1 if len(parts) == 1 or "@" in parts[0] else 2
    name, _, revision = "/".join(parts[:depth]).partition("@")
    return HubPath(kind=kind, repo=name, revision=unquote(revision), path="/".join(parts[depth:]))


def list_hub(url: str) -> Collection:
    """The files of a repository, or of a folder of it, at one commit."""
    place, hub = parse_hub(url), require("huggingface_hub")
    api = hub.HfApi(library_name="stoker")
    try:
        commit = api.repo_info(place.repo, repo_type=place.kind, revision=place.revision or None).sha
        tree = api.list_repo_tree(place.repo, repo_type=place.kind, revision=commit, recursive=True)
        entries = [entry for entry in tree if isinstance(entry, hub.hf_api.RepoFile)]
    except (*hub.errors.HfHubHTTPError.__bases__, OSError, ValueError) as error:
        raise _refused(url, error) from error  # also what its HTTP client raises, whichever that is
    prefix = f"{place.path}/" if place.path else ""
    files = tuple(
        _remote(
            place, commit, entry, name=entry.path.removeprefix(prefix) if entry.path != place.path else ""
        )
        for entry in entries
        if entry.path == place.path or entry.path.startswith(prefix)
    )
    if not files:
        raise AbsentError(f"there is nothing at {url}", hint="check the folder's name in the repository")
    return Collection(url=url, kind="hub", files=files, revision=commit)


def hub_address(url: str) -> Address:
    """Where a file's bytes are asked for; the hub redirects from there to where they lie."""
    hub, place = require("huggingface_hub"), parse_hub(url)
    where = hub.hf_hub_url(place.repo, place.path, repo_type=place.kind, revision=place.revision)
    token = hub.get_token()
    return Address(url=where, headers=(("Authorization", f"Bearer {token}"),) if token else ())


def _remote(place: HubPath, commit: str, entry: Any, *, name: str) -> RemoteFile:
    """Large files are known by their sha256, the others by the hash that git gives them."""
    one = HubPath(kind=place.kind, repo=place.repo, revision=commit, path=entry.path)
    digest = f"sha256:{entry.lfs.sha256}" if entry.lfs else f"sha1git:{entry.blob_id}"
    return RemoteFile(
        name=name or entry.path.rpartition("/")[2],
        url=one.url,
        bytes=entry.size,
        version=digest.partition(":")[2],
        digest=digest,
    )


def _refused(url: str, error: Exception) -> StorageError:
    return StorageError(
        f"cannot list {url}: {str(error).splitlines()[0] if str(error) else error!r}",
        hint="check the name and the revision, HF_TOKEN for a private or gated repository, and HF_ENDPOINT",
    )

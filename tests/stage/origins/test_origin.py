"""What folders and lists of files can be staged."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stoker.errors import BadManifestError, StorageError, UsageError
from stoker.stage.origins.hub import HubPath, parse_hub
from stoker.stage.origins.origin import Collection, RemoteFile, resolve

if TYPE_CHECKING:
    from pathlib import Path


def collection(*names: str) -> Collection:
    files = tuple(RemoteFile(name=name, url=f"s3://bucket/{name}", bytes=1) for name in names)
    return Collection(url="s3://bucket", kind="folder", files=files)


@pytest.mark.parametrize(
    "name", ["", "/a", "a//b", "a/../b", "..", ".", "a/./b", "a\0b", "x" * 256, "ü" * 128]
)
def test_a_name_that_cannot_be_a_file_is_refused(name: str) -> None:
    with pytest.raises(StorageError, match="cannot be the name of a file"):
        collection("good", name)


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a/b"), ("a", "a.b", "a/b")])
def test_a_file_that_is_also_a_folder_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(StorageError, match="both as a file and as a folder"):
        collection(*names)


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(StorageError, match="'a' twice"):
        collection("a", "a")


@pytest.mark.parametrize("name", ["...", "a b", "x" * 255, "-rf", "a\\b", "ü/ö", "a\nb"])
def test_odd_names_are_names(name: str) -> None:
    assert collection(name).files[0].name == name


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"22")
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "empty").mkdir()
    found = resolve(str(tmp_path))
    assert (found.kind, sum(file.bytes for file in found.files)) == ("folder", 3)
    assert [(file.name, file.url) for file in found.files] == [
        ("a", str(tmp_path / "a")),
        ("sub/b", str(tmp_path / "sub" / "b")),
    ]


def test_folders_that_are_links_belong_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "elsewhere/deep/b").write_bytes(b"22")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a").write_bytes(b"1")
    (tmp_path / "folder/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/deep/back").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder/here").symlink_to(".")
    assert [file.name for file in resolve(str(tmp_path / "folder")).files] == ["a", "link/deep/b"]


def test_a_file_is_itself(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (file,) = resolve((tmp_path / "a").as_uri()).files
    assert (file.name, file.url, file.bytes) == ("a", str(tmp_path / "a"), 1)
    assert file.version == str((tmp_path / "a").stat().st_mtime_ns)


@pytest.mark.parametrize("make", ["mkdir", "nothing"])
def test_nothing_to_stage_is_told(make: str, tmp_path: Path) -> None:
    if make == "mkdir":
        (tmp_path / "x").mkdir()
    with pytest.raises(StorageError, match="there is nothing at"):
        resolve(str(tmp_path / "x"))


def test_a_torn_manifest_is_told(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"version": 1, "shards": [{"name": "sha')
    with pytest.raises(BadManifestError, match=r"/manifest\.json cannot be read"):
        resolve(str(tmp_path))


def test_what_lives_in_memory_cannot_be_staged() -> None:
    with pytest.raises(UsageError, match="memory://x"):
        resolve("memory://x")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("hf://org/name", HubPath(kind="model", repo="org/name")),
        ("hf://models/org/name/", HubPath(kind="model", repo="org/name")),
        ("hf://datasets/org/name@v1.0", HubPath(kind="dataset", repo="org/name", revision="v1.0")),
        (
            "hf://org/name@refs%2Fpr%2F1/a/b",
            HubPath(kind="model", repo="org/name", revision="refs/pr/1", path="a/b"),
        ),
    ],
)
def test_a_place_in_a_hub(url: str, place: HubPath) -> None:
    assert parse_hub(url) == place
    assert parse_hub(place.url) == place


@pytest.mark.parametrize("url", ["hf://", "hf://datasets/"])
def test_a_hub_without_a_repository_is_told(url: str) -> None:
    with pytest.raises(UsageError, match="names no repository"):
        resolve(url)


def test_what_is_no_file_is_left_out_and_named(tmp_path):
    folder = tmp_path / "origin"
    folder.mkdir()
    (folder / "file").write_bytes(b"x")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    found = resolve(str(folder))
    assert [file.name for file in found.files] == ["file"]
    assert found.left_out == ("gone (a link to nothing)", "pipe (no plain file)")


def test_a_name_that_no_file_can_have_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StorageError, match=r"'\\ud800', which cannot be the name of a file"):
        Collection(url="x", kind="dataset", files=(RemoteFile(name="\ud800", url="x", bytes=1),))


@pytest.mark.parametrize(
    ("url", "repo", "revision", "path"),
    [
        ("hf://gpt2", "gpt2", "", ""),
        ("hf://gpt2@v1", "gpt2", "v1", ""),
        ("hf://datasets/squad", "squad", "", ""),
        ("hf://org/name@v1/sub", "org/name", "v1", "sub"),
    ],
)
def test_the_oldest_repositories_have_no_organisation(url, repo, revision, path):
    place = parse_hub(url)
    assert (place.repo, place.revision, place.path) == (repo, revision, path)
    assert parse_hub(place.url) == place

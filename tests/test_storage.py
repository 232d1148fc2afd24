"""Stores: files appear whole or not at all, and what cannot be reached is said."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker.errors import ChangedError, StorageError, UsageError
from stoker.storage import Entry, join_url, local_path, new_file, open_store, split_url


def paths(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["local", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kinds = {"local": str(tmp_path), "file": tmp_path.as_uri(), "memory": f"memory://{tmp_path.name}"}
    return kinds[request.param]


def test_what_is_written_is_read_back(url: str) -> None:
    open_store(url).write("a/b.bin", b"content")
    with open_store(url).open("a/b.bin") as file:
        assert file.read() == b"content"


def test_a_file_can_be_written_from_a_file(url: str, tmp_path: Path) -> None:
    source = tmp_path.parent / f"{tmp_path.name}-source"
    source.write_bytes(b"x" * 100_000)
    open_store(url).write("copy", source)
    assert open_store(url).stat("copy").bytes == 100_000


def test_listing_is_sorted_and_goes_into_folders(url: str) -> None:
    store = open_store(url)
    for name in ("b", "a/2", "a/1", "c/d/e"):
        store.write(name, b"")
    assert sorted(entry.path for entry in store.list()) == ["a/1", "a/2", "b", "c/d/e"]


def test_listing_below_a_prefix_keeps_the_whole_path(url: str) -> None:
    store = open_store(url)
    store.write("a/1", b"12")
    store.write("b/1", b"")
    assert [(entry.path, entry.bytes) for entry in store.list("a")] == [("a/1", 2)]


def test_a_missing_file_is_named(url: str) -> None:
    with pytest.raises(StorageError, match="nowhere/x"):
        open_store(url).open("nowhere/x")


def test_a_missing_folder_lists_nothing(tmp_path: Path) -> None:
    assert list(open_store(tmp_path / "none").list()) == []


def test_the_version_of_a_file_changes_with_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write("x", b"1")
    before = store.stat("x").version
    while store.stat("x").version == before:  # until the clock of the filesystem has moved
        store.write("x", b"2")
    assert store.stat("x") == Entry(path="x", bytes=1, version=store.stat("x").version)


def test_a_listing_does_not_follow_links_out_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/a").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/latest").symlink_to(tmp_path / "elsewhere")
    assert list(open_store(tmp_path / "folder").list()) == []


def test_an_object_that_is_replaced_is_not_read_as_one_with_its_successor() -> None:
    versions = [bytes([n]) * (10 << 20) for n in (1, 2)]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            data, tag = versions[0], f'"{versions[0][0]}"'
            changed = self.headers.get("If-Match", tag) != tag
            start, _, end = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")
            body = b"" if changed else data[int(start) : int(end) + 1 if end else None]
            self.send_response(412 if changed else 206 if "Range" in self.headers else 200)
            self.send_header("ETag", tag)
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(data)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        with open_store(f"http://127.0.0.1:{server.server_port}").open("x") as file:
            assert file.read(5) == versions[0][:5]
            del versions[0]
            with pytest.raises(ChangedError, match="changed while it was read"):
                file.read()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown scheme 'gopher'") as caught:
        open_store("gopher://hole/1")
    assert "s3" in caught.value.hint


def test_a_half_written_file_is_not_visible(tmp_path: Path) -> None:
    with new_file(tmp_path / "shard.bin") as file:
        file.write(b"half")
        file.flush()
        assert [name for name in paths(tmp_path) if not name.startswith(".")] == []


def test_a_written_file_leaves_no_temporary_one(tmp_path: Path) -> None:
    with new_file(tmp_path / "shard.bin") as file:
        file.write(b"whole")
    assert paths(tmp_path) == ["shard.bin"]


def fail_in_the_middle(path: Path) -> None:
    with new_file(path) as file:
        file.write(b"half")
        raise RuntimeError


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        fail_in_the_middle(tmp_path / "shard.bin")
    assert paths(tmp_path) == []


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "shard.bin").write_bytes(b"before")
    with pytest.raises(RuntimeError):
        fail_in_the_middle(tmp_path / "shard.bin")
    assert (tmp_path / "shard.bin").read_bytes() == b"before"


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        open_store(tmp_path / "file" / "below").write("x", b"")


def test_an_error_names_the_credentials_of_its_own_store() -> None:
    with pytest.raises(StorageError) as caught:
        open_store("az://container")
    assert "AZURE_STORAGE_ACCOUNT_NAME" in caught.value.hint
    with pytest.raises(StorageError) as caught:
        open_store("http://[no-address/")
    assert "AWS" not in caught.value.hint


def test_a_tilde_is_the_home_folder_as_in_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [local_path(text) for text in ("~", "~/a", "b/~", "~c")] == [
        tmp_path,
        tmp_path / "a",
        Path("b/~"),
        Path("~c"),
    ]


def test_a_file_url_is_unquoted() -> None:
    assert local_path("file:///a%20b/c") == Path("/a b/c")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b.jsonl", ("s3://bucket/a", "b.jsonl")),
        ("b.jsonl", (".", "b.jsonl")),
        ("/b.jsonl", ("/", "b.jsonl")),
        ("a/b.jsonl", ("a", "b.jsonl")),
    ],
)
def test_a_url_splits_into_folder_and_name(url: str, parts: tuple[str, str]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize("base", ["s3://bucket/a", "s3://bucket/a/"])
def test_joining_puts_one_slash(base: str) -> None:
    assert join_url(base, "b") == "s3://bucket/a/b"

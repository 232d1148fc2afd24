"""Small files that travel together: whatever a server answers, they come out as if asked for one by one."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_server import Server, answering, plain

from stoker.errors import BadShardError, ChangedError, StorageError
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.wire import client, dial, flight
from stoker.stage.wire.secure import can_lend_tls
from stoker.stage.wire.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BODY = bytes(range(256)) * 40


def in_chunks(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (7, body[:7], len(body) - 7, body[7:])


# What a server may answer before it answers as it should; `True`: it closes the connection then.
ODD: dict[str, tuple[bytes, bool]] = {
    "busy": (b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", False),
    "in chunks": (in_chunks(BODY), False),
    "without a length": (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, True),
    "of HTTP/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, True),
    "and goodbye": (plain(BODY, more="Connection: close\r\n"), True),
    "with a long head": (plain(BODY, more=f"X-Long: {'x' * 9000}\r\n"), False),
    "after an early hint": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + plain(BODY), False),
    "cut within the head": (plain(BODY)[:30], True),
    "cut within the body": (plain(BODY)[:3000], True),
    "nothing": (b"", True),
    "elsewhere": (b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", False),
}


def files_at(server: Server, count: int, *, size: int = len(BODY), version: str = "") -> list[RemoteFile]:
    return [
        RemoteFile(name=f"{n}", url=f"{server.url}/{n}", bytes=size, version=version) for n in range(count)
    ]


def fetch(files: Sequence[RemoteFile], **options: float) -> dict[str, bytes]:
    got: dict[str, bytes] = {}

    def deliver(landed: Sequence[tuple[RemoteFile, memoryview]]) -> None:
        for file, data in landed:
            assert file.name not in got, "every file once"
            got[file.name] = bytes(data)

    with Wire(**options) as wire:
        wire.fetch_small(files, deliver=deliver)
    return got


@pytest.fixture(params=["native", "python", "native over TLS", "python over TLS"], autouse=True)
def _way(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    skip_or_fail: Callable[[str], None],
) -> None:
    """With the extension, and as where there is no compiler; in clear and secured."""
    if request.param.endswith("TLS"):
        trusted, chain = request.getfixturevalue("authority")
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        monkeypatch.setattr(Server, "chain", chain)
    if request.param.startswith("python"):
        monkeypatch.setattr(flight, "native", lambda name: None)
        for module in (client, dial):
            monkeypatch.setattr(module, "tls_handle", lambda plug: 0)
    elif flight.native("stage.wire._flight") is None:
        skip_or_fail("the extension was not built: install a C compiler, then `make venv`")


def test_secured_sockets_are_read_in_c_on_this_python() -> None:
    assert can_lend_tls()


def test_plain_answers_are_asked_for_once() -> None:
    bodies = {f"/{n}": os.urandom(n * 97 % 5000 + 1) for n in range(300)}
    with answering(lambda path, times: (plain(bodies[path]), False)) as server:
        files = [
            RemoteFile(name=path, url=server.url + path, bytes=len(body)) for path, body in bodies.items()
        ]
        assert fetch(files) == bodies
        assert set(server.asked.values()) == {1}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_answer_costs_another_question_at_most(kind: str) -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return ODD[kind] if path == "/7" and times == 1 else (plain(BODY), False)

    with answering(answer) as server:
        assert fetch(files_at(server, 100)) == {f"{n}": BODY for n in range(100)}


@pytest.mark.parametrize(
    "kind", sorted(set(ODD) - {"busy", "cut within the head", "cut within the body", "nothing"})
)
def test_a_server_that_is_always_odd_is_understood(kind: str) -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return (plain(BODY), False) if path == "/elsewhere" else ODD[kind]

    with answering(answer) as server:
        assert fetch(files_at(server, 40)) == {f"{n}": BODY for n in range(40)}


@settings(max_examples=15)
@given(st.lists(st.sampled_from(["", *ODD]), min_size=1, max_size=60))
def test_any_mixture_of_answers_brings_every_file(kinds: list[str]) -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        kind = kinds[int(path[1:])] if times == 1 and path != "/elsewhere" else ""
        return ODD[kind] if kind else (plain(BODY), False)

    with answering(answer) as server:
        assert fetch(files_at(server, len(kinds))) == {f"{n}": BODY for n in range(len(kinds))}


def test_a_reset_is_asked_again() -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return (plain(BODY)[:5000], True) if times == 1 and int(path[1:]) % 5 == 0 else (plain(BODY), False)

    with answering(answer) as server:
        assert fetch(files_at(server, 60)) == {f"{n}": BODY for n in range(60)}


@pytest.mark.parametrize("size", [len(BODY) - 1, len(BODY) + 1])
def test_another_length_is_a_change(size: int) -> None:
    with answering(lambda path, times: (plain(BODY), False)) as server, pytest.raises(ChangedError):
        fetch(files_at(server, 20, size=size))


def test_more_than_was_said_is_never_taken_for_the_next_answer() -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool]:
        return plain(BODY) + plain(b"x" * len(BODY)), False

    with answering(answer) as server, suppress(StorageError):
        assert set(fetch(files_at(server, 3), patience_s=1).values()) == {BODY}


def test_another_etag_is_a_change() -> None:
    answer = (plain(BODY, more='ETag: "new"\r\n'), False)
    with answering(lambda path, times: answer) as server, pytest.raises(ChangedError, match='"new"'):
        fetch(files_at(server, 20, version='"old"'))


def test_the_etag_that_was_listed_is_no_change() -> None:
    with answering(lambda path, times: (plain(BODY, more='etag: "old" \r\n'), False)) as server:
        assert len(fetch(files_at(server, 20, version='"old"'))) == 20
        assert set(server.asked.values()) == {1}


def test_a_silent_server_is_asked_again() -> None:
    def answer(path: str, times: int) -> tuple[bytes, bool] | None:
        return None if path == "/3" and times == 1 else (plain(BODY), False)

    with answering(answer) as server:
        assert len(fetch(files_at(server, 20), timeout_s=0.3)) == 20


def test_what_takes_the_files_may_refuse_them() -> None:
    def refuse(landed: Sequence[tuple[RemoteFile, memoryview]]) -> None:
        raise BadShardError("not these", hint="others")

    with (
        answering(lambda path, times: (plain(BODY), False)) as server,
        Wire() as wire,
        pytest.raises(BadShardError, match="not these"),
    ):
        wire.fetch_small(files_at(server, 50), deliver=refuse)


def test_a_wire_that_is_closed_waits_for_no_answer() -> None:
    waiting = threading.Event()

    def answer(path: str, times: int) -> None:
        waiting.set()

    with answering(answer) as server, Wire() as wire, ExitStack() as stack:
        closer = threading.Thread(target=lambda: (waiting.wait(), wire.close()))
        closer.start()
        stack.callback(closer.join)
        with pytest.raises(StorageError, match="closed"):
            wire.fetch_small(files_at(server, 50), deliver=lambda landed: None)


def test_a_process_that_may_open_few_files_is_content_with_few_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect, asked = dial.begin_another, Counter[str]()

    def connect_twice(like: socket.socket, place: Any) -> socket.socket:
        asked["times"] += 1
        if asked["times"] > 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(like, place)

    monkeypatch.setattr(dial, "begin_another", connect_twice)
    with answering(lambda path, times: (plain(BODY), False)) as server:
        assert len(fetch(files_at(server, 100))) == 100

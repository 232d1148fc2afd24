"""The wire against real servers: what networks, servers and other people do to a download."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from faults import Fault, FaultyProxy, faulty
from s3_server import S3Server, serve

from stoker.errors import ChangedError, StorageError
from stoker.stage.origins.origin import RemoteFile, resolve
from stoker.stage.wire.wire import SLICE_BYTES, Wire
from stoker.storage import ObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("credentials")]

MIB = 1 << 20
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Memory:
    """A sink that remembers, and complains about what a sink need not take."""

    def __init__(self, count: int) -> None:
        self.data = bytearray(count)
        self.landed = 0
        self._lock = threading.Lock()

    def write(self, offset: int, data: memoryview) -> None:
        assert 0 < len(data) <= SLICE_BYTES
        assert offset // SLICE_BYTES == (offset + len(data) - 1) // SLICE_BYTES
        with self._lock:
            self.data[offset : offset + len(data)] = data
            self.landed += len(data)


@pytest.fixture
def wire() -> Iterator[Wire]:
    with Wire(timeout_s=2) as wire:
        yield wire


@pytest.fixture
def disturbed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The S3 server with faults before it: `with disturbed(lambda number, head: Fault(...)) as proxy`."""

    @contextmanager
    def start(faults: Callable[[int, str], Fault | None]) -> Iterator[FaultyProxy]:
        with faulty(s3.endpoint, faults) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            yield proxy

    return start


def put(path: Path, count: int) -> bytes:
    data = os.urandom(count)
    path.write_bytes(data)
    return data


def fetch(wire: Wire, file: RemoteFile) -> bytes:
    sink = Memory(file.bytes)
    wire.fetch(file, missing=[(0, file.bytes)], sink=sink)
    assert sink.landed == file.bytes, "every byte once"
    return bytes(sink.data)


def fetch_small(wire: Wire, files: tuple[RemoteFile, ...]) -> dict[str, bytes]:
    got: dict[str, bytes] = {}
    wire.fetch_small(
        files, deliver=lambda landed: got.update((file.name, bytes(data)) for file, data in landed)
    )
    return got


def the_file(url: str) -> RemoteFile:
    (file,) = resolve(url).files
    return file


def nth(*numbers: int, fault: Fault) -> Callable[[int, str], Fault | None]:
    return lambda number, head: fault if number in numbers else None


# --- what should just work ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, MIB - 1, MIB, MIB + 1, 40 * MIB + 17])
def test_an_object_arrives_as_it_is(count: int, bucket: Path, wire: Wire) -> None:
    data = put(bucket / "x", count)
    assert fetch(wire, the_file("s3://bucket/x")) == data


def test_only_what_is_missing_is_asked_for(bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 9 * MIB)
    with disturbed(lambda number, head: None) as proxy:
        file, sink = the_file("s3://bucket/x"), Memory(9 * MIB)
        wire.fetch(file, missing=[(5, 9), (2 * MIB, 3 * MIB + 1), (4, 4)], sink=sink)
    assert sink.data[5:9] == data[5:9]
    assert sink.data[2 * MIB : 3 * MIB + 1] == data[2 * MIB : 3 * MIB + 1]
    assert sink.landed == 4 + MIB + 1
    asked = sorted(line for head in proxy.requests for line in head.split("\r\n") if line.startswith("Range"))
    assert asked == [f"Range: bytes={2 * MIB}-{3 * MIB}", "Range: bytes=5-8"]


def test_small_objects_arrive_each_once(bucket: Path, wire: Wire) -> None:
    files = {f"{number:04d}": os.urandom(1 + number * 7) for number in range(300)} | {"empty": b""}
    for name, data in files.items():
        (bucket / name).write_bytes(data)
    assert fetch_small(wire, resolve("s3://bucket").files) == files


def test_connections_are_used_again(bucket: Path, disturbed: Any, wire: Wire) -> None:
    for number in range(400):
        (bucket / f"{number:04d}").write_bytes(b"x")
    with disturbed(lambda number, head: None) as proxy:
        files = resolve("s3://bucket").files
        before = proxy.connections
        fetch_small(wire, files)
        assert proxy.connections - before <= 64


def test_many_fetches_share_the_wire(bucket: Path, wire: Wire) -> None:
    data = {f"{number}": put(bucket / f"{number}", 3 * MIB + number) for number in range(8)}
    got: dict[str, bytes] = {}
    threads = [
        threading.Thread(target=lambda file=file: got.__setitem__(file.name, fetch(wire, file)))
        for file in resolve("s3://bucket").files
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == data


def test_an_object_that_was_uploaded_in_parts(bucket: Path, wire: Wire) -> None:
    import obstore
    from obstore.store import from_url

    data = os.urandom(11 * MIB)
    store = from_url("s3://bucket", client_options={"allow_http": True})
    obstore.put(store, "parts", data, chunk_size=5 * MIB, use_multipart=True)
    # rclone goes on naming the time at which the upload began, nginx names that of the file: if a second ends
    # between the two, the object has changed for ever. Under another name both look at the file.
    (bucket / "parts").rename(bucket / "whole")
    while "whole" not in {entry.path for entry in ObjectStore("s3://bucket").list()}:
        time.sleep(0.01)  # rclone remembers for a moment what the folder held
    assert fetch(wire, the_file("s3://bucket/whole")) == data


def test_the_bytes_counted_are_the_bytes_landed(bucket: Path, wire: Wire) -> None:
    put(bucket / "x", 3 * MIB + 5)
    counts: list[int] = []
    file = the_file("s3://bucket/x")
    wire.fetch(file, missing=[(0, file.bytes)], sink=Memory(file.bytes), on_bytes=counts.append)
    assert sum(counts) == file.bytes


def test_a_rate_limit_holds_over_all_lanes(bucket: Path) -> None:
    put(bucket / "x", 6 * MIB)
    with Wire(limit_rate=4 * MIB) as wire:
        started = time.monotonic()
        fetch(wire, the_file("s3://bucket/x"))
        assert time.monotonic() - started > 1.0  # 6 MiB at 4 MiB/s, of which the first slices are free


# --- what networks do -----------------------------------------------------------------------------


def test_a_reset_within_an_object_costs_no_byte_that_had_come(
    bucket: Path, disturbed: Any, wire: Wire
) -> None:
    data = put(bucket / "x", 24 * MIB)
    with disturbed(nth(0, 2, 3, fault=Fault(cut_after=2 * MIB + 1000))) as proxy:
        assert fetch(wire, the_file("s3://bucket/x")) == data
    # a reset throws away what the kernel had not handed over yet: on a busy machine nearly all, never all
    assert sum(proxy.sent) - 24 * MIB < 3 * (2 * MIB + 1000)


def test_resets_among_small_objects_lose_none(bucket: Path, disturbed: Any, wire: Wire) -> None:
    files = {f"{number:04d}": put(bucket / f"{number:04d}", 5000) for number in range(200)}
    with disturbed(lambda number, head: Fault(cut_after=100) if number % 20 == 7 else None):
        assert fetch_small(wire, resolve("s3://bucket").files) == files


def test_a_silent_server_is_asked_again(bucket: Path, disturbed: Any) -> None:
    data = put(bucket / "x", 2 * MIB)
    with disturbed(nth(0, fault=Fault(silent_after=MIB + 5))), Wire(timeout_s=0.3) as wire:
        assert fetch(wire, the_file("s3://bucket/x")) == data


def test_nobody_there_for_too_long_is_told(bucket: Path, disturbed: Any) -> None:
    put(bucket / "x", MIB)
    with (
        disturbed(lambda number, head: Fault(cut_after=0)),
        Wire(patience_s=0.5) as wire,
        pytest.raises(StorageError, match="s3://bucket/x brought nothing for 0 s") as caught,
    ):
        fetch(wire, the_file("s3://bucket/x"))
    assert "goes on where it ended" in caught.value.hint


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_given_time(status: int, bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 9 * MIB)
    with disturbed(nth(0, 1, 3, fault=Fault(status=status, body=SLOW_DOWN))):
        assert fetch(wire, the_file("s3://bucket/x")) == data


def test_a_server_that_says_when_is_not_asked_before(bucket: Path, disturbed: Any, wire: Wire) -> None:
    put(bucket / "x", 100)
    times: list[float] = []
    fault = Fault(status=503, headers=("Retry-After: 1",), before=lambda: times.append(time.monotonic()))
    note = Fault(before=lambda: times.append(time.monotonic()))
    with disturbed(lambda number, head: note if number else fault):
        fetch(wire, the_file("s3://bucket/x"))
    assert times[1] - times[0] >= 1.0


def test_a_throttled_server_is_waited_for(
    require_binary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {"rclone": require_binary("rclone"), "nginx": require_binary("nginx")}
    with serve(tmp_path, **programs, settings="limit_rate 2m;") as slow, Wire(connections=4) as wire:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.endpoint)
        data = put(slow.root / "bucket" / "x", 4 * MIB)
        assert fetch(wire, the_file("s3://bucket/x")) == data


# --- what servers do ------------------------------------------------------------------------------


def test_an_answer_of_all_bytes_is_streamed_once(bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 20 * MIB + 3)
    with disturbed(lambda number, head: Fault(drop=("range",))) as proxy:
        assert fetch(wire, the_file("s3://bucket/x")) == data
    assert len(proxy.requests) == 1


def test_a_server_without_ranges_can_still_complete_a_file(bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 5 * MIB)
    with disturbed(lambda number, head: Fault(drop=("range",), cut_after=None if number else 3 * MIB)):
        sink = Memory(5 * MIB)
        file = the_file("s3://bucket/x")
        wire.fetch(file, missing=[(MIB, 2 * MIB), (4 * MIB, 5 * MIB)], sink=sink)
    assert (sink.landed, sink.data[4 * MIB :]) == (2 * MIB, data[4 * MIB :])
    assert sink.data[MIB : 2 * MIB] == data[MIB : 2 * MIB]


def test_a_server_that_names_no_version_is_believed_by_size(bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 9 * MIB)
    with disturbed(lambda number, head: Fault(hide=("etag", "last-modified"))) as proxy:
        file = the_file(f"{proxy.endpoint}/bucket/x")
        assert (file.version, fetch(wire, file)) == ("", data)


def test_a_body_in_chunks_is_put_together(bucket: Path, disturbed: Any, wire: Wire) -> None:
    body = b"5;x=y\r\nabcde\r\n3\r\nfgh\r\n0\r\nTrailer: x\r\n\r\n"

    def raw(number: int, head: str) -> Fault:
        return Fault(status=200, headers=("Transfer-Encoding: chunked",), body=body)

    (bucket / "x").write_bytes(b"abcdefgh")
    with disturbed(raw):
        files = resolve("s3://bucket").files
        assert fetch_small(wire, files) == {"x": b"abcdefgh"}


def test_a_body_that_goes_on_is_noticed(bucket: Path, disturbed: Any, wire: Wire) -> None:
    longer = Fault(status=200, headers=("Transfer-Encoding: chunked",), body=b"9\r\nabcdefghi\r\n0\r\n\r\n")
    (bucket / "x").write_bytes(b"abcdefgh")
    with disturbed(lambda number, head: longer), pytest.raises(ChangedError, match="too long"):
        fetch(wire, the_file("s3://bucket/x"))


def test_a_redirect_is_followed_and_remembered(
    s3: S3Server, bucket: Path, disturbed: Any, wire: Wire
) -> None:
    data = put(bucket / "x", 30 * MIB)
    there = f"Location: {s3.endpoint}/bucket/x"
    with disturbed(lambda number, head: Fault(status=302, headers=(there,))) as proxy:
        file = RemoteFile(name="x", url=f"{proxy.endpoint}/moved", bytes=len(data))
        assert fetch(wire, file) == data
    assert len(proxy.requests) == 1


def test_a_redirect_that_ran_out_is_asked_for_anew(
    s3: S3Server, bucket: Path, disturbed: Any, wire: Wire
) -> None:
    data = put(bucket / "x", 30 * MIB)
    with disturbed(lambda number, head: Fault(status=403) if number == 2 else None) as store:
        there = f"Location: {store.endpoint}/bucket/x"
        with faulty(s3.endpoint, lambda number, head: Fault(status=302, headers=(there,))) as hub:
            file = RemoteFile(name="x", url=f"{hub.endpoint}/x", bytes=len(data), digest="xxh3:0")
            assert fetch(wire, file) == data
    assert len(hub.requests) >= 2


def test_a_store_that_cannot_sign_is_read_through_its_client(
    bucket: Path, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sign(self: ObjectStore, paths: object, **_: object) -> None:
        raise StorageError("this identity may not sign")

    monkeypatch.setattr(ObjectStore, "sign", sign)
    data = put(bucket / "x", 6 * MIB + 1)
    file = the_file("s3://bucket/x")
    assert fetch(wire, file) == data
    assert fetch_small(wire, (file,)) == {"x": data}
    with pytest.raises(ChangedError):
        fetch(wire, replace(file, version='"other"'))


def test_redirects_in_a_circle_are_told(disturbed: Any, wire: Wire) -> None:
    with disturbed(lambda number, head: Fault(status=302, headers=("Location: /again",))) as proxy:
        file = RemoteFile(name="x", url=f"{proxy.endpoint}/again", bytes=5)
        with pytest.raises(StorageError, match="redirects without end"):
            fetch(wire, file)


def test_a_signature_that_ran_out_is_renewed_once(bucket: Path, disturbed: Any, wire: Wire) -> None:
    data = put(bucket / "x", 100)
    expired = Fault(status=403, body=b"<Error><Code>AccessDenied</Code>Request has expired</Error>")
    with disturbed(nth(0, fault=expired)):
        assert fetch(wire, the_file("s3://bucket/x")) == data


def test_no_right_to_read_is_told(bucket: Path, disturbed: Any, wire: Wire) -> None:
    put(bucket / "x", 100)
    denied = Fault(status=403, body=b"<Error><Code>AccessDenied</Code></Error>")
    with disturbed(lambda number, head: denied) as proxy:
        file = the_file("s3://bucket/x")
        with pytest.raises(StorageError, match="s3://bucket/x: 403 AccessDenied") as caught:
            fetch(wire, file)
    assert (len(proxy.requests), "AWS_SECRET_ACCESS_KEY" in caught.value.hint) == (2, True)


def test_wrong_credentials_are_told(s3: S3Server, bucket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bucket / "x", 100)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="s3://bucket") as caught:
        resolve("s3://bucket/x")
    assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint


# --- what other people do -------------------------------------------------------------------------


def test_an_object_that_is_gone_is_named(bucket: Path, wire: Wire) -> None:
    put(bucket / "x", 100)
    file = the_file("s3://bucket/x")
    (bucket / "x").unlink()
    with pytest.raises(StorageError, match="s3://bucket/x does not exist"):
        fetch(wire, file)


@pytest.mark.parametrize("count", [24 * MIB, 24 * MIB - 1, 24 * MIB + 1, 5])
def test_an_object_replaced_within_the_download_is_noticed(
    count: int, bucket: Path, disturbed: Any, wire: Wire
) -> None:
    put(bucket / "x", 24 * MIB)

    def replace() -> None:
        (bucket / "new").write_bytes(os.urandom(count))
        later = time.time() + 5  # nginx makes its ETag of the size and the second of the change
        os.utime(bucket / "new", (later, later))
        (bucket / "new").rename(bucket / "x")

    with disturbed(nth(1, fault=Fault(before=replace))):
        file = the_file("s3://bucket/x")
        with pytest.raises(ChangedError, match="s3://bucket/x changed while it was read"):
            fetch(wire, file)


def test_an_etag_of_the_listing_is_insisted_on(bucket: Path, disturbed: Any, wire: Wire) -> None:
    put(bucket / "x", 100)
    with disturbed(lambda number, head: None) as proxy:
        file = RemoteFile(name="x", url=f"{proxy.endpoint}/bucket/x", bytes=100, version='"other"')
        with pytest.raises(ChangedError):
            fetch(wire, file)
    assert 'If-Match: "other"' in proxy.requests[0]


def test_an_object_shorter_than_listed_is_noticed(bucket: Path, wire: Wire) -> None:
    put(bucket / "x", 100)
    file = RemoteFile(name="x", url="s3://bucket/x", bytes=101)
    with pytest.raises(ChangedError, match="100 bytes now and had 101"):
        fetch(wire, file)
    with pytest.raises(ChangedError, match="100 bytes now and had 101"):
        fetch_small(wire, (file,))


def test_what_the_sink_raises_ends_the_fetch_and_is_raised(bucket: Path, wire: Wire) -> None:
    class Full:
        def write(self, offset: int, data: memoryview) -> None:
            raise OSError(28, "No space left on device")

    put(bucket / "x", 30 * MIB)
    file = the_file("s3://bucket/x")
    with pytest.raises(OSError, match="No space left"):
        wire.fetch(file, missing=[(0, file.bytes)], sink=Full())
    assert len(fetch(wire, file)) == file.bytes  # the wire is as good as before


@pytest.mark.parametrize("when", ["before the answer", "within the answer"])
def test_a_wire_that_is_closed_ends_what_is_under_way(when: str, bucket: Path, disturbed: Any) -> None:
    put(bucket / "x", 2 * MIB)
    begun, over = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def run() -> None:
        try:
            fetch(wire, file)
        except StorageError as error:
            caught.append(error)

    def keep_waiting() -> None:
        begun.set()
        over.wait()

    before, within = Fault(before=keep_waiting), Fault(before=begun.set, silent_after=5)
    with disturbed(lambda number, head: before if when == "before the answer" else within):
        file, wire = the_file("s3://bucket/x"), Wire(timeout_s=1000)
        thread = threading.Thread(target=run)
        thread.start()
        begun.wait()
        wire.close()
        thread.join()
        over.set()
    assert "closed" in str(caught[0])

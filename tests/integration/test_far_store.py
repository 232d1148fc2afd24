"""A store that is far by its time to first byte: what is asked for at once follows what was measured."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from far_store import gate, netem
from s3_server import S3Server, serve

from certificates import certificate
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.wire.http import Address
from stoker.stage.wire.pace import SMALL_AT_ONCE, START_LANES
from stoker.stage.wire.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIRST_BYTE_S = 0.04


@pytest.fixture(params=["http", "https"])
def far(
    request: pytest.FixtureRequest, require_binary: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[S3Server]:
    settings, trusted = "", None
    if request.param == "https":
        trusted, chain = certificate(tmp_path / "tls", openssl=require_binary("openssl"))
        settings = f"ssl_certificate {chain}; ssl_certificate_key {chain.with_suffix('.key')};"
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    programs = {"rclone": require_binary("rclone"), "nginx": require_binary("nginx")}
    with (
        gate(FIRST_BYTE_S) as (more, locations),
        serve(
            tmp_path, **programs, settings=settings + more, locations=locations, tls=trusted is not None
        ) as server,
    ):
        yield server


def test_more_small_files_are_asked_for_at_once(far: S3Server) -> None:
    bodies = {f"{number}": os.urandom(1000 + number) for number in range(1500)}
    for name, body in bodies.items():
        (far.root / "bucket" / name).write_bytes(body)
    files = [
        RemoteFile(name=name, url=f"{far.endpoint}/bucket/{name}", bytes=len(body))
        for name, body in bodies.items()
    ]
    got: dict[str, bytes] = {}
    with Wire() as wire:
        wire.fetch_small(files, deliver=lambda some: got.update((f.name, bytes(d)) for f, d in some))
        window = wire._means.hosts.of(Address(url=files[0].url)).window
    assert got == bodies
    assert (window.is_far, window.size > SMALL_AT_ONCE) == (True, True)


def test_more_lanes_bring_a_large_file(far: S3Server) -> None:
    data = os.urandom(32 << 20)
    (far.root / "bucket" / "x").write_bytes(data)
    got = bytearray(len(data))

    class Sink:
        def write(self, offset: int, data: memoryview) -> None:
            got[offset : offset + len(data)] = data

    file = RemoteFile(name="x", url=f"{far.endpoint}/bucket/x", bytes=len(data), digest="xxh3:0")
    with Wire() as wire:
        wire.fetch(file, missing=[(0, len(data))], sink=Sink())
        pace = wire._means.hosts.of(Address(url=file.url)).pace
        assert pace.lanes > START_LANES
    assert got == data


def test_a_long_way_has_a_namespace_of_its_own(namespaces: Any) -> None:
    """Where the kernel has netem; elsewhere the part says so, and leaves nothing behind."""
    with suppress(RuntimeError), netem(0.01) as inside:
        assert inside[:3] == ["ip", "netns", "exec"]
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "stoker-far" not in left

"""Distance, as a reusable part: a gate that answers late, for nginx to ask before each of its answers.

A store that is far by its time to first byte, while connecting takes next to nothing and bytes then come as
fast as ever: what a lane of our own would see of S3 within its region. nginx asks the gate (auth_request) and
sends the file itself, so that the delay costs no throughput, over http and https alike. For a long way on
which connecting takes its time too there is `netem`, in a network namespace of its own, where the kernel has
it.

    python far_store.py PORT DELAY_MS        a gate
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from s3_server import free_ports, running

if TYPE_CHECKING:
    from collections.abc import Iterator

OPEN = b"HTTP/1.1 204 No Content\r\n\r\n"

SETTINGS = """
    upstream gate {{ server 127.0.0.1:{port}; keepalive 4096; keepalive_requests 1000000; }}
"""
LOCATIONS = """
        auth_request /.gate;
        location = /.gate {
            internal;
            proxy_pass http://gate;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_pass_request_headers off;
            proxy_pass_request_body off;
        }
"""


class Gate(asyncio.Protocol):
    """Answers every request so much later."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for _ in range(data.count(b"\r\n\r\n")):
            asyncio.get_running_loop().call_later(self._delay_s, self._transport.write, OPEN)


@contextmanager
def gate(delay_s: float) -> Iterator[tuple[str, str]]:
    """What nginx needs to answer so much later: lines for its http block, and for a server's."""
    (port,) = free_ports(1)
    with running([sys.executable, __file__, str(port), str(1e3 * delay_s)], port=port):
        yield SETTINGS.format(port=port), LOCATIONS


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextmanager
def netem(delay_s: float) -> Iterator[list[str]]:
    """A network namespace whose loopback takes so long one way: a prefix for commands that run in it. Raises
    RuntimeError where the kernel has no netem."""
    name = f"stoker-far-{free_ports(1)[0]}"
    _run("ip", "netns", "add", name)
    try:
        inside = ["ip", "netns", "exec", name]
        _run(*inside, "ip", "link", "set", "lo", "up")
        delayed = ("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", f"{1e3 * delay_s:.3f}ms")
        ran = subprocess.run([*inside, *delayed], capture_output=True, text=True)
        if ran.returncode:
            raise RuntimeError(f"this kernel has no netem: {ran.stderr.strip()}")
        yield inside
    finally:
        _run("ip", "netns", "del", name)


async def _listen(port: int, delay_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Gate(delay_s), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_listen(int(sys.argv[1]), float(sys.argv[2]) / 1e3))

"""Leases on NFSv4 between two nodes with kernels of their own."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import nfs_nodes
import pytest

from stoker.stage.lease import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nfs_nodes import Node, Server

pytestmark = pytest.mark.integration

TTL_S = 3.0
ROUNDS = 40

PRELUDE = f"""
import time
from pathlib import Path
import stoker
from stoker.errors import LeaseLostError
from stoker.stage.lease import Claim

MNT = Path("/mnt")

def take(path, ttl_s={TTL_S}):
    claim = Claim(MNT / path, ttl_s=ttl_s)
    while (lease := claim.try_take()) is None:
        time.sleep(0.05)
    return lease

def is_lost(lease):
    try:
        lease.check()
    except LeaseLostError:
        return True
    return False

def race(names, start, gap_s):
    claims, wins = [Claim(MNT / name, ttl_s={TTL_S}) for name in names], []
    for number, claim in enumerate(claims):
        while time.time() < start + number * gap_s:
            pass
        wins.append(claim.try_take())
    return wins
"""


@pytest.fixture(scope="module")
def server(
    require_binary: Callable[[str], str],
    skip_or_fail: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        skip_or_fail("NFS nodes need root and /dev/net/tun")
    programs = {"ganesha": require_binary("ganesha.nfsd"), "linux": require_binary("linux.uml")}
    with nfs_nodes.serve(tmp_path_factory.mktemp("nfs"), nodes=3, **programs) as server:
        yield server


@pytest.fixture(scope="module")
def nodes(server: Server) -> Iterator[tuple[Node, Node]]:
    """Two nodes that stay for all tests."""
    with ExitStack() as stack:
        both = stack.enter_context(server.node(1)), stack.enter_context(server.node(2))
        for node in both:
            node.run(PRELUDE)
        yield both


def test_one_of_two_nodes_founds_a_lease(server: Server, nodes: tuple[Node, Node]) -> None:
    names = [f"found-{number}.lease" for number in range(ROUNDS)]
    start = time.time() + 0.5
    for node in nodes:
        node.begin("run", f"won = race({names}, {start}, 0.03)")
    for node in nodes:
        node.end()
    wins = [node.ask("[lease is not None for lease in won]") for node in nodes]
    assert [sum(pair) for pair in zip(*wins, strict=True)] == [1] * ROUNDS
    for node in nodes:
        assert node.ask("[is_lost(lease) for lease in won if lease]") == [False] * node.ask(
            "len(list(filter(None, won)))"
        )
        node.run("for lease in filter(None, won): lease.release()")
    assert list(server.export.iterdir()) == []

"""Leases on NFSv4 between two nodes with kernels of their own."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import nfs_nodes
import pytest

from stage.leases.holders import fall_silent, take
from stoker.stage.leases.lease import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from nfs_nodes import Node, Server

pytestmark = pytest.mark.integration

TTL_S = 3.0
ROUNDS = 40

PRELUDE = f"""
import os, time
from pathlib import Path
import stoker
from stoker.errors import LeaseLostError
from stoker.stage.leases.lease import Claim

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

def succeed_all(names):
    claims, won = {{name: Claim(MNT / name, ttl_s={TTL_S}) for name in names}}, {{}}
    while claims:
        for name, claim in list(claims.items()):
            if lease := claim.try_take():
                won[name] = lease
            if lease or claim.holder().epoch > 1:
                del claims[name]
        time.sleep(0.05)
    return won

def meet(rank, name):
    # Enters a block as one of two ranks.
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="node-1", MASTER_PORT="29500")
    return stoker.first_rank(name, per="job", folder=MNT / "meet", ttl_s={TTL_S}).__enter__()

def answer(first, result):
    first.result = result
    first.__exit__(None, None, None)

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
    if reason := nfs_nodes.refusal():
        skip_or_fail(reason)
    programs = {"ganesha": require_binary("ganesha.nfsd"), "linux": require_binary("linux.uml")}
    with nfs_nodes.serve(tmp_path_factory.mktemp("nfs"), nodes=3, **programs) as server:
        yield server


@pytest.fixture(scope="module")
def nodes(server: Server, skip_or_fail: Callable[[str], None]) -> Iterator[list[Node]]:
    """Two nodes that stay for all tests."""
    with ExitStack() as stack:
        try:
            both = stack.enter_context(server.boot(1, 2))
        except (AssertionError, TimeoutError) as error:
            skip_or_fail(f"a guest kernel does not boot here: {error}")
        for node in both:
            node.run(PRELUDE)
        yield both


def race(nodes: list[Node], names: list[str]) -> list[int]:
    """How many nodes won each lease."""
    start = time.time() + 0.5
    for node in nodes:
        node.begin("run", f"won = race({names}, {start}, 0.03)")
    for node in nodes:
        node.end()
    return [
        sum(wins)
        for wins in zip(*(node.ask("[bool(lease) for lease in won]") for node in nodes), strict=True)
    ]


def test_one_of_two_nodes_founds_a_lease(server: Server, nodes: list[Node]) -> None:
    assert race(nodes, [f"found-{number}.lease" for number in range(ROUNDS)]) == [1] * ROUNDS
    for node in nodes:
        assert not node.ask("any(is_lost(lease) for lease in won if lease)")
        node.run("for lease in filter(None, won): lease.release()")
    assert list(server.export.iterdir()) == []


def test_one_of_two_nodes_succeeds_a_silent_owner(server: Server, nodes: list[Node]) -> None:
    names = [f"succeed-{number}.lease" for number in range(ROUNDS)]
    for name in names:
        fall_silent(take(Claim(server.export / name, ttl_s=TTL_S)))
    for node in nodes:
        node.begin("run", f"won = succeed_all({names})")
    for node in nodes:
        node.end()
    assert sorted(nodes[0].ask("sorted(won)") + nodes[1].ask("sorted(won)")) == sorted(names)
    for node in nodes:
        assert node.ask("{lease.epoch for lease in won.values()} <= {2}")
        assert not node.ask("any(map(is_lost, won.values()))")
        node.run("for lease in won.values(): lease.release()")
    assert list(server.export.iterdir()) == []


def test_a_killed_node_is_succeeded_within_twice_the_ttl(server: Server, nodes: list[Node]) -> None:
    with server.boot(3) as (doomed,):
        doomed.run(PRELUDE)
        doomed.run("lease = take('killed.lease')")
        nodes[0].begin("run", "lease = take('killed.lease')")
        time.sleep(TTL_S)  # it watches a living owner for a while
        killed_at = time.monotonic()
        doomed.kill()
        nodes[0].end()
    assert time.monotonic() - killed_at < 2 * TTL_S
    assert nodes[0].ask("[lease.epoch, lease.previous.host, lease.previous_is_dead]") == [2, "node-3", False]
    nodes[0].run("lease.release()")


def test_a_node_that_slept_is_fenced(server: Server, nodes: list[Node]) -> None:
    sleeper, successor = nodes
    sleeper.run("lease = take('slept.lease')")
    assert successor.ask("Claim(MNT / 'slept.lease').holder().host") == "node-1"
    sleeper.pause()
    successor.run("lease = take('slept.lease')")
    sleeper.resume()
    assert sleeper.ask("is_lost(lease)")
    sleeper.run("lease.release()")
    assert not successor.ask("is_lost(lease)")
    assert sleeper.ask("Claim(MNT / 'slept.lease').holder().host") == "node-2"
    successor.run("lease.release()")
    assert sleeper.ask("Claim(MNT / 'slept.lease').holder()") is None
    assert list(server.export.iterdir()) == []


def test_a_release_on_one_node_is_seen_at_once_on_the_other(nodes: list[Node]) -> None:
    """Whatever the other node's caches hold of the folder, the take that decides asks the server."""
    for number in range(10):
        here, there = nodes[number % 2], nodes[1 - number % 2]
        here.run("lease = take('handed.lease')")
        assert there.ask("Claim(MNT / 'handed.lease').try_take()") is None
        here.run("lease.release()")
        there.run("lease = Claim(MNT / 'handed.lease').try_take(); lease.check(); lease.release()")


def test_ranks_on_two_nodes_share_an_answer(server: Server, nodes: list[Node]) -> None:
    worker, waiter = nodes
    worker.run("first = meet(0, 'shared')")
    assert worker.ask("bool(first)")
    waiter.begin("run", "first = meet(1, 'shared')")
    time.sleep(1.0)  # it looks, in vain, and its kernel remembers that
    worker.run("answer(first, {'path': '/data'})")
    waiter.end(seconds=10)  # less than an NFS client would remember that there is no answer yet
    assert waiter.ask("[bool(first), first.result]") == [False, {"path": "/data"}]
    assert list((server.export / "meet").iterdir()) == []


def test_a_late_node_gets_the_answer_of_a_living_one(server: Server, nodes: list[Node]) -> None:
    worker, late = nodes
    worker.run("first = meet(0, 'late'); answer(first, 1)")
    late.run("first = meet(1, 'late')")
    assert late.ask("[bool(first), first.result]") == [False, 1]
    assert list((server.export / "meet").iterdir()) == []


def test_a_rank_takes_over_from_a_killed_node(server: Server, nodes: list[Node]) -> None:
    with server.boot(3) as (doomed,):
        doomed.run(PRELUDE)
        doomed.run("first = meet(0, 'taken')")
        nodes[0].begin("run", "first = meet(1, 'taken')")
        doomed.kill()
        nodes[0].end(seconds=10 * TTL_S)
    assert nodes[0].ask("bool(first)")
    nodes[0].run("first.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)")


FETCH = """
import struct, subprocess, sys
from stoker.stage.cache import Cache
from stoker.stage.run import stage

def begin_fetching(url, limit_rate):
    # A process of its own, to be killed.
    code = f"from stoker.stage.cache import Cache; from stoker.stage.run import stage\\n" \
        f"stage({url!r}, Cache('/mnt/cache', limit_rate={limit_rate}, ttl_s=3.0))"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL)

def landed_bytes():
    maps = list(MNT.glob("cache/.stoker/parts/*/map"))
    noted = maps[0].read_bytes().partition(b"\\n")[2] if maps else b""
    return sum(landed for landed, _ in struct.iter_unpack("<QQ", noted[: len(noted) // 16 * 16]))
"""


def test_another_node_goes_on_with_what_a_killed_fetcher_left(
    server: Server, nodes: list[Node], tmp_path: Path
) -> None:
    origin, data = tmp_path / "x.bin", os.urandom(32 << 20)  # the nodes see this machine's files
    origin.write_bytes(data)
    doomed, successor = nodes
    for node in nodes:
        node.run(FETCH)
    doomed.run(f"child = begin_fetching({str(origin)!r}, {10 << 20})")
    while doomed.ask("landed_bytes()") < 20 << 20:
        assert doomed.ask("child.poll()") is None
        time.sleep(0.05)
    doomed.run("child.kill(); child.wait()")
    successor.run(f"with Cache('/mnt/cache', ttl_s={TTL_S}) as cache: staged = stage({str(origin)!r}, cache)")
    # lost is what its kernel had not written back, which is asked of it for 8 MiB at a time by each lane
    assert successor.ask("staged.fetched_bytes") <= len(data) - (4 << 20)
    assert (server.export / "cache/local" / str(origin)[1:]).read_bytes() == data
    assert list((server.export / "cache/.stoker/parts").iterdir()) == []
    shutil.rmtree(server.export / "cache")


def test_what_a_release_left_that_was_cut_short_is_free(server: Server, nodes: list[Node]) -> None:
    (server.export / "empty.lease").mkdir()
    (server.export / "rest.lease").mkdir()
    (server.export / "rest.lease" / "0123456789abcdef.json").touch()
    for name in ("empty.lease", "rest.lease"):
        nodes[0].run(f"take('{name}').release()")
        assert not (server.export / name).exists()

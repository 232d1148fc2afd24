"""The doctor on a real NFS mount of a kernel of its own: options in force, and a server that is gone."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import nfs_nodes
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nfs_nodes import Node

pytestmark = pytest.mark.integration

FLAGS = {"rw", "noatime", "vers=4.2", "proto=tcp", "sec=sys"}  # given besides, or no option of the filesystem

PRELUDE = """
from dataclasses import replace
from pathlib import Path
from stoker.doctor.examine import examine
from stoker.machine.files import Files
from stoker.machine.places import read_place
from stoker.machine.snapshot import Snapshot

def levels():
    place = read_place(Files(), "data", Path("/mnt"))
    return {result.check.name: result.level for result in examine(Snapshot(places=(place,)))}

def remedies(*names):
    place = read_place(Files(), "data", Path("/mnt"))
    found = examine(Snapshot(places=(place,)))
    return [line for one in found if one.check.name in names for line in one.seen.fix]

def mount_again(options):
    import __main__
    assert __main__.libc.umount2(b"/mnt", 0) == 0
    server = "10.99.1.1"
    own = f"vers=4.2,proto=tcp,sec=sys,addr={server},clientaddr=10.99.1.2,{options}"
    __main__.mount(f"{server}:/export", "/mnt", kind="nfs4", options=own)
"""


@pytest.fixture(scope="module")
def node(
    require_binary: Callable[[str], str],
    skip_or_fail: Callable[[str], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Node]:
    if reason := nfs_nodes.refusal():
        skip_or_fail(reason)
    programs = {"ganesha": require_binary("ganesha.nfsd"), "linux": require_binary("linux.uml")}
    with (
        nfs_nodes.serve(tmp_path_factory.mktemp("doctor-nfs"), nodes=1, **programs) as server,
        server.boot(1) as (node,),
    ):
        node.run(PRELUDE)
        yield node


def of_nfs(levels: dict[str, Any]) -> dict[str, Any]:
    names = ("NFS transfer size", "NFS caching", "NFS errors", "NFS repeats")
    return {name: levels[name] for name in names}


def test_the_options_of_a_mount_are_those_in_force(node: Node) -> None:
    assert of_nfs(node.ask("levels()")) == {
        "NFS transfer size": "ok",
        "NFS caching": "ok",
        "NFS errors": "ok",
        "NFS repeats": "ok",
    }
    node.run("mount_again('rsize=65536,wsize=65536,soft,noac')")
    assert of_nfs(node.ask("levels()")) == {
        "NFS transfer size": "warn",
        "NFS caching": "warn",
        "NFS errors": "warn",
        "NFS repeats": "ok",
    }


def test_a_mount_made_anew_as_told_is_good(node: Node) -> None:
    """mount.nfs is not in the guest: the remedy's options go to mount(2) as it would hand them on. Twice."""
    node.run("mount_again('rsize=65536,wsize=65536,soft,noac')")
    told = node.ask("remedies('NFS transfer size', 'NFS connections', 'NFS caching', 'NFS errors')")
    assert len(set(told)) == 1
    for _ in range(2):
        words = shlex.split(told[0])
        assert (words[:3], words[-2:]) == (["umount", "/mnt", "&&"], ["10.99.1.1:/export", "/mnt"])
        options = words[words.index("-o") + 1].split(",")
        assert "noatime" in options  # a flag to mount(2), and no option of the filesystem
        node.run(f"mount_again({','.join(set(options) - FLAGS)!r})")
    levels = node.ask("levels()")
    names = ("NFS transfer size", "NFS connections", "NFS caching", "NFS errors")
    assert {name: levels[name] for name in names} == dict.fromkeys(names, "ok")


def test_a_server_that_is_gone_is_told_and_not_waited_for(node: Node) -> None:
    node.run("mount_again('hard,noac')")
    node.run("import subprocess; subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)")
    assert node.ask("levels()['filesystem']", seconds=20) == "fail"

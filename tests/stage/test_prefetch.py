"""What is brought before it is asked for."""

from __future__ import annotations

import threading

from stoker.errors import CacheFullError
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit
from stoker.stage.prefetch import Prefetcher


def unit(name: str) -> Unit:
    return Unit(key=name, folder="x", files=(RemoteFile(name=name, url=name, bytes=1),))


def test_what_has_no_room_does_not_hold_up_another_order() -> None:
    began, go_on, came = threading.Event(), threading.Event(), threading.Event()

    def bring(unit: Unit) -> None:
        if unit.key == "new":
            came.set()
            return
        began.set()
        assert go_on.wait(30)
        raise CacheFullError("no room", hint="")

    prefetcher = Prefetcher(bring, at_once=1)
    prefetcher.follow([unit("old")])
    assert began.wait(30)
    prefetcher.follow([unit("new")])
    go_on.set()
    assert came.wait(10)
    prefetcher.close()

"""What is known of each host: how many lanes and requests it bears. A slow or busy one slows down itself
only."""

from __future__ import annotations

import resource
from collections.abc import Callable

from stoker.stage.wire.http import Address
from stoker.stage.wire.pace import MOST_AT_ONCE, Company, Pace, Window


class Host:
    """One server, or all mounted filesystems. Whoever uses it holds the wire's lock."""

    def __init__(self, pace: Pace, *, most_at_once: int) -> None:
        self.pace, self.company, self.window = pace, Company(), Window(most=most_at_once)
        self.active = 0  # lanes that work for it

    def slow_down(self, *, now: float) -> None:
        self.pace.slow_down(now=now)
        self.window.slow_down(now=now)


class Hosts:
    """Hosts by the root of their addresses."""

    def __init__(self, make_pace: Callable[[], Pace]) -> None:
        self._make_pace, self._hosts = make_pace, dict[str, Host]()
        self._most_at_once = _spare_files()

    def of(self, address: Address) -> Host:
        key = address.root if address.url.startswith(("http://", "https://")) else ""
        if key not in self._hosts:
            self._hosts[key] = Host(self._make_pace(), most_at_once=self._most_at_once)
        return self._hosts[key]


def _spare_files() -> int:
    """Connections are open files, of which a process has so many: the others are the program's own."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_AT_ONCE if soft == resource.RLIM_INFINITY else soft // 4

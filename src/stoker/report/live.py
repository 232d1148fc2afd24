"""Live view: a run as it goes, looked at every second, shown on whichever surfaces were asked for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from stoker.formats.prometheus import CONTENT_TYPE
from stoker.recording import Recording
from stoker.report.html import live_page
from stoker.report.metrics import expose
from stoker.report.page.sections import sections
from stoker.report.serve import Address, Answer, Server, start, token_for
from stoker.report.summary import Summary, of_node, summarise
from stoker.report.totals import Totals

EVERY_S = 1.0
LOOKING_SHARE = 0.05  # of one core: a look that takes long is taken less often,
LOOK_WITHIN_S = 20.0  # but often enough to name a hang while it lasts
_NOTHING_YET = Recording(title="", wall_s=0.0, ended="running", ranks=(), gpus=(), hosts=())


class Surface(Protocol):
    """Something that shows summaries; called from the looking thread only, closed after it has ended."""

    def show(self, summary: Summary) -> None: ...
    def close(self) -> None: ...


class Live:
    """Shows a run while the block lasts; `look` is called from a thread of its own.

    With a `node` the metrics are that node's only: every node of a job has an endpoint of its own.

    >>> with Live(look, surface=Screen(sys.stderr), page=Address(port=8080)) as live:
    ...     print(live.page_url)
    ...     child.wait()
    """

    def __init__(
        self,
        look: Callable[[], Summary],
        *,
        surface: Surface | None = None,
        page: Address | None = None,
        metrics: Address | None = None,
        node: str = "",
        every_s: float = EVERY_S,
    ) -> None:
        self._look, self._surface, self._every_s = look, surface, every_s
        self._node = node
        self.trouble: Exception | None = None  # why the last look was not shown
        self._totals = Totals()
        self._lock = threading.Lock()  # requests come in threads of their own; totals are added to meanwhile
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="stoker-live")
        self._summary = self._blank = summarise(_NOTHING_YET, ())
        self._servers: dict[Address, Server] = {}
        with ExitStack() as opened:  # a second port that is taken closes the first again
            self.page_url = self._serve(page, opened).url_of("/") if page else ""
            self.metrics_url = self._serve(metrics, opened).url_of("/metrics") if metrics else ""
            self._open = opened.pop_all()
        if surface is not None:
            self._open.callback(surface.close)
        start(self._thread)

    @property
    def summary(self) -> Summary:
        """The last one taken."""
        return self._summary

    def close(self) -> None:
        """Take a last look, show it, and end; safe twice."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self._once()
        self._open.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- looking ----------------------------------------------------------------------------------

    def _follow(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            began = time.monotonic()
            self._once()
            took_s = time.monotonic() - began
            wait_s = max(self._every_s, min(took_s / LOOKING_SHARE, LOOK_WITHIN_S))

    def _once(self) -> None:
        try:
            self._summary = self._looked()
            if self._surface:
                self._surface.show(self._summary)
            self.trouble = None
        except Exception as error:
            # A file read while it is written, a terminal that is gone, or a fault of ours: none of them may
            # disturb the program observed.
            self.trouble = error

    def _looked(self) -> Summary:
        summary = self._look()
        with self._lock:
            self._totals.add(of_node(summary, self._node))
        return summary

    # --- serving ----------------------------------------------------------------------------------

    def _serve(self, address: Address, opened: ExitStack) -> Server:
        """Every server answers every path: one address for page and metrics needs one server."""
        if address not in self._servers:
            routes = {"/": self._page, "/page.json": self._news, "/metrics": self._metrics}
            server = Server(address, routes, token=token_for(address))
            self._servers[address] = opened.enter_context(server)
        return self._servers[address]

    def _page(self) -> Answer:
        return Answer(content_type="text/html; charset=utf-8", body=live_page(self._summary).encode())

    def _news(self) -> Answer:
        summary = self._summary
        news = {"running": summary.running, "sections": sections(summary)}
        return Answer(content_type="application/json", body=json.dumps(news).encode())

    def _metrics(self) -> Answer:
        summary = self._summary
        with self._lock:
            text = "" if summary is self._blank else expose(of_node(summary, self._node), self._totals)
        return Answer(content_type=CONTENT_TYPE, body=text.encode())

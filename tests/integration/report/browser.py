"""A real browser for tests: headless Chromium, spoken to through a pipe (the Chrome DevTools Protocol)."""

from __future__ import annotations

import json
import os
import subprocess
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The protocol is spoken on descriptors 3 and 4: bash puts ours there (sh knows one-digit ones only).
AS_3_AND_4 = 'exec "$0" "$@" 3<&{down} 4>&{up}'


class Page:
    """One open page."""

    def __init__(self, down: int, up: int) -> None:
        self._down, self._up = down, up
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []  # what the page's console says: errors, refused requests
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size and wait until it is there."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of an expression of the page."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait in the page, frame by frame, until a condition holds."""
        frame = "await new Promise((go) => setTimeout(go, 20))"
        self.ask(f"(async () => {{ while (!({condition})) {frame}; }})()")

    def point_at(self, selector: str, *, across: float) -> None:
        """Move the mouse over an element, so far across it."""
        self.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.ask(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        x, y = box["x"] + across * box["width"], box["y"] + box["height"] / 2
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG, for people."""
        height = self.ask("document.documentElement.scrollHeight")
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        taken = self._ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(b64decode(taken["data"]))

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        call = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            call["sessionId"] = self._session
        os.write(self._down, json.dumps(call).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._hear(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._up, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))


@contextmanager
def browse(program: str, folder: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `folder`, while the block runs."""
    their_in, down = os.pipe()
    up, their_out = os.pipe()
    options = ["--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(
        ["bash", "-c", AS_3_AND_4.format(down=their_in, up=their_out), program, *options],
        pass_fds=(their_in, their_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Page(down, up)
    finally:
        os.close(down)  # the browser ends with its pipe
        os.close(up)
        process.wait(timeout=20)

"""Chromium without a window, driven over its own pipe: the page in it, and what it asks for."""

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--remote-debugging-pipe", "--no-first-run"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
)

PATIENCE_S = 60


class Page:
    """One page of a running Chromium."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requested: list[str] = []
        self.errors: list[str] = []

    def open(self, path: Path, width: int = 1200, height: int = 900) -> None:
        """Load a file and wait until its script says that it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=path.as_uri())
        self.run(
            "new Promise(done => { const wait = () => document.documentElement?.dataset.ready"
            " ? done() : setTimeout(wait, 20); wait(); })"
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A mouse event at a place of the window: "Moved", "Pressed", "Released" or "Wheel"."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("Pressed", "Released"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def shot(self, path: Path) -> None:
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its answer; events on the way are noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Network.requestWillBeSent":
            self.requested.append(event["params"]["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"]["text"])
        elif event["method"] == "Log.entryAdded":
            self.errors.append(event["params"]["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], PATIENCE_S)
            assert ready, "Chromium says nothing"
            part = os.read(self._back, 1 << 16)
            assert part, "Chromium has ended"
            self._buffer += part
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


@contextmanager
def browser(directory: Path) -> Generator[Page]:
    """A page of a Chromium that keeps its files in a directory and ends with the block."""
    assert CHROMIUM
    read_by_it, to = os.pipe()
    back, written_by_it = os.pipe()
    # The protocol's pipe is descriptors 3 and 4 of the browser.
    command = f'exec "$@" 3<&{read_by_it} 4>&{written_by_it}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", CHROMIUM, f"--user-data-dir={directory}", *OPTIONS],
        pass_fds=(read_by_it, written_by_it),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_by_it)
    os.close(written_by_it)
    try:
        yield Page(to, back)
    finally:
        os.close(to)  # Chromium ends when its pipe does
        os.close(back)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()

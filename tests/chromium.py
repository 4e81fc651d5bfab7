"""Headless Chromium, driven through its own pipe, to test pages as a browser shows them."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--remote-debugging-pipe"),
)


class Chromium:
    """One open page.

    Attributes:
        said: messages that the page wrote to the console, including its errors.
        asked: addresses that the page requested.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._in = os.fdopen(reading, "rb")
        self._out = os.fdopen(writing, "wb", buffering=0)
        self._number = 0
        self._session: str | None = None
        self._rest = b""
        self._loaded = False
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        if method.startswith("Browser."):
            message.pop("sessionId", None)
        self._out.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a file in a window of the given size, in light or dark mode."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.said, self.asked, self._loaded = [], [], False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self._loaded:
            self._hear(self._next())

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Save a PNG of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def _next(self) -> Mapping[str, Any]:
        while b"\0" not in self._rest:
            read = self._in.read1(65536)
            assert read, "Chromium is gone"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        answer: Mapping[str, Any] = json.loads(message)
        return answer

    def _hear(self, event: Mapping[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.asked.append(values["request"]["url"])
        elif method == "Log.entryAdded":
            self.said.append(values["entry"]["text"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(values))


@contextmanager
def chromium(folder: Path) -> Iterator[Chromium]:
    """Start a browser with its own profile, and end it afterwards.

    Args:
        folder: folder that the browser may write to.
    """
    assert BINARY is not None
    # Chromium reads commands from file descriptor 3 and answers on 4.
    tell_out, tell_in = os.pipe()
    hear_out, hear_in = os.pipe()
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{tell_out} 4>&{hear_in}', "bash", BINARY, *_FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(tell_out, hear_in),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(tell_out)
    os.close(hear_in)
    page = Chromium(hear_out, tell_in)
    try:
        yield page
    finally:
        page.call("Browser.close")
        process.wait()
        page._in.close()
        page._out.close()

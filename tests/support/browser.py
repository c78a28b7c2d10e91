"""A headless Chromium driven through its DevTools protocol over a pipe, with the standard library alone.

The browser is Debian's `chromium` (or what `LLMEM_CHROMIUM` names). It runs without a network, in a profile of its
own, and is closed by the process id that started it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",  # CI runs as root in a container
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The path of a Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("LLMEM_CHROMIUM") or next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `events` holds what the browser reported since the page was opened."""

    def __init__(self, chromium: str, profile: Path, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._buffer = b""
        self._count = 0
        to_read, self._send = os.pipe()
        self._receive, to_write = os.pipe()
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        targets = self.call("Target.getTargets", session=None)["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", session=None, targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            self.call("Browser.close", session=None)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        os.close(self._send)
        os.close(self._receive)

    def call(self, method: str, session: str | None = "page", **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; RuntimeError if the browser refuses it."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if session is not None and self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        for answer in self._messages():
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Messages as they come; events are kept on the way. TimeoutError if none comes for long."""
        deadline = time.monotonic() + self.timeout
        while True:
            while b"\0" in self._buffer:
                text, self._buffer = self._buffer.split(b"\0", 1)
                message = json.loads(text)
                if "id" not in message:
                    self.events.append(message)
                yield message
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._receive], [], [], left)[0]:
                raise TimeoutError(f"no answer from the browser in {self.timeout} s")
            chunk = os.read(self._receive, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._buffer += chunk

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page (promises are awaited)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", expression))
        return answer["result"].get("value")

    def view(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Set the window's size in CSS pixels, the pixel ratio, and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Open a file and wait until it has been read; its script may still be at work."""
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        if not self.until("location.protocol == 'file:' && document.readyState == 'complete'"):
            raise TimeoutError(f"{path} did not load in {self.timeout} s")
        self.settle()

    def until(self, expression: str) -> bool:
        """Wait until an expression is true in the page; whether it has become so in time."""
        deadline = time.monotonic() + self.timeout
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def settle(self) -> None:
        """Wait until two frames have been drawn."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def press(self, key: str) -> None:
        """Press and release a key, as a person would, on what has the focus."""
        names = {"+": "Equal", "-": "Minus", "0": "Digit0", "p": "KeyP"}
        codes = {
            "ArrowLeft": 37,
            "ArrowRight": 39,
            "ArrowUp": 38,
            "ArrowDown": 40,
            "PageUp": 33,
            "PageDown": 34,
            "Tab": 9,
            "Home": 36,
            "End": 35,
            "Enter": 13,
        }
        common = {"key": key, "code": names.get(key, key)}
        if key in codes:
            common["windowsVirtualKeyCode"] = codes[key]  # type: ignore[assignment]
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def drag(self, start: tuple[float, float], stop: tuple[float, float] | None = None) -> None:
        """Move the mouse to `start` and, where `stop` is given, drag it there with the left button."""
        self._mouse("mouseMoved", start)
        if stop is not None:
            self._mouse("mousePressed", start, button="left", clickCount=1)
            self._mouse("mouseMoved", stop, button="left")
            self._mouse("mouseReleased", stop, button="left", clickCount=1)
        self.settle()

    def _mouse(self, kind: str, at: tuple[float, float], **params: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **params)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save a picture of the window, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it would be printed."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def faults(self) -> list[str]:
        """Script errors, console errors and policy violations since the page was opened."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for, but its own file."""
        sent = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if not url.startswith(("data:", "file:"))]

"""A headless Chromium, driven over its debugging pipe. No package is needed, and no network."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
START_S, ANSWER_S = 60.0, 60.0
"""A machine that is busy otherwise takes its time."""
ARGUMENTS = ("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--force-color-profile=srgb")
KEY_CODES = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39, "Enter": 13, "Escape": 27, "Tab": 9}


class Page:
    """The one page of a browser."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._last = 0
        self._unread = b""
        self._session = ""
        self.requests: list[str] = []
        """Addresses that the page asked for."""
        self.problems: list[str] = []
        """What the page's console complained of, and exceptions that nobody caught."""

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command of the DevTools protocol."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, fragment: str = "") -> None:
        """Show a file, in full."""
        self.requests.clear()
        self.problems.clear()
        # Another fragment of the same file would be no navigation.
        self.call("Page.navigate", url="about:blank")
        self._until_loaded("about:blank")
        self.requests.clear()
        url = path.as_uri()
        self.call("Page.navigate", url=f"{url}#{fragment}" if fragment else url)
        self._until_loaded(url)

    def _until_loaded(self, url: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if self.value(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})"):
                return
            time.sleep(0.02)
        raise TimeoutError(f"{url} was not loaded")

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Read what is written in the elements of a selector."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        found: list[str] = self.value(f"{elements}.map((element) => element.textContent)")
        return found

    def press(self, key: str) -> None:
        """Press a key and let go of it."""
        text = {"Enter": "\r", "Tab": ""}.get(key, key if len(key) == 1 else "")
        code = {"windowsVirtualKeyCode": KEY_CODES.get(key, ord(key[0].upper()))}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def point_at(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer over the first element of a selector, and click if asked."""
        x, y = self.value(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                          "return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._answers, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError("Chromium does not answer")
            self._unread += more
        message, _, self._unread = self._unread.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, event: dict[str, Any]) -> None:
        method, told = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("warning", "error"):
            self.problems.append(told["entry"]["text"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser; skip the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")
    command_reader, commands = os.pipe()
    answers, answer_writer = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4; ours must not be those.
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in (command_reader, answer_writer)]
    log = os.open(profile.with_suffix(".log"), os.O_WRONLY | os.O_CREAT, 0o600)
    process = os.posix_spawn(
        program, [program, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"], dict(os.environ),
        file_actions=[(os.POSIX_SPAWN_DUP2, away[0], 3), (os.POSIX_SPAWN_DUP2, away[1], 4),
                      (os.POSIX_SPAWN_DUP2, log, 1), (os.POSIX_SPAWN_DUP2, log, 2)], setpgroup=0)
    for descriptor in (command_reader, answer_writer, *away, log):
        os.close(descriptor)
    page = Page(commands, answers)
    try:
        page.attach()
        yield page
    finally:
        os.close(commands)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(answers)

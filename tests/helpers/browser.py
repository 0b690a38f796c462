"""A headless Chromium, asked over its debugging pipe: what pages show, and what their consoles say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT = 20.0
"""Seconds until an answer is missing."""


class Browser:
    """A tab. `errors` has what consoles said since it was emptied."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._number = write, read, b"", 0
        self._session: str | None = None
        self._events: list[str] = []
        self.errors: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The browser's answer."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Load a page."""
        self._events.clear()
        self.ask("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._note(self._next())

    def resize(self, width: int) -> None:
        """Give the window another width."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """What JavaScript makes of an expression; a promise is waited for."""
        return self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)["result"].get("value")

    def until(self, expression: str, page: object) -> Any:
        """The value of an expression once it is true of `page`."""
        end = time.monotonic() + WAIT
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"{page}: {expression}")
            time.sleep(0.05)
        return value

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (more := os.read(self._read, 1 << 16)):
                raise EOFError("the browser has ended")
            self._rest += more
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        name, what = event.get("method", ""), event.get("params", {})
        self._events.append(name)
        if name == "Runtime.exceptionThrown":
            self.errors.append(str(what["exceptionDetails"].get("exception", what["exceptionDetails"])))
        elif name == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif name == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.errors.append(str([one.get("value", one.get("description")) for one in what["args"]]))


@contextmanager
def browser() -> Iterator[Browser | None]:
    """A browser with an empty profile; None where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        yield None
        return
    asked, write = os.pipe()
    read, answered = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}")
        pipes = f'exec 3<&{asked} 4>&{answered}; exec "$@"'  # where a browser looks for them
        command = ["bash", "-c", pipes, "browser", program, *options]
        process = subprocess.Popen(command, pass_fds=(asked, answered), stderr=subprocess.DEVNULL)
        for theirs in (asked, answered):
            os.close(theirs)
        try:
            yield Browser(write, read)
        finally:
            process.kill()
            process.wait()
            for ours in (write, read):
                os.close(ours)

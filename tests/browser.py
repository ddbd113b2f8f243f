"""Drive a headless Chromium through its debugging pipe, which needs no port and no package.

The protocol (https://chromedevtools.github.io/devtools-protocol/) sends JSON messages ended by a zero byte.
The browser reads them from descriptor 3 and writes them to descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = """--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --disable-sync
    --disable-extensions --disable-background-networking --disable-component-update --disable-dev-shm-usage
    --remote-debugging-pipe""".split()
# program that moves the pipe to descriptors 3 and 4; a shell may not support descriptors above 9
BECOME = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
# label and size of every figure in pixels; a figure that plotly did not draw has height 0
FIGURES = """[...document.querySelectorAll('[role=img]')].map(e => {
  const drawn = e.classList.contains('plot') ? e.querySelector('.main-svg') : e;
  const b = drawn ? drawn.getBoundingClientRect() : {width: 0, height: 0};
  return {label: e.getAttribute('aria-label'), width: b.width, height: b.height}; })"""
# texts of a figure that overlap another text or exceed the figure by more than `slack` pixels
COLLISIONS = """(slack => { const found = [];
  for (const svg of document.querySelectorAll('.plot')) {
    const outer = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')].filter(
      t => t.textContent && t.getClientRects().length).map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([name, a], i) => {
      if (a.left < outer.left - slack || a.right > outer.right + slack || a.top < outer.top - slack
          || a.bottom > outer.bottom + slack) found.push([name, 'exceeds its figure']);
      texts.slice(i + 1).forEach(([other, b]) => {
        const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (w > slack && h > slack) found.push([name, other]); }); }); }
  return found; })(2)"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def find() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one tab. `errors` lists errors, warnings, crashes and network requests since `open`."""

    def __init__(self, program: str, patience_s: float = 60):
        self.patience_s, self.errors, self._number, self._buffer = patience_s, [], 0, b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        browser_in, self._to = os.pipe()
        self._from, browser_out = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BECOME, str(browser_in), str(browser_out), *command],
            pass_fds=(browser_in, browser_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, page: Path, width: int = 1200, dark: bool = False, media: str = "") -> None:
        """Load a file and wait until it is drawn. `media` is "print", or empty for the screen."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", media=media, features=scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self.errors.clear()
        result = self._call("Page.navigate", url=page.absolute().as_uri())
        if result.get("errorText"):
            raise FileNotFoundError(f"{page}: {result['errorText']}")
        self._wait_for_event("Page.loadEventFired")
        self.evaluate("new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 50)))")

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression that the page evaluates."""
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description"))
        return result["result"].get("value")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def _wait_for_event(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        """Read the next message. Add it to `errors` if it reports an error."""
        deadline = time.monotonic() + self.patience_s
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._from, 2**20)
            if not chunk:
                raise RuntimeError("the browser has ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._record_errors(message.get("method"), message.get("params", {}))
        return message

    def _record_errors(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value")) for a in params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:", "blob:")):
                self.errors.append(f"request of {url}")
        elif method == "Inspector.targetCrashed":
            self.errors.append("the page crashed")

"""A headless Chromium over its debugging pipe (no port, no package): what a page logs, what it shows.

The protocol: https://chromedevtools.github.io/devtools-protocol/, JSON messages ended by a zero byte, read by
the browser from descriptor 3 and written to descriptor 4.
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
# the browser wants its pipe at 3 and 4; a shell need not know descriptors above 9
BECOME = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
# what a figure is and where; one that plotly did not draw has no height
FIGURES = """[...document.querySelectorAll('[role=img]')].map(e => {
  const drawn = e.classList.contains('plot') ? e.querySelector('.main-svg') : e;
  const b = drawn ? drawn.getBoundingClientRect() : {width: 0, height: 0};
  return {label: e.getAttribute('aria-label'), width: b.width, height: b.height}; })"""
# texts of a figure that meet another one or leave it, by more than `slack` pixels
COLLISIONS = """(slack => { const found = [];
  for (const svg of document.querySelectorAll('.plot')) {
    const outer = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll('text')].filter(
      t => t.textContent && t.getClientRects().length).map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([name, a], i) => {
      if (a.left < outer.left - slack || a.right > outer.right + slack || a.top < outer.top - slack
          || a.bottom > outer.bottom + slack) found.push([name, 'leaves its figure']);
      texts.slice(i + 1).forEach(([other, b]) => {
        const w = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const h = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (w > slack && h > slack) found.push([name, other]); }); }); }
  return found; })(2)"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def find() -> str | None:
    """The browser of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `errors` gathers what the console, the network or the policy said since `open`."""

    def __init__(self, program: str, patience_s: float = 60):
        self.patience_s, self.errors, self._number, self._buffer = patience_s, [], 0, b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BECOME, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(self, page: Path, width: int = 1200, dark: bool = False, media: str = "") -> None:
        """Load a file and wait until it is drawn; `media`: print, or nothing for the screen."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", media=media, features=scheme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self.errors.clear()
        done = self._ask("Page.navigate", url=page.absolute().as_uri())
        if done.get("errorText"):
            raise FileNotFoundError(f"{page}: {done['errorText']}")
        self._until("Page.loadEventFired")
        self.evaluate("new Promise(drawn => requestAnimationFrame(() => setTimeout(drawn, 50)))")

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page; the page itself needs none."""
        done = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description"))
        return done["result"].get("value")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _until(self, event: str) -> None:
        while self._read().get("method") != event:
            pass

    def _read(self) -> dict[str, Any]:
        """The next message; what tells of an error is kept."""
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
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
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

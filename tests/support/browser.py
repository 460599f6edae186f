"""A browser that tests look at the site with: Debian's chromium, over a pipe, without a driver.

The protocol is Chrome's own: JSON with an id, ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--hide-scrollbars", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-pipe",
]  # fmt: skip


class Browser:
    """One page of a chromium; ``errors`` collects what its console complains about."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM
        here, there = os.pipe(), os.pipe()
        shell = ["bash", "-c", f'exec "$@" 3<&{here[0]} 4>&{there[1]}', "bash"]
        command = [*shell, PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(here[0], there[1]), **quiet)
        os.close(here[0])
        os.close(there[1])
        self.to, self.answers = os.fdopen(here[1], "wb"), os.fdopen(there[0], "rb")
        self.number, self.session, self.read = 0, "", b""
        self.events: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in "Page", "Runtime", "Log":
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def receive(self) -> dict[str, Any]:
        """Read one message, and keep what it says of errors."""
        while b"\0" not in self.read:
            block = os.read(self.answers.fileno(), 1 << 16)
            assert block, "chromium has ended"
            self.read += block
        line, _, self.read = self.read.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, params = message.get("method", ""), message.get("params", {})
        self.events.append(method)
        entry = params.get("entry", {})
        failed = method == "Runtime.consoleAPICalled" and params["type"] == "error"
        if failed or method == "Runtime.exceptionThrown" or entry.get("level") == "error":
            self.errors.append(json.dumps(params)[:500])
        return message

    def open(self, address: str) -> None:
        """Go to an address and wait until the page has loaded."""
        self.errors.clear()
        self.events.clear()
        self.call("Page.navigate", url=address)
        self.wait_for_load()

    def wait_for_load(self) -> None:
        """Wait for the page that is on its way."""
        while "Page.loadEventFired" not in self.events:
            self.receive()

    def resize(self, width: int) -> None:
        """Give the window another width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def show(self, width: int, theme: str) -> None:
        """Give the window another width, and the system another colour scheme."""
        self.resize(width)
        features = {"prefers-color-scheme": theme, "prefers-reduced-motion": "reduce"}
        pairs = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)
        # The theme looks a third of a second later what has to scroll, and can be given the focus.
        self.run("new Promise(done => setTimeout(done, 400))")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true, ten seconds at most."""
        loop = f"""new Promise((done, failed) => {{
          const end = Date.now() + 10000;
          const look = () => ({condition}) ? done(true)
            : Date.now() > end ? failed("never true") : setTimeout(look, 20);
          look();
        }})"""
        self.run(loop)

    def run(self, script: str) -> Any:
        """Evaluate JavaScript in the page; a promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        """End the process."""
        self.session = ""
        self.call("Browser.close")
        self.process.wait(10)
        self.to.close()
        self.answers.close()

"""Drives a headless Chromium over the two pipes of its DevTools protocol: no driver, no package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT = 30.0
#: keys that are more than a letter -> code and number
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Backspace": 8, " ": 32}
SHIFT = 8


def find_chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab. `events` holds what Chromium told of it."""

    def __init__(self, process: subprocess.Popen[bytes], read: int, write: int) -> None:
        self.process, self._read, self._write = process, read, write
        self._numbers, self._held, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []

    def open_tab(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")
        # Else the window loses the keyboard for good where a page refuses a drop.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + WAIT
        while True:
            found = self._next(end)
            if found.get("id") == number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def _next(self, end: float) -> Any:
        while b"\0" not in self._held:
            left = max(0.0, end - time.monotonic())
            assert select.select([self._read], [], [], left)[0], "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._held += part
        raw, _, self._held = self._held.partition(b"\0")
        return json.loads(raw)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def leave(self) -> None:
        """Leave the page, and forget what was told of it."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.events.clear()

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, (script, found["exceptionDetails"])
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + WAIT
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}\n{self.text()}"
            time.sleep(0.02)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        named = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        down = {"text": {"Enter": "\r", " ": " "}.get(key, "")} if key in ("Enter", " ") else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **named, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **named)

    def focused(self) -> str:
        return str(self.run("document.activeElement.id || document.activeElement.className"))

    def choose_files(self, selector: str, *paths: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(p) for p in paths])

    def drop_files(self, *paths: Path) -> None:
        """Drag files in from elsewhere, and let them go in the middle of the page."""
        data = {"items": [], "files": [str(p) for p in paths], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=200, y=200, data=data)

    def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Take a size of the window and a scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def told(self, method: str) -> list[dict[str, Any]]:
        """Parameters of all events of a kind."""
        self.run("0")  # those on their way
        return [e["params"] for e in self.events if e.get("method") == method]


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A context with a new Chromium, whose files lie in a folder."""
    path = find_chromium()
    assert path, "no Chromium: apt-get install chromium"
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--no-first-run", "--disable-extensions", "--disable-background-networking"]
    flags += [f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    to_read, to_write = os.pipe(), os.pipe()  # Chromium reads at 3 and writes at 4
    script = f'exec "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", path, *flags],
        pass_fds=(to_read[0], to_write[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read[0])
    os.close(to_write[1])
    page = Page(process, to_write[0], to_read[1])
    try:
        page.open_tab()
        yield page
    finally:
        process.terminate()
        process.wait(10)
        os.close(to_read[1])
        os.close(to_write[0])

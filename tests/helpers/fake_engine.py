"""A program that stands for ``vllm serve``: ``python fake_engine.py PORT FOLDER``.

What it does is said by FOLDER/behaviour.json, read again at each request, so that a test changes its mind while it
runs. In FOLDER it notes its process ids (``starts``), the one-token requests (``canaries``) and its end (``ends``).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_PR_SET_NAME = 15


class Handler(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        wishes = behaviour(self.folder)
        if self.path == "/health":
            while behaviour(self.folder).get("health") == "hang":
                time.sleep(0.01)
            self._answer(wishes.get("health", 200), b"")
        elif self.path == "/version":
            self._answer(200, json.dumps({"version": wishes.get("version", "0.32.0")}).encode())
        else:
            self._answer(200, wishes.get("metrics", "").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/inference/v1/abort_requests":
            self._answer(200 if behaviour(self.folder).get("aborts") else 404, b"{}")
            return
        note(self.folder / "canaries", {"model": body["model"], "key": self.headers["authorization"]})
        while behaviour(self.folder).get("canary") == "hang":
            time.sleep(0.01)
        self._answer(behaviour(self.folder).get("canary", 200), b"{}")

    def _answer(self, status: int | str, body: bytes) -> None:
        if status == "hang":
            status = 200
        self.send_response(int(status))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A question that was broken off is nothing for the log."""


def behaviour(folder: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((folder / "behaviour.json").read_text())
    return value


def note(file: Path, value: object) -> None:
    with file.open("a") as out:
        out.write(json.dumps(value) + "\n")


def titled_child(title: str) -> None:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode(), 0, 0, 0)
        time.sleep(60)
        os._exit(0)


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2])
    wishes = behaviour(folder)
    note(folder / "starts", os.getpid())
    print("the engine starts", flush=True)

    def end(*_: object) -> None:
        note(folder / "ends", time.monotonic())
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    if title := wishes.get("title"):
        titled_child(title)
    if wishes.get("start") == "hang":
        time.sleep(60)
    while behaviour(folder).get("start") == "wait":
        time.sleep(0.01)
    wishes = behaviour(folder)
    if status := wishes.get("start"):
        print("the engine cannot start", flush=True)
        if status < 0:
            os.kill(os.getpid(), -status)
        os._exit(status)
    Handler.folder = folder
    server = Server(("127.0.0.1", port), Handler)
    if (after_s := wishes.get("die_after_s")) is not None:
        threading.Timer(after_s, lambda: os._exit(9)).start()
    server.serve_forever()


if __name__ == "__main__":
    main()

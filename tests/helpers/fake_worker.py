"""A program that stands for ``python -m trivet.gateway.worker``: ``python fake_worker.py FOLDER ...``.

What it reports is said by FOLDER/behaviour.json, read at its start: ``word`` (the line it reports, null for none),
``words`` (what it prints), ``status`` (ends with it after the word) and ``stubborn`` (SIGTERM does not end it). In
FOLDER it notes each start (``starts``) with all it was given, each later line (``lines``) and its end (``ends``).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

folder = Path(sys.argv[1])
behaviour = json.loads((folder / "behaviour.json").read_text())


def note(name: str, value: object) -> None:
    with (folder / name).open("a") as file:
        file.write(json.dumps(value) + "\n")


def end(*_: object) -> None:
    note("ends", os.getpid())
    if not behaviour.get("stubborn"):
        os._exit(0)


signal.signal(signal.SIGTERM, end)
config = json.loads(sys.stdin.readline())
with socket.socket(fileno=os.dup(config["listen_fd"])) as listener:
    port = listener.getsockname()[1]
note("starts", {"pid": os.getpid(), "argv": sys.argv[2:], "config": config, "port": port, "env": dict(os.environ)})
print(behaviour.get("words", "the worker starts"), flush=True)
note("lines", json.loads(sys.stdin.readline()))
if behaviour.get("word"):
    os.write(config["report_fd"], json.dumps(behaviour["word"]).encode() + b"\n")
if (status := behaviour.get("status")) is not None:
    os._exit(status)
for line in sys.stdin:
    note("lines", json.loads(line))
note("ends", os.getpid())

"""``trivet reload``: has a running service read its topology file again, and tells how that went."""

from __future__ import annotations

import os
import signal
import time

from rich.markup import escape

from trivet.cli.common import out
from trivet.errors import TopologyError, TrivetError
from trivet.gateway.service import last_service

_LOOK_S = 0.1


def reload() -> None:
    """Have the service started last here read its topology file again, and wait until its engines are as it says."""
    service = last_service()
    if service is None:
        raise TrivetError("no service runs here", mend="start one with `trivet up FILE`")
    before = service.reload()
    if before is None:
        raise TrivetError(
            f"the service at {service.url} cannot be reloaded",
            mend="if it still starts, wait until `trivet up` says that it serves",
        )
    os.kill(service.pid, signal.SIGHUP)
    told = ""
    while True:
        now = service.reload()
        if now is not None and now.number > before.number:
            if now.state != "running":
                break
            if told != now.told:
                told = now.told
                out.print(f"{escape(told)} ...", soft_wrap=True)
        if last_service() != service:
            raise TrivetError(f"the service at {service.url} ended while it was reloaded", mend="trivet up FILE")
        time.sleep(_LOOK_S)
    if now.state != "done":
        raise (TopologyError if now.state == "refused" else TrivetError)(f"reload {now.state}: {now.told}")
    out.print(f"reloaded: {escape(now.told)}", soft_wrap=True)

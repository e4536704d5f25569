"""``trivet reload``: has a running service read its topology file again, and tells how that went."""

from __future__ import annotations

import time

from rich.markup import escape

from trivet.cli.common import out
from trivet.errors import TopologyError, TrivetError
from trivet.gateway.runs import last_service

_LOOK_S = 0.1
_SILENCE_S = 300.0
"""A service that has shown no sign of life for so long, while it should be reloaded, is waited for no more."""


def reload() -> None:
    """Have the service started last here read its topology file again, and wait until its engines are as it says."""
    service = last_service()
    if service is None:
        raise TrivetError("no service runs here", mend="start one with `trivet up FILE`")
    before = service.reload()
    if before is None or service.started is None:
        raise TrivetError(
            f"the service at {service.url} cannot be reloaded",
            mend="if it still starts, wait until `trivet up` says that it serves",
        )
    service.hang_up()
    told, sign, heard_s = "", service.sign_of_life(), time.monotonic()
    while True:
        now = service.reload()
        if now is not None and now.number > before.number:
            if now.state != "running":
                break
            if told != now.told:
                told = now.told
                out.print(f"{escape(told)} ...", soft_wrap=True)
        if now is None or last_service() != service:  # it takes back that it can be reloaded when it stops
            raise TrivetError(f"the service at {service.url} ended while it was reloaded", mend="trivet up FILE")
        if sign != (sign := service.sign_of_life()):
            heard_s = time.monotonic()
        if time.monotonic() - heard_s > _SILENCE_S:
            raise TrivetError(
                f"the service at {service.url} has not been heard of for {_SILENCE_S:.0f} s while it was reloaded",
                mend=f"see trivet status, and its logs in {service.run_dir}",
            )
        time.sleep(_LOOK_S)
    if now.state != "done":
        raise (TopologyError if now.state == "refused" else TrivetError)(f"reload {now.state}: {now.told}")
    out.print(f"reloaded: {escape(now.told)}", soft_wrap=True)

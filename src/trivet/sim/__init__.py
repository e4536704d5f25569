"""A simulated engine: vLLM's HTTP surface, scheduling and KV hand-overs without a model, for tests and load work."""

from __future__ import annotations

from trivet.sim.engine import SimEngine
from trivet.sim.faults import Fault
from trivet.sim.record import RequestRecord, SimState
from trivet.sim.settings import SimSettings

__all__ = ["Fault", "RequestRecord", "SimEngine", "SimSettings", "SimState"]

"""A topology file that is planned when a service starts, and again while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trivet.cli.common import model_folder, read_topology
from trivet.errors import TopologyError
from trivet.topology import EnginePlan, Plan, make_plan
from trivet.topology.ports import PortBook


class PlanFile:
    """The file and the ports of its engines, which are held until ``close``."""

    def __init__(self, path: Path | None, *, port: int | None = None) -> None:
        """
        Args:
            path: the file; None for the demo's topology, which cannot be read again.
            port: of the gateway, whatever the file says.
        """
        self._path = path
        self._port = port
        self._ports = PortBook()
        self._newer: PortBook | None = None

    def plan(self) -> Plan:
        """The file's plan, for a service that starts.

        Raises:
            TrivetError: the file asks for what cannot be.
        """
        return self._planned(self._ports, ())

    def again(self, running: Plan) -> Plan:
        """The file's plan, for the service that runs; its ports are held until ``keep`` or ``drop``.

        Raises:
            TrivetError: the file asks for what cannot be, or cannot be read.
        """
        if self._path is None:
            raise TopologyError(
                "this service was started without a topology file, so there is none to read again",
                mend="trivet topology init writes one; start with it: trivet up FILE",
            )
        self._newer = self._ports.again()
        return self._planned(self._newer, running.engines)

    def keep(self, *, whole: bool) -> None:
        """The engines of the newest plan run, all of them and no others if ``whole``."""
        if self._newer is not None:
            self._ports.adopt(self._newer, whole=whole)
            self._newer = None

    def drop(self) -> None:
        """None of the newest plan's engines was started."""
        if self._newer is not None:
            self._newer.close()
            self._newer = None

    def close(self) -> None:
        """Gives all ports back."""
        self.drop()
        self._ports.close()

    def _planned(self, ports: PortBook, running: Sequence[EnginePlan]) -> Plan:
        topology = read_topology(self._path)
        if self._port is not None:
            gateway = topology.gateway.model_copy(update={"port": self._port})
            topology = topology.model_copy(update={"gateway": gateway})
        return make_plan(topology, ports, model=model_folder(topology), running=running)

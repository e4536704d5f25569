"""When a request is over, and who is told then."""

from __future__ import annotations

import logging
from collections.abc import Callable

from trivet.gateway.metrics import GatewayMetrics
from trivet.journal import GenerationRecord, RequestRecord

logger = logging.getLogger(__name__)

Listener = Callable[[RequestRecord], None]


class Endings:
    """Tells of each request once, when it was answered and all of its generations have ended.

    An answer may be whole before its generations are: an engine tells behind the last token what it had cached, and
    legs of a client that left are ended behind its back. A record that were told of before would lack that.
    """

    def __init__(self, metrics: GatewayMetrics, *listeners: Listener) -> None:
        """
        Args:
            metrics: count every generation that ends.
            listeners: are called with each request; what they raise is logged, and is nobody else's trouble.
        """
        self._metrics = metrics
        self._listeners = listeners

    def generation(self, record: GenerationRecord, owner: RequestRecord | None) -> None:
        """A generation has ended."""
        self._metrics.ended(record, owner)
        if owner is not None:
            self._look(owner)

    def request(self, record: RequestRecord) -> None:
        """A request has its answer, or its client has left."""
        record.answered = True
        self._look(record)

    def _look(self, record: RequestRecord) -> None:
        if not record.answered or record.running or record.told:
            return
        record.told = True
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:
                logger.exception("request %s", record.request_id)

"""What a client may not say: the fields that steer the transfer of KV, and the engine's choice of its own ids.

In vLLM a client's ``kv_transfer_params`` reach the connector: they can name a host that the engine then talks to, or
leave out a key without which the engine's process ends. ``request_id`` is what aborts and pairs requests. A topology
can allow each of them by name (``gateway.allow``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

STEERING = ("kv_transfer_params", "ec_transfer_params", "request_id", "data_parallel_rank")
"""What the topology can allow."""

RANK_HEADER = "x-data-parallel-rank"

_LONGEST_WAY = 120
_BODIES_WITHIN = ("vllm_xargs", "extra_args", "extra_body", "sampling_params")
"""Objects inside a body whose keys end up where the body's own do."""


def steering_fields(body: object) -> Iterator[tuple[str, str]]:
    """The fields of a parsed body that steer the transfer, each as ``(where, what)``; a null says nothing.

    Looks into lists of requests and into objects whose keys vLLM copies, however deep they are nested.
    """
    waiting: list[tuple[str, object]] = [("", body)]  # no recursion: a client says how deep it goes
    while waiting:
        where, one = waiting.pop()
        if isinstance(one, Mapping):
            yield from ((where + name, name) for name in STEERING if one.get(name) is not None)
            waiting += ((f"{where}{name}.", one[name]) for name in reversed(_BODIES_WITHIN) if name in one)
        elif isinstance(one, list):
            waiting += [(where, part) for part in reversed(one) if type(part) in (dict, list)]


def refusal_of(body: object, header_names: Collection[str], allowed: Collection[str]) -> str | None:
    """Why a request is refused for what it says, or None.

    Args:
        body: the parsed body.
        header_names: in lower case.
        allowed: what the topology allows of ``STEERING``.
    """
    if RANK_HEADER in header_names and "data_parallel_rank" not in allowed:
        return _refusal(f"the header {RANK_HEADER}", "data_parallel_rank")
    for where, what in steering_fields(body):
        if what not in allowed:
            return _refusal(where, what)
    return None


def _refusal(where: str, what: str) -> str:
    where = where if len(where) <= _LONGEST_WAY else f"{where[:_LONGEST_WAY]}..."
    return f"{where} is not for clients of this service (a topology may allow it: gateway.allow: [{what}])"

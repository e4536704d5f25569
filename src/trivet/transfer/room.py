"""Whether a decode engine has blocks for a transfer, as far as vLLM does not see to it.

Two things could keep requests waiting for each other for ever, as vLLM takes no blocks from one that is loading:

- Behind a prompt that fills its last block, the first token needs a block in each cache group that vLLM does not know
  of when it gives blocks to the prompt. Were all blocks held by such prompts, none could go on. Those blocks are kept
  free. Requests that run may take them: they come back when these end.
- Up to vLLM 0.31 a request that waits for blocks is not overtaken by one that has its KV and only has to go on. Were
  all blocks held by the latter, neither could. There, nothing that would have to wait is offered to vLLM while others
  hold blocks without running.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trivet.transfer.incoming import Incoming, State

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class Room:
    """See the module. For the scheduler's thread."""

    def __init__(self, block_tokens: Sequence[int], *, overtaken: bool) -> None:
        """
        Args:
            block_tokens: tokens of a block, by cache group.
            overtaken: whether vLLM lets requests that have their KV overtake those that wait for blocks.
        """
        self._block_tokens, self._overtaken = tuple(block_tokens), overtaken
        self._manager: KVCacheManager | None = None
        self._loading: dict[str, int] = {}
        """Blocks that the first token will need, by request id."""
        self._kept = 0
        """Their sum."""
        self._landed: list[Request] = []
        self._first: Incoming | None = None
        """Waits for blocks: nobody behind it takes them."""

    def bind(self, manager: KVCacheManager) -> None:
        """vLLM's owner of blocks."""
        self._manager = manager

    def fits(self, incoming: Incoming, cached_tokens: int) -> bool:
        """Whether it may be offered to vLLM now; else it is to be asked for again.

        How many of its ``cached_tokens`` lie in blocks that are in use anyway is not known, so they count as if they
        were not, and one that has such waits longer than it might. Others wait behind it only where it would lack
        blocks if all of those were in use.
        """
        first = self._first
        if first is incoming or (first is not None and first.state is State.OPENED and not first.fails):
            first = self._first = None
        if first is not None and first.request < incoming.request:
            return False
        spare = self._spare(incoming)
        fits = not (spare or self._kept) and (self._overtaken or not self._is_held())
        if not (fits or self._has(incoming.request, spare)):
            if not self._has(incoming.request, spare, cached_tokens):  # not even if all that is cached were in use
                self._first = incoming
            return False
        return True

    def lets(self, request: Request) -> bool:
        """The same for a request whose KV does not come from prefill.

        It waits behind the first as well: plain requests that keep coming would take every block that comes back.
        """
        first = self._first
        if first is not None and (first.state is not State.OPENED or first.fails) and first.request < request:
            return False
        return self._overtaken or not self._is_held() or self._has(request, 0)

    def _has(self, request: Request, spare: int, shared_tokens: int = 0) -> bool:
        pool = getattr(self._manager, "block_pool", None)
        if pool is None:
            return True
        own = spare + sum(-(-request.num_tokens // size) - shared_tokens // size for size in self._block_tokens)
        if own > pool.num_gpu_blocks - 1:
            return not self._is_held()  # whether there are ever as many is for vLLM to say
        return bool(own + self._kept <= pool.get_num_free_blocks())

    def take(self, incoming: Incoming) -> None:
        """It has blocks from now on, and does not run."""
        if self._first is incoming:
            self._first = None
        spare = self._spare(incoming)
        self._loading[incoming.request.request_id] = spare
        self._kept += spare

    def landed(self, incoming: Incoming) -> None:
        """It has its KV and its first token, and goes on when vLLM sees it. From here vLLM counts for itself."""
        self.leave(incoming)
        if not self._overtaken:
            self._landed.append(incoming.request)

    def leave(self, incoming: Incoming) -> None:
        """It waits for no blocks, and holds none without running."""
        if self._first is incoming:
            self._first = None
        self._kept -= self._loading.pop(incoming.request.request_id, 0)

    def _spare(self, incoming: Incoming) -> int:
        if not incoming.takes_first_token or incoming.token_taken or incoming.fails:
            return 0
        tokens = incoming.request.num_prompt_tokens
        return sum(tokens % size == 0 for size in self._block_tokens)

    def _is_held(self) -> bool:
        """Whether a request holds blocks and does not run."""
        if self._landed:
            self._landed = [one for one in self._landed if one.status.name in ("WAITING_FOR_REMOTE_KVS", "WAITING")]
        return bool(self._loading or self._landed)

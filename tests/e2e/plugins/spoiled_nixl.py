"""NixlConnector whose received blocks can be spoiled on purpose, to prove that the equality tests would notice.

What is done to the next transfers stands in the file that ``TRIVET_TEST_SPOIL`` names: ``zero`` clears the first
received block, ``mistake`` puts the second block's content into the first, anything else leaves the blocks alone.
(Exchanging two whole blocks would change nothing: attention does not care for the order of its keys, and a key's
position is part of it.)
"""

import os
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector


class SpoiledNixlConnector(NixlPullConnector):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._control = Path(os.environ["TRIVET_TEST_SPOIL"])
        self._caches = {}
        self._receiving = {}

    def register_kv_caches(self, kv_caches):
        self._caches = dict(kv_caches)
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context, **kwargs):
        for request_id, meta in self._connector_metadata.reqs_to_recv.items():
            blocks = meta.local_block_ids
            if blocks and isinstance(blocks[0], (list, tuple)):  # one list for each KV cache group
                blocks = blocks[0]
            self._receiving[request_id] = list(blocks)
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids):
        sent, received = super().get_finished(finished_req_ids)
        self._spoil(received)
        return sent, received

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        self._spoil(results.finished_recving)
        return results

    def _spoil(self, received):
        for request_id in received or ():
            blocks = self._receiving.pop(request_id, [])
            order = self._control.read_text() if self._control.exists() else ""
            for cache in self._caches.values():
                if order == "zero" and blocks:
                    cache[blocks[0]].zero_()
                elif order == "mistake" and len(blocks) > 1:
                    cache[blocks[0]].copy_(cache[blocks[1]])

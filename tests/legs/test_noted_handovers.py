"""What handovers between simulated engines have cost is noted on the board, for those who choose."""

import dataclasses

import pytest

from helpers.stack import QUICK, answer_of, stack, token_request
from trivet.sim import Fault


@pytest.mark.parametrize("connector", ["NixlConnector", "TrivetConnector"])
async def test_a_pairs_handovers_are_noted(connector):
    async with stack("prefill", "decode", settings=dataclasses.replace(QUICK, kv_connector=connector)) as built:
        pair = built.engines.ready("prefill")[0], built.engines.ready("decode")[0]
        assert built.engines.board.handover(*pair) is None
        for number in range(3):
            await answer_of(built, token_request(start=300 + number))
        mean_s, samples = built.engines.board.handover(*pair)
        assert samples == 3
        first = [one.decode_first_s - one.prefill_end_s for one in built.records]
        assert mean_s == pytest.approx(sum(first) / 3, rel=0.01, abs=1e-6)
        anew = dataclasses.replace(pair[1], generation=pair[1].generation + 1)
        assert built.engines.board.handover(pair[0], anew) is None


async def test_a_handover_behind_a_fault_tells_nothing_of_the_pair():
    async with stack("prefill", "decode") as built:
        pair = built.engines.ready("prefill")[0], built.engines.ready("decode")[0]
        built.sim("prefill-0").faults.add(Fault("status", status=503))
        await answer_of(built, token_request())
        assert built.records[0].attempts > 1
        assert built.engines.board.handover(*pair) is None


async def test_a_colocated_request_is_no_handover():
    async with stack("decode") as built:
        await answer_of(built, token_request())
        decode = built.engines.ready("decode")[0]
        assert built.engines.board.handover(decode, decode) is None

"""Scheduler sides together, over a real link; what the workers would report is told by hand."""

import contextlib
import time
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from transfer.schedulers import BLOCK, IDENTITY, blocks_of, end, make_request, output_of, preempt, step
from transfer.waiting import until
from trivet.transfer.decode import DecodeSide
from trivet.transfer.plan import Report
from trivet.transfer.prefill import PrefillSide
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace


class Pair:
    """A prefill and a decode engine's schedulers."""

    def __init__(self, folder, *, lease_s=30.0, differs=False):
        self._folder, self._lease_s = folder, lease_s
        self.counts = Counts()
        self.prefill = self.start_prefill("prefill-1")
        other = {**IDENTITY, "model": "other"} if differs else IDENTITY
        self.decode = DecodeSide(
            self._settings("d"),
            "decode-1",
            other,
            ranks=1,
            block_tokens=[BLOCK],
            max_model_len=200,
            carries_output=True,
            overtaken=True,
            counts=self.counts,
            trace=Trace("decode"),
        )
        self.freed = []
        self.decode.bind(SimpleNamespace(free=lambda request: self.freed.append(request.request_id)))

    def _settings(self, name):
        return Settings(f"unix:{self._folder / name}", (), 2**20, 2**18, self._lease_s, False)

    def start_prefill(self, engine):
        own = self._settings("p")
        return PrefillSide(own, engine, IDENTITY, [f"{own.path}.0"], self.counts, Trace("prefill"))

    def ask_prefill(self, transfer="t", **params):
        request = make_request(f"p-{transfer}", 40, {"do_remote_decode": True, "transfer_id": transfer, **params})
        self.prefill.on_new_request(request, request.kv_transfer_params)
        return request

    def ask_decode(self, transfer="t", **params):
        address = self._settings("p").address
        params = {"do_remote_prefill": True, "transfer_id": transfer, "prefill_address": address, **params}
        request = make_request(f"d-{transfer}", 40, params)
        self.decode.on_new_request(request, params)
        return request

    def opened(self, transfer="t"):
        """Waits until prefill has heard what decode wants."""
        prefill = self.prefill

        def heard():
            outgoing = prefill._outgoing.get(transfer)
            return transfer in prefill._early or (outgoing is not None and outgoing.opener is not None)

        until(heard, f"opening of {transfer}")

    def compute(self, request, tokens=40, **kind):
        return self.prefill.plan(step((request, tokens), **kind))

    def take_blocks(self, request):
        until(lambda: self.decode.matched(request, 0) == (40, True), "announcement")
        self.decode.allocated(request, blocks_of([1, 2, 3]), 40)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        (receive,) = self.decode.plan().receives
        return receive

    def update(self, report=None):
        output = output_of(report)
        self.decode.update(output)
        return output.finished_recving or set()

    def land(self, request, attempt=0):
        """The workers report until the request goes on."""
        report = Report(landed={request.request_id: 1}, attempts={request.request_id: attempt})
        until(lambda: self.update(report) == {request.request_id}, "going on")

    def close(self):
        self.decode.close()
        self.prefill.close()


@pytest.fixture
def pair(folder):
    with contextlib.closing(Pair(folder)) as pair:
        yield pair


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_request_is_handed_over_whichever_leg_comes_first(pair, first):
    if first == "decode":
        receiving = pair.ask_decode(first_token=True)
        pair.opened()
        sending = pair.ask_prefill(first_token=True)
    else:
        sending = pair.ask_prefill(first_token=True)
        receiving = pair.ask_decode(first_token=True)
        pair.opened()
    assert pair.decode.matched(receiving, 0) == (None, False)
    pair.compute(sending, 20)
    assert pair.take_blocks(receiving).transfer == "t"
    pair.compute(sending, 20)
    end(sending, 7)
    assert pair.prefill.request_finished(sending) == (True, {"transfer_id": "t", "handed_over": True})
    pair.land(receiving)
    assert list(receiving.output_token_ids) == [7]
    until(lambda: "t" in pair.prefill.plan(step()).dropped, "freeing of prefill's blocks")
    pair.decode.request_finished(receiving)
    assert pair.counts.take() is None


def test_decode_may_come_after_prefills_answer(pair):
    sending = pair.ask_prefill(first_token=True)
    pair.compute(sending)
    end(sending, 7)
    assert pair.prefill.request_finished(sending)[0]
    receiving = pair.ask_decode(first_token=True)
    pair.take_blocks(receiving)
    pair.land(receiving)
    assert list(receiving.output_token_ids) == [7]


def test_a_decode_that_has_all_before_prefill_ends_lets_it_keep_nothing(pair):
    sending, receiving = pair.ask_prefill(), pair.ask_decode()
    pair.compute(sending)
    pair.take_blocks(receiving)
    pair.land(receiving)
    until(lambda: pair.prefill._outgoing["t"].taken)
    end(sending)
    assert pair.prefill.request_finished(sending) == (False, {"transfer_id": "t", "handed_over": True})


def test_an_abort_at_decode_is_told_in_prefills_answer(pair):
    sending, receiving = pair.ask_prefill(), pair.ask_decode()
    pair.compute(sending, 20)
    pair.opened()
    pair.decode.request_finished(receiving)
    until(lambda: pair.prefill._outgoing["t"].unwanted)
    pair.compute(sending, 20)
    end(sending)
    kept, params = pair.prefill.request_finished(sending)
    assert (kept, params["handed_over"]) == (False, False)


def test_an_abort_at_prefill_lets_decode_compute(pair):
    sending, receiving = pair.ask_prefill(), pair.ask_decode()
    pair.opened()
    pair.compute(sending, 20)
    sending.status = RequestStatus.FINISHED_ABORTED
    pair.prefill.request_finished(sending)
    until(lambda: pair.decode.matched(receiving, 0) == (0, False), "recomputing")
    assert pair.counts.take().data["recomputed"] == {"requests": 1, "tokens": 40}


def test_decode_that_opens_after_the_release_computes(pair):
    sending = pair.ask_prefill()
    pair.compute(sending)
    end(sending)
    pair.prefill.request_finished(sending)
    pair.prefill.on_new_request(make_request("release"), {"release_transfer": "t"})
    assert pair.prefill.plan(step()).dropped == ("t",)
    receiving = pair.ask_decode()
    until(lambda: pair.decode.matched(receiving, 0) == (0, False), "recomputing")
    assert receiving.num_tokens == 40


def test_decode_keeps_its_lease_until_it_has_blocks(folder):
    with contextlib.closing(Pair(folder, lease_s=0.6)) as pair:
        sending, receiving = pair.ask_prefill(), pair.ask_decode()
        pair.opened()
        pair.compute(sending)
        end(sending)
        pair.prefill.request_finished(sending)
        end_s = time.monotonic() + 1.3
        while time.monotonic() < end_s:
            assert pair.prefill.plan(step()).dropped == ()
            time.sleep(0.02)
        pair.decode.request_finished(receiving)
        until(lambda: pair.prefill.plan(step()).dropped == ("t",))
        assert pair.counts.take() is None


def test_engines_that_differ_hand_nothing_over_and_decode_computes_behind_the_first_token(folder, caplog):
    with contextlib.closing(Pair(folder, differs=True)) as pair:
        sending, receiving = pair.ask_prefill(first_token=True), pair.ask_decode(first_token=True)
        pair.opened()
        pair.compute(sending)
        assert pair.decode.matched(receiving, 0) == (None, False)
        end(sending, 7)
        kept, params = pair.prefill.request_finished(sending)
        assert not kept
        assert params["handed_over"] is False
        assert "differ in model: m and other" in params["problem"]
        until(lambda: pair.decode.matched(receiving, 0) == (0, False), "recomputing")
        assert list(receiving.output_token_ids) == [7]
        assert pair.counts.take().data["failed"] == {"differ": 1}
        assert caplog.text.count("differ in model: m and other") >= 2  # both logs say so


def test_a_prefill_engine_that_is_started_again_takes_the_next_request(pair):
    sending, receiving = pair.ask_prefill(), pair.ask_decode()
    pair.compute(sending)
    pair.take_blocks(receiving)
    pair.land(receiving)
    pair.prefill.close()
    for link in list(pair.decode._links.values()):
        link.close()  # the end of the process
    until(lambda: all(link.ended for link in pair.decode._links.values()))
    pair.prefill = pair.start_prefill("prefill-2")
    sending, receiving = pair.ask_prefill("u"), pair.ask_decode("u")
    pair.opened("u")
    pair.compute(sending)
    assert pair.take_blocks(receiving).prefill_engine == "prefill-2"
    pair.land(receiving)


def test_a_prefill_side_that_closes_is_gone_for_decode(pair):
    receiving = pair.ask_decode()
    pair.opened()
    pair.prefill.close()
    until(lambda: pair.decode.matched(receiving, 0) == (0, False), "recomputing", 2)


def test_a_decode_side_that_closes_wants_nothing_more(pair):
    sending = pair.ask_prefill()
    pair.ask_decode()
    pair.opened()
    pair.compute(sending)
    pair.decode.close()
    until(lambda: pair.prefill._outgoing["t"].unwanted)


def test_a_preemption_at_prefill_gives_decodes_blocks_back_and_begins_again(pair):
    sending, receiving = pair.ask_prefill(first_token=True), pair.ask_decode(first_token=True)
    pair.opened()
    pair.compute(sending, 20)
    pair.take_blocks(receiving)
    preempt(sending)
    pair.prefill.plan(step())
    until(lambda: pair.decode.plan().given_up == (("d-t", 0),), "withdrawal")
    name = receiving.request_id
    assert pair.update(Report(stopped={name: 1}, reasons={name: "given up"}, attempts={name: 0})) == {name}
    assert pair.freed == [name]
    assert pair.decode.matched(receiving, 0) == (None, False)
    pair.compute(sending, 40, first=9, resumed=(sending,))
    assert pair.take_blocks(receiving).attempt == 1
    end(sending, 7)
    pair.prefill.request_finished(sending)
    pair.land(receiving, attempt=1)
    assert pair.counts.take() is None


def test_many_requests_at_once_are_told_apart(pair):
    receiving = [pair.ask_decode(f"t{number}", first_token=True) for number in range(32)]
    sending = [pair.ask_prefill(f"t{number}", first_token=True) for number in range(32)]
    for number in range(32):
        pair.opened(f"t{number}")
    for number, request in enumerate(sending):
        pair.compute(request)
        end(request, number)
        assert pair.prefill.request_finished(request)[0]
    for number, request in enumerate(receiving):
        pair.take_blocks(request)
        pair.land(request)
        assert list(request.output_token_ids) == [number]

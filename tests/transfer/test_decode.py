import contextlib
import time
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from transfer.schedulers import BLOCK, IDENTITY, FakePrefill, blocks_of, make_request, output_of
from transfer.waiting import until
from trivet.transfer.decode import DecodeSide
from trivet.transfer.link import Connection
from trivet.transfer.messages import PROTOCOL, Alive, Announce, First, Hello, Landed, Lost, Open, Took, Withdraw
from trivet.transfer.plan import Receive, Report
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace

LONGEST = 200
"""--max-model-len."""


class Decode:
    """A scheduler with a decode side."""

    def __init__(self, folder, *, ranks=1, lease_s=30.0, v2=True, groups=(BLOCK,), windows=(), overtaken=True):
        self.counts = Counts()
        self.settings = Settings(f"unix:{folder / 'd'}", (), 2**20, 2**18, lease_s, False)
        self.side = DecodeSide(
            self.settings,
            "decode-1",
            IDENTITY,
            ranks=ranks,
            block_tokens=list(groups),
            windows=windows,
            max_model_len=LONGEST,
            carries_output=v2,
            overtaken=overtaken,
            counts=self.counts,
            trace=Trace("decode"),
        )
        self.freed = []
        self.side.bind(SimpleNamespace(free=lambda request: self.freed.append(request.request_id)))

    def ask(self, prefill, transfer="t", name="r", tokens=40, first_token=False, **sampling):
        params = {
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "prefill_address": prefill if isinstance(prefill, str) else prefill.address,
            "first_token": first_token,
        }
        request = make_request(name, tokens, params, **sampling)
        self.side.on_new_request(request, params)
        return request

    def matches(self, request, cached=0, within=(40, True)):
        """Waits until vLLM is told of so many tokens."""
        until(lambda: self.side.matched(request, cached) == within, f"matching of {within}")

    def load(self, prefill, request, transfer="t", cached=0, blocks=((1, 2, 3),)):
        """A request up to where its KV arrives."""
        prefill.opened(transfer)
        prefill.link.send(Announce(transfer))
        tokens = request.num_tokens - cached
        self.matches(request, cached, (tokens, True))
        self.side.allocated(request, blocks_of(*map(list, blocks)), tokens)
        request.status, request.num_computed_tokens = RequestStatus.WAITING_FOR_REMOTE_KVS, request.num_tokens
        (receive,) = self.side.plan().receives
        return receive

    def update(self, report=None):
        """What vLLM hears behind a step: requests that go on."""
        output = output_of(report)
        self.side.update(output)
        return output.finished_recving or set()

    def landed(self, name="r", ranks=1, attempt=0):
        return Report(landed={name: ranks}, attempts={name: attempt})

    def stopped(self, name="r", ranks=1, attempt=0, why="prefill's worker is gone"):
        return Report(stopped={name: ranks}, reasons={name: why}, attempts={name: attempt})

    def close(self):
        self.side.close()


@pytest.fixture
def prefill(folder):
    with contextlib.closing(FakePrefill(str(folder / "p"))) as prefill:
        yield prefill


@pytest.fixture
def make(folder):
    """Makes decode sides."""
    with contextlib.ExitStack() as stack:
        yield lambda **kind: stack.enter_context(contextlib.closing(Decode(folder, **kind)))


@pytest.fixture
def decode(make):
    return make()


@pytest.fixture
def fence(decode, prefill):
    """A transfer of which prefill says something, which tells that decode has heard what was said before."""
    decode.ask(prefill, "fence", "r-fence")
    prefill.opened("fence")

    def wait():
        incoming = decode.side._incoming["r-fence"]
        incoming.announced = False
        prefill.link.send(Announce("fence"))
        until(lambda: incoming.announced)

    return wait


# asking


def test_prefill_is_asked_when_the_request_comes(decode, prefill):
    decode.ask(prefill)
    prefill.opened("t")
    assert prefill.hellos == [Hello(PROTOCOL, "decode-1", IDENTITY)]


def test_one_link_serves_all_requests_of_a_prefill_engine(decode, prefill):
    for number in range(5):
        decode.ask(prefill, f"t{number}", f"r{number}")
    assert {prefill.link.next(Open).transfer for _ in range(5)} == {f"t{number}" for number in range(5)}
    assert len(prefill.links) == 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"transfer_id": "t", "prefill_address": "unix:/a"},
        {"do_remote_prefill": True, "prefill_address": "unix:/a"},
        {"do_remote_prefill": True, "transfer_id": "t"},
        {"do_remote_prefill": True, "transfer_id": 5, "prefill_address": "unix:/a"},
        {"do_remote_prefill": False, "transfer_id": "t", "prefill_address": "unix:/a"},
    ],
)
def test_requests_without_a_transfer_are_none_of_its_business(decode, params):
    request = make_request("r")
    decode.side.on_new_request(request, params)
    assert decode.side.matched(request, 0) == (0, False)
    decode.side.allocated(request, blocks_of([1]), 0)
    decode.side.request_finished(request)
    assert decode.side.plan().receives == ()


def test_a_prompt_of_embeddings_is_computed_here(decode, prefill):
    request = make_request("r")
    request.prompt_token_ids = None
    decode.side.on_new_request(
        request, {"do_remote_prefill": True, "transfer_id": "t", "prefill_address": prefill.address}
    )
    assert decode.side.matched(request, 0) == (0, False)


# blocks


def test_a_request_takes_no_blocks_before_it_is_announced(decode, prefill):
    request = decode.ask(prefill)
    assert decode.side.matched(request, 0) == (None, False)
    prefill.opened("t")
    assert decode.side.matched(request, 0) == (None, False)
    prefill.link.send(Announce("t"))
    decode.matches(request)
    assert decode.side.matched(request, 16) == (24, True)


def test_the_workers_are_told_what_must_come_and_from_where(decode, prefill):
    request = decode.ask(prefill)
    receive = decode.load(prefill, request)
    paths = (f"{prefill.address[5:]}.0", f"{prefill.address[5:]}.1")
    assert receive == Receive("t", "r", 0, paths, "prefill-1", ((1, 2, 3),), (((0, 3),),))
    assert decode.side.plan().receives == ()
    assert decode.side.matched(request, 0)[0] is not None


@pytest.mark.parametrize(("cached", "wanted"), [(16, ((1, 3),)), (32, ((2, 3),))])
def test_what_is_cached_here_is_not_wanted(decode, prefill, cached, wanted):
    receive = decode.load(prefill, decode.ask(prefill), cached=cached)
    assert receive.wanted == (wanted,)


def test_places_outside_a_sliding_window_are_not_wanted(make, prefill):
    decode = make(groups=(16, 16, 32))
    request = decode.ask(prefill, tokens=100)
    receive = decode.load(
        prefill, request, blocks=((1, 2, 3, 4, 5, 6, 7), (0, 0, 0, 0, 0, 8, 9), (0, 10, 0, 11)), cached=16
    )
    assert receive.wanted == (((1, 7),), ((5, 7),), ((1, 2), (3, 4)))


def test_a_request_that_may_not_read_caches_is_computed_here(decode, prefill):
    request = decode.ask(prefill)
    prefill.opened("t")
    prefill.link.send(Announce("t"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([1, 2, 3]), 0)
    assert prefill.closed("t") is False
    assert decode.side.matched(request, 0) == (0, False)
    assert decode.side.plan().receives == ()


# landing


def test_a_request_goes_on_once_its_kv_is_there(decode, prefill):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    assert decode.update(Report(attempts={"r": 0})) == set()
    assert decode.update() == set()
    assert decode.update(decode.landed()) == {"r"}
    assert prefill.closed("t") is True
    assert decode.side.plan().forget == ("r",)
    assert decode.update(decode.landed()) == set()
    assert decode.side.matched(request, 0) == (0, False)
    assert (decode.freed, decode.counts.take()) == ([], None)


def test_a_request_goes_on_when_all_ranks_have_its_kv(make, prefill):
    decode = make(ranks=2)
    decode.load(prefill, decode.ask(prefill))
    assert decode.update(decode.landed(ranks=1)) == set()
    assert decode.update(decode.landed(ranks=2)) == {"r"}


def notify(decode, *notices):
    with contextlib.closing(Connection.to(decode.settings.notice_path)) as worker:
        for notice in notices:
            worker.send(notice)


def test_notices_of_workers_count_as_their_reports_do(make, prefill):
    decode = make(ranks=2)
    decode.load(prefill, decode.ask(prefill))
    incoming = decode.side._incoming["r"]
    notify(decode, Landed("r", 0, 0), Landed("r", 0, 0), Landed("unknown", 0, 1))
    until(lambda: incoming.landed_at)
    assert decode.update() == set()
    notify(decode, Landed("r", 0, 1))
    until(lambda: len(incoming.landed_at) == 2)
    assert decode.update() == {"r"}
    assert decode.update(decode.landed(ranks=2)) == set()


def test_a_notice_and_a_report_of_the_same_rank_are_one(make, prefill):
    decode = make(ranks=2)
    decode.load(prefill, decode.ask(prefill))
    notify(decode, Landed("r", 0, 0))
    until(lambda: decode.side._incoming["r"].landed_at)
    assert decode.update(decode.landed(ranks=1)) == set()


def test_what_vllm_says_besides_is_kept(decode, prefill):
    decode.load(prefill, decode.ask(prefill))
    output = output_of(decode.landed())
    output.finished_recving = {"another"}
    decode.side.update(output)
    assert output.finished_recving == {"another", "r"}


def test_a_stranger_among_the_workers_is_cut_off(decode):
    with contextlib.closing(Connection.to(decode.settings.notice_path)) as worker:
        worker.send(Took(1))
        assert worker.receive() is None


# the first token


def test_a_request_waits_for_its_first_token(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    assert decode.update(decode.landed()) == set()
    prefill.link.send(First("t", 7))
    fence()
    assert decode.update(decode.landed()) == {"r"}
    assert list(request.output_token_ids) == [7]
    assert (request.num_prompt_tokens, request.num_tokens) == (40, 41)


def test_a_first_token_that_was_not_asked_for_is_not_taken(decode, prefill, fence):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    prefill.link.send(First("t", 7))
    fence()
    assert decode.update(decode.landed()) == {"r"}
    assert request.num_tokens == 40


def test_a_first_token_that_prefill_does_not_have_ends_the_request_with_an_error(decode, prefill, fence):
    """The client has one, so that decode must not make it again."""
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    prefill.link.send(First("t", None))
    fence()
    assert decode.update(decode.landed()) == set()
    assert decode.side.plan().failed == ("r",)
    assert request.num_tokens == 40


def test_a_runner_that_carries_output_gets_the_token_as_output(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True, tokens=31, max_tokens=8, min_tokens=2)
    decode.load(prefill, request, blocks=((1, 2),))
    prefill.link.send(First("t", 7))
    fence()
    decode.update(decode.landed())
    assert list(request.all_token_ids) == [*range(1000, 1031), 7]
    assert (request.num_output_tokens, request.max_tokens, len(request.block_hashes)) == (1, 8, 2)
    assert request.sampling_params.min_tokens == 2


@pytest.fixture
def v1(make):
    return make(v2=False)


def take_v1(decode, prefill, tokens, **sampling):
    request = decode.ask(prefill, first_token=True, tokens=tokens, **sampling)
    decode.load(prefill, request, blocks=((1, 2, 3),))
    prefill.link.send(First("t", 7))
    until(lambda: decode.side._incoming["r"].token_known)
    assert decode.update(decode.landed()) == {"r"}
    return request


def test_for_another_runner_the_token_is_the_prompts_last(v1, prefill):
    request = take_v1(v1, prefill, 31, max_tokens=8, min_tokens=2)
    same = make_request("same", 31)
    assert list(request.all_token_ids) == request.prompt_token_ids == [*same.prompt_token_ids, 7]
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (32, 32, 0)
    assert (request.max_tokens, request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (7, 7, 1)
    same.append_output_token_ids(7)
    assert len(request.block_hashes) == 2
    assert request.block_hashes == same.block_hashes


def test_a_least_number_of_tokens_does_not_fall_below_none(v1, prefill):
    assert take_v1(v1, prefill, 40, max_tokens=3).sampling_params.min_tokens == 0


def test_the_sampling_of_other_requests_with_the_same_parameters_is_not_changed(v1, prefill):
    request = v1.ask(prefill, first_token=True, max_tokens=8)
    shared = request.sampling_params
    v1.load(prefill, request)
    prefill.link.send(First("t", 7))
    until(lambda: v1.side._incoming["r"].token_known)
    v1.update(v1.landed())
    assert (shared.max_tokens, request.sampling_params.max_tokens) == (8, 7)


# what does not come


def test_a_transfer_that_is_lost_is_computed_here_and_counted(decode, prefill):
    request = decode.ask(prefill)
    prefill.opened("t")
    prefill.link.send(Lost("t", "its lease has ended"))
    decode.matches(request, 16, (0, False))
    assert prefill.closed("t") is False
    assert decode.counts.take().data == {"failed": {"lease": 1}, "recomputed": {"requests": 1, "tokens": 24}}
    assert decode.side.matched(request, 16) == (0, False)
    assert decode.counts.take() is None


def test_a_transfer_that_is_lost_while_it_arrives_is_given_up_and_computed_here(decode, prefill, fence):
    request = decode.ask(prefill)
    decode.load(prefill, request, cached=16)
    prefill.link.send(Lost("t", "it was released"))
    fence()
    assert decode.update(Report(attempts={"r": 0})) == set()
    assert decode.side.plan().given_up == (("r", 0),)
    assert decode.side.plan().given_up == ()
    assert decode.update(Report(attempts={"r": 0})) == set()
    assert decode.update(decode.stopped(why="given up")) == {"r"}
    assert (decode.freed, request.num_computed_tokens) == (["r"], 0)
    assert prefill.closed("t") is False
    assert decode.counts.take().data["recomputed"] == {"requests": 1, "tokens": 24}
    assert decode.side.matched(request, 0) == (None, False)  # once, so that it holds nobody up who has its blocks
    assert decode.side.matched(request, 0) == (0, False)


def test_a_worker_that_stopped_by_itself_stops_the_others(make, prefill):
    decode = make(ranks=2)
    request = decode.ask(prefill)
    decode.load(prefill, request)
    assert decode.update(decode.stopped(ranks=1, why="prefill sent a piece whose checksum differs")) == set()
    assert decode.side.plan().given_up == (("r", 0),)
    both = Report(landed={"r": 1}, stopped={"r": 1}, reasons={"r": "prefill sent a checksum"}, attempts={"r": 0})
    assert decode.update(both) == {"r"}
    assert decode.freed == ["r"]
    assert decode.counts.take().data["recomputed"]["tokens"] == 40


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("prefill sent a piece whose checksum differs", "checksum"),
        ("prefill and decode differ in model: a and b; start both alike", "differ"),
        ("no mover between prefill and decode: shm: no", "no mover"),
        ("prefill's worker is gone", "gone"),
        ("prefill's worker cannot be reached at /a: No such file", "cannot be reached"),
        ("something new", "other"),
    ],
)
def test_reasons_are_counted_by_few_words(decode, prefill, why, kind):
    decode.load(prefill, decode.ask(prefill))
    assert decode.update(decode.stopped(why=why)) == {"r"}
    assert decode.counts.take().data["failed"] == {kind: 1}


def test_what_does_not_arrive_in_time_after_prefill_is_done_is_given_up(make, prefill):
    decode = make(lease_s=0.15)
    decode.load(prefill, decode.ask(prefill))
    time.sleep(0.2)
    assert decode.side.plan().given_up == ()
    prefill.link.send(First("t", None))
    until(lambda: decode.side.plan().given_up == (("r", 0),))
    assert decode.update(decode.stopped(why="given up")) == {"r"}
    assert decode.counts.take().data["failed"] == {"did not arrive": 1}


def test_waiting_for_blocks_is_no_waiting_for_kv(make, prefill):
    """Prefill may be done long before blocks are free here."""
    decode = make(lease_s=0.15)
    request = decode.ask(prefill)
    prefill.opened("t")
    prefill.link.send(Announce("t"))
    prefill.link.send(First("t", None))
    until(lambda: decode.side._incoming["r"].token_known)
    time.sleep(0.3)
    decode.matches(request)
    decode.side.allocated(request, blocks_of([1, 2, 3]), 40)
    assert decode.side.plan().given_up == ()
    until(lambda: decode.side.plan().given_up == (("r", 0),))  # from here on it counts


def test_a_prefill_engine_that_is_not_there_lets_decode_compute(decode, folder):
    request = decode.ask(f"unix:{folder / 'none'}")
    decode.matches(request, 0, (0, False))
    assert decode.counts.take().data["failed"] == {"cannot be reached": 1}


def test_a_prefill_engine_that_dies_lets_decode_compute(decode, prefill):
    waiting = decode.ask(prefill)
    prefill.opened("t")
    loading = decode.ask(prefill, "u", "s")
    decode.load(prefill, loading, "u")
    prefill.close()
    decode.matches(waiting, 0, (0, False))
    assert decode.side.plan().given_up == (("s", 0),)
    assert decode.update(decode.stopped("s")) == {"s"}
    assert decode.counts.take().data["failed"] == {"gone": 2}


def test_a_prefill_engine_that_was_started_again_is_asked_again(decode, prefill, folder):
    first = decode.ask(prefill)
    prefill.opened("t")
    prefill.close()
    decode.matches(first, 0, (0, False))
    with contextlib.closing(FakePrefill(str(folder / "p"), "prefill-2")) as later:
        second = decode.ask(later, "u", "s")
        assert decode.load(later, second, "u").prefill_engine == "prefill-2"
        assert decode.update(decode.landed("s")) == {"s"}


def test_a_prefill_engine_that_differs_is_told_of_and_lets_decode_compute(decode, folder, caplog):
    with contextlib.closing(FakePrefill(str(folder / "p"), problem="prefill and decode differ in model")) as prefill:
        request = decode.ask(prefill)
        prefill.opened("t")
        prefill.link.send(Lost("t", "prefill and decode differ in model"))
        decode.matches(request, 0, (0, False))
        assert decode.counts.take().data["failed"] == {"differ": 1}
        assert "differ in model" in caplog.text


# lost, with a first token


def test_a_lost_request_waits_for_its_token_while_prefill_lives(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True)
    prefill.opened("t")
    prefill.link.send(Lost("t", "they differ", first_comes=True))
    fence()
    assert decode.side.matched(request, 0) == (None, False)
    prefill.link.send(First("t", 7))
    decode.matches(request, 0, (0, False))
    assert list(request.output_token_ids) == [7]
    assert decode.counts.take().data["recomputed"] == {"requests": 1, "tokens": 40}


def test_a_lost_request_whose_token_nobody_knows_ends_with_an_error(decode, prefill):
    request = decode.ask(prefill, first_token=True)
    prefill.opened("t")
    prefill.close()
    decode.matches(request)  # vLLM ends with an error only what it waits for
    decode.side.allocated(request, blocks_of([1, 2, 3]), 40)
    plan = decode.side.plan()
    assert (plan.failed, plan.receives, plan.given_up) == (("r",), (), ())
    assert decode.update() == set()
    assert decode.side.plan().failed == ()
    request.status = RequestStatus.FINISHED_ERROR
    decode.side.request_finished(request)
    assert not decode.side._incoming


def test_a_lost_request_whose_token_prefill_will_not_say_ends_with_an_error(decode, prefill):
    request = decode.ask(prefill, first_token=True)
    prefill.opened("t")
    prefill.link.send(Lost("t", "prefill's request was ended"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([1, 2, 3]), 40)
    assert decode.side.plan().failed == ("r",)


def test_a_request_that_arrives_whose_token_prefill_will_not_say_ends_with_an_error(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    prefill.link.send(Lost("t", "prefill's request was ended"))
    fence()
    assert decode.side.plan().given_up == (("r", 0),)
    assert decode.update(decode.stopped(why="given up")) == set()
    assert decode.side.plan().failed == ("r",)


def test_a_token_that_is_known_is_not_lost_with_the_transfer(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True)
    prefill.opened("t")
    prefill.link.send(First("t", 7))
    prefill.link.send(Lost("t", "its lease has ended"))
    fence()
    assert decode.side.matched(request, 0) == (0, False)
    assert list(request.output_token_ids) == [7]


def test_a_request_with_all_its_kv_whose_token_nobody_knows_ends_with_an_error(decode, prefill):
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    assert decode.update(decode.landed()) == set()
    prefill.close()
    until(lambda: prefill.address not in decode.side._links)
    for _ in range(3):
        assert decode.update(decode.landed()) == set()
    plan = decode.side.plan()
    assert (plan.failed, plan.forget) == (("r",), ("r",))
    decode.side.request_finished(request)
    assert not decode.side._incoming


def test_a_request_that_stops_arriving_with_its_token_known_is_computed_behind_it(decode, prefill, fence):
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    prefill.link.send(First("t", 7))
    fence()
    assert decode.update(decode.stopped()) == {"r"}
    assert list(request.output_token_ids) == [7]
    assert decode.freed == ["r"]


@pytest.mark.parametrize("tokens", [LONGEST - 1, LONGEST])
@pytest.mark.parametrize("v2", [False, True])
def test_a_first_token_behind_which_there_is_no_room_is_not_taken(make, prefill, tokens, v2, caplog):
    decode = make(v2=v2)
    request = decode.ask(prefill, first_token=True, tokens=tokens)
    prefill.opened("t")
    assert decode.side.matched(request, 0) == (tokens, True)
    decode.side.allocated(request, blocks_of(list(range(1, 14))), tokens)
    plan = decode.side.plan()
    assert (plan.failed, plan.receives) == (("r",), ())
    request.status = RequestStatus.FINISHED_ERROR
    decode.side.request_finished(request)
    assert prefill.closed("t") is False
    assert request.num_tokens == tokens
    assert f"--max-model-len is {LONGEST}" in caplog.text
    assert decode.counts.take().data["failed"] == {"behind the first": 1}


def test_the_list_that_a_front_end_has_as_well_is_not_changed(v1, prefill):
    request = v1.ask(prefill, first_token=True)
    shared = request.prompt_token_ids
    v1.load(prefill, request)
    prefill.link.send(First("t", 7))
    until(lambda: v1.side._incoming["r"].token_known)
    v1.update(v1.landed())
    assert (len(shared), request.prompt_token_ids[-1], len(request.prompt_token_ids)) == (40, 7, 41)


# aborts


@pytest.mark.parametrize("announced", [False, True])
def test_an_abort_before_blocks_are_taken_leaves_nothing(decode, prefill, announced):
    request = decode.ask(prefill)
    prefill.opened("t")
    if announced:
        prefill.link.send(Announce("t"))
        decode.matches(request)
    decode.side.request_finished(request)
    assert prefill.closed("t") is False
    assert not decode.side._incoming
    assert decode.side.matched(request, 0) == (0, False)


@pytest.mark.parametrize("outcome", ["stopped", "landed"])
def test_an_abort_while_kv_arrives_keeps_the_blocks_until_nobody_writes(decode, prefill, outcome):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    request.status = RequestStatus.FINISHED_ABORTED
    decode.side.request_finished(request)
    assert decode.side.plan().given_up == (("r", 0),)
    assert decode.update(Report(attempts={"r": 0})) == set()
    assert decode.update(getattr(decode, outcome)()) == {"r"}
    prefill.closed("t")
    assert decode.side.plan().forget == ("r",)
    assert not decode.side._incoming
    assert decode.freed == []


def test_an_abort_in_the_step_that_takes_blocks_reaches_the_workers_behind_it(decode, prefill):
    request = decode.ask(prefill)
    prefill.opened("t")
    prefill.link.send(Announce("t"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([1, 2, 3]), 40)
    decode.side.request_finished(request)
    plan = decode.side.plan()
    assert ([one.transfer for one in plan.receives], plan.given_up) == (["t"], (("r", 0),))


def test_an_abort_does_not_wait_for_a_first_token(decode, prefill):
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    decode.side.request_finished(request)
    decode.side.plan()
    assert decode.update(decode.stopped()) == {"r"}
    assert not decode.side._incoming


def test_an_end_after_all_went_well_leaves_nothing(decode, prefill):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    decode.update(decode.landed())
    decode.side.request_finished(request)
    assert not decode.side._incoming
    assert not decode.side._links[prefill.address]._transfers


# prefill begins again


def test_an_announcement_that_is_withdrawn_is_waited_for_again(decode, prefill, fence):
    request = decode.ask(prefill)
    prefill.opened("t")
    prefill.link.send(Announce("t"))
    decode.matches(request)
    prefill.link.send(Withdraw("t"))
    fence()
    assert decode.side.matched(request, 0) == (None, False)
    prefill.link.send(Announce("t"))
    decode.matches(request)


@pytest.mark.parametrize("announced", ["before", "after"])
def test_a_request_gives_its_blocks_back_and_takes_others_when_prefill_begins_again(decode, prefill, fence, announced):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    prefill.link.send(Withdraw("t"))
    if announced == "before":
        prefill.link.send(Announce("t"))
    fence()
    assert decode.side.plan().given_up == (("r", 0),)
    assert decode.update(Report(attempts={"r": 0})) == set()
    assert decode.update(decode.stopped(why="given up")) == {"r"}
    assert (decode.freed, request.num_computed_tokens) == (["r"], 0)
    assert decode.side.plan().forget == ("r",)
    if announced == "after":
        assert decode.side.matched(request, 0) == (None, False)
        prefill.link.send(Announce("t"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([7, 8, 9]), 40)
    (receive,) = decode.side.plan().receives
    assert (receive.attempt, receive.blocks) == (1, ((7, 8, 9),))
    assert decode.update(decode.stopped(why="given up")) == set()  # of the former attempt
    assert decode.update(decode.landed(attempt=1)) == {"r"}
    assert prefill.closed("t") is True
    assert decode.counts.take() is None


def test_a_notice_of_a_former_attempt_is_not_of_this_one(decode, prefill, fence):
    request = decode.ask(prefill)
    decode.load(prefill, request)
    prefill.link.send(Withdraw("t"))
    prefill.link.send(Announce("t"))
    fence()
    decode.side.plan()
    decode.update(decode.stopped(why="given up"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([7, 8, 9]), 40)
    decode.side.plan()
    notify(decode, Landed("r", 0, 0), Landed("r-fence", 0, 0))
    until(lambda: decode.side._incoming["r-fence"].landed_at)
    assert decode.update() == set()


def test_what_had_all_come_before_prefill_began_again_is_given_back_as_well(decode, prefill, fence):
    """Kept for its first token, it could hold the blocks that let prefill begin again."""
    request = decode.ask(prefill, first_token=True)
    decode.load(prefill, request)
    assert decode.update(decode.landed()) == set()
    prefill.link.send(Withdraw("t"))
    fence()
    decode.side.plan()
    assert decode.update(decode.landed()) == {"r"}
    assert decode.freed == ["r"]
    assert decode.side.matched(request, 0) == (None, False)
    prefill.link.send(Announce("t"))
    decode.matches(request)
    decode.side.allocated(request, blocks_of([7, 8, 9]), 40)
    assert decode.side.plan().receives[0].attempt == 1
    prefill.link.send(First("t", 7))
    fence()
    assert decode.update(decode.landed()) == set()  # of the former attempt
    assert decode.update(decode.landed(attempt=1)) == {"r"}
    assert list(request.output_token_ids) == [7]


# leases


def test_decode_says_that_it_lives_while_it_wants_something(make, prefill):
    decode = make(lease_s=0.15)
    request = decode.ask(prefill)
    prefill.opened("t")
    for _ in range(3):
        prefill.link.next(Alive)
    decode.side.request_finished(request)
    until(lambda: not decode.side._incoming)
    time.sleep(0.15)
    while not prefill.link.silent():
        prefill.link.heard.get()
    time.sleep(0.2)
    assert prefill.link.silent()


def test_closing_ends_the_links(decode, prefill):
    decode.ask(prefill)
    prefill.opened("t")
    decode.side.close()
    assert prefill.link.heard.get(timeout=5) is None


# blocks for first tokens


def pool_of(decode, free, size=100):
    pool = SimpleNamespace(get_num_free_blocks=lambda: free, num_gpu_blocks=size, get_cached_block=lambda *_: None)
    decode.side.bind(SimpleNamespace(free=lambda request: None, block_pool=pool))


def announced(decode, prefill, name, tokens, first_token):
    request = decode.ask(prefill, name, f"r-{name}", tokens, first_token)
    prefill.opened(name)
    prefill.link.send(Announce(name))
    until(lambda: decode.side._incoming[request.request_id].announced)
    return request


def test_a_prompt_that_fills_its_last_block_waits_for_one_block_more(decode, prefill):
    """Its first token needs that block; a decode engine full of such prompts could never go on."""
    request = announced(decode, prefill, "t", 2 * BLOCK, True)
    pool_of(decode, free=2)
    assert decode.side.matched(request, 0) == (None, False)
    pool_of(decode, free=3)
    assert decode.side.matched(request, 0) == (2 * BLOCK, True)


@pytest.mark.parametrize(("groups", "needed"), [((16, 16), 6), ((16, 32), 5), ((16, 64), 4)])
def test_a_first_token_needs_a_block_in_each_group_whose_last_is_full(make, prefill, groups, needed):
    decode = make(groups=groups)
    request = announced(decode, prefill, "t", 2 * BLOCK, True)
    pool_of(decode, free=needed - 1)
    assert decode.side.matched(request, 0) == (None, False)
    pool_of(decode, free=needed)
    assert decode.side.matched(request, 0) == (2 * BLOCK, True)


def test_nobody_overtakes_who_waits_for_blocks_and_came_first(decode, prefill):
    first = announced(decode, prefill, "t", 4 * BLOCK, True)
    second = announced(decode, prefill, "u", BLOCK + 1, False)
    pool_of(decode, free=4)
    assert decode.side.matched(first, 0) == (None, False)
    assert decode.side.matched(second, 0) == (None, False)
    prefill.link.send(Withdraw("t"))
    until(lambda: not decode.side._incoming[first.request_id].announced)
    assert decode.side.matched(second, 0) == (BLOCK + 1, True)


@pytest.mark.parametrize(("tokens", "first_token"), [(2 * BLOCK - 1, True), (2 * BLOCK, False)])
def test_others_take_what_they_need(decode, prefill, tokens, first_token):
    request = announced(decode, prefill, "t", tokens, first_token)
    pool_of(decode, free=0)  # whether that is enough is for vLLM to say
    assert decode.side.matched(request, 0) == (tokens, True)


def test_nobody_takes_the_block_that_a_loading_prompt_will_need(decode, prefill):
    loading = announced(decode, prefill, "t", 2 * BLOCK, True)
    decode.side.allocated(loading, blocks_of([1, 2]), 2 * BLOCK)
    other = announced(decode, prefill, "u", BLOCK, False)
    pool_of(decode, free=1)
    assert decode.side.matched(other, 0) == (None, False)
    pool_of(decode, free=2)
    assert decode.side.matched(other, 0) == (BLOCK, True)


def test_a_prompt_that_could_never_have_so_many_blocks_is_left_to_vllm(decode, prefill):
    request = announced(decode, prefill, "t", 4 * BLOCK, True)
    pool_of(decode, free=4, size=5)  # one of them is vLLM's null block
    assert decode.side.matched(request, 0) == (4 * BLOCK, True)

import contextlib
import time

import pytest
from vllm.v1.request import RequestStatus

from transfer.schedulers import IDENTITY, FakeDecode, end, make_request, preempt, step
from transfer.waiting import until
from trivet.transfer.link import Connection
from trivet.transfer.messages import PROTOCOL, Alive, Announce, Close, First, Got, Hello, Lost, Open, Withdraw
from trivet.transfer.plan import Chunk
from trivet.transfer.prefill import PrefillSide
from trivet.transfer.prompts import prompt_of
from trivet.transfer.settings import Settings
from trivet.transfer.stats import Counts
from trivet.transfer.trace import Trace

MODES = ["before", "after"]


class Prefill:
    """A scheduler with a prefill side."""

    def __init__(self, folder, lease_s=30.0):
        self.counts = Counts()
        self.path = str(folder / "p")
        own = Settings(f"unix:{self.path}", (), 2**20, 2**18, lease_s, False)
        paths = [f"{self.path}.0"]
        self.side = PrefillSide(own, "prefill-1", IDENTITY, paths, self.counts, Trace("prefill"))
        gone = self.ask("ended long ago", name="r-gone")
        gone.status = RequestStatus.FINISHED_ABORTED
        self.side.request_finished(gone)
        assert self.plan().dropped == ("ended long ago",)

    def ask(self, transfer="t", tokens=40, name="r", **params):
        request = make_request(name, tokens, {"do_remote_decode": True, "transfer_id": transfer, **params})
        self.side.on_new_request(request, request.kv_transfer_params)
        return request

    def plan(self, *scheduled, **kind):
        return self.side.plan(step(*scheduled, **kind))

    def answer(self, transfer="t", token=7, **params):
        """A request that was computed and has ended."""
        request = self.ask(transfer, **params)
        self.plan((request, 40))
        end(request, token)
        return request, self.side.request_finished(request)

    def close(self):
        self.side.close()


@pytest.fixture
def prefill(folder):
    with contextlib.closing(Prefill(folder)) as prefill:
        yield prefill


@pytest.fixture
def quick(folder):
    with contextlib.closing(Prefill(folder, lease_s=0.4)) as prefill:
        yield prefill


@pytest.fixture
def decode(prefill):
    with contextlib.closing(FakeDecode(prefill.path)) as decode:
        yield decode


# the link


def test_decode_is_told_where_the_workers_listen(prefill, decode):
    assert decode.welcome.engine_id == "prefill-1"
    assert decode.welcome.data_paths == [f"{prefill.path}.0"]
    assert decode.welcome.problem is None


def test_an_engine_of_another_kind_is_told_what_differs(prefill):
    with contextlib.closing(FakeDecode(prefill.path, {**IDENTITY, "model": "other"})) as decode:
        assert decode.welcome.problem == "prefill and decode differ in model: m and other; start both alike"


def test_an_engine_of_another_protocol_is_told_so(prefill):
    with contextlib.closing(FakeDecode(prefill.path, protocol=9)) as decode:
        assert decode.welcome.problem == f"prefill speaks protocol {PROTOCOL} of TrivetConnector, decode 9"


@pytest.mark.parametrize("first", [Alive(), Open("t")])
def test_who_does_not_begin_with_hello_is_not_served(prefill, first):
    with contextlib.closing(Connection.to(prefill.path)) as stranger:
        stranger.send(first)
        assert stranger.receive() is None


def test_a_message_that_has_no_place_on_a_link_ends_that_link_only(prefill, decode):
    with contextlib.closing(FakeDecode(prefill.path)) as other:
        other.send(Got("t", 0))
        assert other.heard.get(timeout=5) is None
    decode.settle()


# chunks


def test_requests_without_a_transfer_are_none_of_its_business(prefill):
    for name, params in (("a", {}), ("b", {"do_remote_decode": True}), ("c", {"transfer_id": "t"})):
        request = make_request(name)
        prefill.side.on_new_request(request, params)
        assert prefill.plan((request, 40)).chunks == ()
        end(request)
        assert prefill.side.request_finished(request) == (False, None)


def test_a_prompt_in_one_step_is_one_chunk(prefill):
    request = prefill.ask()
    assert prefill.plan((request, 40)).chunks == (Chunk("t", "r", ((1, 2, 3),), True, 40, True),)
    assert prefill.plan((request, 1)).chunks == ()


def test_a_prompt_in_several_steps_is_as_many_chunks(prefill):
    request = prefill.ask()
    assert prefill.plan((request, 20)).chunks == (Chunk("t", "r", ((1, 2),), True, 20, False),)
    assert prefill.plan((request, 10), first=3).chunks == (Chunk("t", "r", (), False, 30, False),)
    assert prefill.plan((request, 10), first=3).chunks == (Chunk("t", "r", ((3,),), False, 40, True),)
    assert prefill.plan((request, 1), first=4).chunks == ()


def test_what_was_cached_counts_as_computed(prefill):
    request = prefill.ask()
    request.num_computed_tokens = 32
    output = step((request, 8))
    output.scheduled_cached_reqs = step().scheduled_cached_reqs
    request.num_computed_tokens = 32
    from vllm.v1.core.sched.output import NewRequestData

    output.scheduled_new_reqs.append(NewRequestData.from_request(request, ([5, 6, 7],)))
    assert prefill.side.plan(output).chunks == (Chunk("t", "r", ((5, 6, 7),), True, 40, True),)


def test_only_transfers_have_chunks_in_a_step_with_others(prefill):
    request, other = prefill.ask(), make_request("other")
    plan = prefill.plan((other, 40), (request, 40))
    assert [chunk.request_id for chunk in plan.chunks] == ["r"]


# announcing


@pytest.mark.parametrize("opened", MODES)
def test_a_transfer_is_announced_when_its_first_chunk_is_scheduled(prefill, decode, opened):
    if opened == "before":
        decode.send(Open("t"))
        decode.settle()
    request = prefill.ask()
    if opened == "after":
        decode.send(Open("t"))
    decode.settle()  # nothing came before
    prefill.plan()
    decode.settle()
    prefill.plan((request, 20))
    assert decode.next(Announce) == Announce("t")
    prefill.plan((request, 20))
    decode.settle()  # once


def test_who_opens_after_the_first_chunk_is_announced_to_at_once(prefill, decode):
    request = prefill.ask()
    prefill.plan((request, 20))
    decode.send(Open("t"))
    assert decode.next(Announce) == Announce("t")


# the first token


@pytest.mark.parametrize("opened", MODES)
@pytest.mark.parametrize(("wants", "token"), [(True, 7), (False, None)])
def test_the_first_token_is_handed_over_where_it_was_asked_for(prefill, decode, opened, wants, token):
    request = prefill.ask(first_token=wants)
    prefill.plan((request, 40))
    if opened == "before":
        decode.send(Open("t"))
        decode.next(Announce)
    end(request)
    kept, params = prefill.side.request_finished(request)
    if opened == "after":
        decode.send(Open("t"))
        decode.next(Announce)
    assert decode.next(First) == First("t", token)
    assert (kept, params) == (True, {"transfer_id": "t", "handed_over": True})
    assert prefill.plan().finished == ("t",)


def test_the_token_is_handed_over_before_the_answer_goes_out(prefill, decode):
    request = prefill.ask(first_token=True)
    prefill.plan((request, 40))
    decode.send(Open("t"))
    decode.next(Announce)
    end(request)
    prefill.side.request_finished(request)
    prefill.close()
    assert decode.next(First).token == 7  # it was sent when the scheduler went on


# ends


def test_blocks_are_kept_until_the_workers_have_sent_them(prefill, decode):
    request, (kept, _) = prefill.answer()
    assert kept
    prefill.plan()
    prefill.side.freed({"another", request.request_id})
    decode.send(Open("t"))
    assert decode.next(Lost) == Lost("t", "a decode engine has taken it")


def test_decode_that_has_all_before_the_end_needs_no_blocks_kept(prefill, decode):
    request = prefill.ask()
    decode.send(Open("t"))
    prefill.plan((request, 40))
    decode.next(Announce)
    decode.send(Close("t", has_all=True))
    decode.settle()
    end(request)
    assert prefill.side.request_finished(request) == (False, {"transfer_id": "t", "handed_over": True})
    assert prefill.plan().dropped == ("t",)


def test_decode_that_has_all_after_the_end_gives_the_blocks_free(prefill, decode):
    decode.send(Open("t"))
    decode.settle()
    _, (kept, _) = prefill.answer()
    assert kept
    decode.next(Announce)
    decode.next(First)
    decode.send(Close("t", has_all=True))
    decode.settle()
    plan = prefill.plan()
    assert (plan.finished, plan.dropped) == (("t",), ("t",))


@pytest.mark.parametrize("left", ["closed", "gone"])
def test_decode_that_went_away_before_the_end_is_told_in_the_answer(prefill, decode, left):
    request = prefill.ask()
    decode.send(Open("t"))
    prefill.plan((request, 20))
    decode.next(Announce)
    if left == "closed":
        decode.send(Close("t", has_all=False))
        decode.settle()
    else:
        decode.close()
        until(lambda: prefill.side._outgoing["t"].opener is None)
    prefill.plan((request, 20))
    end(request)
    kept, params = prefill.side.request_finished(request)
    assert not kept
    assert params == {"transfer_id": "t", "handed_over": False, "problem": "decode did not want it any more"}
    assert prefill.plan().dropped == ("t",)


@pytest.mark.parametrize("left", ["closed", "gone"])
def test_decode_that_went_away_after_the_end_gives_the_blocks_free(prefill, decode, left):
    decode.send(Open("t"))
    decode.settle()
    prefill.answer()
    decode.next(Announce)
    decode.next(First)
    assert prefill.plan().finished == ("t",)
    if left == "closed":
        decode.send(Close("t", has_all=False))
    else:
        decode.close()
    until(lambda: "t" in prefill.plan().dropped)


def test_who_opens_again_after_going_away_is_served(prefill, decode):
    request = prefill.ask()
    decode.send(Open("t"))
    prefill.plan((request, 40))
    decode.next(Announce)
    decode.send(Close("t", has_all=False))
    decode.send(Open("t"))
    assert decode.next(Announce) == Announce("t")
    end(request)
    assert prefill.side.request_finished(request) == (True, {"transfer_id": "t", "handed_over": True})


def test_a_close_of_anothers_transfer_is_not_heard(prefill, decode):
    request = prefill.ask()
    decode.send(Open("t"))
    decode.settle()
    with contextlib.closing(FakeDecode(prefill.path)) as other:
        other.send(Close("t", has_all=False))
        other.settle()
    prefill.plan((request, 40))
    end(request)
    assert prefill.side.request_finished(request)[0]


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
@pytest.mark.parametrize("computed", [0, 20, 40])
def test_a_request_that_is_aborted_is_lost(prefill, decode, status, computed):
    request = prefill.ask()
    decode.send(Open("t"))
    decode.settle()
    if computed:
        prefill.plan((request, computed))
        decode.next(Announce)
    request.status = status
    assert prefill.side.request_finished(request) == (False, None)
    assert decode.next(Lost) == Lost("t", "prefill's request was ended before its prompt was computed")
    assert prefill.plan().dropped == ("t",)
    decode.send(Open("t"))
    assert decode.next(Lost).transfer == "t"


def test_an_aborted_request_that_nobody_opened_leaves_nothing(prefill):
    request = prefill.ask()
    prefill.plan((request, 20))
    request.status = RequestStatus.FINISHED_ABORTED
    assert prefill.side.request_finished(request) == (False, None)
    assert prefill.plan().dropped == ("t",)
    assert not prefill.side._outgoing
    assert not prefill.side._by_request


def test_a_request_stopped_by_its_token_is_handed_over(prefill):
    request = prefill.ask()
    prefill.plan((request, 40))
    end(request, status=RequestStatus.FINISHED_STOPPED)
    assert prefill.side.request_finished(request) == (True, {"transfer_id": "t", "handed_over": True})


def test_a_transfer_that_has_ended_is_lost_to_who_opens_it(prefill, decode):
    decode.send(Open("ended long ago"))
    assert decode.next(Lost).why == "prefill's request was ended before its prompt was computed"


def test_an_early_open_that_is_taken_back_is_forgotten(prefill, decode):
    decode.send(Open("t"))
    decode.send(Close("t", has_all=False))
    decode.settle()
    request = prefill.ask()
    prefill.plan((request, 40))
    decode.settle()
    assert not prefill.side._early


def test_an_early_open_of_a_decode_engine_that_went_away_is_forgotten(prefill, decode):
    decode.send(Open("t"))
    decode.settle()
    decode.close()
    until(lambda: not prefill.side._early)
    request = prefill.ask()
    prefill.plan((request, 40))
    end(request)
    assert prefill.side.request_finished(request)[0]


def test_a_transfer_of_a_name_that_is_taken_is_not_mixed_up_with_it(prefill):
    first = prefill.ask()
    second = prefill.ask(name="r2")
    plan = prefill.plan((first, 40), (second, 40))
    assert [chunk.request_id for chunk in plan.chunks] == ["r"]
    end(second)
    assert prefill.side.request_finished(second) == (False, None)


def test_a_name_may_be_used_again_once_its_transfer_has_ended(prefill, decode):
    request, _ = prefill.answer()
    prefill.side.freed({request.request_id})
    again = prefill.ask(name="r2")
    decode.send(Open("t"))
    prefill.plan((again, 40))
    assert decode.next(Announce) == Announce("t")


@pytest.mark.parametrize("dropped", ["aborted", "taken"])
def test_a_name_is_not_used_again_in_the_step_that_drops_its_transfer(prefill, decode, dropped):
    """The workers, told of both at once, would drop the new one."""
    if dropped == "aborted":
        request = prefill.ask()
        prefill.plan((request, 20))
        request.status = RequestStatus.FINISHED_ABORTED
        prefill.side.request_finished(request)
    else:
        decode.send(Open("t"))
        decode.settle()
        prefill.answer()
        decode.next(Announce)
        decode.next(First)
        decode.send(Close("t", has_all=True))
        decode.settle()
    second = prefill.ask(name="r2")
    plan = prefill.plan((second, 40))
    assert (plan.chunks, plan.dropped) == ((), ("t",))
    end(second)
    assert prefill.side.request_finished(second) == (False, None)
    third = prefill.ask(name="r3")
    assert [chunk.request_id for chunk in prefill.plan((third, 40)).chunks] == ["r3"]


@pytest.mark.parametrize("opened", MODES)
def test_kv_of_another_prompt_is_never_handed_over(prefill, decode, opened):
    """Neither it nor its token, whoever mixed up the ids; the right decode engine is served all the same."""
    other = prompt_of(make_request("other", 41))
    if opened == "before":
        decode.send(Open("t", other))
        decode.settle()
    request = prefill.ask(first_token=True)
    if opened == "after":
        decode.send(Open("t", other))
    lost = decode.next(Lost)
    assert "another prompt by this transfer id: 40 tokens" in lost.why
    assert not lost.first_comes
    with contextlib.closing(FakeDecode(prefill.path)) as right:
        right.send(Open("t", prompt_of(make_request("same", 40))))
        right.settle()
        prefill.plan((request, 40))
        assert right.next(Announce) == Announce("t")
        end(request)
        assert prefill.side.request_finished(request)[0]
        assert right.next(First) == First("t", 7)
        decode.settle()  # heard nothing


@pytest.mark.parametrize("opened", MODES)
def test_a_decode_engine_whose_transfer_another_opens_is_told(prefill, decode, opened):
    if opened == "after":
        prefill.ask()
    decode.send(Open("t"))
    decode.settle()
    with contextlib.closing(FakeDecode(prefill.path)) as other:
        other.send(Open("t"))
        assert decode.next(Lost) == Lost("t", "another decode engine has opened it")
        if opened == "before":
            prefill.ask()
        decode.close()
        other.settle()
        assert prefill.side._outgoing["t"].opener is not None


def test_a_prompt_preempted_and_begun_again_between_two_plans_is_announced_anew(prefill, decode):
    request = prefill.ask()
    decode.send(Open("t"))
    prefill.plan((request, 20))
    decode.next(Announce)
    preempt(request)
    prefill.plan((request, 20), first=9, resumed=(request,))
    decode.next(Withdraw)
    decode.next(Announce)


# releasing


def test_kv_is_released_by_a_request_that_says_so(prefill, decode):
    prefill.answer()
    release = make_request("release")
    prefill.side.on_new_request(release, {"release_transfer": "t"})
    assert prefill.plan().dropped == ("t",)
    decode.send(Open("t"))
    assert decode.next(Lost) == Lost("t", "it was released")
    end(release)
    assert prefill.side.request_finished(release) == (False, None)


def test_a_release_of_what_is_not_kept_does_nothing(prefill):
    request = prefill.ask()
    for name in ("t", "unknown"):
        prefill.side.on_new_request(make_request("release"), {"release_transfer": name})
    plan = prefill.plan((request, 40))
    assert (plan.dropped, len(plan.chunks)) == ((), 1)


def test_what_is_released_while_it_is_computed_is_not_kept(prefill):
    request = prefill.ask()
    prefill.plan((request, 40))
    prefill.side.on_new_request(make_request("release"), {"release_transfer": "t"})
    end(request, 7)
    kept, said = prefill.side.request_finished(request)
    assert (kept, said["handed_over"]) == (False, False)


def test_a_release_that_overtakes_its_request_is_remembered(prefill):
    prefill.side.on_new_request(make_request("release"), {"release_transfer": "t"})
    _, (kept, _) = prefill.answer()
    assert not kept


def test_what_is_released_and_opened_all_the_same_is_kept(prefill, decode):
    request = prefill.ask()
    prefill.plan((request, 40))
    prefill.side.on_new_request(make_request("release"), {"release_transfer": "t"})
    decode.send(Open("t"))
    assert decode.next(Announce) == Announce("t")
    end(request, 7)
    assert prefill.side.request_finished(request)[0]


# leases


def test_kv_that_nobody_asks_for_is_kept_as_long_as_its_lease(quick):
    start_s = time.monotonic()
    quick.answer()
    assert quick.plan().dropped == ()
    until(lambda: quick.plan().dropped == ("t",))
    assert 0.4 <= time.monotonic() - start_s < 5
    assert quick.counts.take().data == {"expired": {"transfers": 1}}


def test_decode_that_says_nothing_loses_what_it_opened(quick):
    with contextlib.closing(FakeDecode(quick.path)) as decode:
        decode.send(Open("t"))
        decode.settle()
        quick.answer()
        decode.next(Announce)
        decode.next(First)
        until(lambda: quick.plan().dropped == ("t",))
        assert decode.next(Lost) == Lost("t", "its lease has ended")
        assert quick.counts.take().data == {"expired": {"transfers": 1}}


def test_decode_that_says_it_lives_keeps_what_it_opened(quick):
    with contextlib.closing(FakeDecode(quick.path)) as decode:
        decode.send(Open("t"))
        decode.settle()
        quick.answer()
        end_s = time.monotonic() + 0.9
        while time.monotonic() < end_s:
            decode.send(Alive())
            time.sleep(0.02)
            assert quick.plan().dropped == ()


def test_a_prompt_may_take_longer_than_a_lease(quick):
    request = quick.ask()
    quick.plan((request, 20))
    time.sleep(0.5)
    assert quick.plan((request, 20)).dropped == ()
    end(request)
    assert quick.side.request_finished(request)[0]
    assert quick.plan().dropped == ()
    assert quick.counts.take() is None


# engines that do not suit


@pytest.mark.parametrize("opened", MODES)
def test_an_engine_that_differs_gets_nothing_and_the_answer_says_why(prefill, opened):
    with contextlib.closing(FakeDecode(prefill.path, {**IDENTITY, "model": "x"})) as decode:
        request = prefill.ask(first_token=True)
        prefill.plan((request, 40))
        if opened == "before":
            decode.send(Open("t"))
            lost = decode.next(Lost)
            assert ("differ in model" in lost.why, lost.first_comes) == (True, True)
        end(request)
        kept, params = prefill.side.request_finished(request)
        if opened == "before":
            assert not kept
            assert params["handed_over"] is False
            assert "differ in model: m and x" in params["problem"]
        else:
            assert kept
            decode.send(Open("t"))
            lost = decode.next(Lost)
            assert ("differ in model" in lost.why, lost.first_comes) == (True, True)
        assert decode.next(First) == First("t", 7)  # decode needs it to compute the rest itself
        assert prefill.plan().dropped == ("t",)


def test_an_engine_that_differs_is_not_announced_to(prefill):
    with contextlib.closing(FakeDecode(prefill.path, {**IDENTITY, "model": "x"})) as decode:
        decode.send(Open("t"))
        decode.settle()
        request = prefill.ask()
        decode.next(Lost)
        prefill.plan((request, 40))
        decode.settle()


# preemption


def test_a_preemption_is_told_once_and_the_prompt_begins_anew(prefill):
    request = prefill.ask()
    prefill.plan((request, 20))
    preempt(request)
    assert prefill.plan().preempted == ("t",)
    assert prefill.plan().preempted == ()
    plan = prefill.plan((request, 40), first=9, resumed=(request,))
    assert plan.preempted == ()
    assert plan.chunks == (Chunk("t", "r", ((9, 10, 11),), True, 40, True),)


def test_a_prompt_that_was_done_and_is_preempted_begins_anew(prefill):
    request = prefill.ask()
    prefill.plan((request, 40))
    preempt(request)
    assert prefill.plan().preempted == ("t",)
    assert prefill.plan((request, 20), first=9, resumed=(request,)).chunks[0].anew
    assert prefill.plan((request, 20), first=11).chunks == (Chunk("t", "r", ((11,),), False, 40, True),)


def test_a_request_that_the_v2_runner_is_told_as_new_begins_anew(prefill):
    request = prefill.ask()
    prefill.plan((request, 20))
    preempt(request)
    prefill.plan()
    assert prefill.plan((request, 20), first=9).chunks == (Chunk("t", "r", ((9, 10),), True, 20, False),)


@pytest.mark.parametrize("told_as", ["resumed", "new"])
def test_a_request_preempted_and_resumed_between_two_plans_is_told_as_preempted(prefill, told_as):
    """As by ``reset_prefix_cache(reset_running_requests=True)``: no step lies between."""
    request = prefill.ask()
    prefill.plan((request, 20))
    preempt(request)
    plan = prefill.plan((request, 20), first=9, resumed=(request,) if told_as == "resumed" else ())
    assert plan.chunks[0].anew
    assert plan.preempted == ("t",)


def test_a_preemption_withdraws_what_was_announced_until_the_prompt_is_scheduled_again(prefill, decode):
    request = prefill.ask()
    decode.send(Open("t"))
    prefill.plan((request, 20))
    assert decode.next(Announce)
    preempt(request)
    prefill.plan()
    assert decode.next(Withdraw) == Withdraw("t")
    prefill.plan()
    decode.settle()
    prefill.plan((request, 20), first=9, resumed=(request,))
    assert decode.next(Announce) == Announce("t")
    decode.settle()


def test_who_opens_while_the_prompt_is_preempted_is_announced_to_later(prefill, decode):
    request = prefill.ask()
    prefill.plan((request, 20))
    preempt(request)
    prefill.plan()
    decode.send(Open("t"))
    decode.settle()
    prefill.plan((request, 20), first=9, resumed=(request,))
    assert decode.next(Announce) == Announce("t")


def test_preempted_requests_are_not_given_up(prefill):
    request = prefill.ask()
    prefill.plan((request, 20))
    preempt(request)
    assert prefill.plan().dropped == ()


def test_hello_twice_ends_the_link(prefill, decode):
    decode.send(Hello(PROTOCOL, "e", IDENTITY))
    assert decode.heard.get(timeout=5) is None

import pickle

from trivet.transfer.plan import Chunk, Receive, Report, StepPlan


def test_reports_of_ranks_are_summed_and_their_reasons_kept():
    one = Report({"a": 1, "b": 1}, {"c": 1}, {"c": "gone"}, {"a": 0, "b": 2})
    other = Report({"a": 1}, {"b": 1, "c": 1}, {"b": "lost", "c": "other"}, {"b": 2, "c": 1})
    both = one.aggregate(other)
    assert (both.landed, both.stopped) == ({"a": 2, "b": 1}, {"b": 1, "c": 2})
    assert both.reasons == {"b": "lost", "c": "gone"}
    assert both.attempts == {"a": 0, "b": 2, "c": 1}
    assert one == Report({"a": 1, "b": 1}, {"c": 1}, {"c": "gone"}, {"a": 0, "b": 2})


def test_a_plan_and_a_report_reach_workers_in_other_processes():
    plan = StepPlan(
        chunks=(Chunk("t", "r", ((1, 2), (3,)), True, 32, False),),
        receives=(Receive("t", "r", 0, ("/a.0",), "e", ((1,),), (((0, 1),),)),),
        failed=("x",),
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
    report = Report({"a": 1}, {}, {})
    assert pickle.loads(pickle.dumps(report)) == report

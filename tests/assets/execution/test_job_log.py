"""Events as lines: their number during a long job."""

from itertools import pairwise

from assets.execution.job_log import EventLines


def test_a_week_leaves_a_few_thousand_lines_and_none_is_five_minutes_late():
    """By hand: 100 lines until 500 s, a hundredth later each until 30,000 s (about 411), then 1,916 to the end of the week."""
    lines: list[str] = []
    told = EventLines(lines.append, "policy")
    moments = []
    for at in range(0, 7 * 24 * 3600, 5):
        before = len(lines)
        progress = {"done": at, "total": 604_800, "unit": "steps", "seconds_left": None}
        told.on_event({"event": "progress", "time": 1000.0 + at + at / 1e6, **progress})
        moments += [at] * (len(lines) - before)
    gaps = [after - before for before, after in pairwise(moments)]
    assert set(gaps[:90]) == {5} and max(gaps) <= 305
    assert 2000 < len(lines) < 2600

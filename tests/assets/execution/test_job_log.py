"""Events as lines: their number during a long job."""

from itertools import pairwise
from typing import Any

from assets.execution.job_log import EventLines
from training.contract.protocol.events import make_event


def test_event_lines_over_a_week_are_a_few_thousand():
    """By hand: 100 lines until 500 s, with gaps growing by 1% until 30,000 s (about 411), then 1,916 until the end."""
    lines: list[str] = []
    event_lines = EventLines(lines.append, "policy")
    times = []
    for second in range(0, 7 * 24 * 3600, 5):
        count = len(lines)
        progress: dict[str, Any] = {"done": second, "total": 604_800, "unit": "steps", "seconds_left": None}
        event_lines.on_event(make_event("progress", time=1000.0 + second + second / 1e6, **progress))
        times += [second] * (len(lines) - count)
    gaps = [after - before for before, after in pairwise(times)]
    assert set(gaps[:90]) == {5} and max(gaps) <= 305
    assert 2000 < len(lines) < 2600

"""Events: at any time, a follower reads complete events, each once, in order."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.contract.protocol.events import EventWriter, Follower, Progress, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "job" / "events.jsonl"


def test_read_events_returns_events_in_order_with_a_time(path):
    writer = EventWriter(path)
    writer.phase("load")
    writer.emit("step", step=1, loss=0.5)
    writer.note("line separators \u2028 and \n stay inside")
    events = list(read_events(path))
    assert [e["event"] for e in events] == ["phase", "step", "note"]
    assert events[1]["loss"] == 0.5 and events[2]["text"] == "line separators \u2028 and \n stay inside"
    assert all(abs(time.time() - e["time"]) < 60 for e in events)


def test_writer_without_a_path_writes_nothing(tmp_path):
    EventWriter(None).note("dropped")
    EventWriter(None).rewind(3)
    assert list(tmp_path.iterdir()) == []


def test_follower_of_missing_file_yields_nothing_until_it_is_written(path):
    follower = Follower(path)
    assert list(follower.new()) == [] and list(read_events(path)) == []
    EventWriter(path).note("now")
    assert [e["text"] for e in follower.new()] == ["now"]


def test_follower_yields_an_incomplete_line_only_once_it_is_complete(path):
    """Two lines, cut at every byte."""
    lines = b"".join(
        json.dumps({"event": "step", "step": n, "time": 0, "text": "ä"}, ensure_ascii=False).encode() + b"\n"
        for n in (1, 2)
    )
    path.parent.mkdir()
    for cut in range(len(lines) + 1):
        path.write_bytes(lines[:cut])
        follower = Follower(path)
        before = [e["step"] for e in follower.new()]
        with open(path, "ab") as file:
            file.write(lines[cut:])
        assert before + [e["step"] for e in follower.new()] == [1, 2]
        assert list(follower.new()) == []


WRITER = """
import sys
from pathlib import Path
from training.contract.protocol.events import EventWriter
writer = EventWriter(Path(sys.argv[1]))
for step in range(1, 3001):
    writer.emit("step", step=step, text="x" * (step % 700))
"""


def test_follower_of_another_process_yields_every_event_once(path):
    follower, seen = Follower(path), []
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as process:
        while process.poll() is None:
            seen += [(e["step"], len(e["text"])) for e in follower.new()]
    seen += [(e["step"], len(e["text"])) for e in follower.new()]
    assert process.returncode == 0 and seen == [(n, n % 700) for n in range(1, 3001)]


def test_rewind_drops_later_steps(path):
    writer = EventWriter(path)
    writer.phase("train")
    for step in (1, 2, 3):
        writer.emit("step", step=step, loss=float(step))
    writer.emit("eval", step=3)
    follower = Follower(path)
    assert len(list(follower.new())) == 5
    writer.rewind(1)
    writer.emit("step", step=2, loss=20.0)
    assert [(e["event"], e.get("loss")) for e in follower.new()] == [("phase", None), ("step", 1.0), ("step", 20.0)]
    assert list(follower.new()) == []
    writer.rewind(1)
    writer.note("longer than what was dropped " * 9)
    assert [e["event"] for e in follower.new()] == ["phase", "step", "note"]


def test_rewind_drops_evaluations_from_the_checkpoint_on(path):
    writer = EventWriter(path)
    writer.emit("eval", step=0)
    for step in (1, 2, 3):
        writer.emit("step", step=step)
    writer.emit("eval", step=2)
    writer.emit("eval", step=3)
    writer.rewind(3)
    assert [e["step"] for e in read_events(path) if e["event"] == "step"] == [1, 2, 3]
    assert [e["step"] for e in read_events(path) if e["event"] == "eval"] == [0, 2]


def test_kept_file_continues_after_its_last_complete_line(path):
    EventWriter(path).emit("step", step=1, loss=1.0)
    with open(path, "ab") as file:
        file.write(b'{"event": "step", "step": 2, "lo')
    follower = Follower(path)
    assert [e["step"] for e in follower.new()] == [1]
    writer = EventWriter(path, keep=True)
    writer.rewind(1)
    writer.emit("step", step=2, loss=2.0)
    assert (
        [e["step"] for e in read_events(path)] == [1, 2] == [1, *(e["step"] for e in follower.new() if e["step"] > 1)]
    )


def test_follower_restarts_when_a_new_attempt_overwrites_the_file(path):
    follower = Follower(path)
    first = EventWriter(path)
    first.note("a long note of the first attempt")
    assert len(list(follower.new())) == 1
    EventWriter(path).note("2nd")
    assert [e["text"] for e in follower.new()] == ["2nd"]


def test_emit_of_nan_raises_and_writes_nothing(path):
    writer = EventWriter(path)
    with pytest.raises(ValueError, match="JSON"):
        writer.emit("step", step=1, loss=float("nan"))
    writer.note("after")
    assert [e["text"] for e in read_events(path)] == ["after"]


def test_progress_ends_at_its_total_with_zero_seconds_left(path):
    progress = Progress(EventWriter(path), total=1000, unit="rows")
    for _ in range(1000):
        progress.advance()
    *earlier, last = read_events(path)
    assert (last["done"], last["total"], last["unit"], last["seconds_left"]) == (1000, 1000, "rows", 0)
    assert len(earlier) < 20, "at most twice a second"


def test_progress_beyond_its_total_is_not_reported(path):
    """Other code counts the total. A count that is too low must not cause a line per row, or negative seconds."""
    progress = Progress(EventWriter(path), total=2, unit="rows")
    for _ in range(1000):
        progress.advance()
    assert [(e["done"], e["total"], e["seconds_left"]) for e in read_events(path)] == [(2, 2, 0)]


def test_progress_estimates_the_time_left_from_this_attempt_alone(path):
    """25 rows done earlier, 25 more in about 0.6 s: the 50 left need about 1.2 s; an average over 50 would give 0.6 s."""
    progress = Progress(EventWriter(path), total=100, unit="rows", done=25)
    time.sleep(0.6)
    progress.advance(25)
    (event,) = read_events(path)
    assert event["done"] == 50 and 1.1 < event["seconds_left"] < 4


GARBAGE = [
    bytes(range(128, 200)),
    b"{" * 100_000,
    b"[1, 2]",
    b'{"event": 3, "time": 1}',
    b'{"event": "step", "time": 1}',
    b'{"event": "note"}',
    b"",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_lines_that_are_no_event_are_skipped_and_noted(path, garbage):
    writer = EventWriter(path)
    for step in (1, 2, 3):
        writer.emit("step", step=step, loss=0.5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + garbage + b"\n" + lines[2])
    assert [event["step"] for event in read_events(path)] == [1, 3]
    EventWriter(path, keep=True).rewind(3)
    *steps, removed, missing = read_events(path)
    assert [event["step"] for event in steps] == [1, 3]
    assert f"1 lines of {path} " in removed["text"]
    assert "1 of 3 steps (first 2, last 2)" in missing["text"] and str(path) in missing["text"]


def test_a_deleted_file_of_events_is_noted(path):
    EventWriter(path, keep=True).rewind(20)
    [missing] = read_events(path)
    assert "20 of 20 steps (first 1, last 20)" in missing["text"]

"""Events: whatever the writer is doing, a follower gets whole events, each once, in order."""

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


def test_events_come_back_in_order_with_a_time(path):
    writer = EventWriter(path)
    writer.phase("load")
    writer.emit("step", step=1, loss=0.5)
    writer.note("line separators \u2028 and \n stay inside")
    events = list(read_events(path))
    assert [e["event"] for e in events] == ["phase", "step", "note"]
    assert events[1]["loss"] == 0.5 and events[2]["text"] == "line separators \u2028 and \n stay inside"
    assert all(abs(time.time() - e["time"]) < 60 for e in events)


def test_a_writer_without_a_path_writes_nothing(tmp_path):
    EventWriter(None).note("unheard")
    EventWriter(None).rewind(3)
    assert list(tmp_path.iterdir()) == []


def test_there_may_be_no_file_yet(path):
    follower = Follower(path)
    assert list(follower.new()) == [] and list(read_events(path)) == []
    EventWriter(path).note("now")
    assert [e["text"] for e in follower.new()] == ["now"]


def test_a_line_in_the_making_is_never_parsed(path):
    """Every way to cut two lines in two: the follower gives what is whole, and the rest once it is."""
    lines = b"".join(
        json.dumps({"event": "step", "step": n, "text": "ä"}, ensure_ascii=False).encode() + b"\n" for n in (1, 2)
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


def test_a_follower_of_another_process_gets_every_event_once(path):
    follower, seen = Follower(path), []
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) as process:
        while process.poll() is None:
            seen += [(e["step"], len(e["text"])) for e in follower.new()]
    seen += [(e["step"], len(e["text"])) for e in follower.new()]
    assert process.returncode == 0 and seen == [(n, n % 700) for n in range(1, 3001)]


def test_rewinding_forgets_the_steps_of_a_lost_attempt(path):
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


def test_rewinding_forgets_what_was_observed_since_the_checkpoint(path):
    writer = EventWriter(path)
    writer.emit("eval", step=0)
    for step in (1, 2, 3):
        writer.emit("step", step=step)
    writer.emit("eval", step=2)
    writer.emit("eval", step=3)
    writer.rewind(3)
    assert [e["step"] for e in read_events(path) if e["event"] == "step"] == [1, 2, 3]
    assert [e["step"] for e in read_events(path) if e["event"] == "eval"] == [0, 2]


def test_an_attempt_taken_up_again_goes_on_after_the_last_whole_line(path):
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


def test_a_new_attempt_in_the_same_file_is_followed_from_its_start(path):
    follower = Follower(path)
    first = EventWriter(path)
    first.note("a long note of the first attempt")
    assert len(list(follower.new())) == 1
    EventWriter(path).note("2nd")
    assert [e["text"] for e in follower.new()] == ["2nd"]


def test_a_number_that_is_none_is_refused_before_anything_is_written(path):
    writer = EventWriter(path)
    with pytest.raises(ValueError, match="JSON"):
        writer.emit("step", step=1, loss=float("nan"))
    writer.note("after")
    assert [e["text"] for e in read_events(path)] == ["after"]


def test_progress_ends_at_its_total_and_says_what_is_left(path):
    progress = Progress(EventWriter(path), total=1000, unit="rows")
    for _ in range(1000):
        progress.advance()
    *earlier, last = read_events(path)
    assert (last["done"], last["total"], last["unit"], last["seconds_left"]) == (1000, 1000, "rows", 0)
    assert len(earlier) < 20, "at most twice a second"


def test_progress_beyond_its_total_is_told_no_more(path):
    """Rows that were counted by other code: one that counts too few must not cost a line a row, or give negative seconds."""
    progress = Progress(EventWriter(path), total=2, unit="rows")
    for _ in range(1000):
        progress.advance()
    assert [(e["done"], e["total"], e["seconds_left"]) for e in read_events(path)] == [(2, 2, 0)]


def test_the_time_left_is_of_this_attempt_alone(path):
    """A quarter done before; 25 more in about 0.6 s: 50 are left, so about 1.2 s, not the 0.6 of an average over 50."""
    progress = Progress(EventWriter(path), total=100, unit="rows", done=25)
    time.sleep(0.6)
    progress.advance(25)
    (event,) = read_events(path)
    assert event["done"] == 50 and 1.1 < event["seconds_left"] < 4

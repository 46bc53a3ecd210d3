"""Notes about a job that reports nothing, on a clock of the test's own."""

from training.contract.protocol.events import make_event
from training.launch.stall import StallDetector


class Clock:
    """Shows the time that the test sets."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def notes_of(
    stall: StallDetector, clock: Clock, seconds: range, stopped: tuple[int, ...] = ()
) -> list[tuple[int, str]]:
    """Return the time and the text of each note, if the job is asked every second."""
    found = []
    for clock.seconds in map(float, seconds):
        if (note := stall.note("policy", lambda: stopped)) is not None:
            found.append((int(clock.seconds), note["text"]))
    return found


def test_note_comes_after_two_minutes_and_then_after_twice_the_time() -> None:
    clock = Clock()
    times = [time for time, _ in notes_of(StallDetector(clock), clock, range(1000))]
    assert times == [120, 240, 480, 960]


def test_note_names_the_step_and_the_stopped_processes() -> None:
    clock = Clock()
    stall = StallDetector(clock)
    stall.on_event(make_event("step", step=5, loss=0.5))
    [(_, text)] = notes_of(stall, clock, range(200), stopped=(4711, 4712))
    assert "policy job" in text and "120 s" in text and "step 6" in text
    assert "`kill -CONT 4711 4712`" in text


def test_job_with_long_steps_is_silent_for_ten_of_them() -> None:
    """Its steps take 50 s, so 499 s without one are not remarkable."""
    clock, events = Clock(), iter(range(1, 10))
    stall = StallDetector(clock)
    for step in range(1, 4):
        clock.seconds = 50.0 * step
        stall.on_event(make_event("step", step=next(events), loss=0.5))
    assert [time for time, _ in notes_of(stall, clock, range(150, 800))] == [150 + 500]


def test_event_ends_the_silence() -> None:
    clock = Clock()
    stall = StallDetector(clock)
    for second in range(0, 1000, 100):
        clock.seconds = float(second)
        stall.on_event(make_event("phase", phase="training"))
        assert stall.note("policy", tuple) is None

"""Lost interrupts of a process that works on a run."""

import signal
import sys
import time
import weakref
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.run_liveness import reraise_lost_interrupts, tag_run_with_process


class Thing:
    pass


def test_interrupt_in_a_weakref_callback_is_raised_again(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Python alone would print a warning, ignore the interrupt and continue."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    reraise_lost_interrupts.__wrapped__()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            del thing
            for _ in range(100):
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert reference() is None and capfd.readouterr().err == ""


def test_other_ignored_exceptions_reach_the_previous_hook(monkeypatch: pytest.MonkeyPatch):
    ignored: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    reraise_lost_interrupts.__wrapped__()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: 1 / 0)
    del thing
    assert reference() is None and [type(arguments.exc_value) for arguments in ignored] == [ZeroDivisionError]


def test_dagster_interrupt_in_a_weakref_callback_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a step, Dagster raises its own exception for the signal. If it were lost, the step would continue to sleep."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    reraise_lost_interrupts.cache_clear()
    slept: list[bool] = []

    @dg.asset
    def terminated(context: dg.AssetExecutionContext) -> None:
        tag_run_with_process(context.instance, context.run, tmp_path)
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        assert reference() is None
        time.sleep(5)
        slept.append(True)

    with pytest.raises(dg.DagsterExecutionInterruptedError):
        dg.materialize([terminated])
    reraise_lost_interrupts.cache_clear()  # monkeypatch restores the hook after this test
    assert not slept

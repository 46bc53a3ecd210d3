"""A process that works on a run, and the interrupts that it gets."""

import signal
import sys
import time
import weakref
from pathlib import Path

import dagster as dg
import pytest

from assets.execution.run_liveness import reraise_lost_interrupts, sign


class Thing:
    pass


def test_an_interrupt_is_not_lost_in_a_callback(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """One that comes while a weak reference's callback runs: Python says that it ignores it, and goes on."""
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


def test_what_else_is_ignored_is_told_as_before(monkeypatch: pytest.MonkeyPatch):
    told: list[sys.UnraisableHookArgs] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    reraise_lost_interrupts.__wrapped__()
    thing = Thing()
    reference = weakref.ref(thing, lambda _: 1 / 0)
    del thing
    assert reference() is None and [type(each.exc_value) for each in told] == [ZeroDivisionError]


def test_a_run_of_dagster_is_interrupted_wherever_the_signal_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a step Dagster raises an exception of its own for the signal. Lost in a callback, the step would sleep on."""
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    reraise_lost_interrupts.cache_clear()
    slept: list[bool] = []

    @dg.asset
    def terminated(context: dg.AssetExecutionContext) -> None:
        sign(context.instance, context.run, tmp_path)
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        assert reference() is None
        time.sleep(5)
        slept.append(True)

    with pytest.raises(dg.DagsterExecutionInterruptedError):
        dg.materialize([terminated])
    reraise_lost_interrupts.cache_clear()  # what it has changed ends with this test
    assert not slept

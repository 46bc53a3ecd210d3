"""run_job with real processes: events during the run, the cause of a failure, and no process left after it."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.training.launch.living import AnyEvent, alive
from training.contract.errors import JobFailed
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.contract.system.locks import is_held
from training.launch.engine import JobState
from training.launch.launcher import run_job, write_job
from training.launch.local import LocalEngine

LOCAL = LocalEngine("plain_program")
MakeJob = Callable[..., Job]


def run(job: Job, **options) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    run_job(LOCAL, job, events.append, **options)
    return events


def failure(job: Job) -> str:
    with pytest.raises(JobFailed) as caught:
        run(job)
    return str(caught.value)


def test_run_job_passes_events_during_the_run(make_job: MakeJob) -> None:
    """The job takes its second step only after an answer to its first."""
    job = make_job("answered")
    steps: list[int] = []

    def answer(event: AnyEvent) -> None:
        steps.append(event["step"])
        (job.folder / "answer").touch()

    run_job(LOCAL, job, answer)
    assert steps == [1, 2]


class LastMoment:
    """An engine and its handle. The job writes an event and ends just before `state` returns."""

    def find(self, job: Job) -> None:
        return None

    def submit(self, job: Job, lock: BinaryIO | None = None) -> "LastMoment":
        self.events, self.log = job.events, job.log
        return self

    def state(self) -> JobState:
        EventWriter(self.events).note("done")
        return JobState("ended", status=0)

    def stopped(self) -> list[int]:
        return []

    def cancel(self) -> None:
        pass

    def detach(self) -> None:
        pass


def test_run_job_passes_an_event_written_just_before_the_end(make_job: MakeJob) -> None:
    texts: list[str] = []
    run_job(LastMoment(), make_job("status"), lambda event: texts.append(event["text"]))
    assert texts == ["done"]


def test_run_job_failure_without_a_cause_has_the_status_and_the_end_of_the_log(make_job: MakeJob) -> None:
    job = make_job("status")
    message = failure(job)
    assert all(value in message for value in ("policy job", "exit status 3", str(job.log), "    last line"))


def test_run_job_failure_with_an_empty_log_says_so(make_job: MakeJob) -> None:
    assert f"{(job := make_job('silent')).log} (" in (message := failure(job))
    assert message.endswith(" is empty [job-failed]")


def test_run_job_failure_tells_of_memory_that_ran_out(make_job: MakeJob) -> None:
    """The runtime of C++ says so before it aborts. The list of modules that follows hides it."""
    message = failure(make_job("out_of_memory"))
    assert "SIGABRT because it ran out of memory" in message and message.endswith("[out-of-memory]")
    assert "Extension modules" not in message


def test_run_job_failure_names_the_rank_with_an_exit_status(make_job: MakeJob) -> None:
    assert "rank 0 ended with exit status 70" in failure(make_job("report_of_an_error"))


def test_run_job_with_a_removed_folder_ends_the_job(make_job: MakeJob) -> None:
    job = make_job("answered")
    with pytest.raises(JobFailed, match=r"was removed while the policy job ran.*\[job-folder-removed\]"):
        run_job(LOCAL, job, lambda _: shutil.rmtree(job.folder))


def test_run_job_notes_a_long_silence(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped process is named, and the job goes on."""
    monkeypatch.setattr("training.launch.stall._SHORTEST_SECONDS", 0.2)
    monkeypatch.setattr("training.launch.stall._TIMES_LONGEST", 0.0)
    job, notes = make_job("answered"), list[str]()

    def answer(event: AnyEvent) -> None:
        if event["event"] == "note":
            notes.append(event["text"])
            (job.folder / "answer").touch()

    run_job(LOCAL, job, answer)
    assert notes and "has reported nothing for" in notes[0]


def test_run_job_failure_names_the_signal(make_job: MakeJob) -> None:
    assert "SIGSEGV" in failure(make_job("segfault"))


def test_run_job_failure_has_the_message_of_the_job(make_job: MakeJob) -> None:
    job = make_job("data_error")
    message = failure(job)
    assert message.startswith("row 7 is not a pair; ")
    assert str(job.log) in message and "rank" not in message


def test_run_job_failure_on_several_nodes_names_rank_and_node(make_job: MakeJob) -> None:
    """A line of the other node is between the lines of the report. With one process per node, rank 0 is on node 0."""
    assert "rank 0 was ended by SIGKILL" in failure(make_job("report"))
    message = failure(make_job("data_error", nodes=2))
    assert message.startswith("row 7 is not a pair; rank 0 (node 0)")


def test_run_job_failure_names_the_crashed_rank_not_the_killed_ones(make_job: MakeJob) -> None:
    """torchrun kills the other ranks if they ignore SIGTERM."""
    assert "rank 1 was ended by SIGSEGV" in failure(make_job("report_of_deaf_ranks"))


def test_run_job_failure_with_an_incomplete_cause_has_the_status(make_job: MakeJob) -> None:
    assert "exit status 1" in failure(make_job("half_a_failure"))


def test_run_job_removes_error_and_events_of_an_earlier_attempt(make_job: MakeJob) -> None:
    failure(make_job("data_error"))
    again = make_job("status")
    again.events.write_text('{"event": "step", "step": 9, "loss": 1.0}\n')
    events: list[AnyEvent] = []
    with pytest.raises(JobFailed, match="exit status 3"):
        run_job(LOCAL, again, events.append)
    assert events == [] and again.events.read_text() == ""


def test_run_job_with_checkpoints_keeps_events(make_job: MakeJob) -> None:
    job = make_job("answered")
    job.checkpoints.mkdir(parents=True)
    (job.folder / "answer").touch()
    job.events.write_text('{"event": "step", "time": 1, "step": 0, "loss": 1.0}\n')
    assert [event["step"] for event in run(job)] == [0, 1, 2]


def test_run_job_restores_signals_for_the_job(make_job: MakeJob) -> None:
    """A background job of a shell ignores SIGINT. This test also ignores SIGTERM and blocks SIGUSR1."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        (note,) = run(make_job("signals"))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (note["interrupt"], note["terminate"], note["blocked"]) == (True, True, [])


def test_run_job_with_a_rendezvous_folder_of_another_user_moves_it(make_job: MakeJob, monkeypatch) -> None:
    """torchrun makes a folder with mode 0700, and a kill leaves it. root could remove it, so the test replaces rmtree."""
    job = make_job("signals")
    left = job.folder / "rendezvous" / "none_abc" / "ranks"
    left.parent.mkdir(parents=True)
    left.touch()
    with monkeypatch.context() as refused:
        refused.setattr(shutil, "rmtree", lambda *_, **__: None)
        run(job)
    assert list((job.folder / "rendezvous").iterdir()) == []
    assert [path.name for path in job.folder.rglob("ranks")] == ["ranks"]


def test_run_job_removes_the_rendezvous_folder(make_job: MakeJob) -> None:
    job = make_job("signals")
    run(job)
    assert list(job.folder.glob("rendezvous*")) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_run_job_an_exception_leaves_no_process_and_no_lock(make_job: MakeJob, error: type[BaseException]) -> None:
    """The job has an orphan in another session that ignores SIGTERM. It too ends before the exception is raised."""
    job = make_job("orphan")
    pids: list[int] = []

    def stop(event: AnyEvent) -> None:
        pids.extend(event["pids"])
        assert alive(pids) == pids
        raise error

    with Store(job.store).lock("policy", "key") as lock:
        started = Path(lock.name)
        with pytest.raises(error):
            run_job(LOCAL, job, stop, lock=lock)
    assert alive(pids) == []
    assert not is_held(started)


def test_submitted_job_holds_the_lock_after_its_submitter_released_it(make_job: MakeJob) -> None:
    job = make_job("answered")
    write_job(job)
    with Store(job.store).lock("policy", "key") as lock:
        handle = LOCAL.submit(job, lock)
        path = Path(lock.name)
    assert is_held(path)
    (job.folder / "answer").touch()
    while handle.state().status is None:
        time.sleep(0.01)
    assert not is_held(path)


def test_cancel_may_be_called_twice(make_job: MakeJob) -> None:
    job = make_job("answered")
    write_job(job)
    handle = LOCAL.submit(job)
    handle.cancel()
    handle.cancel()
    assert handle.state().status == 128 + signal.SIGTERM

"""run_job with real processes: events while they run, the cause when they fail, nothing left when they are cancelled."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.training.launch.living import alive
from training.contract.errors import JobFailed
from training.contract.protocol.events import Event, EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import Store
from training.contract.system.locks import is_held
from training.launch.launcher import run_job, write_job
from training.launch.local import LocalLauncher

LAUNCHER = LocalLauncher("plain_program")
MakeJob = Callable[..., Job]


def run(job: Job, **options) -> list[Event]:
    events: list[Event] = []
    run_job(LAUNCHER, job, events.append, **options)
    return events


def failure(job: Job) -> str:
    with pytest.raises(JobFailed) as caught:
        run(job)
    return str(caught.value)


def test_events_arrive_while_the_job_runs(make_job: MakeJob) -> None:
    """The job takes its second step only once its first one was answered."""
    job = make_job("answered")
    steps: list[int] = []

    def answer(event: Event) -> None:
        steps.append(event["step"])
        (job.folder / "answer").touch()

    run_job(LAUNCHER, job, answer)
    assert steps == [1, 2]


class LastMoment:
    """A job, by the protocols of a launcher and its handle, that tells an event and ends just before it is asked."""

    def start(self, job: Job, lock: BinaryIO | None = None) -> "LastMoment":
        self.events, self.log = job.events, job.log
        return self

    def poll(self) -> int:
        EventWriter(self.events).note("done")
        return 0

    def cancel(self) -> None:
        pass


def test_what_is_told_at_the_last_moment_arrives(make_job: MakeJob) -> None:
    heard: list[str] = []
    run_job(LastMoment(), make_job("status"), lambda event: heard.append(event["text"]))
    assert heard == ["done"]


def test_exit_status_and_last_lines_when_nobody_says_why(make_job: MakeJob) -> None:
    job = make_job("status")
    message = failure(job)
    assert "the policy job failed: exit status 3" in message
    assert str(job.log) in message
    assert "the last thing it said" in message


def test_signal_is_named(make_job: MakeJob) -> None:
    assert "it was ended by SIGSEGV" in failure(make_job("segfault"))


def test_failure_is_reported_as_its_message(make_job: MakeJob) -> None:
    job = make_job("data_error")
    assert failure(job) == f"row 7 is not a pair; the policy job failed, whose log is {job.log}"


def test_on_several_nodes_the_rank_is_found_and_its_node_named(make_job: MakeJob) -> None:
    """Though the other node's report stands between; with one process a node, rank 0 is of node 0."""
    assert "rank 0 was ended by SIGKILL" in failure(make_job("report"))
    assert "row 7 is not a pair; rank 0 (node 0) of the policy job failed" in failure(make_job("data_error", nodes=2))


def test_a_rank_that_was_killed_since_it_did_not_hear_is_not_the_cause(make_job: MakeJob) -> None:
    assert "rank 1 was ended by SIGSEGV" in failure(make_job("report_of_deaf_ranks"))


def test_failure_cut_short_falls_back_to_the_exit_status(make_job: MakeJob) -> None:
    assert "exit status 1" in failure(make_job("half_a_failure"))


def test_what_an_earlier_attempt_said_is_gone(make_job: MakeJob) -> None:
    failure(make_job("data_error"))
    again = make_job("status")
    again.events.write_text('{"event": "step", "step": 9, "loss": 1.0}\n')
    heard: list[Event] = []
    with pytest.raises(JobFailed, match="exit status 3"):
        run_job(LAUNCHER, again, heard.append)
    assert heard == [] and again.events.read_text() == ""


def test_events_of_a_job_with_checkpoints_stay(make_job: MakeJob) -> None:
    job = make_job("answered")
    job.checkpoints.mkdir(parents=True)
    (job.folder / "answer").touch()
    job.events.write_text('{"event": "step", "step": 0, "loss": 1.0}\n')
    assert [event["step"] for event in run(job)] == [0, 1, 2]


def test_signals_are_restored(make_job: MakeJob) -> None:
    """A shell's background job has SIGINT ignored; here SIGTERM is ignored as well and SIGUSR1 blocked."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        (note,) = run(make_job("signals"))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (note["interrupt"], note["terminate"], note["blocked"]) == (True, True, [])


def test_where_another_users_ranks_met_does_not_stop_the_next_ones(make_job: MakeJob, monkeypatch) -> None:
    """torchrun makes a folder of 0700 there, which stays when everything is killed. Played, since root may remove it."""
    job = make_job("signals")
    left = job.folder / "rendezvous" / "none_abc" / "ranks"
    left.parent.mkdir(parents=True)
    left.touch()
    with monkeypatch.context() as refused:
        refused.setattr(shutil, "rmtree", lambda *_, **__: None)
        run(job)
    assert list((job.folder / "rendezvous").iterdir()) == []
    assert [path.name for path in job.folder.rglob("ranks")] == ["ranks"]


def test_of_where_the_ranks_met_nothing_is_left(make_job: MakeJob) -> None:
    job = make_job("signals")
    run(job)
    assert list(job.folder.glob("rendezvous*")) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_leaves_no_process_and_no_lock(make_job: MakeJob, error: type[BaseException]) -> None:
    """Below the job there is an orphan in another session that ignores SIGTERM; it is gone when the exception is out."""
    job = make_job("orphan")
    pids: list[int] = []

    def stop(event: Event) -> None:
        pids.extend(event["pids"])
        assert alive(pids) == pids
        raise error

    with Store(job.store).lock("policy", "key") as lock:
        started = Path(lock.name)
        with pytest.raises(error):
            run_job(LAUNCHER, job, stop, lock=lock)
    assert alive(pids) == []
    assert not is_held(started)


def test_the_job_holds_the_lock_when_its_launcher_does_not(make_job: MakeJob) -> None:
    job = make_job("answered")
    write_job(job)
    with Store(job.store).lock("policy", "key") as lock:
        handle = LAUNCHER.start(job, lock)
        path = Path(lock.name)
    assert is_held(path)
    (job.folder / "answer").touch()
    while handle.poll() is None:
        time.sleep(0.01)
    assert not is_held(path)


def test_cancel_may_be_called_again(make_job: MakeJob) -> None:
    job = make_job("answered")
    write_job(job)
    handle = LAUNCHER.start(job)
    handle.cancel()
    handle.cancel()
    assert handle.poll() == 128 + signal.SIGTERM

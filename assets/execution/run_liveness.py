"""Liveness of runs: a tag of each run names its process, so that other processes can check if it is alive.

The tag names a lock file, held by the process as long as it lives. Any process with access to the file can try the lock. So
reused process ids, clocks, reboots, containers and other machines do not matter.
"""

import functools
import os
import platform
import signal
import sys
import threading
from pathlib import Path

import dagster as dg

from assets.execution.instance_ids import note_records
from training.contract.store.staging import LockedFolder, claim_folder
from training.contract.system.atomic_io import make_group_writable
from training.contract.system.locks import is_held

# Dagster's pages hide tags with this prefix. Unfinished runs of an earlier version have the other tag.
PROCESS_TAG = ".dagster/pedigree_process"
_EARLIER_PROCESS_TAG = "pedigree/process"
_SECONDS_UNTIL_SENT_AGAIN = 0.1
# The states of a run with a process at work, or with a process that died.
BEGUN = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def tag_run_with_process(instance: dg.DagsterInstance, run: dg.DagsterRun, home: Path) -> None:
    """Tag `run` with this process, unless the command that started it did so.

    Fail orphaned runs first, as a command does before its run. Otherwise a run started by a schedule would wait for their slots
    in a pool.
    """
    reraise_lost_interrupts()
    note_records(instance, home)
    share_records(Path(instance.root_directory), run.run_id, home)
    if process_of(run) is None:
        fail_orphaned_runs(instance, home)
        instance.add_run_tags(run.run_id, signature(run.run_id, home))


@functools.cache
def reraise_lost_interrupts() -> None:
    """Send lost interrupts of this process again, from now on.

    A signal raises in the code that is running. Python ignores exceptions in callbacks of weak references, and SQLAlchemy has
    many of them. So Ctrl-C, or the termination of a run, would sometimes fail.
    """
    previous_hook = sys.unraisablehook

    def send_again(ignored: "sys.UnraisableHookArgs") -> None:
        if isinstance(ignored.exc_value, KeyboardInterrupt | dg.DagsterExecutionInterruptedError):
            again = threading.Timer(_SECONDS_UNTIL_SENT_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            previous_hook(ignored)

    sys.unraisablehook = send_again


def fail_orphaned_runs(instance: dg.DagsterInstance, home: Path) -> None:
    """Mark runs with dead processes as failed, and free the pool slots of all runs with dead processes.

    A killed process cannot end its run, and Dagster does not do it for local runs. Such a run would count as started for ever.
    Its assets would count as in progress, so automation conditions would not request them. Its slot in the pool `gpu` would
    stay taken. Slots are freed for ended runs too: a user may have marked a run as canceled before it was killed.
    """
    for begun in instance.get_runs(dg.RunsFilter(statuses=BEGUN)):
        if (process := process_of(begun)) is None or is_alive(process, home):
            continue
        # Read the run again now that its process is dead: the process may have ended it since the runs were listed.
        for run in instance.get_runs(dg.RunsFilter([begun.run_id], statuses=BEGUN)):
            _close(instance, run)
    for run_id in instance.event_log_storage.get_concurrency_run_ids():
        holder = instance.get_run_by_id(run_id)
        if holder is None or (holder.is_finished and (process := process_of(holder)) and not is_alive(process, home)):
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)


def _close(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Mark a run with a dead process as failed, or as canceled if the user was stopping it."""
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, "The process of this run is dead; the user was stopping it.")
    else:
        instance.report_run_failed(run, "The process of this run is dead; it was killed or the machine went down.")


@functools.cache
def share_records(records: Path, run_id: str, home: Path) -> None:
    """Make Dagster's databases in `records`, the run's included, group-writable like the lock of this process.

    Do it once, when the run begins: a killed process could not do it at the end, and another user's process must be able to
    close the run. `run_id` is only for the cache.
    """
    make_group_writable(records.rglob("*.db*"), like=Path(_claim(home).lock.name))


def signature(run_id: str, home: Path) -> dict[str, str]:
    """Return the tag of a run for this process. It names the run too, because Dagster copies tags to a re-execution."""
    return {PROCESS_TAG: f"{run_id} {this_process(home)}"}


def process_of(run: dg.DagsterRun) -> str | None:
    """Return the process in the run's tag; None if the tag is missing or was copied from another run."""
    run_id, _, process = (run.tags.get(PROCESS_TAG) or run.tags.get(_EARLIER_PROCESS_TAG, "")).partition(" ")
    return process if run_id == run.run_id else None


def this_process(home: Path) -> str:
    """Return host and process id, for display, and the lock file of this process in `home`."""
    return f"{platform.node()} {os.getpid()} {_claim(home).lock.name}"


def is_alive(process: str, home: Path) -> bool:
    """Return whether a process described by `this_process` is alive. `home` may have been moved or copied since."""
    lock = Path(process.split(" ", 2)[2])
    return is_held(lock if lock.parent.is_dir() else home / "processes" / lock.name)


_CLAIMED: dict[Path, LockedFolder] = {}


def _claim(home: Path) -> LockedFolder:
    """Return the lock of this process. The kernel releases it when the process ends.

    Claim another one if the file was removed: a server lives for weeks, and others could not see that it does.
    """
    claimed = _CLAIMED.get(home)
    if claimed is None or not Path(claimed.lock.name).exists():
        claimed = _CLAIMED[home] = claim_folder(home / "processes")
    return claimed

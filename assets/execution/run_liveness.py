"""Which process works on a run: a tag of the run names it, so that others can see whether it is still alive.

The tag names a lock file that the process holds as long as it lives. So neither reused process ids, nor clocks, reboots,
containers or other machines matter: whoever sees the file can try the lock.
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

PROCESS_TAG = "pedigree/process"
_SECONDS_UNTIL_SENT_AGAIN = 0.1
# The states of a run that a process is working on, or was before it died.
BEGUN = [
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def sign(instance: dg.DagsterInstance, run: dg.DagsterRun, home: Path) -> None:
    """Tag `run` with this process, unless the command that started it has done so.

    What dead processes left is closed first, as a command does before its run: else one that a schedule started would wait
    for a slot of theirs in a pool.
    """
    reraise_lost_interrupts()
    note_records(instance, home)
    share_records(Path(instance.root_directory), run.run_id, home)
    if process_of(run) is None:
        fail_orphaned_runs(instance, home)
        instance.add_run_tags(run.run_id, signature(run.run_id, home))


@functools.cache
def reraise_lost_interrupts() -> None:
    """From now on send this process an interrupt again that was lost.

    A signal raises in whatever is running, and Python ignores what is raised in a callback of a weak reference, of which
    SQLAlchemy has many: Ctrl-C, or the termination of a run, would now and then do nothing.
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
    """Close runs whose process is gone, as failed, and free the slots in pools of all such runs, however they ended.

    A killed process cannot close its run, and Dagster closes no run on its own machine. Such a run would count as started for
    ever. Its assets would count as in progress, so no automation condition would request them. Its slot in the pool `gpu` would
    stay taken. A person may have marked the run as canceled before it was killed.
    """
    for begun in instance.get_runs(dg.RunsFilter(statuses=BEGUN)):
        if (process := process_of(begun)) is None or is_alive(process, home):
            continue
        # Asked again now that nobody works on it: its process may have ended it since the runs were listed.
        for run in instance.get_runs(dg.RunsFilter([begun.run_id], statuses=BEGUN)):
            _close(instance, run)
    for run_id in instance.event_log_storage.get_concurrency_run_ids():
        holder = instance.get_run_by_id(run_id)
        if holder is None or (holder.is_finished and (process := process_of(holder)) and not is_alive(process, home)):
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)


def _close(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Mark a run whose process is gone as failed, or as canceled if a person was stopping it."""
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, "The process of this run is gone; a person was stopping it.")
    else:
        instance.report_run_failed(run, "The process of this run is gone; it was killed or the machine went down.")


@functools.cache
def share_records(records: Path, run_id: str, home: Path) -> None:
    """Make the databases in `records`, Dagster's, the group's, as the lock of this process is: that of the run is among them.

    At the beginning of the run, once: whoever is killed does it at no end, and whoever comes next closes the run.
    `run_id` is for the cache alone.
    """
    make_group_writable(records.rglob("*.db*"), like=Path(_claim(home).lock.name))


def signature(run_id: str, home: Path) -> dict[str, str]:
    """The tag of a run that this process works on; it names the run too, since Dagster copies tags to a re-execution."""
    return {PROCESS_TAG: f"{run_id} {this_process(home)}"}


def process_of(run: dg.DagsterRun) -> str | None:
    """The process that has signed this run itself."""
    signed, _, process = run.tags.get(PROCESS_TAG, "").partition(" ")
    return process if signed == run.run_id else None


def this_process(home: Path) -> str:
    """Host and process id, for people, and the lock of this process among those at work in `home`."""
    return f"{platform.node()} {os.getpid()} {_claim(home).lock.name}"


def is_alive(process: str, home: Path) -> bool:
    """Whether the process that `this_process` described is alive; `home` may have been moved or copied since."""
    lock = Path(process.split(" ", 2)[2])
    return is_held(lock if lock.parent.is_dir() else home / "processes" / lock.name)


@functools.cache
def _claim(home: Path) -> LockedFolder:
    """Held until this process ends, when the kernel releases the lock."""
    return claim_folder(home / "processes")

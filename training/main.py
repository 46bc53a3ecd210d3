"""The one entry point of every job: `python -m training.main job.json`, alone or on every rank of torchrun.

Each rank joins the group and does the work of the job's kind; rank 0 empties the staging folder before and publishes it
after. The first rank that fails writes `error.json`, since the others then fail too, because of a closed connection; the log
has the errors of all.
"""

import contextlib
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from training.contract.errors import DataError, PedigreeError, TrainingError
from training.contract.identity.file_hashing import report_hashing_to
from training.contract.protocol.events import EventWriter
from training.contract.protocol.input_files import InputFiles
from training.contract.protocol.job import SUPERVISOR, Failure, Job, JobKind
from training.contract.store.store import JobResult, Store
from training.contract.system.atomic_io import free_bytes, is_disk_full, write_error
from training.contract.system.imports import import_without_gc
from training.contract.system.process import die_with_parent
from training.launch.process_tree import ancestors

if TYPE_CHECKING:
    from training.distributed import Group

# The module whose `run` does the work of a kind. Imported once the kind is known, so that a rank that trains does not load the
# libraries that read data (60 MB, half a second).
WORK: dict[JobKind, str] = {
    "preferences": "training.jobs.read_preferences",
    "tokenizer": "training.jobs.freeze_tokenizer",
    "release_files": "training.jobs.freeze_release_files",
    "pairs": "training.jobs.tokenize_pairs",
    "sft": "training.jobs.sft",
    "reference": "training.jobs.reference_logprobs",
    "policy": "training.jobs.policy",
    "evaluation": "training.jobs.evaluation",
    "merge": "training.jobs.merge_adapter",
    "proof": "training.jobs.rescore",
}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
_MICRO_TOKENS: dict[JobKind, str] = {"policy": "training.micro_tokens", "sft": "reference.sft.micro_tokens"}
# Longer than torchrun takes to notice a rank that was killed and to end the others.
_TORCHRUN_SECONDS = 3.0


def main(path: Path) -> int:
    """Do the job that `path` describes; the exit status is 0 if its artifact was published, else 1."""
    _bind_to_launcher()
    job = Job.read(path)
    try:
        distributed = import_without_gc("training.distributed")
        alone = contextlib.nullcontext(distributed.ALONE)
        with distributed.group(job.compute.device) if job.distributed else alone as members:
            make(job, members)
    except Exception as error:
        _report(job, _explained(job, error))
        return 1
    return 0


def make(job: Job, members: "Group") -> None:
    """Do the work, from an empty staging folder to the published artifact."""
    events = EventWriter(job.events if members.is_main else None, keep=job.checkpoints.exists())
    inputs = InputFiles(job, members.is_main)
    if members.is_main:
        shutil.rmtree(job.staging, ignore_errors=True)
        job.staging.mkdir(parents=True)
    about = import_without_gc("training.provenance").provenance(members)
    members.barrier()
    with report_hashing_to(events.emit), inputs.watched():
        _verify(inputs, members)
        with inputs.blamed():
            made: JobResult = import_without_gc(WORK[job.kind]).run(job, members, events)
        members.barrier()
        if members.is_main:
            inputs.check_inputs_unchanged()
            for files in inputs.changed_models():
                events.note(f"{files} changed after it was read: {job.artifact} is made from what was read")
            made = replace(made, details=made.details | {"provenance": about})
            Store(job.store).publish(job.staging, job.derivation, made)
            shutil.rmtree(job.staging, ignore_errors=True)  # still there if the same contents were published before
            shutil.rmtree(job.checkpoints, ignore_errors=True)  # nothing resumes from them any more


def _verify(inputs: InputFiles, members: "Group") -> None:
    """Raise DataError on every rank if an input is no longer what was hashed; rank 0 alone reads it."""
    problem = ""
    if members.is_main:
        try:
            inputs.verify()
        except PedigreeError as error:
            problem = str(error)
    if problem := members.gather_texts(problem)[0]:
        raise DataError(problem)


def _bind_to_launcher() -> None:
    """A rank ends with its torchrun; if that, or the supervisor above it, died before this line, it ends here."""
    if "RANK" in os.environ:
        die_with_parent()
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor and int(supervisor) not in ancestors():
        sys.exit(f"the supervisor (process {supervisor}) of this job is gone; the job was cancelled")


def _explained(job: Job, error: Exception) -> Exception:
    """The error; or, if a library ran out of disk, whatever it raised, or torch out of memory, one a person can act on."""
    text = "".join(traceback.format_exception(error))
    report_hashing_to = [line for line in text.splitlines() if is_disk_full(line)]
    lacks_memory = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)))
    if isinstance(error, PedigreeError) or not (report_hashing_to or lacks_memory):
        return error
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
    if lacks_memory:
        advice = ", or ".join(_memory_savers(job)) or "run it on a machine with more memory"
        return TrainingError(f"{job.artifact}: {str(error).splitlines()[0]}; {advice}")
    # With the library's own line: it may be a quota, or another place, such as that for temporary files.
    return write_error(f"make {job.artifact}", min(job.store, job.folder, key=free_bytes), report_hashing_to[-1])


def _memory_savers(job: Job) -> Iterator[str]:
    """What in the recipe lets this job take less memory; first what leaves its checkpoints good."""
    if field := _MICRO_TOKENS.get(job.kind):
        if not job.compute.activation_checkpointing:
            yield "set `compute.activation_checkpointing: true`"
        yield f"lower `{field}` ({job.settings['micro_tokens']:,})"
    if job.kind in ("sft", "reference", "policy", "evaluation"):
        yield "share the weights among more processes (`compute.processes_per_node`, with `compute.parallel: fsdp`)"


def _report(job: Job, error: Exception) -> None:
    """Write the error to the log, and to error.json unless another rank was first."""
    expected = isinstance(error, PedigreeError)
    text = "" if expected else "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the log may lie on a disk that is full
        sys.stderr.write(text or f"{type(error).__name__}: {error}\n")
    if isinstance(error, RuntimeError) and "RANK" in os.environ:
        # It may come from a connection that another rank's end has closed. If that rank was killed, it wrote no error.json,
        # and neither should this one: torchrun names the killed rank, and ends this one while it waits.
        time.sleep(_TORCHRUN_SECONDS)
    rank = int(os.environ.get("RANK", 0))
    Failure(type=type(error).__name__, message=str(error), rank=rank, traceback=text).write_first(job.error)


def _leave(status: int) -> NoReturn:
    """End the process; at once where the work failed, since taking torch down takes seconds and saves nothing."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit()


if __name__ == "__main__":
    _leave(main(Path(sys.argv[1])))

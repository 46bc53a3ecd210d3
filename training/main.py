"""The entry point of every job: `python -m training.main job.json`, in one process or on every rank of torchrun.

Each rank joins the group and runs the job's kind. Rank 0 empties the staging folder before, and publishes it after. The first
rank that fails writes `error.json`, because the other ranks then fail too, with a closed connection. The log has all errors.
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
from training.contract.protocol.settings import SupervisedTuningSettings, TrainingSpec
from training.contract.store.artifact import JobResult
from training.contract.store.artifact_kind import Details
from training.contract.store.store import Store
from training.contract.system.atomic_io import free_bytes, is_disk_full, write_error
from training.contract.system.imports import import_without_gc
from training.contract.system.process import die_with_parent
from training.launch.process_tree import ancestors, living_siblings

if TYPE_CHECKING:
    from training.distributed import Group

# The module of a kind, with its `run`. It is imported when the kind is known, so that a training rank does not load the
# libraries that read data (60 MB, half a second).
WORK: dict[JobKind, str] = {
    "preferences": "training.jobs.read_preferences",
    "tokenizer": "training.jobs.freeze_tokenizer",
    "release_files": "training.jobs.freeze_release_files",
    "pairs": "training.jobs.tokenize_pairs",
    "sft": "training.jobs.sft",
    "reference": "training.jobs.reference_logprobs",
    "prequential": "training.jobs.prequential",
    "policy": "training.jobs.policy",
    "evaluation": "training.jobs.evaluation",
    "merge": "training.jobs.merge_adapter",
    "proof": "training.jobs.rescore",
}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED")
# The kernel closes a killed process's connections some time before it has ended.
_ENDING_SECONDS = 3.0
# torchrun needs less time, on a busy machine too, to notice an ended rank and to end the others.
_TORCHRUN_SECONDS = 60.0


def main(path: Path) -> int:
    """Run the job of `path`. Return the exit status: 0 if its artifact was published, else 1."""
    _bind_to_launcher()
    job = Job.read(path)
    try:
        distributed = import_without_gc("training.distributed")
        alone = contextlib.nullcontext(distributed.ALONE)
        with distributed.group(job.compute.device) if job.distributed else alone as members:
            make(job, members)
    except Exception as error:
        _report(job, _explain(job, error))
        return 1
    return 0


def make(job: Job, members: "Group") -> None:
    """Run the job, from an empty staging folder to the published artifact. Raises PedigreeError."""
    events = EventWriter(job.events if members.is_main else None, keep=job.checkpoints.exists())
    inputs = InputFiles(job, members.is_main)
    if members.is_main:
        shutil.rmtree(job.staging, ignore_errors=True)
        job.staging.mkdir(parents=True)
    provenance = import_without_gc("training.provenance").provenance(members)
    members.barrier()
    with report_hashing_to(events.emit), inputs.watched():
        _verify(inputs, members)
        with inputs.blamed():
            context = import_without_gc("training.job_context").JobContext(job, members, events)
            result: JobResult = import_without_gc(WORK[job.kind]).run(context)
        members.barrier()
        if members.is_main:
            inputs.check_inputs_unchanged()
            for files in inputs.changed_models():
                events.note(f"{files} changed after the job read it: {job.artifact} is made from the earlier content")
            details = (result.details or Details()).model_copy(update={"provenance": provenance})
            result = replace(result, details=details)
            Store(job.store).publish(job.staging, job.derivation, result)
            shutil.rmtree(job.staging, ignore_errors=True)  # it remains if the same contents were published before
            shutil.rmtree(job.checkpoints, ignore_errors=True)  # no run resumes from them now


def _verify(inputs: InputFiles, members: "Group") -> None:
    """Raise DataError on every rank if an input differs from its hash. Only rank 0 reads the inputs."""
    problem = ""
    if members.is_main:
        try:
            inputs.verify()
        except PedigreeError as error:
            problem = str(error)
    if problem := members.gather_texts(problem)[0]:
        raise DataError(problem)


def _bind_to_launcher() -> None:
    """End this rank when its torchrun ends. Exit now if torchrun or the supervisor has already ended."""
    if "RANK" in os.environ:
        die_with_parent()
    supervisor = os.environ.get(SUPERVISOR)
    if supervisor and int(supervisor) not in ancestors():
        sys.exit(f"the supervisor (process {supervisor}) of this job has ended; the job is cancelled")


def _explain(job: Job, error: Exception) -> Exception:
    """Return the error; for a full disk or lack of memory in a library, return a PedigreeError with advice instead."""
    text = "".join(traceback.format_exception(error))
    disk_full_lines = [line for line in text.splitlines() if is_disk_full(line)]
    lacks_memory = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)))
    if isinstance(error, PedigreeError) or not (disk_full_lines or lacks_memory):
        return error
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
    if lacks_memory:
        advice = ", or ".join(_ways_to_save_memory(job)) or "run it on a machine with more memory"
        cause = next(iter(str(error).splitlines()), "out of memory")  # a MemoryError has no text
        return TrainingError(f"{job.artifact}: {cause}; {advice}", "out-of-memory")
    # With the library's own line: the cause may be a quota, or another folder, such as the one for temporary files.
    return write_error(f"make {job.artifact}", min(job.store, job.folder, key=free_bytes), disk_full_lines[-1])


def _ways_to_save_memory(job: Job) -> Iterator[str]:
    """Yield changes of the recipe that save memory. Those that keep the checkpoints usable come first."""
    if isinstance(job.settings, TrainingSpec | SupervisedTuningSettings):
        field = "training.micro_tokens" if job.kind == "policy" else "reference.sft.micro_tokens"
        if not job.compute.activation_checkpointing:
            yield "set `compute.activation_checkpointing: true`"
        yield f"lower `{field}` ({job.settings.micro_tokens:,})"
    if job.kind in ("sft", "reference", "prequential", "policy", "evaluation"):
        yield "share the weights among more processes (`compute.processes_per_node`, with `compute.parallel: fsdp`)"


def _report(job: Job, error: Exception) -> None:
    """Write the error to the log, and to error.json if no other rank has written one."""
    expected = isinstance(error, PedigreeError)
    text = "" if expected else "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # the disk of the log may be full
        sys.stderr.write(text or f"{type(error).__name__}: {error}\n")
    if isinstance(error, RuntimeError) and "RANK" in os.environ:
        # The cause may be a connection that another rank closed by its end. A killed rank writes no error.json, and this rank
        # must not write one either: torchrun names the killed rank, and ends this one while it waits.
        time.sleep(_ENDING_SECONDS)
        if living_siblings() < int(os.environ["LOCAL_WORLD_SIZE"]):
            time.sleep(_TORCHRUN_SECONDS)
    rank = int(os.environ.get("RANK", 0))
    Failure(type=type(error).__name__, message=str(error), rank=rank, traceback=text).write_first(job.error)


def _leave(status: int) -> NoReturn:
    """End the process. After a failure skip the shutdown of torch, because it takes seconds."""
    if status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit()


if __name__ == "__main__":
    _leave(main(Path(sys.argv[1])))

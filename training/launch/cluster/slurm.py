"""Jobs in the queue of Slurm, by `sbatch`, `scontrol`, `squeue` and `scancel`. No accounting database is needed.

The batch script runs one task a node (task.py), which runs torchrun. It begins again when Slurm queues the job again: after a
preemption, or after the loss of a node. At the time limit the script itself queues the job again, if a checkpoint was committed
since its start. `--dependency=singleton` on the job's name keeps a second job of the same work waiting.

Sources: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/job_reason_codes.html
"""

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from training.contract.errors import EngineError, without_code
from training.contract.protocol.job import Failure, Job
from training.contract.system.templates import templates_beside
from training.launch.cluster.engine_file import SlurmProfile, SlurmSettings
from training.launch.cluster.task import PORT, write_software
from training.launch.engine import JobState, Submission, digest_of, name_of

_TEMPLATES = templates_beside(__file__)
_COMMAND_SECONDS = 60.0
# The ranks meet at a port that nothing uses on the first node.
_FIRST_PORT, _PORTS = 20_000, 10_000
_FIELD = re.compile(r"(\w+)=(\S*)")
_AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were transmitted"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY\b|_URI\b|_URL\b", re.IGNORECASE)
_UNKNOWN_JOB = "Invalid job id"
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_SIGTERM = 15
_CANCELED = 128 + _SIGTERM
_BETWEEN_LOOKS = 1.0
# Reasons of a waiting job that do not pass by themselves, and what to do. `{id}` is the job's.
_REMEDIES = {
    r"(?i).*held.*": "`scontrol release {id}` lets it start; `scontrol show job {id}` shows why it was held",
    r"PartitionTimeLimit": "lower `time` in the profile below the partition's limit, or name another partition",
    r"PartitionNodeLimit|PartitionConfig": "lower `compute.nodes`, or name another partition in the profile",
    r"PartitionDown|PartitionInactive": "`scontrol update partition=NAME state=up`, or name another partition in the profile",
    r"BadConstraints|ReqNodeNotAvail.*": "correct the options in the profile: no node of the partition has what they ask for",
    r"DependencyNeverSatisfied": "`scancel {id}`, then run again",
    r"InvalidAccount|InvalidQOS|QOSNotAllowed|AccountNotAllowed": "correct `account` or `qos` in the profile",
    r"(Assoc|QOS).*Limit.*": "lower the options in the profile, or wait for your other jobs (`squeue --me`)",
}


_TOO_SHORT = Failure(
    type=EngineError.__name__,
    message=str(
        EngineError(
            "the time limit came before a checkpoint was committed: raise `time` in the profile of engine.yaml, or lower "
            "`compute.checkpoint_every`",
            "time-limit",
        )
    ),
    rank=None,
    traceback="",
)


class ControllerAway(EngineError):
    """slurmctld does not answer."""

    code = "slurm-away"


class SlurmHandle:
    """A job in Slurm's queue. Slurm is asked every `seconds`, and at once when the job's script begins or ends."""

    def __init__(self, job: Job, id: str, seconds: float = 10.0) -> None:
        self.log, self._job, self.id, self._seconds = job.log, job, id, seconds
        self._state, self._asked, self._began = JobState("unknown"), -math.inf, 0.0

    def state(self) -> JobState:
        began = _modified(started(self._job))
        is_new = began != self._began or exit_status(self._job).exists()
        if time.monotonic() - self._asked > (_BETWEEN_LOOKS if is_new else self._seconds):
            self._state, self._asked, self._began = state_of(self._job, self.id), time.monotonic(), began
        return self._state

    def stopped(self) -> list[int]:
        return []

    def cancel(self) -> None:
        """Cancel the job and wait until nothing of it is left. Raises EngineError if Slurm does not answer for long."""
        deadline = time.monotonic() + _COMMAND_SECONDS
        while state_of(self._job, self.id).phase != "ended":
            try:
                cancel(self.id)
            except ControllerAway as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"job {self.id} could not be canceled, so it goes on: {without_code(str(error))}. `scancel {self.id}` "
                        "cancels it, or the same command follows it",
                        "not-canceled",
                    ) from error
            time.sleep(_BETWEEN_LOOKS)

    def detach(self) -> None:
        """Leave the job in the queue."""


class SlurmEngine:
    """Jobs in the queue of Slurm. They outlive the process that submitted them: the next run of the same work follows them."""

    def __init__(self, engine: SlurmSettings, profile: SlurmProfile, module: str = "training.main") -> None:
        self._engine, self._profile, self._module = engine, profile, module

    def find(self, job: Job) -> SlurmHandle | None:
        return None if (id := find(job)) is None else SlurmHandle(job, id)

    def submit(self, job: Job, lock: BinaryIO | None = None) -> SlurmHandle:
        Submission.of("slurm", "", job).write(job)
        id = submit(job, self._engine, self._profile, self._module)
        Submission.of("slurm", id, job).write(job)
        return SlurmHandle(job, id)


def submit(job: Job, engine: SlurmSettings, profile: SlurmProfile, module: str = "training.main") -> str:
    """Submit the job and return its id. Raises EngineError with sbatch's reason, such as a missing account."""
    for left in (job.log, exit_status(job), started(job)):
        left.unlink(missing_ok=True)
    write_software(job)
    script = job.folder / "batch.sh"
    script.write_text(batch_script(job, engine, profile, module), encoding="utf-8")
    options = [
        *("--parsable", f"--job-name={name_of(job)}", "--dependency=singleton"),
        *(f"--nodes={job.nodes}", "--ntasks-per-node=1"),
        *("--requeue", "--open-mode=append", f"--output={str(job.log).replace('%', '%%')}", f"--chdir={job.folder}"),
        f"--signal=B:USR1@{engine.before_time_limit}",
    ]
    return _ask("sbatch", *options, *_options(profile.sbatch), str(script), env=_without_secrets()).partition(";")[0]


def _without_secrets() -> dict[str, str]:
    """Return the environment without passwords, tokens and keys: sbatch passes all of it to the nodes, which need none."""
    return {name: value for name, value in os.environ.items() if not _SECRET.search(name)}


def find(job: Job) -> str | None:
    """Return the id of the job of the same work that has not ended, by its name; None without one."""
    listed = _ask("squeue", "--me", "--noheader", f"--name={name_of(job)}", "--format=%i")
    return min(listed.split(), key=int, default=None)


def state_of(job: Job, id: str) -> JobState:
    """Return the state of the job `id`. An unreachable controller gives the phase `unknown`."""
    try:
        text = _ask("scontrol", "show", "job", id, "--oneliner")
    except ControllerAway as error:
        return JobState("unknown", f"Slurm does not answer about job {id} ({error}); the job itself goes on")
    except EngineError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        return _forgotten(job, id)
    fields = dict(_FIELD.findall(text))
    state, reason = fields["JobState"], fields.get("Reason", "")
    if state in _WAITING:
        return _waiting(id, reason, fields.get("StartTime", "Unknown"))
    if state in _RUNNING:
        starts = int(fields.get("Restarts", 0)) + 1
        return JobState(
            "running", f"job {id} runs on {fields.get('NodeList')}" + (f", start number {starts}" if starts > 1 else "")
        )
    number, _, sent = fields["ExitCode"].partition(":")  # the exit status, and the signal that ended the job
    failed = int(number) or 128 + (int(sent or 0) or _SIGTERM)
    return JobState("ended", f"job {id} has ended: {state}", status=0 if state == "COMPLETED" else failed)


def cancel(id: str) -> None:
    """Cancel the job, waiting or running. An ended job is no error."""
    _ask("scancel", id)


def batch_script(job: Job, engine: SlurmSettings, profile: SlurmProfile, module: str) -> str:
    """Return the script of the first node. It writes the exit status to `exit-status` when the job has ended."""
    python = engine.python or sys.executable
    task = [python, "-P", "-m", "training.launch.cluster.task", str(job.path), digest_of(job), module]
    step = shlex.join(["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *_options(profile.srun), *task])
    script = _TEMPLATES.get_template("batch.sbatch.j2").render(
        error=_quoted(job.error),
        exit_status=_quoted(exit_status(job)),
        started=_quoted(started(job)),
        checkpoints=_quoted(job.checkpoints),
        first_port=_FIRST_PORT,
        ports=_PORTS,
        port_variable=PORT,
        setup=profile.setup.strip(),
        step=step,
        too_short=shlex.quote(_TOO_SHORT.model_dump_json()),
    )
    return f"{script}\n"


def exit_status(job: Job) -> Path:
    return job.folder / "exit-status"


def started(job: Job) -> Path:
    """Return a file that the batch script touches when it begins."""
    return job.folder / "started"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _waiting(id: str, reason: str, start: str) -> JobState:
    known = "" if start in ("Unknown", "N/A") else start.replace("T", " ")
    remedy = next((text for pattern, text in _REMEDIES.items() if re.fullmatch(pattern, reason)), "")
    shown = "" if reason == "None" else f": {reason}"  # Slurm has not looked at it yet
    return JobState("queued", f"job {id} waits in Slurm's queue{shown}", known, remedy.format(id=id))


def _forgotten(job: Job, id: str) -> JobState:
    """Return the state of a job that ended minutes ago: Slurm forgets it, but its script has written the exit status."""
    try:
        status = int(exit_status(job).read_text())
    except (FileNotFoundError, ValueError):
        status = _CANCELED
    return JobState("ended", f"job {id} has ended; Slurm does not know it any more", status=status)


def _options(options: dict[str, str]) -> list[str]:
    return [
        f"--{name}" if value == "true" else f"--{name}={value}" for name, value in options.items() if value != "false"
    ]


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _ask(*command: str, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a command of Slurm. Raises EngineError with its message, ControllerAway without an answer."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_SECONDS, env=env
        )
    except FileNotFoundError:
        raise EngineError(
            f"`{command[0]}` is not installed here, but engine.yaml names Slurm; run on a machine that can submit jobs",
            "no-slurm",
        ) from None
    except subprocess.TimeoutExpired:
        raise ControllerAway(f"`{command[0]}` did not answer in {_COMMAND_SECONDS:.0f} s; try again") from None
    if done.returncode == 0:
        return done.stdout.strip()
    cause = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    if _AWAY.search(cause):
        raise ControllerAway(f"`{command[0]}`: {cause}; check slurmctld")
    raise EngineError(f"`{' '.join(command[:3])}` fails: {cause}; correct the profile in engine.yaml", "slurm-refuses")

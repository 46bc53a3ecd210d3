"""Jobs in a cluster of Ray, by its Jobs API. They outlive the process that submitted them.

The entrypoint of a job is `ray_driver.py`, on the head of the cluster. The submission id is the job's name and a number, so Ray
itself refuses one of two submissions at once. No id is used again: Ray's actor with the id lives on for a moment after the job,
and a new job would die with it. `import ray` takes a second, so only `configured.py` imports this module, when needed.

Source: https://docs.ray.io/en/latest/cluster/running-applications/job-submission/sdk.html
"""

import json
import math
import shlex
import sys
import time
from typing import BinaryIO

from ray.exceptions import RayError
from ray.job_submission import JobDetails, JobInfo, JobStatus, JobSubmissionClient
from requests.exceptions import RequestException

from training.contract.errors import EngineError
from training.contract.protocol.job import Failure, Job
from training.launch.cluster.engine_file import RayProfile, RaySettings
from training.launch.cluster.ray_files import alive_nodes, read_placement
from training.launch.cluster.task import write_software
from training.launch.engine import JobState, Submission, digest_of, name_of

_SECONDS_BETWEEN_LOOKS = 2.0
_SECONDS_WITHOUT_ANSWER = 60.0  # as long as Ray's nodes wait for a lost head
_SECONDS_BEYOND_GRACE = 60.0
_FAILED = 1
_AWAY = (ConnectionError, RequestException)


class RayHandle:
    """A job in Ray. Ray is asked every two seconds."""

    def __init__(self, job: Job, client: JobSubmissionClient, id: str) -> None:
        self.log, self._job, self._client, self.id = job.log, job, client, id
        self._state, self._asked, self._answered = JobState("unknown"), -math.inf, time.monotonic()

    def state(self) -> JobState:
        if self._state.status is None and time.monotonic() - self._asked > _SECONDS_BETWEEN_LOOKS:
            self._state, self._asked = self._ask(), time.monotonic()
        return self._state

    def _ask(self) -> JobState:
        try:
            info = info_of(self._client, self.id)
        except _AWAY as error:
            seconds = time.monotonic() - self._answered
            if seconds < _SECONDS_WITHOUT_ANSWER:
                return JobState(
                    "unknown", f"Ray does not answer about job {self.id}; its nodes may have lost the head, too"
                )
            return self._lost(f"Ray has not answered for {seconds:.0f} s ({error})")
        self._answered = time.monotonic()
        if info is None:
            return self._lost(f"Ray does not know job {self.id} any more, as if its head had been started again")
        if not info.status.is_terminal():
            return read_placement(self._job) or JobState("queued", f"job {self.id} waits in Ray for its driver")
        status = 0 if info.status == JobStatus.SUCCEEDED else info.driver_exit_code or _FAILED
        if status != 0:
            self._keep_output(info)
        return JobState("ended", f"job {self.id} has ended: {info.status}", status=status)

    def _lost(self, cause: str) -> JobState:
        error = EngineError(
            f"{cause}: start the cluster (`ray start --head`), then run again, which goes on from the last checkpoint",
            "ray-lost",
        )
        failure = Failure(type=EngineError.__name__, message=str(error), rank=None, traceback="")
        failure.write_first(self._job.error)
        return JobState("ended", cause, status=_FAILED)

    def _keep_output(self, info: JobInfo) -> None:
        """Append the driver's output to the log. The nodes write there themselves."""
        try:
            output = self._client.get_job_logs(self.id)
        except (*_AWAY, RuntimeError) as error:
            output = f"the output of the driver cannot be read: {error}\n"
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{output}{info.message or ''}\n")

    def stopped(self) -> list[int]:
        return []

    def cancel(self) -> None:
        """Stop the job and wait until nothing of it is left. Raises EngineError if Ray does not answer for long."""
        deadline = time.monotonic() + self._job.grace_seconds + _SECONDS_BEYOND_GRACE
        while self._state.status is None:
            try:
                self._client.stop_job(self.id)
                if (info := info_of(self._client, self.id)) is None or info.status.is_terminal():
                    break
            except (*_AWAY, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"job {self.id} could not be stopped, so it may go on: {error}. `ray job stop {self.id}` stops it, or "
                        "the same command follows it",
                        "not-canceled",
                    ) from error
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)
        while alive_nodes(self._job) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)

    def detach(self) -> None:
        """Leave the job to Ray."""


class RayEngine:
    """Jobs in a cluster of Ray."""

    def __init__(self, settings: RaySettings, profile: RayProfile, module: str = "training.main") -> None:
        self._settings, self._profile, self._module = settings, profile, module

    def find(self, job: Job) -> RayHandle | None:
        client = self._connect()
        try:
            live = _live(_submissions(client, job))
        except (*_AWAY, RuntimeError) as error:
            raise self._away(error) from error
        return None if live is None else RayHandle(job, client, live)

    def submit(self, job: Job, lock: BinaryIO | None = None) -> RayHandle:
        """Submit the job. Raises EngineError if Ray refuses it, or nodes of an earlier job of the same work still run."""
        self._wait_for_nodes(job)
        client = self._connect()
        job.log.unlink(missing_ok=True)
        write_software(job)
        reserved = {"resources": self._profile.resources_for(job), "threads": self._profile.threads_of(job)}
        driver = [self._settings.python or sys.executable, "-P", "-m", "training.launch.cluster.ray_driver"]
        driver += [str(job.path), digest_of(job), self._module, json.dumps(reserved)]
        # Ray sends SIGTERM to the driver, and SIGKILL after this time.
        patience = {"RAY_JOB_STOP_WAIT_TIME_S": str(int(job.grace_seconds + _SECONDS_BEYOND_GRACE))}
        try:
            submissions = _submissions(client, job)
            if (live := _live(submissions)) is not None:
                raise EngineError(f"Ray runs job {live} already; run again, which follows it", "ray-refuses")
            id = f"{name_of(job)}-{max(submissions, default=0) + 1}"
            Submission.of("ray", id, job).write(job)
            client.submit_job(
                entrypoint=shlex.join(driver),
                submission_id=id,
                runtime_env={"env_vars": {**self._profile.env, **patience}},
            )
        except _AWAY as error:
            raise self._away(error) from error
        except RuntimeError as error:
            cause = str(error).strip().splitlines()[-1]
            raise EngineError(f"Ray refuses job {name_of(job)}: {cause}; correct engine.yaml", "ray-refuses") from error
        return RayHandle(job, client, id)

    def _connect(self) -> JobSubmissionClient:
        try:
            return JobSubmissionClient(self._settings.address)
        except _AWAY as error:
            raise self._away(error) from error
        except (RayError, RuntimeError, ValueError) as error:
            raise EngineError(
                f"Ray at {self._settings.address} refuses the connection: {_first_line(error)}; for a cluster with token "
                "authentication, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token of the cluster",
                "ray-refuses",
            ) from error

    def _away(self, error: Exception) -> EngineError:
        return EngineError(
            f"Ray does not answer at `address: {self._settings.address}` of engine.yaml ({_first_line(error)}); "
            "start its head (`ray start --head`), or correct the address",
            "ray-away",
        )

    def _wait_for_nodes(self, job: Job) -> None:
        deadline = time.monotonic() + job.grace_seconds + _SECONDS_BEYOND_GRACE
        while nodes := alive_nodes(job):
            if time.monotonic() > deadline:
                raise EngineError(
                    f"an earlier job still runs on {', '.join(nodes)}, which Ray does not know any more; end its processes "
                    "(`ray stop` there), then run again",
                    "earlier-job",
                )
            time.sleep(_SECONDS_BETWEEN_LOOKS / 4)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).strip()


def _submissions(client: JobSubmissionClient, job: Job) -> dict[int, JobDetails]:
    """Return what Ray knows about the submissions of the job, by their numbers."""
    prefix = f"{name_of(job)}-"
    found = {details.submission_id or "": details for details in client.list_jobs()}
    return {int(id.removeprefix(prefix)): details for id, details in found.items() if id.startswith(prefix)}


def _live(submissions: dict[int, JobDetails]) -> str | None:
    """Return the id of the submission that has not ended; None without one."""
    return next((found.submission_id for found in submissions.values() if not found.status.is_terminal()), None)


def info_of(client: JobSubmissionClient, id: str) -> JobInfo | None:
    """Return what Ray knows about the job; None if it does not know it. Raises the errors of `_AWAY`."""
    try:
        return client.get_job_info(id)
    except RuntimeError as error:
        if "status code 404" in str(error):  # a job's id may hold these digits, too
            return None
        raise ConnectionError(str(error)) from error

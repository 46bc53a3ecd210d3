"""Folders of jobs and of their staging: which are in use, and which have something left to resume."""

import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from assets.pipeline.pipeline import Services
from training.contract.errors import CorruptRecord
from training.contract.protocol.job import Job
from training.contract.store.staging import lock_beside
from training.contract.system.locks import is_held
from training.launch.live_jobs import live_state

_UNREADABLE_JOB_SECONDS = 24 * 3600.0


class JobFolders:
    """The `folders` of jobs in a home, at one moment."""

    def __init__(self, services: Services) -> None:
        self._engine, self._store = services.engine, services.store
        self.folders = folders_in((services.home / "jobs").resolve())

    @cached_property
    def _live(self) -> dict[Path, Job]:
        """The jobs in the queue of an engine. Nobody holds the locks of one without a run that follows it.

        A job counts as live if its engine does not answer.
        """
        jobs = {folder: job for folder in self.folders if (job := _read_job(folder)) is not None}
        return {folder: job for folder, job in jobs.items() if live_state(self._engine, job) is not None}

    def in_progress(self) -> Iterator[Job]:
        """Yield the jobs that run here, or in the queue of an engine."""
        for folder in self.folders:
            job = _read_job(folder)
            if job is None:
                continue
            if folder in self._live or is_held(self._store.lock_file(job.artifact, job.derivation.key)):
                yield job

    def is_finished(self, folder: Path) -> bool:
        if folder in self._live:
            return False
        return not any(is_held(lock) for lock in self.locks_of(folder)) and self.has_ended(folder)

    def locks_of(self, folder: Path) -> list[Path]:
        """Return the lock of the job's key; for an unreadable job, all locks with its folder's name as prefix."""
        job = _read_job(folder)
        if job is None:
            return list(self._store.locks.glob(f"{folder.name}*.lock"))
        return [self._store.lock_file(job.artifact, job.derivation.key)]

    def has_ended(self, folder: Path) -> bool:
        """Return whether nothing is left to resume: the job published its artifact, or lacks checkpoints."""
        job = _read_job(folder)
        if job is None:
            return folder.is_dir() and time.time() - folder.stat().st_mtime > _UNREADABLE_JOB_SECONDS
        return self._is_published(job) or not any((folder / job.checkpoints.name).rglob("step-*"))

    def _is_published(self, job: Job) -> bool:
        try:
            record = self._store.record(job.artifact, job.derivation.key)
        except CorruptRecord:
            return False
        return record is not None and self._store.folder(job.artifact, record.fingerprint).is_dir()

    def _lock_of(self, name: str) -> Path:
        return self._store.locks / f"{name}.lock"

    def lock_of_staging(self, folder: Path) -> Path:
        """Return the lock beside a staging folder, or its job's lock."""
        beside = lock_beside(folder)
        return beside if beside.exists() else self._lock_of(folder.name)

    def is_abandoned(self, folder: Path) -> bool:
        """Return whether a staging folder is unused: neither the lock beside it nor its job's lock is held, nor is it live."""
        if any(job.staging.name == folder.name for job in self._live.values()):
            return False
        beside, named = lock_beside(folder), self._lock_of(folder.name)
        if beside.exists() or named.exists():
            return not is_held(beside) and not is_held(named)
        return not any(is_held(lock) for lock in self._store.locks.glob("*.lock"))


def folders_in(parent: Path) -> list[Path]:
    """Return the folders in `parent`, without links; nothing if `parent` is a link.

    Files behind a link are not ours to remove.
    """
    if parent.is_symlink() or not parent.is_dir():
        return []
    return sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _read_job(folder: Path) -> Job | None:
    """Return the job of a folder; None if it cannot be read, for example because another version of Pedigree wrote it."""
    try:
        return Job.read(folder / "job.json")
    except (OSError, ValidationError):
        return None

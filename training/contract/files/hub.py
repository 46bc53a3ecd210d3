"""Repositories of the Hugging Face hub: the commit a revision points at, the files of a commit, and copies of them here.

The content of a commit never changes, so it is taken from the hub's cache (HF_HOME) without a request. Requests are made for
the commit that a branch or a tag points at now, and for what the cache lacks. If the hub cannot be reached (HF_HUB_OFFLINE, no
answer, a server error), the last known commit of a branch is taken, with a warning.

Errors come early: the hub's client retries for minutes, so one request with a time limit shows first that the hub answers
and has what is wanted. The cache names a file by its hash, SHA-256 for a large one, Git's for a small one; `check_files`
compares. Authentication is the client's: HF_TOKEN, or `hf auth login`.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, ResolvedRevision, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.utils.tqdm import tqdm

from training.contract.errors import HubError
from training.contract.identity.file_hashing import Tally, digest_file, hash_in_threads
from training.contract.identity.fingerprint import short
from training.contract.system.atomic_io import is_disk_full, write_error
from training.contract.system.progress import Emit, seconds_left

_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 0.5
_MEGABYTE = 10**6
_TOO_MANY_REQUESTS = 429
_SHA256_DIGITS, _SHA1_DIGITS = 64, 40
CARD = "README.md"
CARD_FILES = (CARD, ".huggingface.yaml")  # with the configs and splits of a data set: either may have them
_ABOUT_ALL = (*CARD_FILES, ".gitattributes")
_LOG = logging.getLogger(__name__)


class _PromptApi(HfApi):
    """The hub's client with a time limit, which `repo_info` does not have by default."""

    def repo_info(self, *args: Any, **kwargs: Any) -> Any:
        return super().repo_info(*args, **{**kwargs, "timeout": _ANSWER_SECONDS})


@dataclass(frozen=True)
class Repository:
    """A model or a data set of the hub. Every method raises HubError, which says what is wrong and what to do."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    def commit(self) -> str:
        """The commit of the revision; no request is made where the revision is a commit, or `pin_hub_revisions` knows it."""
        known = _COMMITS.get({})
        if self not in known:
            with self._explaining():
                known[self] = self._resolved().resolved
        return known[self]

    def files(self, commit: str) -> dict[str, str]:
        """The files of `commit` by path, with Git's hash of each."""
        tree = self._cached_tree(commit)
        if tree is None:
            replace(self, revision=commit)._download(_ABOUT_ALL, (), _discard)
            tree = self._cached_tree(commit)
        assert tree is not None, "a download leaves the list of files in the cache"
        return tree

    def cached(self, commit: str, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path | None:
        """The folder with those files of `commit` that match `patterns`; None unless all of them are in the cache.

        Other programs may have cached some files of a commit without a list of all. Then the list is requested.
        """
        folder = self._cached_folder(commit, patterns, ignored)
        if folder is None or self._cached_tree(commit) is not None:
            return folder
        try:
            self.files(commit)
        except HubError:
            _LOG.warning("%s is taken to be whole: the list of the files of %s cannot be fetched", folder, self.id)
            return folder
        return self._cached_folder(commit, patterns, ignored)

    def _cached_folder(self, commit: str, patterns: Sequence[str], ignored: Sequence[str]) -> Path | None:
        """The same, except that without a cached list of the commit's files it is the folder with whatever is cached."""
        try:
            return replace(self, revision=commit)._snapshot(patterns, ignored, local_files_only=True)
        except LocalEntryNotFoundError:
            return None

    def fetch(
        self, commit: str, patterns: Sequence[str], ignored: Sequence[str] = (), emit: Emit | None = None
    ) -> Path:
        """The folder with those files, after downloading the missing ones; phase and progress go to `emit`."""
        found = self.cached(commit, patterns, ignored)
        return found or replace(self, revision=commit)._download(patterns, ignored, emit or _discard)

    def _cached_tree(self, commit: str) -> dict[str, str] | None:
        try:
            tree = get_cached_repo_tree(self.id, repo_type=self.kind, revision=commit)
        except CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.blob_id for file in tree}

    def _download(self, patterns: Sequence[str], ignored: Sequence[str], emit: Emit) -> Path:
        with self._explaining():
            _PromptApi().repo_info(self.id, repo_type=self.kind, revision=self.revision)
            emit("phase", phase=f"downloading {self.id} at {short(self.revision)}")
            return self._snapshot(patterns, ignored, tqdm_class=_reporting(emit))

    def _snapshot(self, patterns: Sequence[str], ignored: Sequence[str], **how: Any) -> Path:
        how |= {"allow_patterns": list(patterns), "ignore_patterns": list(ignored)}
        return Path(snapshot_download(self.id, repo_type=self.kind, revision=self.revision, **how))

    def _resolved(self) -> ResolvedRevision:
        about: dict[str, Any] = {"repo_type": self.kind, "revision": self.revision}
        try:
            return _PromptApi().resolve_revision(self.id, **about)
        except HfHubHTTPError as error:
            # Without an answer, or after a server error (5xx), the client itself does the same.
            if error.response.status_code != _TOO_MANY_REQUESTS:
                raise
            try:
                found = _PromptApi().resolve_revision(self.id, **about, local_files_only=True)
            except RevisionResolutionError:
                raise error from None
            _LOG.warning("%s gets too many requests (429); %s is taken to be where it was", constants.ENDPOINT, self.id)
            return found

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn the client's errors into a HubError."""
        try:
            yield
        except Exception as error:  # the client raises many kinds of errors, some as the cause of others
            raise HubError(self._explained(error)) from error

    def _explained(self, error: BaseException) -> str:
        what = f"the {self.kind} {self.id}"
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        for cause in causes:
            match cause:
                case HFValidationError():
                    return f"{self.id!r} is not an id of the hub: expected organization/name"
                case OfflineModeIsEnabled():
                    return (
                        f"{what} ({self._named_revision}) is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
                        "is set; unset it for the first run"
                    )
                case GatedRepoError():
                    return (
                        f"{what} is gated; ask for access on its page of {constants.ENDPOINT}, then set HF_TOKEN "
                        "or run `hf auth login`"
                    )
                case RevisionNotFoundError():
                    return f"{what} has no revision {self._named_revision}; expected a branch, a tag or a whole commit"
                case RepositoryNotFoundError():
                    return (
                        f"{constants.ENDPOINT} has no {self.kind} {self.id}, or it is private; look at the name, and for a "
                        "private one set HF_TOKEN or run `hf auth login`"
                    )
                case OSError() if cause.filename is not None or is_disk_full(str(cause)):
                    return str(write_error(f"download {what}", Path(constants.HF_HUB_CACHE), cause))
                case HfHubHTTPError():
                    said = cause.server_message or cause.response.reason_phrase
                    return (
                        f"{constants.ENDPOINT} answers {cause.response.status_code} ({said}) when asked for {what}; "
                        "try again later, or set HF_HUB_OFFLINE=1 to go on with what is cached"
                    )
        return (
            f"{what} ({self._named_revision}) is not in the cache and cannot be fetched from {constants.ENDPOINT}: "
            f"{type(causes[-1]).__name__}: {str(causes[-1]).strip() or 'no answer'}; look at the network and at HF_ENDPOINT"
        )

    @property
    def _named_revision(self) -> str:
        return self.revision or constants.DEFAULT_REVISION


_COMMITS: ContextVar[dict[Repository, str]] = ContextVar("_COMMITS")  # set within `pin_hub_revisions`


@contextlib.contextmanager
def pin_hub_revisions() -> Iterator[None]:
    """Within the block a branch stays where it was when first asked for: all that is made there is made from one state.

    A block within another is of the other's state.
    """
    token = _COMMITS.set(_COMMITS.get({}))
    try:
        yield
    finally:
        _COMMITS.reset(token)


def check_files(paths: Sequence[Path]) -> None:
    """Raises HubError unless the bytes of `paths`, files of a snapshot, have the hashes by which the cache names them.

    In a cache without symbolic links there are no such names, and nothing is compared.
    """
    hash_in_threads(_check_file, paths, paths)


def _check_file(path: Path, count: Tally) -> None:
    name = path.readlink().name if path.is_symlink() else ""
    if len(name) == _SHA256_DIGITS:
        digest = hashlib.sha256()
    elif len(name) == _SHA1_DIGITS:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        return
    if (found := digest_file(path, digest, count)) != name:
        raise HubError(
            f"{path} is corrupt: its bytes give {short(found)}, and the hub promised {short(name)}; remove "
            f"{path.resolve()} and run again, which downloads it again"
        )


def _discard(event: str, **fields: Any) -> None:
    """An `Emit` that drops what it gets."""


def _reporting(emit: Emit) -> type[tqdm]:
    """A class for a progress bar that draws nothing, and reports to `emit` where it counts the bytes of all files."""

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.total, self._done = kwargs.get("total") or 0, 0.0
            self._counts_bytes = kwargs.get("unit") == "B"
            self._began = self._reported = time.monotonic()

        def update(self, n: float | None = 1) -> None:
            self._done += n or 0
            now = time.monotonic()
            if not self._counts_bytes or now - self._reported < _REPORT_SECONDS:
                return
            self._reported = now
            left = seconds_left(self._began, self._done, self.total)
            done, total = round(self._done / _MEGABYTE), round(self.total / _MEGABYTE)
            emit("progress", done=done, total=total, unit="MB", seconds_left=left)

    return Reporting

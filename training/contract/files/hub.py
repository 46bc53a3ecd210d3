"""Repositories of the Hugging Face Hub: the commit of a revision, the files of a commit, and local copies of them.

The content of a commit never changes, so cached files (HF_HOME) need no request. Requests resolve branches and tags, and
fetch missing files. If the Hub is unreachable (HF_HUB_OFFLINE, no answer, a server error), the last known commit of a branch
is used, with a warning.

The Hub's client retries for minutes. So one request with a time limit first checks that the Hub answers and has the repository.
The cache names a file by its hash, SHA-256 for a large file, Git's for a small one; `check_files` compares. The client
authenticates with HF_TOKEN, or `hf auth login`.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training.contract.errors import HubError
from training.contract.files import hub_api
from training.contract.identity.file_hashing import Tally, digest_file, hash_in_threads
from training.contract.identity.fingerprint import short
from training.contract.system.atomic_io import is_disk_full, write_error
from training.contract.system.progress import Emit, seconds_left

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ResolvedRevision
    from huggingface_hub.utils.tqdm import tqdm

_ANSWER_SECONDS = 5.0
_REPORT_SECONDS = 0.5
_MEGABYTE = 10**6
_TOO_MANY_REQUESTS = 429
_SHA256_DIGITS, _SHA1_DIGITS = 64, 40
CARD = "README.md"
CARD_FILES = (CARD, ".huggingface.yaml")  # either may hold the configs and splits of a data set
_SMALL_FILES = (*CARD_FILES, ".gitattributes")  # any download also caches the list of all files
_LOG = logging.getLogger(__name__)


@cache
def _prompt_api() -> "HfApi":
    """Return the Hub's client, with a time limit for `repo_info`."""

    class PromptApi(hub_api.HfApi):  # type: ignore[misc]
        def repo_info(self, *args: Any, **kwargs: Any) -> Any:
            return super().repo_info(*args, **{**kwargs, "timeout": _ANSWER_SECONDS})

    return PromptApi()


@dataclass(frozen=True)
class Repository:
    """A model or a data set of the Hub. Every method raises HubError."""

    id: str
    kind: Literal["model", "dataset"]
    revision: str | None = None

    def commit(self) -> str:
        """Return the commit of the revision, without a request if it is a commit or `pin_hub_revisions` knows it."""
        known = _COMMITS.get({})
        if self not in known:
            with self._explain_errors():
                known[self] = self._resolve().resolved
        return known[self]

    def files(self, commit: str) -> dict[str, str]:
        """Return Git's hash of each file of `commit`, by path."""
        tree = self._cached_tree(commit)
        if tree is None:
            replace(self, revision=commit)._download(_SMALL_FILES, (), _discard)
            tree = self._cached_tree(commit)
        assert tree is not None, "a download leaves the list of files in the cache"
        return tree

    def cached(self, commit: str, patterns: Sequence[str], ignored: Sequence[str] = ()) -> Path | None:
        """Return the folder with the files of `commit` matching `patterns`; None unless all of them are cached.

        Other programs may cache files of a commit without the list of all its files. This requests the missing list.
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
        """Return the same folder; without a cached list of files, the folder may be incomplete."""
        try:
            return replace(self, revision=commit)._snapshot(patterns, ignored, local_files_only=True)
        except hub_api.LocalEntryNotFoundError:
            return None

    def fetch(
        self, commit: str, patterns: Sequence[str], ignored: Sequence[str] = (), emit: Emit | None = None
    ) -> Path:
        """Download missing files and return the folder with all of them. Report phase and progress to `emit`."""
        folder = self.cached(commit, patterns, ignored)
        return folder or replace(self, revision=commit)._download(patterns, ignored, emit or _discard)

    def _cached_tree(self, commit: str) -> dict[str, str] | None:
        try:
            tree = hub_api.get_cached_repo_tree(self.id, repo_type=self.kind, revision=commit)
        except hub_api.CachedRepoTreeNotFoundError:
            return None
        return {file.path: file.blob_id for file in tree}

    def _download(self, patterns: Sequence[str], ignored: Sequence[str], emit: Emit) -> Path:
        with self._explain_errors():
            _prompt_api().repo_info(self.id, repo_type=self.kind, revision=self.revision)
            emit("phase", phase=f"downloading {self.id} at {short(self.revision)}")
            return self._snapshot(patterns, ignored, tqdm_class=_progress_bar(emit))

    def _snapshot(self, patterns: Sequence[str], ignored: Sequence[str], **options: Any) -> Path:
        options |= {"allow_patterns": list(patterns), "ignore_patterns": list(ignored)}
        return Path(hub_api.snapshot_download(self.id, repo_type=self.kind, revision=self.revision, **options))

    def _resolve(self) -> "ResolvedRevision":
        options: dict[str, Any] = {"repo_type": self.kind, "revision": self.revision}
        try:
            return _prompt_api().resolve_revision(self.id, **options)
        except hub_api.HfHubHTTPError as error:
            # Without an answer, or after a server error (5xx), the client itself uses the cache.
            if error.response.status_code != _TOO_MANY_REQUESTS:
                raise
            try:
                cached = _prompt_api().resolve_revision(self.id, **options, local_files_only=True)
            except hub_api.RevisionResolutionError:
                raise error from None
            _LOG.warning(
                "%s gets too many requests (429); %s is taken to be where it was", hub_api.constants.ENDPOINT, self.id
            )
            return cached

    @contextlib.contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn the client's errors into a HubError."""
        try:
            yield
        except Exception as error:  # the client raises many kinds of errors, some as the cause of others
            raise self._explain(error) from error

    def _explain(self, error: BaseException) -> HubError:
        constants = hub_api.constants
        repository = f"the {self.kind} {self.id}"
        revision = self.revision or constants.DEFAULT_REVISION
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        for cause in causes:
            match cause:
                case hub_api.HFValidationError():
                    return HubError(f"{self.id!r} is not an id of the Hub: expected organization/name", "bad-hub-id")
                case hub_api.OfflineModeIsEnabled():
                    return HubError(
                        f"{repository} ({revision}) is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
                        "is set; unset it for the first run",
                        "hub-offline",
                    )
                case hub_api.GatedRepoError():
                    return HubError(
                        f"{repository} is gated; request access on its page of {constants.ENDPOINT}, then set HF_TOKEN "
                        "or run `hf auth login`",
                        "gated-repository",
                    )
                case hub_api.RevisionNotFoundError():
                    return HubError(
                        f"{repository} has no revision {revision}; expected a branch, a tag or a whole commit",
                        "no-revision",
                    )
                case hub_api.RepositoryNotFoundError():
                    return HubError(
                        f"{constants.ENDPOINT} has no {self.kind} {self.id}, or it is private; check the name; for a "
                        "private one set HF_TOKEN or run `hf auth login`",
                        "no-repository",
                    )
                case OSError() if cause.filename is not None or is_disk_full(str(cause)):
                    return HubError(str(write_error(f"download {repository}", Path(constants.HF_HUB_CACHE), cause)))
                case hub_api.HfHubHTTPError():
                    reason = cause.server_message or cause.response.reason_phrase
                    return HubError(
                        f"{constants.ENDPOINT} answers {cause.response.status_code} ({reason}) to a request for "
                        f"{repository}; try again later, or set HF_HUB_OFFLINE=1 to use the cache",
                        "hub-http-error",
                    )
        return HubError(
            f"{repository} ({revision}) is not in the cache and cannot be fetched from {constants.ENDPOINT}: "
            f"{type(causes[-1]).__name__}: {str(causes[-1]).strip() or 'no answer'}; check the network and HF_ENDPOINT",
            "hub-unreachable",
        )


_COMMITS: ContextVar[dict[Repository, str]] = ContextVar("_COMMITS")  # set within `pin_hub_revisions`


@contextlib.contextmanager
def pin_hub_revisions() -> Iterator[None]:
    """Resolve each branch once within the block, so all its artifacts use one commit. A nested block shares the outer pins."""
    token = _COMMITS.set(_COMMITS.get({}))
    try:
        yield
    finally:
        _COMMITS.reset(token)


def check_files(paths: Sequence[Path]) -> None:
    """Raise HubError unless the files of a snapshot have the hashes in the cache's names.

    A cache without symbolic links lacks such names; then this compares nothing.
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
    if (actual := digest_file(path, digest, count)) != name:
        raise HubError(
            f"{path} is corrupt: its bytes give {short(actual)}, and the Hub promised {short(name)}; remove "
            f"{path.resolve()} and run again to download it",
            "corrupt-download",
        )


def _discard(event: str, **fields: Any) -> None:
    """Drop an event."""


def _progress_bar(emit: Emit) -> "type[tqdm]":
    """Return a class for an invisible progress bar. The bar over the bytes of all files reports to `emit`."""

    class Reporting(hub_api.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})
            self.total, self._done = kwargs.get("total") or 0, 0.0
            self._counts_bytes = kwargs.get("unit") == "B"
            self._began = self._reported = time.monotonic()

        def update(self, n: float | None = 1) -> None:
            self._done += n or 0
            clock = time.monotonic()
            if not self._counts_bytes or clock - self._reported < _REPORT_SECONDS:
                return
            self._reported = clock
            left = seconds_left(self._began, self._done, self.total)
            done, total = round(self._done / _MEGABYTE), round(self.total / _MEGABYTE)
            emit("progress", done=done, total=total, unit="MB", seconds_left=left)

    return Reporting

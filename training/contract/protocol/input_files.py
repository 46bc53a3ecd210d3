"""Check a job's input files against their hashes, by stamps before and after the job reads them.

The launcher takes the stamps of each input's files, hashes the files, and writes the stamps into job.json.

* At its start the job compares the stamps. It hashes inputs with changed or unknown stamps again.
* It reads a model within `reading`, completely and into its own memory. A later change is harmless; the job reports it.
* Other inputs may stay mapped, or be read late. So the job compares them before it publishes (`check_inputs_unchanged`).

After the start, the right hash proves nothing: a file may have changed and changed back while it was read. So a written or
replaced file is an error. A file with only a new change time, such as after `chmod`, is hashed again.

Rank 0 trusts the stamps of job.json. Other ranks may see other device numbers on other machines. So they take their own
stamps before rank 0 compares. A job without stamps detects changes after its start.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path

from training.contract.errors import DataError, ModelError, PedigreeError, without_code
from training.contract.identity.file_stamps import (
    Stamps,
    artifact_stamps,
    model_stamps,
    same_content,
    settled,
    stamp_of,
)
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.artifacts import CHAMPION, AssetName
from training.contract.protocol.job import Input, Job
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.store.manifest import verified_manifest, verify_contents
from training.contract.store.store import Store

_MODELS = (AssetName.BASE_MODEL, AssetName.REFERENCE_MODEL, AssetName.POLICY, CHAMPION)
_SHOWN = 3


class InputFiles:
    """The input files of `job`, as this rank sees them."""

    def __init__(self, job: Job, is_main: bool = True) -> None:
        inputs = dict(job.inputs)
        if isinstance(job.locations, PolicyLocations) and (folder := job.locations.champion) is not None:
            assert isinstance(job.settings, TrainingSpec) and job.settings.champion is not None
            inputs[CHAMPION] = Input(kind=CHAMPION, fingerprint=job.settings.champion, folder=folder)
        if job.stamps is None:
            self._files = {
                name: _Files(source.folder, model_stamps if name in _MODELS else artifact_stamps)
                for name, source in inputs.items()
            }
            return
        self._files = {name: _HashedFiles(source, Store(job.store)) for name, source in inputs.items()}
        if is_main:
            for name, files in self._files.items():
                files.vouched = job.stamps.get(name, {})

    def verify(self) -> None:
        """Raise DataError if an input does not have its fingerprint. Unchanged files are not read."""
        for files in self._files.values():
            files.verify()

    def check_inputs_unchanged(self) -> None:
        """Raise DataError if an input other than a model may have changed while the job read it."""
        for name, files in self._files.items():
            if name not in _MODELS:
                files.check_inputs_unchanged()

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise DataError instead of an unexpected error if an incompletely read file has changed.

        Half a file may cause any error, such as invalid JSON or a wrong shape. A RuntimeError stays as it is: it may come from
        the end of another rank.
        """
        try:
            yield
        except (PedigreeError, RuntimeError):
            raise
        except Exception:
            for files in self._files.values():
                if not files.was_read:
                    files.check_inputs_unchanged()
            raise

    def changed_models(self) -> list[str]:
        """Return the changed files of models, each with a model's paths in one text, after the models were read."""
        return [paths for files in self._files.values() if (paths := files.changed_since_loaded())]

    def files_in(self, folder: Path) -> "_Files | None":
        return next((files for files in self._files.values() if files.folder == folder), None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Make `reading` and `check_inputs_unchanged` use these files within the block."""
        token = _WATCHED.set(self)
        try:
            yield
        finally:
            _WATCHED.reset(token)


class _Files:
    """Files in `folder` without a known hash; `take` lists them with their stamps.

    `seen` holds the stamps of the last check without an error. A file with its stamp in `vouched` is unchanged for certain.
    """

    def __init__(self, folder: Path, take: Callable[[Path], Stamps] = model_stamps) -> None:
        self.folder, self._take = folder, take
        self.seen = take(folder)
        self.vouched = settled(self.seen)
        self._loaded: Stamps = {}

    def verify(self) -> None:
        """Raise DataError if a file has changed. Hash files with a new or unknown stamp."""
        current = self._take(self.folder)
        vouched = settled(current)  # before hashing, which may take long
        previous = self.seen | self.vouched
        changed = {name for name, stamp in previous.items() if current.get(name) != stamp}
        names = changed | {name for name in current if name not in self.vouched}
        if names:
            try:
                self._check_hashes(names)
            except PedigreeError as error:
                # Without any trusted stamp, all files are equally suspect: name the folder.
                suspects = changed or (names if self.vouched else ())
                raise DataError(
                    f"{self._join_paths(suspects)} changed after it was hashed: {without_code(str(error))}; "
                    "run again once it is written",
                    "file-changed",
                ) from error
        self.seen, self.vouched = current, vouched

    def check_inputs_unchanged(self) -> None:
        """Raise DataError if a file was written, replaced or removed after the last check."""
        if names := self._changed_since(self.seen):
            raise DataError(
                f"{self._join_paths(names)} changed while it was read; run again once it is written", "file-changed"
            )
        if any(stamp_of(self.folder / name) != self.vouched.get(name) for name in self.seen):
            self.verify()

    @property
    def was_read(self) -> bool:
        """Whether a whole model is in memory."""
        return bool(self._loaded)

    def note_loaded(self) -> None:
        """Record that all files are in memory."""
        self._loaded = self.seen

    def changed_since_loaded(self) -> str:
        """Return the paths of files with changes after `note_loaded`, or an empty text."""
        names = self._changed_since(self._loaded)
        return self._join_paths(names) if names else ""

    def _changed_since(self, stamps: Stamps) -> list[str]:
        return [name for name, stamp in stamps.items() if not same_content(stamp, stamp_of(self.folder / name))]

    def _check_hashes(self, names: Collection[str]) -> None:
        """Raise PedigreeError if files with these `names` do not have their hashes. Here no hashes are known."""

    def _join_paths(self, names: Collection[str]) -> str:
        """Return the paths of the first names; the folder if `names` is empty."""
        return ", ".join(str(self.folder / name) for name in sorted(names)[:_SHOWN]) or str(self.folder)


class _HashedFiles(_Files):
    """The files of an input: an artifact, or a model in a folder outside the store."""

    def __init__(self, source: Input, store: Store) -> None:
        self._source = source
        self._is_artifact = source.folder == store.folder(source.kind, source.fingerprint)
        super().__init__(source.folder, artifact_stamps if self._is_artifact else model_stamps)

    def _check_hashes(self, names: Collection[str]) -> None:
        kind, expected = self._source.kind, self._source.fingerprint
        if self._is_artifact:
            manifest = verified_manifest(self.folder, kind, expected, hashes=False)
            verify_contents(self.folder, manifest, [name for name in names if name in manifest.files])
        elif (actual := weights_identity(self.folder).fingerprint) != expected:
            raise ModelError(
                f"the weights in {self.folder} are {short(actual)}, expected {short(expected)}", "wrong-weights"
            )


_WATCHED: ContextVar[InputFiles] = ContextVar("_WATCHED")


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Check the model in `folder` before and after the block. The block reads all of it into its own memory.

    Raises ModelError if a file changes meanwhile, or does not have its hash. It replaces any other error of the block.
    """
    watched = _WATCHED.get(None)
    files = (watched.files_in(folder) if watched else None) or _Files(folder)
    try:
        files.verify()
        try:
            yield
        except Exception:
            files.check_inputs_unchanged()
            raise
        files.check_inputs_unchanged()
    except DataError as error:
        raise ModelError(str(error)) from error
    files.note_loaded()


def rewritten_inputs(job: Job) -> list[Path]:
    """Return the input files that were written, replaced or removed after their stamps in `job` were taken."""
    return [
        job.inputs[name].folder / file
        for name, stamps in (job.stamps or {}).items()
        for file, stamp in stamps.items()
        if name in job.inputs and not same_content(stamp, stamp_of(job.inputs[name].folder / file))
    ]


def check_inputs_unchanged() -> None:
    """Run `InputFiles.check_inputs_unchanged` for the job of this process, if it has one."""
    if watched := _WATCHED.get(None):
        watched.check_inputs_unchanged()

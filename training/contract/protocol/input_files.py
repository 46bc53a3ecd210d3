"""What a job reads is what was hashed: its input files are compared, by their stamps, before and after they are read.

The launching side takes the stamps of the files behind each input, hashes the files, and writes the stamps into job.json.

* At its start the job compares. An input with a file that has another stamp, or none, is hashed again.
* A model is read within `reading`, completely and into memory of its own. A later change does no harm; it is noted.
* Everything else may stay mapped, or is read late. So it is compared before anything is published (`check_inputs_unchanged`).

Once a job reads, content that is the same again proves nothing: it may have been another in between. So a file that was
written or replaced is refused; one whose change time alone is another, after a `chmod` say, is hashed again.

Rank 0 trusts the stamps of job.json. The other ranks, perhaps on other machines where devices have other numbers, take their
own before rank 0 compares. A job without stamps, which no launching side described, sees changes from its start on.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path

from training.contract.errors import DataError, ModelError, PedigreeError
from training.contract.identity.file_stamps import (
    Stamps,
    artifact_stamps,
    model_stamps,
    same_content,
    settled,
    stamp_of,
)
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import weights_fingerprint, weights_identity
from training.contract.protocol.job import Input, Job
from training.contract.store.manifest import verified_manifest, verify_contents
from training.contract.store.store import Store

_MODELS = ("base_model", "reference_model", "policy", "champion")
_SHOWN = 3


class InputFiles:
    """The files of the inputs of `job`, as the rank that is asked sees them."""

    def __init__(self, job: Job, is_main: bool = True) -> None:
        inputs = dict(job.inputs)
        if champion := job.locations.get("champion"):
            inputs["champion"] = Input(kind="champion", fingerprint=job.settings["champion"], folder=Path(champion))
        if job.stamps is None:
            self._files = {
                name: _Files(given.folder, model_stamps if name in _MODELS else artifact_stamps)
                for name, given in inputs.items()
            }
            return
        self._files = {name: _HashedFiles(given, Store(job.store)) for name, given in inputs.items()}
        if is_main:
            for name, files in self._files.items():
                files.vouched = job.stamps.get(name, {})

    def verify(self) -> None:
        """Raise DataError if the content of an input is not what its fingerprint says. Unchanged files are not read."""
        for files in self._files.values():
            files.verify()

    def check_inputs_unchanged(self) -> None:
        """Raise DataError if an input that is no model may have been another than what was hashed while it was read."""
        for name, files in self._files.items():
            if name not in _MODELS:
                files.check_inputs_unchanged()

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Raise DataError for an unexpected error within the block if a file changed that was not read to its end by then.

        Half a file may lead to whatever: a header that is no JSON, a shape that fits nothing. A RuntimeError is left alone,
        since it may come from another rank's end.
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
        """The files of models that were read, and have changed since."""
        return [named for files in self._files.values() if (named := files.changed_since_loaded())]

    def of(self, folder: Path) -> "_Files | None":
        return next((files for files in self._files.values() if files.folder == folder), None)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block these files are those that `reading` and `check_inputs_unchanged` mean."""
        token = _WATCHED.set(self)
        try:
            yield
        finally:
            _WATCHED.reset(token)


class _Files:
    """The files in `folder`, those that `take` finds, of which nobody says what they should be.

    `seen` are their stamps when they were last found sound; those in `vouched` show that a file is so still.
    """

    def __init__(self, folder: Path, take: Callable[[Path], Stamps] = model_stamps) -> None:
        self.folder, self._take = folder, take
        self.seen = take(folder)
        self.vouched = settled(self.seen)
        self._loaded: Stamps = {}

    def verify(self) -> None:
        """Raise DataError if the content is not what it should be."""
        now = self._take(self.folder)
        vouched = settled(now)  # before hashing, which may take long
        before = self.seen | self.vouched
        changed = {name for name, stamp in before.items() if now.get(name) != stamp}
        names = changed | {name for name in now if name not in self.vouched}
        if names:
            try:
                self._hash(names)
            except PedigreeError as error:
                # Where nobody vouches for any file, none is more suspect than the others.
                suspects = changed or (names if self.vouched else ())
                raise DataError(
                    f"{self._named(suspects)} changed after it was hashed: {error}; run again once it is written"
                ) from error
        self.seen, self.vouched = now, vouched

    def check_inputs_unchanged(self) -> None:
        """Raise DataError for a file that was written, replaced or removed since it was last found sound."""
        if names := self._changed_since(self.seen):
            raise DataError(f"{self._named(names)} changed while it was read; run again once it is written")
        if any(stamp_of(self.folder / name) != self.vouched.get(name) for name in self.seen):
            self.verify()

    @property
    def was_read(self) -> bool:
        """Whether all of a model is in memory."""
        return bool(self._loaded)

    def note_loaded(self) -> None:
        """Remember that all was read."""
        self._loaded = self.seen

    def changed_since_loaded(self) -> str:
        """Which files are no longer what was read; empty if none."""
        names = self._changed_since(self._loaded)
        return self._named(names) if names else ""

    def _changed_since(self, before: Stamps) -> list[str]:
        return [name for name, stamp in before.items() if not same_content(stamp, stamp_of(self.folder / name))]

    def _hash(self, names: Collection[str]) -> None:
        """Raise PedigreeError if the files with these `names` are not what they should be."""

    def _named(self, names: Collection[str]) -> str:
        """The first files of these names, as places; without any, the folder."""
        return ", ".join(str(self.folder / name) for name in sorted(names)[:_SHOWN]) or str(self.folder)


class _HashedFiles(_Files):
    """The files of an input: of an artifact, or of a model in a folder outside the store."""

    def __init__(self, given: Input, store: Store) -> None:
        self._given = given
        self._is_artifact = given.folder == store.folder(given.kind, given.fingerprint)
        super().__init__(given.folder, artifact_stamps if self._is_artifact else model_stamps)

    def _hash(self, names: Collection[str]) -> None:
        kind, expected = self._given.kind, self._given.fingerprint
        if self._is_artifact:
            manifest = verified_manifest(self.folder, kind, expected, hashes=False)
            verify_contents(self.folder, manifest, [name for name in names if name in manifest.files])
        elif (found := weights_fingerprint(weights_identity(self.folder))) != expected:
            raise ModelError(f"the weights in {self.folder} are {short(found)}, expected {short(expected)}")


_WATCHED: ContextVar[InputFiles] = ContextVar("_WATCHED")


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Read all of the model in `folder` within the block, into memory of its own.

    Raises ModelError if a file of it changes meanwhile, whatever else that leads to, or is not what was hashed.
    """
    watched = _WATCHED.get(None)
    files = (watched.of(folder) if watched else None) or _Files(folder)
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


def check_inputs_unchanged() -> None:
    """Compare the inputs of the job that this process works on, if there is one: see `InputFiles.check_inputs_unchanged`."""
    if watched := _WATCHED.get(None):
        watched.check_inputs_unchanged()

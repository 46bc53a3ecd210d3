"""A job's input files: a changed file raises an error with its name; unchanged files are not hashed again.

The oracle is the order of the edits. The last hash of a file does not prove its content during the reading.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.training.contract.protocol.test_job import job_in
from training.contract.config.recipe import Compute
from training.contract.errors import DataError, ModelError
from training.contract.identity.file_stamps import artifact_stamps, model_stamps, settled
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.input_files import InputFiles, check_inputs_unchanged, reading
from training.contract.protocol.job import Input, Job
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.store.artifact import JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

WEIGHTS, PAIRS = "model.safetensors", "pairs.arrow"
_OPENED: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def record_opened_files() -> None:
    """Record opened files for the rest of the session: an audit hook cannot be removed."""
    sys.addaudithook(lambda event, arguments: _OPENED.append(str(arguments[0])) if event == "open" else None)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    _OPENED.clear()
    yield _OPENED


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": torch.arange(6.0)}, folder / WEIGHTS)
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Input:
    derivation = Derivation(kind="tokenized_pairs", code_version="1", inputs={}, settings={})
    store = Store(tmp_path / "store")
    with store.staging() as staging:
        (staging / PAIRS).write_bytes(b"tokens")
        artifact = store.publish(staging, derivation, JobResult("a" * 64))
    return Input(kind=derivation.kind, fingerprint=artifact.fingerprint, folder=artifact.folder)


@pytest.fixture
def job(tmp_path: Path, model: Path, pairs: Input) -> Job:
    """Return a job as the launcher describes it, with stamps."""
    of_model = Input(kind="reference_model", fingerprint=weights_identity(model).fingerprint, folder=model)
    stamps = {"reference_model": model_stamps(model), "tokenized_pairs": artifact_stamps(pairs.folder)}
    inputs = {"reference_model": of_model, "tokenized_pairs": pairs}
    return job_in(tmp_path, "policy", Compute()).model_copy(update={"inputs": inputs, "stamps": stamps})


def wait_until_settled(job: Job) -> None:
    while not all(settled(stamps) == stamps for stamps in job.stamps.values()):
        time.sleep(0.1)


def rewritten(file: Path, content: bytes | None = None) -> None:
    """Write `content`, by default the same, into the same file."""
    content = file.read_bytes() if content is None else content
    time.sleep(0.02)  # another tick of the clock
    with open(file, "r+b") as opened:
        opened.truncate()
        opened.write(content)


def replaced(file: Path, content: bytes | None = None) -> None:
    new = file.with_name("new")
    new.write_bytes(file.read_bytes() if content is None else content)
    os.replace(new, file)


def there_and_back(file: Path) -> None:
    content = file.read_bytes()
    rewritten(file, bytes(len(content)))
    rewritten(file, content)


def other_weights(file: Path) -> None:
    save_file({"weight": torch.ones(6)}, file)


def test_verify_of_unchanged_files_reads_none_of_them(job: Job, opened: list[str]) -> None:
    wait_until_settled(job)
    opened.clear()
    inputs = InputFiles(job)
    inputs.verify()
    inputs.check_inputs_unchanged()
    names = {str(source.folder / name) for source in job.inputs.values() for name in (WEIGHTS, PAIRS)}
    assert names.isdisjoint(opened)


@pytest.mark.parametrize("stamps", [{}, {"tokenized_pairs": {}}], ids=["of no input", "of no file"])
def test_verify_hashes_files_without_a_stamp(job: Job, opened: list[str], stamps: dict[str, object]) -> None:
    """The launcher leaves out stamps of young files: a second change might leave the same stamp."""
    InputFiles(job.model_copy(update={"stamps": stamps})).verify()
    assert str(job.inputs["tokenized_pairs"].folder / PAIRS) in opened
    assert str(job.inputs["reference_model"].folder / WEIGHTS) in opened
    rewritten(job.inputs["tokenized_pairs"].folder / PAIRS, b"others")
    with pytest.raises(DataError, match=rf"{'a' * 64}.* changed after it was hashed.*\[file-changed\]"):
        InputFiles(job.model_copy(update={"stamps": stamps})).verify()


@pytest.mark.parametrize("change", [rewritten, replaced, Path.touch, lambda file: file.chmod(0o600), there_and_back])
@pytest.mark.parametrize("name", ["reference_model", "tokenized_pairs"])
def test_verify_accepts_a_rewritten_file_with_equal_content(
    job: Job, name: str, change: Callable[[Path], None]
) -> None:
    change(job.inputs[name].folder / (PAIRS if name == "tokenized_pairs" else WEIGHTS))
    InputFiles(job).verify()


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_verify_of_other_content_raises_with_name(job: Job, change: Callable[[Path, bytes], None]) -> None:
    change(file := job.inputs["tokenized_pairs"].folder / PAIRS, b"others")
    with pytest.raises(DataError, match=rf"{file} changed after .*sha256 \w{{12}}; .*\w{{12}}; .*\[file-changed\]"):
        InputFiles(job).verify()


@pytest.mark.parametrize(
    ("name", "change"),
    [(WEIGHTS, other_weights), (WEIGHTS, Path.unlink), ("config.json", lambda file: file.write_text("{}"))],
    ids=["other weights", "none", "another config"],
)
def test_verify_of_changed_model_raises_with_name(job: Job, name: str, change: Callable[[Path], None]) -> None:
    change(file := job.inputs["reference_model"].folder / name)
    with pytest.raises(DataError, match=rf"{file} changed after it was hashed: .*\[file-changed\]"):
        InputFiles(job).verify()


@pytest.mark.parametrize("change", [rewritten, replaced, Path.touch, there_and_back, Path.unlink])
def test_check_inputs_unchanged_of_written_file_raises_with_name(job: Job, change: Callable[[Path], None]) -> None:
    inputs = InputFiles(job)
    inputs.verify()
    change(file := job.inputs["tokenized_pairs"].folder / PAIRS)
    with inputs.watched(), pytest.raises(DataError, match=rf"{file} changed while it was read; .*\[file-changed\]"):
        check_inputs_unchanged()


def test_check_inputs_unchanged_accepts_new_links_and_permissions(job: Job) -> None:
    """A backup by hard links, or `chmod -R`, only causes another hashing."""
    inputs = InputFiles(job)
    inputs.verify()
    file = job.inputs["tokenized_pairs"].folder / PAIRS
    file.chmod(0o600)
    os.link(file, file.parents[2] / "backup")
    inputs.check_inputs_unchanged()


def test_check_inputs_unchanged_of_other_content_with_same_modification_time_raises(job: Job) -> None:
    """`cp -p` resets the modification time, but programs cannot choose the change time."""
    inputs = InputFiles(job)
    inputs.verify()
    file = job.inputs["tokenized_pairs"].folder / PAIRS
    status = file.stat()
    rewritten(file, b"others")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataError, match=rf"{file} changed after it was hashed: .*\[file-changed\]"):
        inputs.check_inputs_unchanged()


@pytest.mark.parametrize("change", [rewritten, replaced, other_weights, Path.unlink, there_and_back])
@pytest.mark.parametrize("known", [True, False])
def test_reading_a_model_that_changes_meanwhile_raises(job: Job, known: bool, change: Callable[[Path], None]) -> None:
    """The model is an input or in another folder, and the reading itself succeeds or fails."""
    file = job.inputs["reference_model"].folder / WEIGHTS
    inputs = InputFiles(job if known else job.model_copy(update={"inputs": {}}))
    for fails in (False, True):
        shutil.copytree(file.parent, aside := file.parents[1] / "aside")
        with (
            inputs.watched(),
            pytest.raises(ModelError, match=rf"{file} changed while it was read; .*\[file-changed\]"),
            reading(file.parent),
        ):
            change(file)
            if fails:
                raise ValueError("half a header")
        shutil.rmtree(file.parent)
        aside.rename(file.parent)
        inputs = InputFiles(job if known else job.model_copy(update={"inputs": {}}))


def test_reading_an_unchanged_model_passes_errors_on(job: Job) -> None:
    with InputFiles(job).watched(), pytest.raises(ValueError, match="half a header"):  # noqa: SIM117
        with reading(job.inputs["reference_model"].folder):
            raise ValueError("half a header")


@pytest.mark.parametrize("change", [other_weights, replaced, Path.unlink, lambda file: shutil.rmtree(file.parent)])
def test_model_that_changes_after_reading_is_only_listed(job: Job, change: Callable[[Path], None]) -> None:
    """Reading it a second time raises."""
    inputs, file = InputFiles(job), job.inputs["reference_model"].folder / WEIGHTS
    inputs.verify()
    with inputs.watched():
        with reading(file.parent):
            pass
        assert inputs.changed_models() == []
        change(file)
        check_inputs_unchanged()
        [paths] = inputs.changed_models()
        assert str(file) in paths
        if change is not replaced:
            message = rf"{file} changed after it was hashed: .*\[file-changed\]"
            with pytest.raises(ModelError, match=message), reading(file.parent):
                pass


def test_check_inputs_unchanged_ignores_a_model_that_is_not_read(job: Job) -> None:
    """For example, if the log-prob cache holds every sequence."""
    inputs = InputFiles(job)
    inputs.verify()
    other_weights(job.inputs["reference_model"].folder / WEIGHTS)
    inputs.check_inputs_unchanged()
    assert inputs.changed_models() == []


@pytest.mark.parametrize("name", ["reference_model", "tokenized_pairs"])
def test_blamed_replaces_an_error_if_an_unread_file_has_changed(job: Job, name: str) -> None:
    """Unchanged files, and models already read, do not replace the error."""
    file = job.inputs[name].folder / (WEIGHTS if name == "reference_model" else PAIRS)
    inputs = InputFiles(job)
    inputs.verify()
    with pytest.raises(ValueError, match="half a header"), inputs.blamed():
        raise ValueError("half a header")
    rewritten(file)
    with pytest.raises(DataError, match=rf"{file} changed while it was read; .*\[file-changed\]"), inputs.blamed():
        raise ValueError("half a header")
    for error in (RuntimeError("connection closed"), ModelError("another reason")):
        with pytest.raises(type(error), match=re.escape(str(error))), inputs.blamed():
            raise error
    if name == "reference_model":
        inputs.verify()
        with inputs.watched(), reading(file.parent):
            pass
        rewritten(file)
        with pytest.raises(ValueError, match="half a header"), inputs.blamed():
            raise ValueError("half a header")


def test_verify_hashes_the_champion(job: Job, model: Path) -> None:
    """Its folder is a location, not an input, so the job lacks its stamps."""
    fingerprint = job.inputs["reference_model"].fingerprint
    shutil.copytree(model, champion := model.with_name("champion"))
    changes = {"locations": PolicyLocations(champion=champion), "settings": TrainingSpec(champion=fingerprint)}
    job = job.model_copy(update=changes)
    InputFiles(job).verify()
    other_weights(champion / WEIGHTS)
    with pytest.raises(DataError, match=rf"{champion} changed after it was hashed: .*\[file-changed\]"):
        InputFiles(job).verify()


def test_rank_other_than_0_takes_its_own_stamps(job: Job, opened: list[str]) -> None:
    """On another machine the same disk has another number, and the ranks must not all hash a large model."""
    stamps = {name: {file: (stamp[0] + 1, *stamp[1:]) for file, stamp in of.items()} for name, of in job.stamps.items()}
    elsewhere = job.model_copy(update={"stamps": stamps})
    wait_until_settled(job)
    opened.clear()
    with InputFiles(elsewhere, is_main=False).watched(), reading(job.inputs["reference_model"].folder):
        pass
    assert str(job.inputs["reference_model"].folder / WEIGHTS) not in opened
    InputFiles(elsewhere).verify()
    assert str(job.inputs["reference_model"].folder / WEIGHTS) in opened


def test_job_without_stamps_detects_changes_after_its_start(job: Job) -> None:
    inputs = InputFiles(job.model_copy(update={"stamps": None}))
    inputs.verify()
    rewritten(file := job.inputs["tokenized_pairs"].folder / PAIRS)
    with pytest.raises(DataError, match=rf"{file} changed while it was read; .*\[file-changed\]"):
        inputs.check_inputs_unchanged()


def test_check_inputs_unchanged_outside_of_a_job_passes(model: Path) -> None:
    check_inputs_unchanged()
    with reading(model):
        pass

"""What a job reads is what was hashed: a file that was another meanwhile is refused by name, and any other is read once.

The oracle is the order of the edits. The hash that a file has at the end proves nothing of what was read in between.
"""

import os
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
from training.contract.identity.model_identity import weights_fingerprint, weights_identity
from training.contract.protocol.input_files import InputFiles, check_inputs_unchanged, reading
from training.contract.protocol.job import Input, Job
from training.contract.store.manifest import Derivation
from training.contract.store.store import JobResult, Store

WEIGHTS, PAIRS = "model.safetensors", "pairs.arrow"
_OPENED: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def noting_what_is_opened() -> None:
    """For good, since no hook of this kind can be taken away."""
    sys.addaudithook(lambda event, given: _OPENED.append(str(given[0])) if event == "open" else None)


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
    how, store = Derivation(kind="tokenized_pairs", code_version="1", inputs={}, settings={}), Store(tmp_path / "store")
    with store.staging() as staging:
        (staging / PAIRS).write_bytes(b"tokens")
        made = store.publish(staging, how, JobResult("a" * 64))
    return Input(kind=how.kind, fingerprint=made.fingerprint, folder=made.folder)


@pytest.fixture
def job(tmp_path: Path, model: Path, pairs: Input) -> Job:
    """As the launching side describes it, with the stamps of files that were written long before."""
    of_model = Input(kind="reference_model", fingerprint=weights_fingerprint(weights_identity(model)), folder=model)
    stamps = {"reference_model": model_stamps(model), "tokenized_pairs": artifact_stamps(pairs.folder)}
    given = {"reference_model": of_model, "tokenized_pairs": pairs}
    return job_in(tmp_path, "policy", Compute()).model_copy(update={"inputs": given, "stamps": stamps})


def wait_until_settled(job: Job) -> None:
    while not all(settled(stamps) == stamps for stamps in job.stamps.values()):
        time.sleep(0.1)


def rewritten(file: Path, content: bytes | None = None) -> None:
    """Other content in the same file, by default the same."""
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
    before = file.read_bytes()
    rewritten(file, bytes(len(before)))
    rewritten(file, before)


def other_weights(file: Path) -> None:
    save_file({"weight": torch.ones(6)}, file)


def test_files_that_nobody_touched_are_not_read_again(job: Job, opened: list[str]) -> None:
    wait_until_settled(job)
    opened.clear()
    inputs = InputFiles(job)
    inputs.verify()
    inputs.check_inputs_unchanged()
    names = {str(given.folder / name) for given in job.inputs.values() for name in (WEIGHTS, PAIRS)}
    assert names.isdisjoint(opened)


@pytest.mark.parametrize("stamps", [{}, {"tokenized_pairs": {}}], ids=["of no input", "of no file"])
def test_files_without_a_stamp_are_hashed(job: Job, opened: list[str], stamps: dict[str, object]) -> None:
    """As those are that changed just before they were hashed: another change might have left the same stamp."""
    InputFiles(job.model_copy(update={"stamps": stamps})).verify()
    assert str(job.inputs["tokenized_pairs"].folder / PAIRS) in opened
    assert str(job.inputs["reference_model"].folder / WEIGHTS) in opened
    rewritten(job.inputs["tokenized_pairs"].folder / PAIRS, b"others")
    with pytest.raises(DataError, match=r"tokens?_?\S* changed after it was hashed"):
        InputFiles(job.model_copy(update={"stamps": stamps})).verify()


@pytest.mark.parametrize("change", [rewritten, replaced, Path.touch, lambda file: file.chmod(0o600), there_and_back])
@pytest.mark.parametrize("name", ["reference_model", "tokenized_pairs"])
def test_before_anything_is_read_the_same_content_will_do(job: Job, name: str, change: Callable[[Path], None]) -> None:
    change(job.inputs[name].folder / (PAIRS if name == "tokenized_pairs" else WEIGHTS))
    InputFiles(job).verify()


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_other_content_than_was_hashed_is_refused_by_name(job: Job, change: Callable[[Path, bytes], None]) -> None:
    change(file := job.inputs["tokenized_pairs"].folder / PAIRS, b"others")
    with pytest.raises(
        DataError, match=rf"{file} changed after it was hashed: .*sha256.*; run again once it is written"
    ):
        InputFiles(job).verify()


@pytest.mark.parametrize(
    ("name", "change"),
    [(WEIGHTS, other_weights), (WEIGHTS, Path.unlink), ("config.json", lambda file: file.write_text("{}"))],
    ids=["other weights", "none", "another config"],
)
def test_another_model_than_was_hashed_is_refused_by_name(job: Job, name: str, change: Callable[[Path], None]) -> None:
    change(file := job.inputs["reference_model"].folder / name)
    with pytest.raises(DataError, match=rf"{file} changed after it was hashed: "):
        InputFiles(job).verify()


@pytest.mark.parametrize("change", [rewritten, replaced, Path.touch, there_and_back, Path.unlink])
def test_what_may_have_been_another_while_it_was_read_is_refused(job: Job, change: Callable[[Path], None]) -> None:
    inputs = InputFiles(job)
    inputs.verify()
    change(file := job.inputs["tokenized_pairs"].folder / PAIRS)
    with inputs.watched(), pytest.raises(DataError, match=rf"{file} changed while it was read; run again"):
        check_inputs_unchanged()


def test_links_and_permissions_make_no_other_content(job: Job) -> None:
    """A backup by hard links, or `chmod -R`. The file is hashed again, once."""
    inputs = InputFiles(job)
    inputs.verify()
    file = job.inputs["tokenized_pairs"].folder / PAIRS
    file.chmod(0o600)
    os.link(file, file.parents[2] / "backup")
    inputs.check_inputs_unchanged()


def test_other_content_behind_the_same_time_is_seen_when_it_is_hashed_again(job: Job) -> None:
    """As `cp -p` leaves it. The change time tells, which no program can choose."""
    inputs = InputFiles(job)
    inputs.verify()
    file = job.inputs["tokenized_pairs"].folder / PAIRS
    before = file.stat()
    rewritten(file, b"others")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=rf"{file} changed after it was hashed: "):
        inputs.check_inputs_unchanged()


@pytest.mark.parametrize("change", [rewritten, replaced, other_weights, Path.unlink, there_and_back])
@pytest.mark.parametrize("known", [True, False])
def test_a_model_that_changes_while_it_is_read_is_refused(
    job: Job, known: bool, change: Callable[[Path], None]
) -> None:
    """Of a known input, or of any other folder; whatever the reading itself makes of it."""
    file = job.inputs["reference_model"].folder / WEIGHTS
    inputs = InputFiles(job if known else job.model_copy(update={"inputs": {}}))
    for fails in (False, True):
        shutil.copytree(file.parent, aside := file.parents[1] / "aside")
        with (
            inputs.watched(),
            pytest.raises(ModelError, match=rf"{file} changed while it was read"),
            reading(file.parent),
        ):
            change(file)
            if fails:
                raise ValueError("half a header")
        shutil.rmtree(file.parent)
        aside.rename(file.parent)
        inputs = InputFiles(job if known else job.model_copy(update={"inputs": {}}))


def test_what_is_wrong_with_a_model_that_nobody_touched_is_told_as_it_is(job: Job) -> None:
    with InputFiles(job).watched(), pytest.raises(ValueError, match="half a header"):  # noqa: SIM117
        with reading(job.inputs["reference_model"].folder):
            raise ValueError("half a header")


@pytest.mark.parametrize("change", [other_weights, replaced, Path.unlink, lambda file: shutil.rmtree(file.parent)])
def test_a_model_that_changes_once_it_was_read_does_no_harm_and_is_named(
    job: Job, change: Callable[[Path], None]
) -> None:
    """Not so if it is read a second time."""
    inputs, file = InputFiles(job), job.inputs["reference_model"].folder / WEIGHTS
    inputs.verify()
    with inputs.watched():
        with reading(file.parent):
            pass
        assert inputs.changed_models() == []
        change(file)
        check_inputs_unchanged()
        [named] = inputs.changed_models()
        assert str(file) in named
        if change is not replaced:
            with pytest.raises(ModelError, match=f"{file} changed after it was hashed"), reading(file.parent):
                pass


def test_a_model_that_nobody_reads_may_change(job: Job) -> None:
    """As where the memo knows every sequence."""
    inputs = InputFiles(job)
    inputs.verify()
    other_weights(job.inputs["reference_model"].folder / WEIGHTS)
    inputs.check_inputs_unchanged()
    assert inputs.changed_models() == []


@pytest.mark.parametrize("name", ["reference_model", "tokenized_pairs"])
def test_a_file_that_changed_is_blamed_for_what_half_of_it_led_to(job: Job, name: str) -> None:
    """Wherever it was read. What nobody touched is not blamed, nor is a model that was read before."""
    file = job.inputs[name].folder / (WEIGHTS if name == "reference_model" else PAIRS)
    inputs = InputFiles(job)
    inputs.verify()
    with pytest.raises(ValueError, match="half a header"), inputs.blamed():
        raise ValueError("half a header")
    rewritten(file)
    with pytest.raises(DataError, match=f"{file} changed while it was read"), inputs.blamed():
        raise ValueError("half a header")
    for error in (RuntimeError("connection closed"), ModelError("another reason")):
        with pytest.raises(type(error), match=str(error)), inputs.blamed():
            raise error
    if name == "reference_model":
        inputs.verify()
        with inputs.watched(), reading(file.parent):
            pass
        rewritten(file)
        with pytest.raises(ValueError, match="half a header"), inputs.blamed():
            raise ValueError("half a header")


def test_the_champion_is_hashed_where_the_job_begins(job: Job, model: Path) -> None:
    """Its folder is a location and no input, so no stamp of it is in the job."""
    fingerprint = job.inputs["reference_model"].fingerprint
    shutil.copytree(model, champion := model.with_name("champion"))
    where = {"locations": {"champion": str(champion)}, "settings": {"champion": fingerprint}}
    job = job.model_copy(update=where)
    InputFiles(job).verify()
    other_weights(champion / WEIGHTS)
    with pytest.raises(DataError, match=f"{champion} changed after it was hashed"):
        InputFiles(job).verify()


def test_another_rank_takes_stamps_of_its_own(job: Job, opened: list[str]) -> None:
    """On another machine the same disk has another number, and not every rank shall hash a large model."""
    stamps = {name: {file: (stamp[0] + 1, *stamp[1:]) for file, stamp in of.items()} for name, of in job.stamps.items()}
    elsewhere = job.model_copy(update={"stamps": stamps})
    wait_until_settled(job)
    opened.clear()
    with InputFiles(elsewhere, is_main=False).watched(), reading(job.inputs["reference_model"].folder):
        pass
    assert str(job.inputs["reference_model"].folder / WEIGHTS) not in opened
    InputFiles(elsewhere).verify()
    assert str(job.inputs["reference_model"].folder / WEIGHTS) in opened


def test_a_job_that_nobody_vouches_for_sees_changes_from_its_start_on(job: Job) -> None:
    inputs = InputFiles(job.model_copy(update={"stamps": None}))
    inputs.verify()
    rewritten(file := job.inputs["tokenized_pairs"].folder / PAIRS)
    with pytest.raises(DataError, match=rf"{file} changed while it was read"):
        inputs.check_inputs_unchanged()


def test_outside_of_a_job_there_is_nothing_to_compare(model: Path) -> None:
    check_inputs_unchanged()
    with reading(model):
        pass

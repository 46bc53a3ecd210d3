"""Checkpoints are intact or not used, the last k are kept, and they restore all bits; against safetensors and plain files."""

import errno
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter

from tests.training.runs import on_two_ranks
from training.checkpoint.async_saver import AsyncSaver
from training.checkpoint.checkpoint import Checkpoint, Checkpoints, TrainingState
from training.checkpoint.tensor_slices import LocalRows, TensorSliceReader, piece_of, write_pieces
from training.contract.config.optimizer import AdamW
from training.contract.errors import CorruptArtifact, StoreError
from training.contract.store.manifest import Derivation
from training.distributed import ALONE, Group
from training.optim.optimizer import Optimizers, build_optimizer

JOB = Derivation(kind="policy", code_version="1", inputs={}, settings={"beta": 0.1})
SHAPES = {"a.weight": (5, 3), "b": (4,), "c": (1, 2)}


@dataclass
class Toy:
    """Three parameters and AdamW. Rank `copy` of `copies` holds all rows, or its shard of them if `sharded`."""

    fill: float = 0.0
    copy: int = 0
    copies: int = 1
    sharded: bool = False
    parameters: dict[str, Parameter] = field(init=False)

    def __post_init__(self) -> None:
        whole = {
            n: torch.arange(5.0 * 3)[: shape[0] * shape[-1]].view(shape) for n, shape in SHAPES.items() if n != "b"
        }
        whole["b"] = torch.arange(4.0)
        rows = {n: slice(self.held(n).first, self.held(n).first + self.held(n).rows) for n in SHAPES}
        self.parameters = {name: Parameter(whole[name][rows[name]] + self.fill) for name in SHAPES}
        self.optimizer = build_optimizer(AdamW(learning_rate=0.1), self.parameters, {})
        for parameter in self.parameters.values():
            parameter.grad = parameter.detach() + 1
        self.optimizer.step()

    def held(self, name: str) -> LocalRows:
        of = SHAPES[name][0]
        if not self.sharded:
            return LocalRows(0, of, of, self.copy, self.copies)
        first = min(of, -(-of // self.copies) * self.copy)
        return LocalRows(first, min(of, first + -(-of // self.copies)) - first, of, 0, 1)

    @property
    def state(self) -> TrainingState:
        return TrainingState(self.parameters, self.optimizer, self.held)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: p.detach() for n, p in self.parameters.items()} | self.optimizer.tensors()


def same(left: Toy, right: Toy) -> bool:
    found, expected = left.tensors(), right.tensors()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def saved(folder: Path, *steps: int, keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(folder, JOB, keep)
    saver = AsyncSaver(checkpoints, ALONE)
    for step in steps:
        saver.start(step, Toy(step).state, {"steps": step, "series": {"loss": [0.5]}})
        saver.finish()
    return checkpoints


def resumed(checkpoints: Checkpoints, notes: list[str] | None = None) -> Checkpoint:
    step = checkpoints.last_whole(ALONE, pytest.fail if notes is None else notes.append)
    assert step is not None
    found = checkpoints.read(step)
    restored = Toy(-1.0)
    restored.state.restore(found.tensors)
    assert same(restored, Toy(found.step))
    return found


def place(folder: Path, step: int) -> Path:
    return next(folder.glob(f"*/step-{step:08d}"))


def test_read_returns_the_saved_step_and_facts(tmp_path: Path):
    found = resumed(saved(tmp_path, 5))
    assert (found.step, found.facts) == (5, {"steps": 5, "series": {"loss": [0.5]}})


@pytest.mark.parametrize(("mask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_commit_sets_file_modes_by_umask(tmp_path: Path, mask: int, mode: int):
    before = os.umask(mask)
    try:
        saved(tmp_path, 5)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in place(tmp_path, 5).iterdir()}
    assert modes == {"rank-00000.safetensors": mode, "manifest.json": mode}


def test_last_whole_without_checkpoints_is_none(tmp_path: Path):
    assert Checkpoints(tmp_path / "none", JOB).last_whole(ALONE, pytest.fail) is None


@pytest.mark.parametrize(("keep", "left"), [(1, [100]), (2, [30, 100]), (3, [20, 30, 100])])
def test_commit_keeps_the_last_checkpoints(tmp_path: Path, keep: int, left: list[int]):
    saved(tmp_path, 10, 20, 100, 30, keep=keep)
    assert sorted(int(p.name.removeprefix("step-")) for p in tmp_path.glob("*/*")) == left


def test_manifest_has_size_and_sha256_of_every_file(tmp_path: Path):
    saved(tmp_path, 5)
    folder = place(tmp_path, 5)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"rank-00000.safetensors"} == {p.name for p in folder.iterdir()} - {"manifest.json"}
    content = (folder / "rank-00000.safetensors").read_bytes()
    assert files["rank-00000.safetensors"] == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_file_is_plain_safetensors(tmp_path: Path):
    saved(tmp_path, 5)
    found = load_file(place(tmp_path, 5) / "rank-00000.safetensors")
    assert torch.equal(found["weights/a.weight@0"], Toy(5).parameters["a.weight"])
    assert set(found) == {f"{kind}/{n}@0" for kind in ("weights", "exp_avg", "exp_avg_sq", "step") for n in SHAPES}


WAYS = {"two copies": (2, False), "three copies": (3, False), "two shards": (2, True), "three shards": (3, True)}


@pytest.mark.parametrize("written", WAYS)
@pytest.mark.parametrize("read", WAYS)
def test_restore_on_another_number_of_ranks_gives_the_same_state(tmp_path: Path, written: str, read: str):
    """Tensors have 5, 4 and 1 rows, so some of three ranks have zero rows. The files may be in any order."""
    (writers, cut), (readers, cut_again) = WAYS[written], WAYS[read]
    files = [tmp_path / f"{rank}" for rank in range(writers)]
    for rank, file in enumerate(files):
        write_pieces(Toy(5.0, rank, writers, cut).state.pieces(rank == 0), file)
    for rank in range(readers):
        expected, found = (Toy(fill, rank, readers, cut_again) for fill in (5.0, -1.0))
        found.state.restore(TensorSliceReader(files[::-1]))
        assert same(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_write_pieces_on_several_ranks_writes_each_number_once(tmp_path: Path, way: str):
    ranks, cut = WAYS[way]
    for rank in range(ranks):
        write_pieces(Toy(5.0, rank, ranks, cut).state.pieces(rank == 0), tmp_path / f"{rank}")
    written = sum(tensor.numel() for file in tmp_path.iterdir() for tensor in load_file(file).values())
    assert written == 3 * (5 * 3 + 4 + 2) + 3, "weights and two moments of three parameters, and a count of each"


def test_read_of_missing_rows_or_tensor_raises(tmp_path: Path):
    write_pieces([piece_of("weights/b", torch.ones(2), LocalRows(2, 2, 4, 0, 1))], tmp_path / "half")
    reader = TensorSliceReader([tmp_path / "half"])
    assert reader.read("weights/b", 2, 2).tolist() == [1, 1]
    with pytest.raises(CorruptArtifact, match=r" 2 of the 3 rows 1 to 4 of weights/b \[missing-rows\]"):
        reader.read("weights/b", 1, 3)
    with pytest.raises(CorruptArtifact, match=r"weights/b.* weights/c \[missing-tensor\]"):
        reader.read("weights/c")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_last_whole_with_flipped_bit_takes_the_previous(tmp_path: Path):
    checkpoints = saved(tmp_path, 5, 10)
    file = place(tmp_path, 10) / "rank-00000.safetensors"
    flip_a_bit(file)
    assert load_file(file), "safetensors does not notice"
    notes: list[str] = []
    assert resumed(checkpoints, notes).step == 5
    assert len(notes) == 1 and "step 10 " in notes[0] and file.name in notes[0]
    assert next(tmp_path.glob("*/step-00000010.corrupt")).is_dir()


@pytest.mark.parametrize("damage", ["no manifest", "empty manifest", "truncated", "missing"])
def test_last_whole_with_incomplete_checkpoint_takes_the_previous(tmp_path: Path, damage: str):
    checkpoints = saved(tmp_path, 5, 10)
    folder = place(tmp_path, 10)
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "empty manifest":
            (folder / "manifest.json").write_text("")
        case "truncated":
            os.truncate(folder / "rank-00000.safetensors", 20)
        case "missing":
            (folder / "rank-00000.safetensors").unlink()
    notes: list[str] = []
    assert resumed(checkpoints, notes).step == 5 and len(notes) == 1


def test_last_whole_sets_a_step_aside_twice(tmp_path: Path):
    checkpoints = saved(tmp_path, 5, 10)
    for _ in range(2):
        flip_a_bit(place(tmp_path, 10) / "rank-00000.safetensors")
        assert resumed(checkpoints, []).step == 5
        saved(tmp_path, 10)
    assert resumed(checkpoints).step == 10


def test_commit_of_the_same_step_twice_replaces_it(tmp_path: Path):
    """A run that is stopped after its last save could save that step again."""
    assert resumed(saved(tmp_path, 5, 10, 10)).step == 10


def test_last_whole_with_only_corrupt_checkpoints_is_none(tmp_path: Path):
    checkpoints = saved(tmp_path, 5)
    flip_a_bit(place(tmp_path, 5) / "rank-00000.safetensors")
    assert checkpoints.last_whole(ALONE, lambda text: None) is None
    assert resumed(saved(tmp_path, 5)).step == 5


def test_last_whole_ignores_checkpoints_of_another_derivation(tmp_path: Path):
    saved(tmp_path, 5)
    other = JOB.model_copy(update={"settings": {"beta": 0.2}})
    assert Checkpoints(tmp_path, other).last_whole(ALONE, pytest.fail) is None


def test_start_takes_a_snapshot_of_state_and_facts(tmp_path: Path):
    """The training may change both after `start`, while the thread still works."""
    checkpoints, toy, facts = Checkpoints(tmp_path, JOB), Toy(5), {"series": [1]}
    saver = AsyncSaver(checkpoints, ALONE)
    saver.start(5, toy.state, facts)
    with torch.no_grad():
        for parameter in toy.parameters.values():
            parameter.fill_(float("nan"))
    facts["series"].append(2)
    saver.finish()
    assert resumed(checkpoints).facts == {"series": [1]}


def test_last_whole_removes_partial_checkpoints(tmp_path: Path):
    checkpoints = saved(tmp_path, 5)
    (checkpoints.partial(10) / "rank-00001.json").write_text("{}")
    assert resumed(checkpoints).step == 5
    assert [p.name for p in tmp_path.glob("*/*")] == ["step-00000005"]


def test_save_into_unwritable_folder_raises_with_free_bytes(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    saver = AsyncSaver(Checkpoints(tmp_path / "file", JOB), ALONE)
    saver.start(5, Toy().state, {})
    with pytest.raises(StoreError, match=r"rank 0 .* step 5 in .* bytes free\).*\[checkpoint-not-saved\]"):
        saver.finish()


@pytest.fixture
def room() -> Iterator[Any]:
    """Return a function that limits the size of files, which acts like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("size", "series"), [(0, []), (1, []), (100, []), (1000, []), (4000, ["x" * 5000])])
def test_save_on_full_disk_raises_and_keeps_the_previous(tmp_path: Path, room: Any, size: int, series: list[str]):
    """`size` is too small for the file of weights (about 1,400 bytes), or for the manifest with `series`."""
    checkpoints = saved(tmp_path, 5)
    saver = AsyncSaver(checkpoints, ALONE)
    room(size)
    saver.start(10, Toy(10).state, {"series": series})
    with pytest.raises(StoreError, match=r"step 10.*File too large.*\[checkpoint-not-saved\]"):
        saver.finish()
    room(resource.RLIM_INFINITY)
    assert resumed(checkpoints).step == 5


LATE = {"as it is sealed": "rank-00001.unsealed", "at the manifest": ".manifest.json-"}


def refuse_late(event: str, arguments: tuple[Any, ...]) -> None:
    """Act like a full disk for one file of each of two saves. This is an audit hook of a rank's process."""
    if event == "open" and any(when in str(arguments[0]) and name in str(arguments[0]) for when, name in LATE.items()):
        time.sleep(1)  # like a slow disk or a long hash, during the training
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_save_with_full_disk_on_one_rank_raises_on_all(tmp_path: Path):
    """Rank 1 fails when it writes or seals its file, rank 0 at the manifest. No rank waits forever."""
    checkpoints = [saved(tmp_path / when, 5) for when in ("at once", *LATE)]

    def save(group: Group) -> list[str]:
        sys.addaudithook(refuse_late)
        most, errors = resource.getrlimit(resource.RLIMIT_FSIZE)[1], []
        for when in ("at once", *LATE):
            saver = AsyncSaver(Checkpoints(tmp_path / when, JOB), group)
            if group.rank == 1 and when == "at once":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, most))
            saver.start(10, Toy(10, group.rank, 2).state, {})
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            try:
                saver.finish()
            except StoreError as error:
                errors.append(str(error))
        return errors

    errors_by_rank = on_two_ranks(tmp_path, save)
    assert errors_by_rank[0] == errors_by_rank[1]
    for error, previous, rank in zip(errors_by_rank[0], checkpoints, (1, 1, 0), strict=True):
        assert error.startswith(f"rank {rank} ") and "step 10" in error and "; rank" not in error
        assert resumed(previous).step == 5


def test_optimizer_restored_after_two_steps_gives_the_bits_of_four():
    straight, first, second = ({"a.weight": Parameter(torch.ones(2, 2)), "b": Parameter(torch.ones(3))} for _ in "123")
    settings = AdamW(learning_rate=0.1, weight_decay=0.1)
    optimizers = [build_optimizer(settings, parameters, {}) for parameters in (straight, first, second)]
    take(optimizers[0], straight, range(4))
    take(optimizers[1], first, range(2))
    optimizers[2].restore((name, t.clone()) for name, t in optimizers[1].tensors().items())
    for name, parameter in second.items():
        parameter.data.copy_(first[name])
    take(optimizers[2], second, range(2, 4))
    assert all(torch.equal(straight[name], second[name]) for name in straight)


def take(optimizer: Optimizers, parameters: dict[str, Parameter], steps: range) -> None:
    for step in steps:
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, gradient(step))
        optimizer.step()


def gradient(step: int) -> float:
    return (-1) ** step * 0.3 + step * 0.07


def test_optimizer_tensors_are_named_after_parameters():
    parameters = {"a.weight": Parameter(torch.ones(2, 2)), "b": Parameter(torch.ones(3))}
    optimizer = build_optimizer(AdamW(), parameters, {})
    take(optimizer, parameters, range(1))
    names = {f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in parameters}
    assert set(optimizer.tensors()) == names
    assert optimizer.tensors()["exp_avg/b"] == pytest.approx(torch.full((3,), 0.03))


def test_restore_of_parameter_without_dimensions_gives_the_same(tmp_path: Path):
    """Rank 0 writes such a number and its optimizer state, because they do not have rows."""

    def state(value: float) -> TrainingState:
        parameters = {"scale": Parameter(torch.tensor(value))}
        parameters["scale"].grad = torch.tensor(value)
        optimizer = build_optimizer(AdamW(learning_rate=0.1), parameters, {})
        optimizer.step()
        return TrainingState(parameters, optimizer, Toy().held)

    saved, found = state(3.0), state(5.0)
    write_pieces(saved.pieces(main=True), tmp_path / "pieces")
    found.restore(TensorSliceReader([tmp_path / "pieces"]))
    assert torch.equal(found.parameters["scale"], saved.parameters["scale"])
    assert found.optimizer.tensors() == saved.optimizer.tensors()

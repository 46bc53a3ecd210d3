"""Checkpoints: whole or not used, the last two, restored to the last bit; against safetensors and plain files."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Parameter

from training.checkpoint import Checkpoint, Checkpoints, optimizer_tensors, restore_optimizer
from training.contract.errors import StoreError
from training.contract.manifest import Derivation
from training.contract.recipe import AdamW
from training.distributed import Group
from training.optim import Optimizers, build_optimizer

ALONE = Group(0, 1, torch.device("cpu"))
JOB = Derivation(kind="policy", code_version="1", inputs={}, settings={"beta": 0.1})


def checkpoint(step: int) -> Checkpoint:
    weights = {"w": torch.full((3,), float(step))}
    return Checkpoint(step, weights, {"exp_avg/w": torch.arange(3.0)}, {"steps": step, "series": {"loss": [0.5]}})


def saved(folder: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(folder, JOB)
    for step in steps:
        checkpoints.save(checkpoint(step))
    return checkpoints


def place(folder: Path, step: int) -> Path:
    return next(folder.glob(f"*/step-{step:08d}"))


def test_what_was_saved_comes_back(tmp_path: Path):
    found = saved(tmp_path, 5).resume(ALONE, pytest.fail)
    assert found is not None
    assert (found.step, found.facts) == (5, {"steps": 5, "series": {"loss": [0.5]}})
    assert torch.equal(found.model["w"], torch.full((3,), 5.0))
    assert torch.equal(found.optimizer["exp_avg/w"], torch.arange(3.0))


def test_without_any_there_is_none(tmp_path: Path):
    assert Checkpoints(tmp_path / "none", JOB).resume(ALONE, pytest.fail) is None


def test_the_last_two_are_kept(tmp_path: Path):
    saved(tmp_path, 10, 20, 100, 30)
    assert sorted(p.name for p in tmp_path.glob("*/*")) == ["step-00000030", "step-00000100"]


def test_the_manifest_has_size_and_sha256_of_every_file(tmp_path: Path):
    saved(tmp_path, 5)
    folder = place(tmp_path, 5)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {"model.safetensors", "optimizer.safetensors"}
    for name, entry in files.items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_one_flipped_bit_and_the_one_before_is_taken(tmp_path: Path, name: str):
    checkpoints = saved(tmp_path, 5, 10)
    flip_a_bit(place(tmp_path, 10) / name)
    assert load_file(place(tmp_path, 10) / name), "safetensors itself notices nothing"
    notes: list[str] = []
    found = checkpoints.resume(ALONE, notes.append)
    assert found is not None and found.step == 5
    assert len(notes) == 1 and "step 10 is not used" in notes[0] and name in notes[0]
    assert next(tmp_path.glob("*/step-00000010.corrupt")).is_dir()


@pytest.mark.parametrize("damage", ["no manifest", "empty manifest", "truncated", "missing"])
def test_half_a_checkpoint_is_not_used(tmp_path: Path, damage: str):
    checkpoints = saved(tmp_path, 5, 10)
    folder = place(tmp_path, 10)
    match damage:
        case "no manifest":
            (folder / "manifest.json").unlink()
        case "empty manifest":
            (folder / "manifest.json").write_text("")
        case "truncated":
            os.truncate(folder / "model.safetensors", 20)
        case "missing":
            (folder / "optimizer.safetensors").unlink()
    notes: list[str] = []
    found = checkpoints.resume(ALONE, notes.append)
    assert found is not None and found.step == 5 and len(notes) == 1


def test_all_corrupt_is_none(tmp_path: Path):
    checkpoints = saved(tmp_path, 5)
    flip_a_bit(place(tmp_path, 5) / "model.safetensors")
    assert checkpoints.resume(ALONE, lambda text: None) is None
    checkpoints.save(checkpoint(5))
    found = checkpoints.resume(ALONE, pytest.fail)
    assert found is not None and found.step == 5


def test_another_job_in_the_same_folder_is_another_job(tmp_path: Path):
    saved(tmp_path, 5)
    other = JOB.model_copy(update={"settings": {"beta": 0.2}})
    assert Checkpoints(tmp_path, other).resume(ALONE, pytest.fail) is None


def test_a_folder_that_takes_nothing_is_an_error_with_the_free_bytes(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"step 5 in .* bytes free\)"):
        Checkpoints(tmp_path / "file", JOB).save(checkpoint(5))


KILLED = """
import itertools, sys
from pathlib import Path
import torch
from training.checkpoint import Checkpoint, Checkpoints
from training.contract.manifest import Derivation

job = Derivation(kind="policy", code_version="1", inputs={}, settings={"beta": 0.1})
checkpoints = Checkpoints(Path(sys.argv[1]), job)
for step in itertools.count(1):
    weights = {"w": torch.full((200_000,), float(step))}
    checkpoints.save(Checkpoint(step, weights, {"exp_avg/w": weights["w"]}, {"steps": step}))
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.002, 0.007])
def test_killed_while_saving_nothing_half_written_is_ever_loaded(tmp_path: Path, delay: float):
    """SIGKILL a process that saves without a break: what is then resumed is whole, and at most one save behind."""
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    told = [4, *map(int, process.communicate()[0].split())]
    found = Checkpoints(tmp_path, JOB).resume(ALONE, pytest.fail)
    assert found is not None and found.step in (told[-1], told[-1] + 1)
    assert torch.equal(found.model["w"], torch.full((200_000,), float(found.step)))
    assert torch.equal(found.optimizer["exp_avg/w"], found.model["w"])


def test_an_optimizer_goes_on_as_if_it_had_not_stopped():
    """Two steps, state through `optimizer_tensors`, two more: the same bits as four steps."""
    straight, first, second = ({"a.weight": Parameter(torch.ones(2, 2)), "b": Parameter(torch.ones(3))} for _ in "123")
    settings = AdamW(learning_rate=0.1, weight_decay=0.1)
    optimizers = [build_optimizer(settings, parameters, {}) for parameters in (straight, first, second)]
    take(optimizers[0], straight, range(4))
    take(optimizers[1], first, range(2))
    restore_optimizer(optimizers[2], {name: t.clone() for name, t in optimizer_tensors(optimizers[1]).items()})
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


def test_the_state_of_an_optimizer_is_named_after_its_parameters():
    parameters = {"a.weight": Parameter(torch.ones(2, 2)), "b": Parameter(torch.ones(3))}
    optimizer = build_optimizer(AdamW(), parameters, {})
    take(optimizer, parameters, range(1))
    names = {f"{key}/{name}" for key in ("step", "exp_avg", "exp_avg_sq") for name in parameters}
    assert set(optimizer_tensors(optimizer)) == names
    assert optimizer_tensors(optimizer)["exp_avg/b"] == pytest.approx(torch.full((3,), 0.03))

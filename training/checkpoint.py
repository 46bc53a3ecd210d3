"""Checkpoints: all a run needs to go on as if it had never stopped, each committed whole or not at all.

    checkpoints/<key>/step-00000050/model.safetensors       float32 master weights
                                    optimizer.safetensors   `<state>/<parameter>`: exp_avg, exp_avg_sq, step
                                    manifest.json           sizes and sha256 of both, the run's facts; written last
    checkpoints/<key>/step-00000050.partial/                one in the making
    checkpoints/<key>/step-00000050.corrupt/                one whose bytes are not those of its manifest

Nothing else is needed, since data order, learning rate and dropout are functions of the step. Nothing is pickled.

Saving is: write into `.partial`, fsync, manifest, fsync, rename, fsync the parent; then all but the last two go. A
checkpoint of which a byte differs from its manifest is never used: it is set aside, the one before it is taken, and a
note says so. `<key>` is the derivation's, so a folder used by another recipe or other data before does no harm.

The state is the same on every rank, so rank 0 saves, rank 0 chooses what to resume from, and all read that one.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.contract.durable import sync_folder, write_durably
from training.contract.errors import CorruptArtifact, StoreError
from training.contract.fingerprint import short
from training.contract.manifest import MANIFEST, Derivation, Manifest, list_files, read_manifest, verify_files
from training.distributed import Group

_KEPT = 2
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_PARTIAL, _CORRUPT = ".partial", ".corrupt"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: weights by name, the optimizer's state by `<state>/<name>`, and the run's facts."""

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of the job that `derivation` describes, in `folder`."""

    def __init__(self, folder: Path, derivation: Derivation) -> None:
        self._folder, self._derivation = folder / short(derivation.key), derivation

    def save(self, checkpoint: Checkpoint) -> None:
        """Commit `checkpoint`, keep one more. Raises StoreError where the disk does not take it."""
        try:
            self._save(checkpoint)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._existing_folder()).free
            raise StoreError(
                f"cannot save the checkpoint of step {checkpoint.step} in {self._folder} ({free:,} bytes free): "
                f"{error}; make room and run again: the work goes on from the checkpoint before"
            ) from error

    def resume(self, group: Group, note: Callable[[str], None]) -> Checkpoint | None:
        """The last checkpoint that is whole, the same on every rank; None if there is none."""
        found = self._last_whole(note) if group.is_main else None
        chosen = torch.tensor([-1 if found is None else found], device=group.device)
        step = int(group.broadcast_(chosen))
        return None if step < 0 else self._read(step)

    def _last_whole(self, note: Callable[[str], None]) -> int | None:
        for step in reversed(self._steps()):
            place = self._place(step)
            try:
                verify_files(place, read_manifest(place))
                return step
            except CorruptArtifact as error:
                aside = _replace(place, place.with_name(place.name + _CORRUPT))
                note(f"the checkpoint of step {step} is not used and was moved to {aside}: {error}")
        return None

    def _read(self, step: int) -> Checkpoint:
        place = self._place(step)
        facts = read_manifest(place).details
        return Checkpoint(step, load_file(place / _MODEL), load_file(place / _OPTIMIZER), facts)

    def _save(self, checkpoint: Checkpoint) -> None:
        place = self._place(checkpoint.step)
        partial = place.with_name(place.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_durably(checkpoint.model, partial / _MODEL)
        _write_durably(checkpoint.optimizer, partial / _OPTIMIZER)
        manifest = self._manifest(checkpoint, partial)
        write_durably(partial / MANIFEST, manifest.model_dump_json(indent=2).encode())
        _replace(partial, place)
        sync_folder(self._folder)
        for step in self._steps()[:-_KEPT]:
            shutil.rmtree(self._place(step))

    def _manifest(self, checkpoint: Checkpoint, folder: Path) -> Manifest:
        return Manifest(
            kind="checkpoint",
            fingerprint=self._derivation.key,
            made_from=self._derivation,
            libraries={"torch": str(torch.__version__)},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=list_files(folder),
            details=checkpoint.facts,
        )

    def _place(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}"

    def _existing_folder(self) -> Path:
        return next(folder for folder in (self._folder, *self._folder.parents) if folder.is_dir())

    def _steps(self) -> list[int]:
        names = [p.name.removeprefix("step-") for p in self._folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer over named parameters, flat: `<state>/<parameter>`."""
    saved = optimizer.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {f"{key}/{names[at]}": value for at, state in saved["state"].items() for key, value in state.items()}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give an optimizer the state that `optimizer_tensors` took from one built in the same way."""
    groups = optimizer.state_dict()["param_groups"]
    at = {name: index for index, name in enumerate(name for group in groups for name in group["param_names"])}
    state: dict[int, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        key, name = path.split("/", 1)
        state.setdefault(at[name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _write_durably(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _replace(source: Path, target: Path) -> Path:
    """Rename a folder to `target`, which may be there already."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(source, target)
    return target

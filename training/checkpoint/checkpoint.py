"""Checkpoints: the complete state of a run at a step, committed atomically. A resumed run is bit for bit the same.

    checkpoints/<key>/step-00000050/rank-00000.safetensors   this rank's slices (training.checkpoint.tensor_slices) of
                                                             `weights/<parameter>`, float32, and of
                                                             `<state>/<parameter>`: AdamW's exp_avg, exp_avg_sq,
                                                             step; Muon's momentum_buffer
                                    rank-00001.safetensors   ...
                                    manifest.json            sizes and sha256 of all files, the run's facts; written last
    checkpoints/<key>/step-00000050.partial/                 being written (training.checkpoint.async_saver)
    checkpoints/<key>/step-00000050.corrupt/                 bytes differ from the manifest

Data order, learning rate and dropout are functions of the step, so they are not saved. Nothing is pickled. Other numbers of
ranks and other placements of the weights read the same files.

A corrupt checkpoint is never used: it is set aside with a note, and the previous one is used. `<key>` is the key of the
derivation, so a run never finds checkpoints of another recipe or other data.

`LocalRows`, the rows of a tensor on a rank, come from training.parallel. Optimizer state with the shape of its parameter has
the same rows. Other state, such as a step count, is the same on every rank, and rank 0 writes it.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from training.checkpoint.tensor_slices import LocalRows, TensorSlice, TensorSliceReader, piece_of
from training.contract.config.json_object import JsonObject
from training.contract.errors import CorruptArtifact
from training.contract.protocol.job import checkpoints_of, committed_steps
from training.contract.store.manifest import (
    MANIFEST,
    Derivation,
    FileEntry,
    Manifest,
    read_manifest,
    verify_contents,
    verify_files,
)
from training.contract.system.atomic_io import apply_umask, sync_folder, write_durably
from training.distributed import Group
from training.optim.optimizer import Optimizers

_PARTIAL, _CORRUPT = ".partial", ".corrupt"
_WEIGHTS = "weights"
_NONE = -1


@dataclass(frozen=True)
class TrainingState:
    """The state in a checkpoint: parameters, their optimizer, and `local_rows`, the rows of a parameter on this rank."""

    parameters: Mapping[str, Parameter]
    optimizer: Optimizers
    local_rows: Callable[[str], LocalRows]

    def pieces(self, main: bool) -> list[TensorSlice]:
        """Return the slices that this rank writes. They are views: the tensors must not change before they are written."""
        tensors = {f"{_WEIGHTS}/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        tensors |= self.optimizer.tensors()
        pieces = [self._piece(path, tensor, main) for path, tensor in tensors.items()]
        return [piece for piece in pieces if piece is not None]

    def restore(self, reader: TensorSliceReader) -> None:
        """Read this rank's rows of all tensors. Raises CorruptArtifact if a tensor is missing."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._read(reader, f"{_WEIGHTS}/{name}"))
        states = [path for path in reader.shapes if not path.startswith(f"{_WEIGHTS}/")]
        self.optimizer.restore((path, self._read(reader, path)) for path in states)

    def _piece(self, path: str, tensor: Tensor, main: bool) -> TensorSlice | None:
        name = path.split("/", 1)[1]
        if tensor.shape == self.parameters[name].shape and tensor.ndim:
            return piece_of(path, tensor, self.local_rows(name))
        return TensorSlice(path, 0, tuple(tensor.shape), tensor) if main else None

    def _read(self, reader: TensorSliceReader, path: str) -> Tensor:
        name, shape = path.split("/", 1)[1], reader.shapes.get(path)
        local = self.local_rows(name) if shape else None
        if local is not None and shape == (local.total, *self.parameters[name].shape[1:]):
            return reader.read(path, local.first, local.rows)
        return reader.read(path)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its step, the run's facts, and its tensors."""

    step: int
    facts: JsonObject
    tensors: TensorSliceReader


class Checkpoints:
    """The checkpoints of a derivation's job in `folder`. `commit` keeps the last `keep` of them."""

    def __init__(self, folder: Path, derivation: Derivation, keep: int = 2) -> None:
        self.folder, self._derivation, self._keep = checkpoints_of(folder, derivation), derivation, keep

    def partial(self, step: int) -> Path:
        """Create and return the folder in which the ranks write a checkpoint. Raises OSError."""
        folder = self._folder_of(step, _PARTIAL)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, step: int, files: dict[str, FileEntry], facts: JsonObject) -> None:
        """Write the manifest of a partial checkpoint, rename its folder, and remove old checkpoints. Raises OSError."""
        partial, folder = self._folder_of(step, _PARTIAL), self._folder_of(step)
        manifest = Manifest.of_now(self._derivation, self._derivation.key, files, facts)
        apply_umask(partial)  # another user may resume from it
        write_durably(partial / MANIFEST, manifest.dumps())
        _replace_folder(partial, folder)
        sync_folder(self.folder)
        for old_step in committed_steps(self.folder)[: -self._keep]:
            shutil.rmtree(self._folder_of(old_step))

    def last_whole(self, group: Group, note: Callable[[str], None]) -> int | None:
        """Return the step of the last intact checkpoint, or None; the same on every rank.

        Remove partial checkpoints first, so that a commit never includes the file of an old rank. The ranks share the hashing.
        """
        if group.is_main:
            for partial in self.folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(partial)
        while (step := self._last_step(group)) is not None:
            problem = self._find_problem(step, group)
            if problem is None:
                return step
            if group.is_main:
                folder = self._folder_of(step)
                aside = _replace_folder(folder, folder.with_name(folder.name + _CORRUPT))
                note(f"the checkpoint of step {step} is not used and was moved to {aside}: {problem}")
        return None

    def read(self, step: int) -> Checkpoint:
        """Return the intact checkpoint of `step`."""
        folder = self._folder_of(step)
        manifest = read_manifest(folder)
        return Checkpoint(step, manifest.details, TensorSliceReader(folder / name for name in sorted(manifest.files)))

    def _last_step(self, group: Group) -> int | None:
        """Return the last step that rank 0 finds, because only rank 0 moves corrupt checkpoints."""
        step = int(group.broadcast_(torch.tensor([(committed_steps(self.folder) or [_NONE])[-1]], device=group.device)))
        return None if step == _NONE else step

    def _find_problem(self, step: int, group: Group) -> str | None:
        """Return the problem of a corrupt checkpoint, the same on every rank; None if it is intact."""
        folder, problem = self._folder_of(step), ""
        try:
            manifest = read_manifest(folder)
            verify_files(folder, manifest, hashes=False)
            verify_contents(folder, manifest, sorted(manifest.files)[group.rank :: group.world])
        except CorruptArtifact as error:
            problem = str(error)
        return next(filter(None, group.gather_texts(problem)), None)

    def _folder_of(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"


def _replace_folder(source: Path, target: Path) -> Path:
    """Rename a folder to `target`. Remove an existing `target` first."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(source, target)
    return target

"""Checkpoints: all a run needs to go on as if it had never stopped, each committed whole or not at all.

    checkpoints/<key>/step-00000050/rank-00000.safetensors   this rank's pieces (training.checkpoint.tensor_slices) of
                                                             `weights/<parameter>`, float32, and of
                                                             `<state>/<parameter>`: AdamW's exp_avg, exp_avg_sq,
                                                             step; Muon's momentum_buffer
                                    rank-00001.safetensors   ...
                                    manifest.json            sizes and sha256 of all, the run's facts; written last
    checkpoints/<key>/step-00000050.partial/                 one that is being written (training.checkpoint.async_saver)
    checkpoints/<key>/step-00000050.corrupt/                 one whose bytes differ from its manifest

Nothing else is needed, since data order, learning rate and dropout are functions of the step. Nothing is pickled. Another
number of ranks, or another layout of the weights on them, reads the same files.

A checkpoint with a byte that differs from its manifest is never used: it is set aside with a note, and the one before it is
taken. `<key>` is the derivation's, so checkpoints that another recipe or other data left in the folder are not found.

`LocalRows`, the rows of a tensor that a rank holds, come from training.parallel. Optimizer state of the shape of its
parameter has the same rows; all other state, such as a count of steps, is the same on every rank, and rank 0 writes it.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from training.checkpoint.tensor_slices import LocalRows, TensorSlice, TensorSliceReader, piece_of
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
    """What a checkpoint keeps: parameters, the optimizer that steps them, and what of each this rank holds."""

    parameters: Mapping[str, Parameter]
    optimizer: Optimizers
    local_rows: Callable[[str], LocalRows]

    def pieces(self, main: bool) -> list[TensorSlice]:
        """What this rank writes: views of the tensors, which must not change until they are written."""
        tensors = {f"{_WEIGHTS}/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        tensors |= self.optimizer.tensors()
        found = [self._piece(path, tensor, main) for path, tensor in tensors.items()]
        return [piece for piece in found if piece is not None]

    def restore(self, reader: TensorSliceReader) -> None:
        """Read this rank's rows of all of it. Raises CorruptArtifact where a tensor is missing."""
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
    facts: dict[str, Any]
    tensors: TensorSliceReader


class Checkpoints:
    """The checkpoints in `folder` of the job that `derivation` describes; the last `keep` of them stay."""

    def __init__(self, folder: Path, derivation: Derivation, keep: int = 2) -> None:
        self.folder, self._derivation, self._keep = checkpoints_of(folder, derivation), derivation, keep

    def partial(self, step: int) -> Path:
        """The folder, made here, in which the ranks write a checkpoint. Raises OSError."""
        folder = self._place(step, _PARTIAL)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, step: int, files: dict[str, FileEntry], facts: dict[str, Any]) -> None:
        """Write the manifest of a partial checkpoint and rename it; remove old ones. Raises OSError."""
        partial, place = self._place(step, _PARTIAL), self._place(step)
        manifest = Manifest.of_now(self._derivation, self._derivation.key, files, facts)
        apply_umask(partial)  # who goes on from it need not be who began
        write_durably(partial / MANIFEST, manifest.dumps())
        _replace(partial, place)
        sync_folder(self.folder)
        for old in committed_steps(self.folder)[: -self._keep]:
            shutil.rmtree(self._place(old))

    def last_whole(self, group: Group, note: Callable[[str], None]) -> int | None:
        """The step of the last checkpoint that is whole, the same on every rank; None if there is none.

        Partial ones are removed first, so that no file of an old rank is taken for a new one. The ranks share the hashing.
        """
        if group.is_main:
            for partial in self.folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(partial)
        while (step := self._last(group)) is not None:
            problem = self._problem(step, group)
            if problem is None:
                return step
            if group.is_main:
                place = self._place(step)
                aside = _replace(place, place.with_name(place.name + _CORRUPT))
                note(f"the checkpoint of step {step} is not used and was moved to {aside}: {problem}")
        return None

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of `step`, which is whole."""
        place = self._place(step)
        manifest = read_manifest(place)
        return Checkpoint(step, manifest.details, TensorSliceReader(place / name for name in sorted(manifest.files)))

    def _last(self, group: Group) -> int | None:
        """The last step as rank 0 sees it, which alone moves corrupt checkpoints."""
        step = int(group.broadcast_(torch.tensor([(committed_steps(self.folder) or [_NONE])[-1]], device=group.device)))
        return None if step == _NONE else step

    def _problem(self, step: int, group: Group) -> str | None:
        """Why a checkpoint must not be used, the same on every rank."""
        place, own = self._place(step), ""
        try:
            manifest = read_manifest(place)
            verify_files(place, manifest, hashes=False)
            verify_contents(place, manifest, sorted(manifest.files)[group.rank :: group.world])
        except CorruptArtifact as error:
            own = str(error)
        return next(filter(None, group.gather_texts(own)), None)

    def _place(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step:08d}{suffix}"


def _replace(source: Path, target: Path) -> Path:
    """Rename a folder to `target`, which may be there already."""
    if target.exists():
        shutil.rmtree(target)
    os.rename(source, target)
    return target

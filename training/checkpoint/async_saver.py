"""Saving a checkpoint while the training goes on, one at a time.

    every rank, at the end of a step     snapshot: write its pieces to a file (in the page cache); from a GPU, copy to the host
    every rank, in a thread              fsync and hash the file; then write its seal `rank-00000.json`: size and sha256
    rank 0, in its thread                wait for the seals of all ranks, write the manifest, rename the folder

Threads do not communicate with other ranks. Whether a rank is still saving, or has failed to, is among the flags that the ranks
exchange in each step (training.loop.rank_sync), so all act together: while one is still saving, a save that is due is put off,
and no rank waits; after a failure of any rank all stop, with that rank's message.
"""

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.checkpoint.checkpoint import Checkpoints, TrainingState
from training.checkpoint.tensor_slices import TensorSlice, write_pieces
from training.contract.errors import StoreError
from training.contract.identity.file_hashing import hash_file
from training.contract.store.manifest import FileEntry
from training.contract.system.atomic_io import free_bytes, sync_folder
from training.distributed import Group

_POLL_SECONDS = 0.02


class AsyncSaver:
    """Saves the states of one run; every rank has one, and starts the same saves."""

    def __init__(self, checkpoints: Checkpoints, group: Group) -> None:
        self._checkpoints, self._group = checkpoints, group
        self._failure = ""
        self._thread: threading.Thread | None = None
        self._sealed = threading.Event()
        self._sealed.set()

    @property
    def busy(self) -> bool:
        """Whether this rank still has something to do for the last save."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def start(self, step: int, state: TrainingState, facts: dict[str, Any]) -> None:
        """Begin to save; once this returns, `state` and `facts` may change. A failure is kept for `check_saved`."""
        assert not self.busy, f"step {step}: the save before is still under way"
        pieces = state.pieces(self._group.is_main)
        if self._group.device.type == "cpu":
            with self._noted(step):
                write_pieces(pieces, self._file(step))
            pieces = []
        else:
            pieces = [TensorSlice(piece.name, piece.first, piece.shape, piece.rows.cpu()) for piece in pieces]
        self._sealed.clear()
        # A daemon, so that a process that fails does not wait for it: rank 0's may be waiting for a rank that is gone.
        self._thread = threading.Thread(target=self._run, args=(step, pieces, copy.deepcopy(facts)), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last save is committed; every rank calls it. Raises StoreError on every rank if one failed."""
        self._sealed.wait()
        self.check_saved()
        if self._thread is not None:
            self._thread.join()
        self.check_saved()

    def check_saved(self) -> None:
        """Raise StoreError on every rank if the last save failed on one; every rank calls it."""
        if failures := list(filter(None, self._group.gather_texts(self._failure))):
            raise StoreError("; ".join(failures))

    def _run(self, step: int, pieces: list[TensorSlice], facts: dict[str, Any]) -> None:
        with self._noted(step):
            if pieces:
                write_pieces(pieces, self._file(step))
            if not self.failed:
                _seal(self._file(step))
        self._sealed.set()  # or failed, which is noted
        if self._group.is_main and not self.failed:
            with self._noted(step):
                self._checkpoints.commit(step, self._sealed_files(step), facts)

    def _sealed_files(self, step: int) -> dict[str, FileEntry]:
        """The files of all ranks, once there are as many."""
        folder = self._checkpoints.partial(step)
        seals = [folder / f"{_name(rank)}.json" for rank in range(self._group.world)]
        for seal in seals:
            while not seal.exists():
                time.sleep(_POLL_SECONDS)
        entries = {f"{seal.stem}.safetensors": FileEntry.model_validate_json(seal.read_bytes()) for seal in seals}
        for seal in seals:
            seal.unlink()
        return entries

    def _file(self, step: int) -> Path:
        return self._checkpoints.partial(step) / f"{_name(self._group.rank)}.safetensors"

    @contextlib.contextmanager
    def _noted(self, step: int) -> Iterator[None]:
        """Keep the message of a failure, whatever it is, until `check_saved` raises it on all ranks."""
        try:
            yield
        except Exception as error:
            folder = self._checkpoints.folder
            self._failure = (
                f"rank {self._group.rank} cannot save the checkpoint of step {step} in {folder} "
                f"({free_bytes(folder):,} bytes free): {error!r}; make room and run again: the work goes on from the "
                "last whole checkpoint, or from the beginning where there is none"
            )


def _seal(file: Path) -> None:
    """Flush `file` to the disk, and write its size and sha256 beside it."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
    sync_folder(file.parent)
    entry = FileEntry(bytes=file.stat().st_size, sha256=hash_file(file))
    unsealed = file.with_suffix(".unsealed")
    unsealed.write_text(entry.model_dump_json(), encoding="utf-8")
    # Last, since rank 0 may rename the folder once it sees the seal; not fsynced, since the manifest replaces it.
    os.replace(unsealed, file.with_suffix(".json"))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"

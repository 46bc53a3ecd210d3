"""Save checkpoints during the training, one at a time.

    every rank, at the end of a step     snapshot: write its slices to a file (in the page cache); from a GPU, copy to the host
    every rank, in a thread              fsync and hash the file; then write its seal `rank-00000.json`: size and sha256
    rank 0, in its thread                wait for the seals of all ranks, write the manifest, rename the folder

Threads do not communicate with other ranks. The ranks exchange their `saving` and `failed` flags in each step
(training.loop.rank_sync), so all ranks act together. While one is still saving, a due save is postponed and no rank waits.
After a failure on any rank, all ranks stop with its message.
"""

import contextlib
import copy
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from training.checkpoint.checkpoint import Checkpoints, TrainingState
from training.checkpoint.tensor_slices import TensorSlice, write_pieces
from training.contract.config.json_object import JsonObject
from training.contract.errors import StoreError
from training.contract.identity.file_hashing import hash_file
from training.contract.store.manifest import FileEntry
from training.contract.system.atomic_io import free_bytes, sync_folder
from training.distributed import Group

_POLL_SECONDS = 0.02


class AsyncSaver:
    """Saves the states of one run. Every rank has one and starts the same saves."""

    def __init__(self, checkpoints: Checkpoints, group: Group) -> None:
        self._checkpoints, self._group = checkpoints, group
        self._failure = ""
        self._thread: threading.Thread | None = None
        self._sealed = threading.Event()
        self._sealed.set()

    @property
    def busy(self) -> bool:
        """Whether this rank is still saving."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def start(self, step: int, state: TrainingState, facts: JsonObject) -> None:
        """Start a save. `state` and `facts` may change after the return. `check_saved` raises the error of a failure."""
        assert not self.busy, f"step {step}: the previous save is not finished"
        pieces = state.pieces(self._group.is_main)
        if self._group.device.type == "cpu":
            with self._keeping_failure(step):
                write_pieces(pieces, self._file(step))
            pieces = []
        else:
            pieces = [TensorSlice(piece.name, piece.first, piece.shape, piece.rows.cpu()) for piece in pieces]
        self._sealed.clear()
        # A daemon, so that a failing process does not wait for it: rank 0's thread may wait for a rank that has ended.
        self._thread = threading.Thread(target=self._run, args=(step, pieces, copy.deepcopy(facts)), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last save is committed; every rank calls this. Raises StoreError on every rank if one failed."""
        self._sealed.wait()
        self.check_saved()
        if self._thread is not None:
            self._thread.join()
        self.check_saved()

    def check_saved(self) -> None:
        """Raise StoreError on every rank if the last save failed on any; every rank calls this."""
        if failures := list(filter(None, self._group.gather_texts(self._failure))):
            raise StoreError("; ".join(failures), "checkpoint-not-saved")

    def _run(self, step: int, pieces: list[TensorSlice], facts: JsonObject) -> None:
        with self._keeping_failure(step):
            if pieces:
                write_pieces(pieces, self._file(step))
            if not self.failed:
                _seal(self._file(step))
        self._sealed.set()  # also after a failure, because `finish` waits for it
        if self._group.is_main and not self.failed:
            with self._keeping_failure(step):
                self._checkpoints.commit(step, self._wait_for_seals(step), facts)

    def _wait_for_seals(self, step: int) -> dict[str, FileEntry]:
        """Wait for the seals of all ranks. Return the sizes and hashes of their files, and remove the seals."""
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
    def _keeping_failure(self, step: int) -> Iterator[None]:
        """Keep the message of any exception until `check_saved` raises it on all ranks."""
        try:
            yield
        except Exception as error:
            folder = self._checkpoints.folder
            self._failure = (
                f"rank {self._group.rank} cannot save the checkpoint of step {step} in {folder} "
                f"({free_bytes(folder):,} bytes free): {error!r}; free space and run again: the run resumes from the "
                "last intact checkpoint, or starts again if there is none"
            )


def _seal(file: Path) -> None:
    """Flush `file` to disk, and write its size and sha256 beside it."""
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
    sync_folder(file.parent)
    entry = FileEntry(bytes=file.stat().st_size, sha256=hash_file(file))
    unsealed = file.with_suffix(".unsealed")
    unsealed.write_text(entry.model_dump_json(), encoding="utf-8")
    # Last, because rank 0 may rename the folder when it sees the seal. No fsync, because the manifest replaces the seal.
    os.replace(unsealed, file.with_suffix(".json"))


def _name(rank: int) -> str:
    return f"rank-{rank:05d}"

"""The order of a rank's operations on a checkpoint's folder. Rank 0 renames the folder as soon as all seals exist."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.training.checkpoint.test_checkpoint import JOB, Toy
from tests.training.runs import losses, settings, told, tune
from training.checkpoint.async_saver import AsyncSaver, _seal
from training.checkpoint.checkpoint import Checkpoints
from training.contract.identity.file_hashing import hash_files
from training.distributed import ALONE

TOUCHED: list[tuple[str, str]] = []
WATCHED: set[str] = set()


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Record opens and renames in watched folders. This is an audit hook, and Python never removes these."""
    if WATCHED and event in ("open", "os.rename"):
        path = str(arguments[1] if event == "os.rename" else arguments[0])
        if any(path == folder or path.startswith(f"{folder}/") for folder in WATCHED):
            TOUCHED.append((event, path))


def test_seal_renames_its_file_last(tmp_path: Path):
    """Opening the folder afterwards, to sync it, would fail if rank 0 has renamed it."""
    file = tmp_path / "rank-00001.safetensors"
    file.write_bytes(b"pieces")
    sys.addaudithook(note)
    WATCHED.add(str(tmp_path))
    try:
        _seal(file)
    finally:
        WATCHED.clear()
    seal = file.with_suffix(".json")
    assert TOUCHED[-1] == ("os.rename", str(seal))
    assert ("open", str(tmp_path)) in TOUCHED  # the folder was synced before
    assert json.loads(seal.read_text()) == {"bytes": 6, "sha256": hash_files([file])[0]}


def test_save_syncs_before_and_after_each_rename(tmp_path: Path):
    """Only synced data survives a power cut. The test records the order of calls in the saver's thread."""
    called: list[str] = []

    def note_call(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function in (os.fsync, os.replace, os.rename):
            called.append(function.__name__)

    saver = AsyncSaver(Checkpoints(tmp_path, JOB), ALONE)
    threading.setprofile(note_call)
    try:
        saver.start(5, Toy(5).state, {})
    finally:
        threading.setprofile(None)
    saver.finish()
    pieces_and_folder_then_seal = ["fsync", "fsync", "replace"]
    manifest_then_its_name = ["fsync", "replace", "fsync"]
    assert called == pieces_and_folder_then_seal + manifest_then_its_name + ["rename", "fsync"]


def test_trainer_with_slow_save_still_saves_the_last_step(tiny_inputs: Any, monkeypatch: pytest.MonkeyPatch):
    """The save of step 2 ends after the event of step 6, the last one. So the save of step 4 is postponed."""
    job = tiny_inputs.job("policy", settings(max_steps=6), checkpoint_every=2, keep_checkpoints=9)

    def slow(file: Path) -> None:
        while len(losses(job)) < 6:
            time.sleep(0.01)
        _seal(file)

    monkeypatch.setattr("training.checkpoint.async_saver._seal", slow)
    tune(job)
    assert {place.name for place in job.checkpoints.glob("*/*")} == {"step-00000002", "step-00000006"}
    tune(job)
    assert "resumed from the checkpoint of step 6" in [e["text"] for e in told(job, "note")]

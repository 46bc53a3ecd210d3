"""What a rank does to a checkpoint's folder, and in which order: as soon as all seals are there, rank 0 renames it."""

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
    """An audit hook, which Python never takes away again: it notes who opens or renames what lies in a watched folder."""
    if WATCHED and event in ("open", "os.rename"):
        path = str(arguments[1] if event == "os.rename" else arguments[0])
        if any(path == folder or path.startswith(f"{folder}/") for folder in WATCHED):
            TOUCHED.append((event, path))


def test_a_seal_is_the_last_touch_of_the_folder(tmp_path: Path):
    """Opening the folder once more, to sync it, fails where rank 0 was quick."""
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
    assert ("open", str(tmp_path)) in TOUCHED  # the folder was synced, before
    assert json.loads(seal.read_text()) == {"bytes": 6, "sha256": hash_files([file])[0]}


def test_whatever_a_save_renames_is_on_the_disk_before_and_its_name_after(tmp_path: Path):
    """By the order of calls in its thread. Across a power cut only what was synced counts."""
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


def test_what_is_due_with_the_last_step_is_saved_however_long_the_save_before_takes(
    tiny_world: Any, monkeypatch: pytest.MonkeyPatch
):
    """That of step 2 is not done before step 6, the last one, is told; that of step 4 is put off."""
    job = tiny_world.job("policy", settings(max_steps=6), checkpoint_every=2, keep_checkpoints=9)

    def slow(file: Path) -> None:
        while len(losses(job)) < 6:
            time.sleep(0.01)
        _seal(file)

    monkeypatch.setattr("training.checkpoint.async_saver._seal", slow)
    tune(job)
    assert {place.name for place in job.checkpoints.glob("*/*")} == {"step-00000002", "step-00000006"}
    tune(job)
    assert "resumed from the checkpoint of step 6" in [e["text"] for e in told(job, "note")]

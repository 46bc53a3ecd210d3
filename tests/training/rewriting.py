"""Helpers to rewrite a base model while jobs read it.

`Place` describes jobs like the launching side: with stamps of the files of artifacts and base. `Hand` follows the events of a
job and acts once, at a given event.
"""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests import factories
from tests.training.runs import settings
from tests.training.tiny_inputs import TinyInputs
from training.contract.config.recipe import Compute
from training.contract.config.training import SupervisedTuning
from training.contract.identity.file_stamps import artifact_stamps, model_stamps
from training.contract.identity.model_identity import weights_identity
from training.contract.protocol.events import Event, Follower
from training.contract.protocol.job import Input, Job, JobKind
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

SETTINGS: dict[JobKind, dict[str, Any]] = {
    "policy": settings(max_steps=60),
    "reference": {"dtype": "float32"},
    "sft": SupervisedTuning(epochs=4, batch_size=8).model_dump(mode="json"),
    "evaluation": {"samples": 2, "max_new_tokens": 4, "loss": {"beta": 0.5}},
    "merge": {},
}
_READ: dict[JobKind, tuple[str, ...]] = {
    "policy": ("tokenized_pairs", "reference_logprobs", "reference_model"),
    "reference": ("tokenized_pairs", "reference_model"),
    "sft": ("tokenized_pairs", "base_model"),
    "evaluation": ("tokenized_pairs", "reference_logprobs", "reference_model", "policy"),
    "merge": ("policy", "reference_model"),
}


@dataclass(frozen=True)
class Place:
    """A store with the pairs and the table of tiny inputs, and the base model beside it."""

    root: Path

    @classmethod
    def of(cls, inputs: TinyInputs, root: Path) -> "Place":
        shutil.copytree(inputs.model, root / "base")
        place = cls(root)
        place.publish("tokenized_pairs", inputs.pairs, "a" * 64)
        place.publish("reference_logprobs", inputs.reference, "b" * 64)
        return place

    @property
    def store(self) -> Store:
        return Store(self.root / "store")

    @property
    def weights(self) -> Path:
        return self.root / "base" / "model.safetensors"

    def publish(self, kind: str, folder: Path, fingerprint: str) -> None:
        how = Derivation(kind=kind, code_version="1", inputs={}, settings={})
        with self.store.staging() as staging:
            shutil.copytree(folder, staging, dirs_exist_ok=True)
            (staging / "manifest.json").unlink(missing_ok=True)
            self.store.publish(staging, how, JobResult(fingerprint))

    def copied_to(self, root: Path) -> "Place":
        shutil.copytree(self.root, root)
        return Place(root)

    def job(self, kind: JobKind, changes: dict[str, Any] | None = None, **compute: Any) -> Job:
        base = self.root / "base"
        inputs = {"reference_model": self._base("reference_model"), "base_model": self._base("base_model")}
        for name in ("tokenized_pairs", "reference_logprobs", "policy"):
            for fingerprint in self.store.fingerprints(name):
                folder = self.store.folder(name, fingerprint)
                inputs[name] = Input(kind=name, fingerprint=fingerprint, folder=folder)
        read = {name: inputs[name] for name in _READ[kind]}
        job = factories.job(
            kind,
            self.root,
            SETTINGS[kind] | (changes or {}),
            read,
            Compute.model_validate({"device": "cpu", "processes_per_node": 2, **compute}),
            folder=f"jobs/{kind}",
            stamps={n: (model_stamps if i.folder == base else artifact_stamps)(i.folder) for n, i in read.items()},
        )
        job.write()
        return job

    def _base(self, kind: str) -> Input:
        folder = self.root / "base"
        return Input(kind=kind, fingerprint=weights_identity(folder).fingerprint, folder=folder)


def made(job: Job) -> Artifact[Any] | None:
    return Store(job.store).find(job.artifact, job.derivation.key)


def write_in_place(file: Path, content: bytes) -> None:
    """Rewrite a file like `cp`: truncated first, so a memory map of it loses its pages, also changed private ones."""
    with open(file, "r+b") as opened:
        opened.truncate()
        opened.write(content)


def other_weights(file: Path) -> bytes:
    """Return the file of a model of the same shape with weights that are two percent larger."""
    tensors = {name: tensor * 1.02 for name, tensor in load_file(file).items()}
    save_file(tensors, aside := file.with_name("aside"), metadata={"format": "pt"})
    content = aside.read_bytes()
    aside.unlink()
    return content


class Hand(threading.Thread):
    """Calls `act` once, at the first event of `job` for which `when` is true."""

    def __init__(self, job: Job, when: Callable[[Event], bool], act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._follower, self._when, self._act = Follower(job.events), when, act
        self._is_over = threading.Event()
        self.acted = False

    def run(self) -> None:
        while not self._is_over.is_set() and not self.acted:
            if any(map(self._when, self._follower.new())):
                self._act()
                self.acted = True
            time.sleep(0.001)

    def __enter__(self) -> "Hand":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()


def phase(begins: str) -> Callable[[Event], bool]:
    return lambda event: event["event"] == "phase" and event["phase"].startswith(begins)


def step(number: int) -> Callable[[Event], bool]:
    return lambda event: event["event"] == "step" and event["step"] == number

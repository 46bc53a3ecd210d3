"""A tiny set of inputs for training: a random Llama, random pairs, and reference log-probs by plain transformers."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedModel

from tests import factories
from training.contract.config.recipe import Compute
from training.contract.identity.fingerprint import KEY_BYTES
from training.contract.protocol.job import Input, Job, JobKind
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.pair_dataset import PAIRS_FILE, PAIRS_SCHEMA, SIDES

VOCABULARY = 64
Examples = list[dict[str, Any]]


@dataclass(frozen=True)
class TinyInputs:
    """Folders of a job's input artifacts, and their pairs."""

    root: Path
    examples: Examples

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def pairs(self) -> Path:
        return self.root / "pairs"

    @property
    def reference(self) -> Path:
        return self.root / "reference"

    def copied_to(self, root: Path) -> "TinyInputs":
        """Return a copy that may be changed."""
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        return TinyInputs(root, copy.deepcopy(self.examples))

    def job(self, kind: JobKind, settings: dict[str, Any], name: str = "job", **compute: Any) -> Job:
        folders = {
            "tokenized_pairs": self.pairs,
            "reference_logprobs": self.reference,
            "reference_model": self.model,
            "base_model": self.model,
        }
        names = ("tokenized_pairs", "base_model") if kind == "sft" else tuple(n for n in folders if n != "base_model")
        job = factories.job(
            kind,
            self.root / name,
            settings,
            {name: Input(kind=name, fingerprint="0" * 64, folder=folders[name]) for name in names},
            Compute.model_validate({"device": "cpu", **compute}),
            folder="folder",
        )
        job.staging.mkdir(parents=True, exist_ok=True)
        job.write()
        return job

    @staticmethod
    def plain_logprob(model: PreTrainedModel, example: dict[str, Any], side: str) -> torch.Tensor:
        """Return the summed log-prob of the trained tokens: one unpadded sequence, log-softmax over all logits."""
        ids, mask = torch.tensor(example[f"{side}_ids"]), torch.tensor(example[f"{side}_mask"])
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        return (logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()

    def split(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.examples if e["split"] == name]


def build_tiny_inputs(
    root: Path,
    train: int = 38,
    validation: int = 7,
    attention_dropout: float = 0.0,
    tied: bool = True,
    arrange: Callable[[Examples], Examples] = list,
) -> TinyInputs:
    """Write tiny inputs into `root`. `arrange` may change or reorder its examples before."""
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "initializer_range": 0.2}
    model = factories.llama(**shape, attention_dropout=attention_dropout, tie_word_embeddings=tied)
    examples = arrange(_random_examples(train, validation))
    inputs = TinyInputs(root, examples)
    model.save_pretrained(inputs.model)
    _write_pairs(inputs)
    write_reference(inputs, model)
    return inputs


def _random_examples(train: int, validation: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    examples = []
    for row in range(train + validation):
        prompt = random.integers(VOCABULARY, size=random.integers(2, 12)).tolist()
        example: dict[str, Any] = {"row": 100 + row, "split": "train" if row < train else "validation"}
        example["prompt_length"] = len(prompt)
        for side in ("chosen", "rejected"):
            response = random.integers(VOCABULARY, size=random.integers(1, 14)).tolist()
            example[f"{side}_ids"] = prompt + response
            example[f"{side}_mask"] = [False] * len(prompt) + [True] * len(response)
            example[f"{side}_key"] = random.bytes(KEY_BYTES)
        examples.append(example)
    return examples


def _write_pairs(inputs: TinyInputs) -> None:
    words = [f"w{number}" for number in range(VOCABULARY)]
    factories.word_tokenizer(words).save_pretrained(inputs.pairs / "tokenizer")
    table = pa.Table.from_pylist(inputs.examples, schema=PAIRS_SCHEMA)
    with pa.OSFile(str(inputs.pairs / PAIRS_FILE), "wb") as file, pa.ipc.new_stream(file, PAIRS_SCHEMA) as stream:
        stream.write_table(table)


def write_reference(inputs: TinyInputs, model: PreTrainedModel) -> None:
    """Write the table of reference log-probs of `model`, computed by plain transformers in its dtype."""
    inputs.reference.mkdir(exist_ok=True)
    with torch.no_grad():
        logprobs = [[float(inputs.plain_logprob(model, each, side)) for side in SIDES] for each in inputs.examples]
    tokens = [[sum(each[f"{side}_mask"]) for side in SIDES] for each in inputs.examples]
    dtype = str(model.dtype).removeprefix("torch.")
    LogProbTable(np.array(logprobs), np.array(tokens, dtype=np.int32), "plain", dtype).write(inputs.reference)

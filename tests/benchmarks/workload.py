"""The workload of the training benchmark, made with the project's own jobs: 64 real pairs, a random Llama, eight steps.

    folder/rows.jsonl     every 37th row of the data, the first 64 of them
    folder/base           a random Llama, untied, with the tokenizer and a ChatML template
    folder/order.json     the pairs as messages, in the order in which the policy job takes them: the peer takes the same
    folder/jobs/...       jobs that are ready to be run: reference_logprobs, policy

What is not measured (reading, tokenizing) happens here; what is measured, in a process of its own (measured.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from training import main
from training.contract.fingerprint import fingerprint
from training.contract.job import Input, Job, JobKind
from training.contract.recipe import Compute, Reference, Tokenization, Training
from training.contract.store import Artifact, Store
from training.contract.weights import weights_fingerprint, weights_identity
from training.data.batches import Pairs
from training.data.packing import Batches, train_items
from training.distributed import group
from training.objective import pair_tokens

PAIRS, EVERY, BATCH, BETA, RATE, CLIP, MAX_LENGTH = 64, 37, 8, 0.1, 1e-4, 1.0, 1024
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' %}{% generation %}{{- m['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- m['content'] + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Workload:
    """Where everything is."""

    folder: Path

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def order(self) -> Path:
        return self.folder / "order.json"

    def run(self, job: Job) -> Artifact:
        """Do `job` here and now, and give what it made."""
        with group("cpu") as alone:
            main.make(job, alone)
        made = Store(job.store).find(job.artifact, job.derivation.key)
        assert made is not None
        return made

    def job(
        self,
        kind: JobKind,
        artifact: str,
        inputs: dict[str, Artifact | Path],
        settings: dict[str, Any],
        locations: dict[str, Any] | None = None,
    ) -> Job:
        job = Job(
            kind=kind,
            artifact=artifact,
            code_version="1",
            inputs={name: _as_input(name, given) for name, given in inputs.items()},
            settings=settings,
            locations=locations or {},
            compute=Compute(device="cpu", checkpoint_every=1000, evaluate_every=1000),
            recipe={},
            store=self.folder / "store",
            folder=self.folder / "jobs" / artifact,
        )
        job.write()
        return job


def prepare(data: Path, folder: Path) -> tuple[Workload, Artifact]:
    """The workload in `folder`, from the rows and the tokenizer in `data`, and its tokenized pairs."""
    workload = Workload(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (data / "preferences-real.jsonl").read_bytes().split(b"\n")[::EVERY][:PAIRS]
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    _write_base(data / "tokenizers" / "mistral-v3", workload.base)
    where = {"sources": [{"path": str(folder / "rows.jsonl"), "format": "auto"}]}
    read = {"formats": ["auto"], "validation_fraction": 0.0}
    raw = workload.run(workload.job("preferences", "raw_preferences", {}, read, where))
    rules = Tokenization(max_length=MAX_LENGTH, over_length="error").model_dump(exclude={"tokenizer", "chat_template"})
    where = {"tokenizer": str(workload.base), "revision": None, "chat_template": None}
    spec = workload.run(workload.job("tokenizer", "tokenization_spec", {}, rules, where))
    inputs: dict[str, Artifact | Path] = {"raw_preferences": raw, "tokenization_spec": spec}
    pairs = workload.run(workload.job("pairs", "tokenized_pairs", inputs, {}))
    _write_order(workload, pairs)
    return workload, pairs


def training_settings(micro_tokens: int = 16384) -> Training:
    fields = {
        "loss": {"beta": BETA},
        "batch_size": BATCH,
        "micro_tokens": micro_tokens,
        "optimizer": {"learning_rate": RATE},
        "schedule": {"type": "constant", "warmup_ratio": 0.0},
        "max_grad_norm": CLIP,
    }
    return Training.model_validate(fields)


def batches(pairs: Pairs, settings: Training) -> Batches:
    return Batches(train_items(pairs), pair_tokens(pairs), settings.batch_size, settings.micro_tokens, settings.seed)


def reference_job(workload: Workload, pairs: Artifact) -> Job:
    settings = {"dtype": Reference(model="").dtype}
    inputs: dict[str, Artifact | Path] = {"tokenized_pairs": pairs, "reference_model": workload.base}
    return workload.job("reference", "reference_logprobs", inputs, settings)


def policy_job(workload: Workload, pairs: Artifact, reference: Artifact, micro_tokens: int) -> Job:
    inputs: dict[str, Artifact | Path] = {
        "tokenized_pairs": pairs,
        "reference_model": workload.base,
        "reference_logprobs": reference,
        "training_spec": workload.base,
    }
    return workload.job("policy", "policy", inputs, training_settings(micro_tokens).model_dump(mode="json"))


def _write_base(tokenizer_folder: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_order(workload: Workload, artifact: Artifact) -> None:
    pairs = Pairs.open(artifact.folder)
    assert len(pairs) == PAIRS, f"{len(pairs)} of {PAIRS} pairs were read"
    found = batches(pairs, training_settings())
    order = [int(pairs.rows[item]) for step in range(1, found.steps_per_epoch + 1) for item in found.batch(step)]
    lines = (workload.folder / "rows.jsonl").read_bytes().split(b"\n")
    workload.order.write_text(json.dumps([json.loads(lines[row]) for row in order]), encoding="utf-8")


def _as_input(name: str, given: Artifact | Path) -> Input:
    if isinstance(given, Artifact):
        return Input(kind=given.manifest.kind, fingerprint=given.fingerprint, folder=given.folder)
    weights = weights_fingerprint(weights_identity(given))
    return Input(kind=name, fingerprint=fingerprint(name, {"weights": weights}), folder=given)

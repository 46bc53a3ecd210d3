"""The workload of the training benchmark, made with the project's own jobs: 64 real pairs, a random Llama, eight steps.

    folder/rows.jsonl     64 rows of the data, evenly taken
    folder/base           a random Llama, untied, with the tokenizer and a ChatML template
    folder/order.json     the pairs as messages, in the order of the policy job: the peer takes the same
    folder/jobs/...       jobs that are ready to be run: reference_logprobs, policy

Reading and tokenizing happen here and are not measured. measured.py measures the jobs, in a process of its own.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.setting import BATCH, BETA, CLIP, MAX_LENGTH, RATE
from tests import factories
from tests.training.job_runner import JobRunner
from training.contract.config.fields import Dtype
from training.contract.config.recipe import Compute, Reference, Tokenization
from training.contract.config.training import Training
from training.contract.identity.fingerprint import fingerprint, sequence_key
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store
from training.data.tokenization.batch_sampler import BatchSampler, train_items
from training.data.tokenization.pair_dataset import PAIRS_FILE, PAIRS_SCHEMA, SIDES, Pairs
from training.loop.objective import pair_tokens

PAIRS = 64
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' %}{% generation %}{{- m['content'] + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}"
    "{%- else %}{{- m['content'] + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


ON_CPU = Compute(device="cpu", checkpoint_every=1000, evaluate_every=1000)
DTYPE = Reference(model="any").dtype


@dataclass(frozen=True)
class Workload(JobRunner):
    """The folders of the workload, and how to run its jobs."""

    compute: Compute = ON_CPU

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def order(self) -> Path:
        return self.folder / "order.json"


Rows = Callable[[Path], list[Any]]


def multi_turn_rows(data: Path) -> list[Any]:
    """Return long conversations of many sources: most of a sequence is its prompt."""
    lines = (data / "preferences-real.jsonl").read_bytes().split(b"\n")[::37]
    return [json.loads(line) for line in lines[:PAIRS]]


def short_rows(data: Path) -> list[Any]:
    """Return short instructions with short answers: little to share and little to pad."""
    rows = json.loads((data / "preferences" / "rasbt.instruction-data-with-preference.json").read_bytes())
    return [row for row in rows[::16] if row["chosen"] != row["rejected"]][:PAIRS]


def prepare(data: Path, folder: Path, rows: Rows = multi_turn_rows) -> tuple[Workload, Artifact[Any]]:
    """Write the workload to `folder`, from `rows` and the tokenizer in `data`, with its tokenized pairs."""
    workload = Workload(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(data)), encoding="utf-8")
    _write_base(data / "tokenizers" / "mistral-v3", workload.base)
    raw = workload.read(folder / "rows.jsonl", 0.0)
    rules = Tokenization(max_length=MAX_LENGTH, over_length="error").model_dump(exclude={"tokenizer", "chat_template"})
    pairs = workload.tokenize(raw, workload.base, rules)
    _write_order(workload, raw, pairs)
    return workload, pairs


def training_settings(micro_tokens: int = 16384, **changes: Any) -> Training:
    fields = {
        "loss": {"beta": BETA},
        "batch_size": BATCH,
        "micro_tokens": micro_tokens,
        "optimizer": {"learning_rate": RATE},
        "schedule": {"type": "constant", "warmup_ratio": 0.0},
        "max_grad_norm": CLIP,
    }
    return Training.model_validate(fields | changes)


def batches(pairs: Pairs, settings: Training) -> BatchSampler:
    return BatchSampler(
        train_items(pairs), pair_tokens(pairs), settings.batch_size, settings.micro_tokens, settings.seed
    )


def reference_job(workload: Workload, pairs: Artifact[Any], dtype: Dtype = DTYPE) -> Job:
    settings = {"dtype": dtype}
    inputs: dict[str, Artifact[Any] | Path] = {"tokenized_pairs": pairs, "reference_model": workload.base}
    return workload.job("reference", "reference_logprobs", inputs, settings)


def policy_job(
    workload: Workload, pairs: Artifact[Any], reference: Artifact[Any], micro_tokens: int, **changes: Any
) -> Job:
    inputs: dict[str, Artifact[Any] | Path] = {
        "tokenized_pairs": pairs,
        "reference_model": workload.base,
        "reference_logprobs": reference,
        "training_spec": workload.base,
    }
    return workload.job("policy", "policy", inputs, training_settings(micro_tokens, **changes).model_dump(mode="json"))


def publish_pairs(
    made: Sequence[tuple[list[int], list[int], list[int]]], store: Store, name: dict[str, Any]
) -> Artifact[Any]:
    """Publish made-up pairs of prompt, chosen and rejected tokens; `name` distinguishes them from others."""
    rows = []
    for row, (prompt, *responses) in enumerate(made):
        pair = {"row": row, "split": "train", "prompt_length": len(prompt)}
        for side, response in zip(SIDES, responses, strict=True):
            ids, mask = prompt + response, [False] * len(prompt) + [True] * len(response)
            pair |= {f"{side}_ids": ids, f"{side}_mask": mask, f"{side}_key": sequence_key(ids, mask)}
        rows.append(pair)
    with store.staging() as staging:
        (staging / "tokenizer").mkdir()
        (staging / "tokenizer" / "tokenizer_config.json").write_text("{}")
        with pa.OSFile(str(staging / PAIRS_FILE), "wb") as file, pa.ipc.new_stream(file, PAIRS_SCHEMA) as stream:
            stream.write_table(pa.Table.from_pylist(rows, schema=PAIRS_SCHEMA))
        way = Derivation(kind="tokenized_pairs", code_version="1", inputs={}, settings=name)
        return store.publish(staging, way, JobResult(fingerprint("tokenized_pairs", name)))


def _write_base(tokenizer_folder: Path, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = CHATML
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    model = factories.llama(**sizes, **special, max_position_embeddings=2048, tie_word_embeddings=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_order(workload: Workload, raw: Artifact[Any], artifact: Artifact[Any]) -> None:
    pairs = Pairs.open(artifact.folder)
    assert len(pairs) == PAIRS, f"{len(pairs)} of {PAIRS} pairs were read"
    found = batches(pairs, training_settings())
    order = [int(pairs.rows[item]) for step in range(1, found.steps_per_epoch + 1) for item in found.batch(step)]
    rows = pq.read_table(raw.file("preferences.parquet"), columns=["prompt", "chosen", "rejected"]).to_pylist()
    workload.order.write_text(json.dumps([rows[row] for row in order]), encoding="utf-8")

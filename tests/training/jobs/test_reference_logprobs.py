"""The reference job on real data, from JSONL to the table, compared with float64 values by plain transformers."""

import dataclasses
import hashlib
import json
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests import factories
from tests.training.job_runner import JobRunner
from tests.training.model.architectures import GPT2, build
from tests.training.runs import published
from training.contract.config.recipe import Parallel
from training.contract.errors import CorruptArtifact, ModelError, TemplateError, TrainingError
from training.contract.protocol.events import read_events
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.logprob_table import TABLE_FILE, LogProbTable
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import PAIRS_FILE, PAIRS_SCHEMA, Pairs
from training.jobs import reference_logprobs
from training.model.logprobs.batch_scoring import Prompts, shared_batches
from training.scoring import cached_sequences

TOLERANCE = 1e-3  # nats per sequence
MAX_LENGTH = 1024


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The rows of the published values that are short enough, as artifacts, and these values."""

    job_runner: Any
    data: Path
    rows: list[dict[str, Any]]
    raw: Artifact[Any]

    @property
    def model(self) -> Path:
        return self.data / "models" / "tiny-chat"

    def pairs(self, train_on: str = "last_response") -> Artifact[Any]:
        rules = {"train_on": train_on, "max_length": MAX_LENGTH, "over_length": "error", "template_kwargs": {}}
        return self.job_runner.tokenize(self.raw, self.model, rules)

    def job(self, of: Artifact[Any] | Path) -> Job:
        return self.job_runner.job(
            "reference",
            "reference_logprobs",
            {"tokenized_pairs": of, "reference_model": self.model},
            {"dtype": "float32"},
        )


def fits(row: dict[str, Any]) -> bool:
    return all(row[side]["n_total"] <= MAX_LENGTH for side in ("chosen", "rejected"))


@pytest.fixture(scope="module")
def oracle(shared_data: Path, tmp_path_factory) -> Oracle:
    root = tmp_path_factory.mktemp("oracle")
    rows = [row for row in json.loads((shared_data / "tiny-chat-logps.json").read_text())["rows"] if fits(row)]
    lines = (shared_data / "preferences-real.jsonl").read_bytes().split(b"\n")
    (root / "rows.jsonl").write_bytes(b"".join(lines[row["row"]] + b"\n" for row in rows))
    job_runner = JobRunner(root)
    raw = job_runner.read(root / "rows.jsonl", 0.3)
    assert raw.details.counts.pairs == len(rows) > 300
    return Oracle(job_runner, shared_data, rows, raw)


@pytest.fixture(scope="module")
def last_response(oracle: Oracle) -> tuple[Artifact[Any], Artifact[Any]]:
    of = oracle.pairs()
    return of, oracle.job_runner.run(oracle.job(of))


def worst_difference(
    oracle: Oracle, table: Artifact[Any], field: str, which: Callable[[dict[str, Any]], bool]
) -> float:
    """Return the greatest difference among the rows for which `which` is true, in nats per sequence."""
    found = LogProbTable.read(table.folder, len(oracle.rows))
    return max(
        abs(found.logprobs_P2[n, at] - oracle.rows[n][side][field])
        for n in (n for n, row in enumerate(oracle.rows) if which(row))
        for at, side in enumerate(("chosen", "rejected"))
    )


@pytest.mark.shared
@pytest.mark.slow
def test_table_fingerprint_is_the_digest_of_weights_rule_and_columns(oracle, last_response):
    """The digest by hand: the kind, then each item after its length. Another formula would retrain every policy."""
    _, table = last_response
    found = LogProbTable.read(table.folder, len(oracle.rows))
    weights = table.derivation.inputs["reference_model"].fingerprint
    digest = hashlib.sha256(b'[1,"reference_logprobs"]')
    columns = [of_side[:, side] for side in (0, 1) for of_side in (found.logprobs_P2, found.tokens_P2)]
    for item in (weights.encode(), found.rule.encode(), *(column.tobytes() for column in columns)):
        digest.update(struct.pack(">Q", len(item)) + item)
    assert table.fingerprint == digest.hexdigest()


@pytest.mark.shared
@pytest.mark.slow
def test_table_matches_float64_values(oracle, last_response):
    _, table = last_response
    worst = worst_difference(oracle, table, "suffix_logp", lambda row: True)
    assert worst < TOLERANCE
    found = LogProbTable.read(table.folder, len(oracle.rows))
    assert found.tokens_P2[:, 0].tolist() == [r["chosen"]["n_total"] - r["chosen"]["n_prompt"] for r in oracle.rows]
    assert found.tokens_P2[:, 1].tolist() == [r["rejected"]["n_total"] - r["rejected"]["n_prompt"] for r in oracle.rows]


@pytest.mark.shared
@pytest.mark.slow
def test_table_with_assistant_turns_matches_float64_values(oracle):
    meta = [json.loads(line) for line in (oracle.data / "preferences-real.meta.jsonl").read_text().splitlines()]
    table = oracle.job_runner.run(oracle.job(oracle.pairs("assistant_turns")))
    single = [meta[row["row"]]["turns"] == 1 for row in oracle.rows]
    assert sum(single) > 100
    assert worst_difference(oracle, table, "mask_logp", lambda row: meta[row["row"]]["turns"] == 1) < TOLERANCE


@pytest.mark.shared
@pytest.mark.slow
def test_reference_details_and_progress_have_the_counts(oracle, last_response):
    of, table = last_response
    events = list(read_events(oracle.job(of).events))
    places = len(oracle.rows) * 2
    assert {"sequences": places, "hits": 0, "scored": places, "pairs": places // 2, "finite": places // 2}.items() <= (
        table.details.to_json().items()
    )
    last = [e for e in events if e["event"] == "progress"][-1]
    assert last["done"] == last["total"] and last["seconds_left"] == 0
    assert table.details.tokens == sum(
        r[s]["n_total"] - r[s]["n_prompt"] for r in oracle.rows for s in ("chosen", "rejected")
    )


@pytest.mark.shared
@pytest.mark.slow
def test_reference_run_twice_takes_all_from_the_cache(oracle, last_response):
    of, table = last_response
    again = oracle.job_runner.run(oracle.job(of))
    assert (again.details.hits, again.details.scored) == (table.details.sequences, 0)
    assert again.fingerprint == table.fingerprint


SCORER = """
import sys
from pathlib import Path
import numpy as np
from training.scoring import cached_sequences
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.store import Store
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import group
from training.model.load import load_model

job, rule = Job.read(Path(sys.argv[1])), sys.argv[2]
with group("cpu") as alone:
    sequences = cached_sequences.DistinctSequences.of(Pairs.open(job.inputs["tokenized_pairs"].folder))
    model = load_model(job.inputs["reference_model"].folder, "float32", alone.device)
    missing, cache = np.arange(len(sequences)), LogprobCache(Store(job.store), rule)
    cached_sequences.COMMIT_SECONDS = 0
    cached_sequences.score_missing(model, sequences, missing, cache, alone, EventWriter(None))
"""


def start(script: str, job: Job, *arguments: str) -> "subprocess.Popen[str]":
    path = job.folder / "script.py"
    path.write_text(script)
    job.staging.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(path), str(job.path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def few(last_response: tuple[Artifact[Any], Artifact[Any]], tmp_path_factory) -> Path:
    """Return a folder with the first hundred pairs."""
    folder = tmp_path_factory.mktemp("few")
    with pa.ipc.open_stream(last_response[0].folder / PAIRS_FILE) as stream:
        write_pairs(folder, stream.read_all().slice(0, 100))
    return folder


@pytest.fixture(scope="module")
def undisturbed(oracle: Oracle, few: Path, tmp_path_factory) -> Artifact[Any]:
    return oracle.job_runner.run(copy_of(oracle.job(few), tmp_path_factory.mktemp("undisturbed")))


def write_pairs(folder: Path, table: pa.Table) -> None:
    with pa.OSFile(str(folder / PAIRS_FILE), "wb") as file, pa.ipc.new_stream(file, PAIRS_SCHEMA) as stream:
        stream.write_table(table)


def copy_of(job: Job, root: Path, parallel: Parallel = "auto") -> Job:
    """Return the same job with its own empty store."""
    compute = job.compute.model_copy(update={"parallel": parallel})
    copy = job.model_copy(update={"store": root / "store", "folder": root / "job", "compute": compute})
    copy.write()
    return copy


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_reference_on_several_ranks_gives_the_same_bits_and_disjoint_shards(
    oracle, few, undisturbed, tmp_path, forker, ranks, parallel
):
    """With sharded weights, a rank without batches left runs a padding batch."""
    job = copy_of(oracle.job(few), tmp_path, parallel)
    assert published(job, forker.run(job, ranks)).fingerprint == undisturbed.fingerprint
    folders = list((job.store / "memo").glob("*/*"))
    shards = [{**load_file(f / "index.safetensors"), **load_file(f / "tokens.safetensors")} for f in folders]
    assert len(shards) == ranks
    keys = np.concatenate([shard["keys"] for shard in shards])
    assert len(np.unique(keys, axis=0)) == len(keys) == undisturbed.details.sequences, "disjoint and complete"
    assert min(len(s["tokens"]) for s in shards) > 0.6 / ranks * undisturbed.details.tokens, "comparable parts"


@pytest.mark.shared
@pytest.mark.slow
def test_reference_killed_and_resumed_keeps_shards_and_bits(oracle, few, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    job = copy_of(oracle.job(few), tmp_path)
    rule, store = undisturbed.details.rule, Store(job.store)
    with start(SCORER, job, rule) as killed:
        while len(store.fingerprints(f"memo/{rule}")) < 3 and killed.poll() is None:
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, "it ended before it could be killed"
    kept = len(store.fingerprints(f"memo/{rule}"))
    resumed = oracle.job_runner.run(job)
    assert 0 < resumed.details.hits < resumed.details.sequences and kept >= 3
    assert resumed.fingerprint == undisturbed.fingerprint


# The tests below need no shared data: they use a random model of a few thousand parameters.


def rewrite(inputs: Any, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the pairs of tiny inputs."""
    change(inputs.examples)
    write_pairs(inputs.pairs, pa.Table.from_pylist(inputs.examples, schema=PAIRS_SCHEMA))


def tiny_job(inputs: Any, job_runner: Any, dtype: str = "float32") -> Job:
    inputs = {"tokenized_pairs": inputs.pairs, "reference_model": inputs.model}
    return job_runner.job("reference", "reference_logprobs", inputs, {"dtype": dtype})


@pytest.fixture
def job_runner(tmp_path):
    return JobRunner(tmp_path / "workshop")


def test_table_matches_plain_transformers(tiny_inputs, job_runner):
    made = job_runner.run(tiny_job(tiny_inputs, job_runner))
    found = LogProbTable.read(made.folder, len(tiny_inputs.examples))
    plain = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    np.testing.assert_allclose(found.logprobs_P2, plain.logprobs_P2, atol=1e-4)
    np.testing.assert_array_equal(found.tokens_P2, plain.tokens_P2)
    assert found.dtype == "float32"


def test_reference_with_shared_responses_scores_each_once(tiny_inputs, job_runner):
    def share(examples: list[dict[str, Any]]) -> None:
        for field in ("ids", "mask", "key"):
            for example in examples[:10]:
                example[f"chosen_{field}"] = examples[0][f"chosen_{field}"]
            examples[11][f"rejected_{field}"] = examples[0][f"chosen_{field}"]

    rewrite(tiny_inputs, share)
    made = job_runner.run(tiny_job(tiny_inputs, job_runner))
    assert made.details.sequences == made.details.scored == 2 * len(tiny_inputs.examples) - 10
    table = LogProbTable.read(made.folder, len(tiny_inputs.examples))
    assert len({*table.logprobs_P2[:10, 0], table.logprobs_P2[11, 1]}) == 1


def test_reference_with_new_pairs_scores_only_these(tiny_inputs, job_runner):
    all_pairs = list(tiny_inputs.examples)
    rewrite(tiny_inputs, lambda examples: examples.__setitem__(slice(None), all_pairs[:40]))
    first = job_runner.run(tiny_job(tiny_inputs, job_runner))
    before = LogProbTable.read(first.folder, 40)
    rewrite(tiny_inputs, lambda examples: examples.__setitem__(slice(None), all_pairs[::-1]))
    second = job_runner.run(tiny_job(tiny_inputs, job_runner))
    after = LogProbTable.read(second.folder, len(all_pairs))
    assert (second.details.hits, second.details.scored) == (80, 2 * len(all_pairs) - 80)
    assert after.logprobs_P2[::-1][:40].tolist() == before.logprobs_P2.tolist()


@pytest.mark.parametrize("change", ["dtype", "weights"])
def test_reference_with_other_dtype_or_weights_has_no_hits(tiny_inputs, job_runner, change):
    job_runner.run(tiny_job(tiny_inputs, job_runner))
    job = tiny_job(tiny_inputs, job_runner, "bfloat16" if change == "dtype" else "float32")
    if change == "weights":
        model = job.inputs["reference_model"].model_copy(update={"fingerprint": "1" * 64})
        job = job.model_copy(update={"inputs": {**job.inputs, "reference_model": model}})
    assert job_runner.run(job).details.hits == 0


def test_reference_with_corrupt_shard_scores_again_and_writes_a_note(tiny_inputs, job_runner):
    job = tiny_job(tiny_inputs, job_runner)
    first = job_runner.run(job)
    (shard,) = (job.store / "memo").glob("*/*/index.safetensors")
    content = bytearray(shard.read_bytes())
    content[-2] ^= 64
    shard.write_bytes(content)
    second = job_runner.run(job)
    assert second.details.hits == 0 and second.fingerprint == first.fingerprint
    assert any("set aside" in e["text"] for e in read_events(job.events) if e["event"] == "note")


@pytest.mark.parametrize(("token", "trained"), [(-1, False), (1, True)], ids=["a token less", "one of the prompt"])
def test_reference_with_other_mask_under_the_same_key_raises(tiny_inputs, job_runner, token: int, trained: bool):
    job_runner.run(tiny_job(tiny_inputs, job_runner))
    rewrite(tiny_inputs, lambda examples: examples[3]["chosen_mask"].__setitem__(token, trained))
    with pytest.raises(TrainingError, match=r"^1 of \d+ .*chosen response of row 103.*\[wrong-token-count\]"):
        job_runner.run(tiny_job(tiny_inputs, job_runner))


def test_reference_with_nan_weights_raises_and_stores_nothing(tiny_inputs, job_runner):
    """The embedding of the rarest token is NaN. The error must name a response with this token."""
    weights, examples = load_file(tiny_inputs.model / "model.safetensors"), tiny_inputs.examples
    having = [{token for e in examples for token in e[f"{side}_ids"][:-1]} for side in ("chosen", "rejected")]
    rare = min(having[0] & having[1], key=lambda t: sum(t in e["chosen_ids"] + e["rejected_ids"] for e in examples))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][rare] = np.nan
    save_file(weights, tiny_inputs.model / "model.safetensors", metadata={"format": "pt"})
    job = tiny_job(tiny_inputs, job_runner)
    with pytest.raises(TrainingError, match=r"\[non-finite-logprob\]") as error:
        job_runner.run(job)
    named = re.search(r"the (chosen|rejected) response of row (\d+)", str(error.value))
    assert named is not None and rare in examples[int(named[2]) - 100][f"{named[1]}_ids"][:-1]
    assert not (job.store / "memo").exists()


def test_distinct_sequences_prompts_end_at_the_mask(tiny_inputs):
    """Only the two responses of a pair share a prompt."""
    sequences = cached_sequences.DistinctSequences.of(Pairs.open(tiny_inputs.pairs))
    prompts, read = sequences.prompts(np.arange(len(sequences))), [sequences.read(n) for n in range(len(sequences))]
    assert prompts.lengths_S.tolist() == [int(sequence.mask_T.int().argmax()) for sequence in read]
    texts = [tuple(s.ids_T[:end].tolist()) for s, end in zip(read, prompts.lengths_S.tolist(), strict=True)]
    assert (
        len(set(texts)) == len(set(zip(texts, prompts.numbers_S.tolist(), strict=True))) == prompts.numbers_S.max() + 1
    )


def test_reference_with_token_outside_the_vocabulary_raises(tiny_inputs, job_runner):
    vocabulary = json.loads((tiny_inputs.model / "config.json").read_text())["vocab_size"]

    def add_unknown_token(examples: list[dict[str, Any]]) -> None:
        examples[3]["rejected_ids"][-1] = vocabulary

    rewrite(tiny_inputs, add_unknown_token)
    Pairs.open(tiny_inputs.pairs).check_known_tokens(vocabulary + 1)
    message = rf" {vocabulary}, .* {vocabulary}: .*\[token-outside-vocabulary\]"
    with pytest.raises(TemplateError, match=message):
        job_runner.run(tiny_job(tiny_inputs, job_runner))


def test_reference_with_too_few_positions_raises(tiny_inputs, job_runner):
    longest = Pairs.open(tiny_inputs.pairs).longest
    build("gpt2", GPT2 | {"max_position_embeddings": longest - 1}).save_pretrained(tiny_inputs.model)
    message = rf"^`tokenization\.max_length` .* {longest} tokens, .* {longest - 1} positions.*\[sequence-too-long\]"
    with pytest.raises(ModelError, match=message):
        job_runner.run(tiny_job(tiny_inputs, job_runner))


@pytest.mark.parametrize("beyond", [0, 1])
def test_reference_beyond_the_rotary_positions_of_the_config_writes_a_note(tiny_inputs, job_runner, beyond):
    """Rotary positions have no end, but the base model was not trained on these."""
    longest, config = Pairs.open(tiny_inputs.pairs).longest, tiny_inputs.model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": longest - beyond}))
    job_runner.run(job := tiny_job(tiny_inputs, job_runner))
    texts = [event["text"] for event in read_events(job.events) if event["event"] == "note"]
    notes = [text for text in texts if "`max_position_embeddings`" in text]
    assert len(notes) == beyond
    if beyond:
        assert f" {longest} tokens" in notes[0] and f"`tokenization.max_length: {longest - 1}`" in notes[0]


def test_reference_with_unknown_adapter_target_of_the_policy_raises(tiny_inputs, job_runner):
    """The check comes before the scoring, although only the later policy job needs the adapter."""
    recipe = factories.recipe(training={"adapter": {"target_modules": ["q_prj"]}})
    job = tiny_job(tiny_inputs, job_runner).model_copy(update={"recipe": recipe})
    with pytest.raises(ModelError, match=r"'q_prj'.* LlamaForCausalLM .*\[adapter-target\]"):
        job_runner.run(job)
    assert not (job.store / "memo").exists()


def test_build_table_with_lost_shards_raises(tiny_inputs, job_runner):
    sequences = cached_sequences.DistinctSequences.of(Pairs.open(tiny_inputs.pairs))
    with pytest.raises(TrainingError, match=r"90 of 90 sequences .*\[cache-shards-lost\]"):
        reference_logprobs.build_table(sequences, LogprobCache(Store(job_runner.folder / "store"), "a" * 64), "float32")


def random_prompts(count: int) -> tuple[np.ndarray, Prompts]:
    """Return sequences in random order, about four per prompt, and forty for one prompt."""
    random = np.random.default_rng(0)
    numbers = np.concatenate([np.full(40, 7), random.integers(0, count // 4, size=count - 40)])
    prompt_lengths = random.integers(1, 500, size=count)[numbers]
    return prompt_lengths + random.integers(1, 400, size=count), Prompts(numbers, prompt_lengths)


def tokens_of(batch: Any, lengths: np.ndarray, prompts: Prompts) -> int:
    """Return the tokens of a batch by definition: every response, and the prompt of each group."""
    groups = np.split(batch.positions, np.cumsum(batch.sizes)[:-1])
    assert all(len(set(prompts.numbers_S[group])) == 1 for group in groups)
    return sum(int((lengths - prompts.lengths_S)[group].sum() + prompts.lengths_S[group[0]]) for group in groups)


def test_shared_batches_hold_every_sequence_once_within_the_budget():
    """If some batches are removed, the others stay the same. So a resumed job gives the same bits."""
    lengths, prompts = random_prompts(500)
    batches = shared_batches(lengths, prompts, 4096)
    assert sorted(np.concatenate([b.positions for b in batches])) == list(range(500))
    costs = [tokens_of(batch, lengths, prompts) for batch in batches]
    assert max(costs) <= 4096
    distinct = {int(n): int(length) for n, length in zip(prompts.numbers_S, prompts.lengths_S, strict=True)}
    least = sum(distinct.values()) + int((lengths - prompts.lengths_S).sum())
    assert sum(costs) < 1.05 * least, "the responses of a prompt are together, unless they exceed the budget"
    kept = [b for n, b in enumerate(batches) if n % 3]
    left = np.sort(np.concatenate([b.positions for b in kept]))
    again = shared_batches(lengths[left], Prompts(prompts.numbers_S[left], prompts.lengths_S[left]), 4096)
    assert [(left[b.positions].tolist(), b.sizes) for b in again] == [(b.positions.tolist(), b.sizes) for b in kept]


def test_shared_batches_of_large_group_splits_it():
    """A prompt of 4; responses of 46, 2, 1, 1 tokens. A budget of 8 holds the prompt and two short responses."""
    lengths, prompts = np.array([6, 50, 5, 5]), Prompts(np.zeros(4, np.int64), np.full(4, 4))
    found = shared_batches(lengths, prompts, 8)
    assert [(b.positions.tolist(), b.sizes) for b in found] == [([1], (1,)), ([0, 2], (2,)), ([3], (1,))]
    nothing = np.array([], dtype=np.int64)
    assert shared_batches(nothing, Prompts(nothing, nothing)) == []


@pytest.mark.parametrize("pairs", [44, 46])
def test_logprob_table_of_another_length_raises(tiny_inputs, pairs):
    with pytest.raises(CorruptArtifact, match=rf"float64\[45\].*float64\[{pairs}\]"):
        LogProbTable.read(tiny_inputs.reference, pairs)


def test_logprob_table_with_wrong_file_raises_with_its_name(tiny_inputs):
    shutil.copy(tiny_inputs.model / "model.safetensors", tiny_inputs.reference / TABLE_FILE)
    with pytest.raises(CorruptArtifact, match=TABLE_FILE):
        LogProbTable.read(tiny_inputs.reference, 45)

"""The prequential job on arriving pairs. Oracles: log-probs by plain transformers, and the losses of an evaluation."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.factories import llama, write_inputs
from tests.training.job_runner import JobRunner
from tests.workflows.question_pairs import VOCABULARY
from training.contract.store.artifact import Artifact
from training.data.tokenization.pair_dataset import SIDES, Pairs

RULES = {"train_on": "last_response", "max_length": 128, "over_length": "error", "template_kwargs": {}}
OLD = 16  # of 24 pairs
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}


@dataclass(frozen=True)
class Arrival:
    """A policy that has seen the first 16 pairs, and 24 pairs now."""

    runner: JobRunner
    folder: Path
    old_rows: Artifact[Any]
    old_pairs: Artifact[Any]
    rows: Artifact[Any]
    pairs: Artifact[Any]

    def score(self, loss: dict[str, Any] | None = None, **fields: Any) -> Artifact[Any]:
        policy = {
            "policy": "policy:1",
            "reference": "reference_model:1",
            "pairs": "tokenized_pairs:1",
            "loss": loss or {},
            "seen_rows": ["raw_preferences:0"],
            "seen_pairs": ["tokenized_pairs:0"],
            **fields,
        }
        settings = {"champion": "c" * 64, "policies": [policy], "dtype": "float32", "scoring": "1"}
        inputs: dict[str, Artifact[Any] | Path] = {
            "raw_preferences": self.rows,
            "tokenized_pairs:1": self.pairs,
            "raw_preferences:0": self.old_rows,
            "tokenized_pairs:0": self.old_pairs,
            "policy:1": self.folder / "policy",
            "reference_model:1": self.folder / "base",
        }
        return self.runner.run(self.runner.job("prequential", "prequential_scores", inputs, settings))


def arrival(root: Path, new_rows: Any) -> Arrival:
    """Return the inputs, with `new_rows` made from the 24 pairs."""
    (root / "recipe").mkdir(parents=True)
    write_inputs(root / "recipe")
    folder, runner = root / "recipe", JobRunner(root)
    torch.manual_seed(1)
    policy = llama(**SIZES, **HEADS)
    for parameter in policy.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    policy.save_pretrained(folder / "policy")
    listed = [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]
    made: list[Artifact[Any]] = []
    for name, rows in (("old", listed[:OLD]), ("new", new_rows(listed))):
        file = root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        raw = runner.read(file, 0.25)
        made += [raw, runner.tokenize(raw, folder / "base", RULES)]
    return Arrival(runner, folder, *made)


@pytest.fixture
def arrived(tmp_path: Path) -> Arrival:
    return arrival(tmp_path, lambda rows: rows)


def log_prob(model: Any, pairs: Pairs, index: int, side: Any) -> float:
    sequence = pairs.sequence(index, side)
    with torch.no_grad():
        logits = model(input_ids=sequence.ids_T[None]).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(1, sequence.ids_T[1:, None])[:, 0]
    return float((found * sequence.mask_T[1:]).sum())


def test_scores_of_new_pairs_equal_plain_log_probs_and_their_loss(arrived: Arrival):
    """The loss of DPO by hand: -log sigmoid(beta * margin)."""
    found = arrived.score({"beta": 0.3})
    table = pd.read_parquet(found.file("scores.parquet"))
    assert table["row"].tolist() == list(range(OLD, 24)), "both splits"
    pairs = Pairs.open(arrived.pairs.folder)
    for name, folder in (("policy", "policy"), ("reference", "base")):
        model = AutoModelForCausalLM.from_pretrained(arrived.folder / folder).eval()
        for side in SIDES:
            expected = [log_prob(model, pairs, row, side) for row in table["row"]]
            assert table[f"{name}_{side}_logprob"].tolist() == pytest.approx(expected, abs=1e-4)
    chosen, rejected = (table[f"policy_{side}_logprob"] - table[f"reference_{side}_logprob"] for side in SIDES)
    assert table["loss"].to_numpy() == pytest.approx(np.log1p(np.exp(-0.3 * (chosen - rejected))), abs=1e-6)
    [counted] = found.details.policies
    assert (counted.pairs, counted.finite, counted.hits, counted.scored) == (8, 8, 0, 16)
    assert counted.loss == pytest.approx(table["loss"].mean()) and counted.policy == table["policy"][0]


def test_second_job_takes_all_log_probs_from_the_cache(arrived: Arrival):
    first, second = arrived.score(), arrived.score({"beta": 0.5})
    assert [found.details.policies[0].scored for found in (first, second)] == [16, 0]
    one, two = (pd.read_parquet(found.file("scores.parquet")) for found in (first, second))
    assert one["policy_chosen_logprob"].tolist() == two["policy_chosen_logprob"].tolist()


def test_loss_with_tails_equals_the_loss_of_tokens(arrived: Arrival):
    """LD-DPO with alpha 1 is DPO; with alpha 0 it ignores the tail of the longer response."""
    plain, whole, cut = (
        pd.read_parquet(arrived.score(loss).file("scores.parquet"))["loss"].tolist()
        for loss in ({}, {"ld_alpha": 1.0}, {"ld_alpha": 0.0})
    )
    assert plain == pytest.approx(whole, abs=1e-9) and cut != pytest.approx(plain, abs=1e-3)


def test_prompts_and_sequences_that_were_seen_are_not_scored(tmp_path: Path):
    """A new answer to an old prompt; and an old pair with a space that the template removes."""

    def new_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answer = {**rows[0], "chosen": [{**rows[0]["chosen"][0], "content": "Nobody knows."}]}
        spaced = {**rows[1], "prompt": [{**rows[1]["prompt"][0], "content": rows[1]["prompt"][0]["content"] + " "}]}
        return [*rows[:OLD], answer, spaced, rows[OLD]]

    template = "{{ message['content'] | trim }}"
    found = arrival_with_template(tmp_path, new_rows, template).score()
    assert pd.read_parquet(found.file("scores.parquet"))["row"].tolist() == [OLD + 2]


def arrival_with_template(root: Path, new_rows: Any, content: str) -> Arrival:
    """Return an arrival whose chat template writes contents as `content`."""
    made = arrival(root / "first", new_rows)
    path = made.folder / "base" / "chat_template.jinja"
    text = path.read_text()
    assert "message['content']" in text
    path.write_text(text.replace("message['content']", content.strip("{} ").join("()")))
    pairs = [made.runner.tokenize(raw, made.folder / "base", RULES) for raw in (made.old_rows, made.rows)]
    return Arrival(made.runner, made.folder, made.old_rows, pairs[0], made.rows, pairs[1])

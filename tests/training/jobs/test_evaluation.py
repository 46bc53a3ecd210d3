"""The evaluation job on real pairs, against formulas and greedy decoding by hand."""

import bisect
import copy
import itertools
import json
import math
import operator
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.training.evaluation.parsed_page import Page, lines_of
from tests.training.job_runner import JobRunner, locations_of
from tests.training.model.architectures import build
from tests.training.runs import published
from training.contract.config.loss import Loss
from training.contract.config.recipe import Compute
from training.contract.errors import CorruptArtifact, DataError, ModelError, TemplateError, TrainingError
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.protocol.settings import EvaluationSpec
from training.contract.protocol.votes import vote
from training.contract.store.artifact import Artifact
from training.contract.store.logprob_table import LogProbTable
from training.data.templates.tokenizer import load_tokenizer
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import ALONE
from training.evaluation.generate import answers, greedy, spread_prompts, stop_tokens
from training.jobs import evaluation as evaluation_job
from training.main import _explain
from training.model.load import load_model
from training.scoring.accuracy import wilson_interval
from training.scoring.pairs import score_pairs

BETA = 0.2
SETTINGS = {"samples": 3, "max_new_tokens": 12, "loss": {"type": "sigmoid", "beta": BETA, "label_smoothing": 0.0}}
HOSTILE = "</td><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7 * 7 }} & \"quoted\" 'too'"


class Setup:
    """Forty real pairs, a third held out; tiny-chat as the reference, and a policy beside it."""

    def __init__(self, root: Path, data: Path, job_runner: Any) -> None:
        self.job_runner, self.model = job_runner, data / "models" / "tiny-chat"
        lines = (data / "preferences-real.jsonl").read_bytes().split(b"\n")[:2000:50]
        hostile = {side: [{"role": "assistant", "content": f"{side} {HOSTILE}"}] for side in ("chosen", "rejected")}
        rows = [json.loads(line) for line in lines]
        rows += [{"prompt": [{"role": "user", "content": f"{n} {HOSTILE}"}], **hostile} for n in range(6)]
        long = [{"role": "user", "content": "long " * 2000}]
        rows.insert(0, {**rows[0], "prompt": long})  # dropped, so that positions differ from rows
        (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.policy = root / "policy"
        self._write_policy()
        self.pairs = self.tokenized(job_runner.read(root / "rows.jsonl", 0.4))
        inputs = {"tokenized_pairs": self.pairs, "reference_model": self.model}
        job = job_runner.job("reference", "reference_logprobs", inputs, {"dtype": "float32"})
        self.table = job_runner.run(job)

    def _write_policy(self) -> None:
        model = load_model(self.model, "float32", ALONE.device)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter) * parameter.std().nan_to_num()
        model.save_pretrained(self.policy)

    def tokenized(self, raw: Artifact[Any]) -> Artifact[Any]:
        rules = {"train_on": "last_response", "max_length": 900, "over_length": "drop", "template_kwargs": {}}
        return self.job_runner.tokenize(raw, self.model, rules)

    def inputs(self, policy: Path | None = None) -> dict[str, Artifact[Any] | Path]:
        return {
            "policy": policy or self.policy,
            "reference_logprobs": self.table,
            "tokenized_pairs": self.pairs,
            "reference_model": self.model,
        }

    def job(self, policy: Path | None = None, **settings: Any) -> Job:
        return self.job_runner.job("evaluation", "evaluation", self.inputs(policy), {**SETTINGS, **settings})

    def evaluate(self, policy: Path | None = None, **settings: Any) -> Artifact[Any]:
        return self.job_runner.run(self.job(policy, **settings))


@pytest.fixture(scope="module")
def setup(shared_data, tmp_path_factory) -> Setup:
    root = tmp_path_factory.mktemp("evaluation")
    return Setup(root, shared_data, JobRunner(root))


@pytest.fixture(scope="module")
def evaluation(setup) -> Artifact[Any]:
    return setup.evaluate()


def float64_tokens(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, :-1]
    tokens = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
    return tokens[mask[1:]]


def float64_logprob(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> float:
    return float(float64_tokens(model, ids, mask).sum())


@pytest.fixture(scope="module")
def expected(setup) -> list[dict[str, float]]:
    """Return every held-out pair by the paper's formulas, in float64, one sequence at a time."""
    data = Pairs.open(setup.pairs.folder)
    policy = AutoModelForCausalLM.from_pretrained(setup.policy, dtype=torch.float64).eval()
    frozen = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float64).eval()
    rows = []
    for index in data.indices("validation"):
        values = {"row": float(data.rows[index])}
        for side in ("chosen", "rejected"):
            sequence = data.sequence(index, side)
            values[f"{side}_tokens"] = int(sequence.mask_T.sum())
            values[f"policy_{side}_logprob"] = float64_logprob(policy, sequence.ids_T, sequence.mask_T)
            values[f"reference_{side}_logprob"] = float64_logprob(frozen, sequence.ids_T, sequence.mask_T)
            values[f"reward_{side}"] = BETA * (values[f"policy_{side}_logprob"] - values[f"reference_{side}_logprob"])
        values["margin"] = values["reward_chosen"] - values["reward_rejected"]
        values["loss"] = math.log1p(math.exp(-values["margin"]))
        rows.append(values)
    return rows


@pytest.mark.shared
def test_evaluation_pairs_match_float64_formulas(evaluation, expected):
    rows = pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    assert len(rows) == len(expected) > 10
    for row, values in zip(rows, expected, strict=True):
        assert row == pytest.approx(row | values, abs=1e-3)
    assert np.std([row["margin"] for row in rows]) > 0.1, "the policy differs from its reference"


@pytest.mark.shared
def test_evaluation_pairs_have_the_keys_of_the_tokenized_pairs(setup, evaluation):
    data, rows = Pairs.open(setup.pairs.folder), pq.read_table(evaluation.file("pairs.parquet")).to_pylist()
    held_out = data.indices("validation")
    for side in ("chosen", "rejected"):
        assert [bytes.fromhex(row[f"{side}_key"]) for row in rows] == [k.tobytes() for k in data.keys(side)[held_out]]


@pytest.mark.shared
def test_evaluation_metrics_are_means_over_pairs(evaluation, expected):
    def mean(name: str) -> float:
        return sum(values[name] for values in expected) / len(expected)

    def accuracy(kind: Callable[[float, float], bool]) -> float:
        won = [v["margin"] > 0 for v in expected if kind(v["chosen_tokens"], v["rejected_tokens"])]
        return sum(won) / len(won)

    won = sum(values["margin"] > 0 for values in expected)
    metrics = evaluation.json("metrics.json")
    assert metrics == pytest.approx(
        {
            "eval/loss": mean("loss"),
            "eval/rewards/chosen": mean("reward_chosen"),
            "eval/rewards/rejected": mean("reward_rejected"),
            "eval/rewards/margins": mean("margin"),
            "eval/rewards/accuracies": won / len(expected),
            "eval/logps/chosen": mean("policy_chosen_logprob"),
            "eval/logps/rejected": mean("policy_rejected_logprob"),
            "eval/accuracies/chosen_longer": accuracy(operator.gt),
            "eval/accuracies/chosen_shorter": accuracy(operator.lt),
            "eval/accuracies/same_length": accuracy(operator.eq),
            "eval/pairs": len(expected),
        },
        abs=1e-3,
    )
    assert evaluation.details.metrics == metrics
    assert evaluation.details.interval == wilson_interval(won / len(expected), len(expected))


@pytest.mark.shared
def test_evaluation_with_named_sources_adds_metrics_by_source(setup, evaluation, expected, tmp_path):
    """The same rows come from four files: two share a name, one has another, one has no name. Other results are unchanged."""
    lines = (setup.job_runner.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    cuts, names = (0, 11, 20, 30, len(lines)), ("old", "new", None, "old")
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        (tmp_path / f"{n}.jsonl").write_text("".join(lines[start:end]))
    settings = {"formats": ["auto"] * 4, "held_out": [False] * 4, "names": list(names)}
    settings |= {"validation_fraction": 0.4, "duplicates": "keep"}
    where = locations_of([{"path": str(tmp_path / f"{n}.jsonl")} for n in range(4)])
    job = setup.job_runner.job("preferences", "raw_preferences", setup.job_runner.source(), settings, where)
    raw = setup.job_runner.run(job)
    assert setup.tokenized(raw).fingerprint == setup.pairs.fingerprint
    inputs = {**setup.inputs(), "raw_preferences": raw}
    named = setup.job_runner.run(setup.job_runner.job("evaluation", "evaluation", inputs, SETTINGS))
    held_out = [(names[bisect.bisect_right(cuts, values["row"]) - 1], values) for values in expected]
    by_source = {name: [values for source, values in held_out if source == name] for name in ("new", "old")}
    assert all(len(rows) > 2 for rows in by_source.values()) and sum(map(len, by_source.values())) < len(expected)
    assert named.details.metrics == pytest.approx(
        evaluation.details.metrics
        | {
            f"eval/sources/{name}/{metric}": value
            for name, rows in by_source.items()
            for metric, value in {
                "loss": statistics.fmean(values["loss"] for values in rows),
                "rewards/margins": statistics.fmean(values["margin"] for values in rows),
                "rewards/accuracies": statistics.fmean(values["margin"] > 0 for values in rows),
                "pairs": len(rows),
            }.items()
        },
        abs=1e-3,
    )
    table, before = (pq.read_table(made.file("pairs.parquet")) for made in (named, evaluation))
    assert table["source_name"].to_pylist() == [name for name, _ in held_out]
    assert table.drop_columns("source_name").equals(before)
    assert [row["source"] for row in named.details.sources] == ["new", "old"]
    shown = lines_of(named.file("report.html").read_text()).replace("\n", "|")
    for name, rows in by_source.items():
        won = statistics.fmean(values["margin"] > 0 for values in rows)
        assert f"|{name}|{len(rows)}|{100 * won:.1f}%|" in shown
    assert "Accuracy by source|" in shown and "|chosen longer|" in shown


def greedy_by_hand(model: PreTrainedModel, prompt: list[int], stop: int, length: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + length and (len(ids) == len(prompt) or ids[-1] != stop):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.shared
def test_evaluation_samples_are_greedy_before_and_after(setup, evaluation):
    data = Pairs.open(setup.pairs.folder)
    tokenizer = load_tokenizer(setup.model)
    row_of = {int(row): index for index, row in enumerate(data.rows)}
    samples = evaluation.json("samples.json")
    assert len(samples) == 3 and all(sample["before"] != sample["after"] for sample in samples)
    for sample in samples:
        prompt = data.prompt_ids(row_of[sample["row"]])
        assert sample["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
        for when, folder in (("before", setup.model), ("after", setup.policy)):
            model = load_model(folder, "float32", ALONE.device)
            tokens = greedy_by_hand(model, prompt, tokenizer.eos_token_id, 12)
            assert sample[when] == tokenizer.decode(tokens, skip_special_tokens=True)
        assert "<|im_end|>" not in sample["chosen"] and sample["chosen"]
    shown = [dict(sample) for sample in evaluation.details.samples]
    prompts = [sample.pop("prompt") for sample in shown]
    assert all(len(prompt) <= 500 for prompt in prompts)
    assert all(
        prompt.rpartition("user: ")[2] in sample["prompt"] for prompt, sample in zip(prompts, samples, strict=True)
    )
    assert shown == [
        {
            "row": sample["row"],
            **{name: sample[name][:500] for name in ("before", "after", "chosen")},
        }
        for sample in samples
    ]
    assert max(len(sample["prompt"]) for sample in samples) > 500


def answering(**fields: Any) -> EvaluationSpec:
    return EvaluationSpec(samples=2, max_new_tokens=4, loss=Loss(), **fields)


@pytest.mark.shared
def test_greedy_stops_at_the_end_of_a_turn(setup):
    """tiny-chat answers a greeting with a few dozen tokens and an end token."""
    model, tokenizer = load_model(setup.model, "float32", ALONE.device), load_tokenizer(setup.model)
    prompt = tokenizer("<|im_start|>user\nThanks!<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    tokens = greedy(model, prompt, stop_tokens(model.config, tokenizer, answering(eos_token_ids=(2,))), 300)
    assert tokens == greedy_by_hand(model, prompt, tokenizer.eos_token_id, 300)
    assert 1 < len(tokens) < 300 and tokens[-1] == tokenizer.eos_token_id


@pytest.mark.shared
def test_stop_tokens_are_those_of_settings_or_config(setup):
    """In tiny-chat's vocabulary 0 to 2 are control tokens. The tokenizer's `eos_token` does not count."""
    tokenizer = load_tokenizer(setup.model)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    config = LlamaConfig(eos_token_id=[7, 5])
    assert stop_tokens(config, tokenizer, answering(eos_token_ids=(9,))) == [9]
    assert stop_tokens(config, tokenizer, answering(eos_token_ids=(9,), eos_tokens=("<|im_end|>",))) == [2, 9]
    assert stop_tokens(config, tokenizer, answering(eos_token_ids=())) == []
    assert stop_tokens(config, tokenizer, answering()) == [5, 7]  # an old spec has neither field
    with pytest.raises(TemplateError, match=r"`release\.eos_tokens` has 'nothing of it'.*\[unknown-eos-token\]"):
        stop_tokens(config, tokenizer, answering(eos_tokens=("nothing of it",)))


@pytest.mark.shared
def test_greedy_ignores_the_generation_config_of_the_model(setup):
    model = load_model(setup.model, "float32", ALONE.device)
    prompt = list(range(100, 120))
    plain = greedy(model, prompt, [2], 10)
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=9.0, num_beams=3)
    assert greedy(model, prompt, [2], 10) == plain


@pytest.mark.shared
@pytest.mark.parametrize(("length", "left"), [(1020, 4), (1024, 0), (1030, 0)])
def test_greedy_with_long_prompt_uses_the_remaining_positions(setup, length, left):
    model, tokenizer = load_model(setup.model, "float32", ALONE.device), load_tokenizer(setup.model)
    assert len(greedy(model, [300] * length, [], 50)) == left
    assert len(answers(model, [[300] * length], [], tokenizer, 50, ALONE)) == 1


@pytest.mark.shared
def test_spread_prompts_are_distinct_and_evenly_spaced(setup):
    data = Pairs.open(setup.pairs.folder)
    twice = np.repeat(data.indices("validation"), 2)
    distinct = spread_prompts(data, twice, 1000)
    assert distinct == sorted(set(twice.tolist())), "each prompt once"
    five = spread_prompts(data, twice, 5)
    assert five == [distinct[n * len(distinct) // 5] for n in range(5)]
    assert spread_prompts(data, twice, 0) == []


@pytest.mark.shared
def test_evaluation_of_the_reference_has_zero_margins(setup):
    """The loss of every pair is ln 2. Ties do not count as correct."""
    metrics = setup.evaluate(policy=setup.model, samples=0).details.metrics
    assert metrics["eval/loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert metrics["eval/rewards/margins"] == pytest.approx(0, abs=1e-4)


@pytest.mark.shared
def test_evaluation_of_policy_that_fails_the_self_check_raises(setup, tmp_path):
    build("gemma3_text", {"use_bidirectional_attention": True, "vocab_size": 2048}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"gemma3_text.*\[self-check\]"):
        setup.evaluate(policy=tmp_path)


@pytest.mark.shared
def test_evaluation_fingerprint_depends_on_loss_and_samples(setup, evaluation):
    assert setup.evaluate().fingerprint == evaluation.fingerprint
    assert setup.evaluate(loss={"type": "sigmoid", "beta": 0.3}).fingerprint != evaluation.fingerprint
    assert setup.evaluate(samples=2).fingerprint != evaluation.fingerprint


@pytest.mark.shared
def test_evaluation_with_votes_keeps_exact_files_and_shows_votes_alone(setup: Setup, evaluation: Artifact[Any]) -> None:
    voted = setup.evaluate(disclosure="votes")
    assert voted.json("metrics.json") == evaluation.json("metrics.json")
    assert pq.read_table(voted.file("pairs.parquet")).equals(pq.read_table(evaluation.file("pairs.parquet")))
    assert voted.fingerprint != evaluation.fingerprint and voted.details.samples == ()
    margins = pq.read_table(voted.file("pairs.parquet"))["margin"].to_pylist()
    expected = vote([float(margin > 0) for margin in margins], "eval/votes/accuracy", voted.derivation.key)
    assert voted.details.shown_metrics == {"eval/votes/accuracy": expected}
    assert setup.evaluate(disclosure="votes").fingerprint == voted.fingerprint
    page = voted.file("report.html").read_text(encoding="utf-8")
    assert "<!-- release -->" in page and f">{expected:.2f}<" in page
    exact = evaluation.details
    texts = [sample.before for sample in exact.samples] + [f"{value:.4f}" for value in exact.metrics.values()]
    assert not [text for text in texts if len(text) > 5 and text in page]


def test_evaluation_with_ld_alpha_takes_tails_from_the_cache(setup):
    """LD-DPO by hand, in float64: tokens beyond the length of the other response count 0.3 times."""
    data = Pairs.open(setup.pairs.folder)
    models = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64).eval() for m in (setup.policy, setup.model)]
    expected = []
    for index in data.indices("validation"):
        sequences = [data.sequence(index, side) for side in ("chosen", "rejected")]
        policy, frozen = ([float64_tokens(m, s.ids_T, s.mask_T) for s in sequences] for m in models)
        common = min(map(len, policy))
        ratios = [p - f for p, f in zip(policy, frozen, strict=True)]
        chosen, rejected = (float(ratio[:common].sum() + 0.3 * ratio[common:].sum()) for ratio in ratios)
        expected.append(math.log1p(math.exp(-BETA * (chosen - rejected))))
    made = setup.evaluate(loss={"beta": BETA, "ld_alpha": 0.3})
    found = pq.read_table(made.file("pairs.parquet"))["loss"].to_pylist()
    assert found == pytest.approx(expected, abs=1e-4)
    events = setup.job(loss={"beta": BETA, "ld_alpha": 0.3}).events.read_text()
    assert "scoring them again" not in events


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, "ddp"), (2, "fsdp"), (3, "fsdp")])
def test_evaluation_on_several_ranks_gives_the_same_bits(setup, evaluation, tmp_path, forker, ranks, parallel):
    """Three ranks answer one prompt each, or all prompts together if the weights are sharded."""
    compute = Compute(device="cpu", parallel=parallel)
    changes = {"store": tmp_path / "store", "folder": tmp_path / "job", "compute": compute}
    job = setup.job().model_copy(update=changes)
    job.write()
    made = published(job, forker.run(job, ranks))
    assert made.fingerprint == evaluation.fingerprint
    assert tokens_in_report(made) == tokens_in_report(evaluation)


def tokens_in_report(evaluation: Artifact[Any]) -> list[str]:
    tokens = re.findall(r"<span[^>]* title=.*?</span>", evaluation.file("report.html").read_text(), re.DOTALL)
    assert len(tokens) > 100
    return tokens


def tiny_held_out(setup: Any, table: LogProbTable, policy: PreTrainedModel) -> Any:
    data = Pairs.open(setup.pairs)
    return score_pairs(policy, data, data.indices("validation"), table, Loss(), ALONE, EventWriter(None))


def test_score_pairs_with_nan_policy_raises_with_row(tiny_inputs):
    policy = load_model(tiny_inputs.model, "float32", ALONE.device)
    policy.model.norm.weight.data[:] = torch.nan
    table = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    with pytest.raises(TrainingError, match=r" 14 of 14 .* row 138;.*\[non-finite-logprob\]"):
        tiny_held_out(tiny_inputs, table, policy)


def test_score_pairs_with_other_token_counts_raises_with_row(tiny_inputs):
    table = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    wrong = copy.deepcopy(table)
    wrong.tokens_P2[40, 1] += 1
    with pytest.raises(CorruptArtifact, match=r"row 140 .*\d+ tokens.*\[wrong-token-count\]"):
        tiny_held_out(tiny_inputs, wrong, load_model(tiny_inputs.model, "float32", ALONE.device))


def test_held_out_positions_without_validation_pairs_raises(tiny_inputs):
    data = Pairs(Pairs.open(tiny_inputs.pairs)._table.slice(0, 38))
    with pytest.raises(DataError, match=r" 38 tokenized .*data\.validation_fraction.*\[no-held-out-pairs\]"):
        evaluation_job.held_out_positions(data)


def test_accuracy_of_repeated_pairs_has_no_narrower_interval(tiny_inputs):
    """Seven held-out pairs of seven prompts, each three times, have no more information than once."""
    data, policy = Pairs.open(tiny_inputs.pairs), load_model(tiny_inputs.model, "float32", ALONE.device)
    with torch.no_grad():
        policy.lm_head.weight += 0.1 * torch.randn(
            policy.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    table, positions = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples)), data.indices("validation")
    once, thrice = (
        score_pairs(policy, data, np.repeat(positions, times), table, Loss(), ALONE, EventWriter(None))
        for times in (1, 3)
    )
    assert 0 < once.accuracy().share < 1
    overall = (thrice.accuracy(), once.accuracy())
    for repeated, single in (
        overall,
        *((thrice.accuracy_by_length()[kind], single) for kind, single in once.accuracy_by_length().items()),
    ):
        assert (repeated.pairs, repeated.prompts, repeated.share) == (3 * single.pairs, single.pairs, single.share)
        low, high = repeated.interval
        assert low <= single.interval[0] + 1e-9 and high >= single.interval[1] - 1e-9
    more = {"eval/pairs": 21, "eval/prompts": 7}
    assert thrice.metrics() == pytest.approx(once.metrics() | more) and "eval/prompts" not in once.metrics()


@pytest.mark.shared
def test_report_is_self_contained_and_shows_the_results(evaluation):
    page = Page(evaluation.file("report.html").read_text())
    text = "".join(page.text)
    assert page.addresses == [] and "script" not in page.tags and "url(" not in text and "@import" not in text
    metrics = evaluation.details.metrics
    assert f"{metrics['eval/loss']:.4f}" in text and f"{100 * metrics['eval/rewards/accuracies']:.1f}%" in text
    assert all(f"{100 * end:.1f}%" in text for end in evaluation.details.interval)
    assert all(sample["after"] in text for sample in evaluation.json("samples.json"))
    worst = max(pq.read_table(evaluation.file("pairs.parquet")).to_pylist(), key=lambda row: row["loss"])
    assert f"{worst['loss']:,.4f}" in text


@pytest.mark.shared
def test_report_shows_rewards_that_sum_to_those_of_the_pairs(evaluation):
    """The oracle are the sums of `pairs.parquet`; policy and table were scored in other batches. Titles have four digits."""
    rows = {row["row"]: row for row in pq.read_table(evaluation.file("pairs.parquet")).to_pylist()}
    page = evaluation.file("report.html").read_text()
    found = [int(row) for row in re.findall(r"<summary>Row (\d+): margin", page)]
    blocks = re.findall(r"<details class=\"card\".*?</details>", page, re.DOTALL)
    losses = sorted(rows, key=lambda row: -rows[row]["loss"])
    sampled = [sample["row"] for sample in evaluation.json("samples.json")]
    assert found == list(dict.fromkeys([*sampled, *losses[:10]])) and len(blocks) == len(found)
    for row, block in zip(found, blocks, strict=True):
        parts = re.findall(r'<div class="tokens">.*?</div>', block, re.DOTALL)
        for side, part in zip(("chosen", "rejected"), parts, strict=True):
            rewards = [float(title) for title in re.findall(r'title="([+-][\d.]+)"', part)]
            if rows[row][f"{side}_tokens"] <= 300:
                assert len(rewards) == rows[row][f"{side}_tokens"]
                assert sum(rewards) == pytest.approx(rows[row][f"reward_{side}"], abs=5e-5 * len(rewards) + 1e-4)


@pytest.mark.shared
def test_report_without_reference_in_the_loss_shows_log_ratios(setup):
    made = setup.evaluate(loss={"type": "simpo", "beta": 2.0, "gamma": 0.5})
    text = lines_of(made.file("report.html").read_text())
    assert "Log-ratios by token" in text and "The loss uses no reference model" in text
    [(row, difference)] = re.findall(r"Row (\d+): difference\s+(\S+)", text)[:1]
    values = {row["row"]: row for row in pq.read_table(made.file("pairs.parquet")).to_pylist()}[int(row)]
    chosen, rejected = (
        values[f"policy_{side}_logprob"] - values[f"reference_{side}_logprob"] for side in ("chosen", "rejected")
    )
    assert float(difference) == pytest.approx(chosen - rejected, abs=1e-3)


def text_of(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@pytest.mark.shared
def test_report_shows_messages_or_decoded_tokens_without_them(setup, tmp_path):
    """The source rows are the oracle. The decoded prompts of tiny-chat (ChatML) begin with `user` or `system`."""
    lines = [json.loads(line) for line in (setup.job_runner.folder / "rows.jsonl").read_text().splitlines()]
    shutil.copytree(setup.job_runner.store, tmp_path / "store")
    changes = {"store": tmp_path / "store", "folder": tmp_path / "job"}
    job = setup.job(samples=4).model_copy(update=changes)
    made = setup.job_runner.run(job)
    frozen = made.json("samples.json")
    assert all(sample["prompt"].startswith(("user\n", "system\n")) for sample in frozen)
    for shown, sample in zip(made.details.samples, frozen, strict=True):
        prompt = text_of(lines[sample["row"]]["prompt"])
        assert dict(shown) == {**sample, "prompt": prompt[-500:]} | {
            name: sample[name][:500] for name in ("before", "after", "chosen")
        }
    page = Page(made.file("report.html").read_text())
    worst = max(pq.read_table(made.file("pairs.parquet")).to_pylist(), key=lambda row: row["loss"])["row"]
    for text in (text_of(lines[worst]["prompt"])[-500:], lines[worst]["rejected"][-1]["content"][:500]):
        assert text in page.text
    assert not any(re.match(r"(user|system)\n", text) for text in page.text)

    shutil.rmtree(tmp_path / "store" / "evaluation")
    shutil.rmtree(tmp_path / "store" / "raw_preferences")
    again = setup.job_runner.run(job)
    assert again.fingerprint == made.fingerprint
    assert [sample.prompt for sample in again.details.samples] == [sample["prompt"][-500:] for sample in frozen]


def test_evaluation_without_memory_writes_advice(setup):
    """A tensor of that size exceeds any address space, so torch's allocator fails."""
    with pytest.raises(RuntimeError) as lacking:
        torch.zeros(1 << 60, dtype=torch.uint8)
    message = str(_explain(setup.job(), lacking.value))
    assert message.startswith("evaluation: ") and "can't allocate memory" in message
    assert re.search(r"`compute\.processes_per_node`, .*`compute\.parallel: fsdp`.*\[out-of-memory\]$", message)

"""The policy job with every loss: compared with naive loops, with other micro-batches and ranks, and resumed."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from tests import factories
from tests.training import runs
from tests.training.runs import BETA, RATE, SIDES, TIMED, losses, published, told, tune
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.loss import LossType
from training.contract.errors import TrainingError
from training.contract.protocol.events import EventWriter
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import epoch_order
from training.data.tokenization.pair_dataset import Pairs
from training.scoring.logprob_tails import read_table

EPS = 1e-5  # with the usual 1e-8 the first steps of Adam amplify rounding errors of gradients near zero to full steps
MPO = [{"type": "sigmoid", "weight": 0.8}, {"type": "bco_pair", "weight": 0.2}, {"type": "sft", "weight": 0.5}]


def settings(loss: dict[str, Any], **changes: Any) -> dict[str, Any]:
    optimizer = {"learning_rate": RATE, "eps": EPS}
    fields = {"loss": {"beta": BETA, **loss}, "micro_tokens": 60, "optimizer": optimizer, "max_steps": 6}
    return runs.settings(**fields | changes)


class Naive:
    """One batch by plain transformers: one unpadded sequence at a time, all logits, ordinary autograd."""

    def __init__(self, inputs: Any, model: Any, reference: Any, batch: np.ndarray) -> None:
        pairs = [inputs.split("train")[at] for at in batch]
        self.policy = [[self._tokens(model, pair, side) for side in SIDES] for pair in pairs]
        with torch.no_grad():
            frozen = [[self._tokens(reference, pair, side) for side in SIDES] for pair in pairs]
        self.counts_B2 = torch.tensor([[len(tokens) for tokens, _ in pair] for pair in frozen])
        self.reference = [[tokens for tokens, _ in pair] for pair in frozen]

    def _tokens(self, model: Any, pair: dict[str, Any], side: str) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the response's tokens, and the log of the sum of squared probabilities at each."""
        ids, mask = torch.tensor(pair[f"{side}_ids"]), torch.tensor(pair[f"{side}_mask"])[1:]
        logprobs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[mask, 0], (2 * logprobs).logsumexp(1)[mask]

    def ratios(self, alpha: float = 1.0) -> Tensor:
        """Return log-ratios, B x 2. Tokens beyond the length of the other response count `alpha` times."""
        rows = []
        for policy, reference, counts in zip(self.policy, self.reference, self.counts_B2.tolist(), strict=True):
            weights = [torch.where(torch.arange(n) < min(counts), 1.0, alpha) for n in counts]
            rows.append(torch.stack([((policy[s][0] - reference[s]) * weights[s]).sum() for s in (0, 1)]))
        return torch.stack(rows)

    def sums(self) -> Tensor:
        return torch.stack([torch.stack([tokens.sum() for tokens, _ in pair]) for pair in self.policy])

    def typicality(self) -> Tensor:
        means = [[(tokens - squares).mean().exp().item() for tokens, squares in pair] for pair in self.policy]
        return torch.tensor(means, dtype=torch.float64).prod(dim=1)


def aot_unpaired(batch: Naive, memory: list[Tensor]) -> Tensor:
    chosen, rejected = batch.ratios().sort(dim=0).values.unbind(1)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def aot(batch: Naive, memory: list[Tensor]) -> Tensor:
    policy = (batch.sums()[:, 0] - batch.sums()[:, 1]).sort().values
    reference = torch.stack([chosen.sum() - rejected.sum() for chosen, rejected in batch.reference]).sort().values
    return -logsigmoid(BETA * (policy - reference)).mean()


def mpo(batch: Naive, memory: list[Tensor]) -> Tensor:
    rewards = BETA * batch.ratios()
    memory.append(rewards.detach().flatten())
    chosen, rejected = (rewards - torch.cat(memory).mean()).unbind(1)
    binary = -logsigmoid(chosen) - logsigmoid(-rejected)
    supervised = -batch.sums()[:, 0].sum() / batch.counts_B2[:, 0].sum()
    return (-0.8 * logsigmoid(rewards[:, 0] - rewards[:, 1]) + 0.2 * binary).mean() + 0.5 * supervised


def ld_dpo(batch: Naive, memory: list[Tensor]) -> Tensor:
    ratios = batch.ratios(alpha=0.3)
    return -logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])).mean()


def wpo(batch: Naive, memory: list[Tensor]) -> Tensor:
    ratios = batch.ratios()
    return (-logsigmoid(BETA * (ratios[:, 0] - ratios[:, 1])) * batch.typicality()).mean()


def simpo(batch: Naive, memory: list[Tensor]) -> Tensor:
    means = batch.sums() / batch.counts_B2
    return -logsigmoid(2.0 * (means[:, 0] - means[:, 1]) - 0.5).mean()


NAIVE: list[tuple[dict[str, Any], Callable[[Naive, list[Tensor]], Tensor]]] = [
    ({"type": "aot"}, aot),
    ({"type": "aot_unpaired"}, aot_unpaired),
    ({"type": "mixture", "of": MPO}, mpo),
    ({"ld_alpha": 0.3}, ld_dpo),
    ({"weighting": "wpo"}, wpo),
    ({"type": "simpo", "beta": 2.0}, simpo),
]


def naive_losses(inputs: Any, of_batch: Callable[[Naive, list[Tensor]], Tensor], steps: int) -> Iterator[float]:
    model, frozen = (AutoModelForCausalLM.from_pretrained(inputs.model) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0, foreach=False)
    count = len(inputs.split("train"))
    memory: list[Tensor] = []
    for step in range(steps):
        epoch, at = divmod(step, math.ceil(count / 8))
        value = of_batch(Naive(inputs, model, frozen, epoch_order(count, 0, epoch)[at * 8 :][:8]), memory)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield value.item()


@pytest.mark.parametrize(("loss", "of_batch"), NAIVE, ids=lambda given: getattr(given, "__name__", None))
def test_policy_losses_match_a_naive_loop(tiny_inputs, loss, of_batch):
    """In micro-batches of two or three pairs. The last batch of an epoch is smaller."""
    job = tiny_inputs.job("policy", settings(loss))
    tune(job)
    assert losses(job) == pytest.approx(list(naive_losses(tiny_inputs, of_batch, 6)), abs=3e-6)


EVERY: list[dict[str, Any]] = [{"type": kind} for kind in LossType if kind.traits.compares_responses]
FILLED: dict[str, dict[str, Any]] = {
    "exo_pair": {"label_smoothing": 0.01},
    "mixture": {"of": MPO},
    "simpo": {"beta": 2.0},
}


@pytest.mark.parametrize("loss", [loss | FILLED.get(loss["type"], {}) for loss in EVERY], ids=lambda loss: loss["type"])
def test_policy_with_each_loss_learns(tiny_inputs, loss):
    """From the reference check to the written policy. The loss falls over 10 steps on the same 38 pairs."""
    job = tiny_inputs.job("policy", settings(loss, max_steps=10, batch_size=38, micro_tokens=1000))
    made = tune(job)
    assert losses(job)[-1] < losses(job)[0]
    assert abs(made.details.step0_loss - made.details.step0_expected) <= made.details.step0_allowed
    assert {e["step"] for e in told(job, "eval")} == {0, 10}
    assert told(job, "eval")[-1]["eval/loss"] == pytest.approx(made.details.eval["eval/loss"])


def test_policy_events_have_the_losses_of_a_mixture(tiny_inputs):
    job = tiny_inputs.job("policy", settings({"type": "mixture", "of": MPO}, max_steps=2))
    tune(job)
    for event, prefix in ((told(job)[-1], ""), (told(job, "eval")[-1], "eval/")):
        parts = [term["weight"] * event[f"{prefix}losses/{term['type']}"] for term in MPO]
        assert event[f"{prefix}loss"] == pytest.approx(sum(parts), rel=1e-9)


@pytest.mark.parametrize("loss", [{"type": "aot_unpaired"}, {"type": "bco_pair", "ld_alpha": 0.5}])
def test_policy_with_other_micro_batches_has_the_same_losses(tiny_inputs, loss):
    small = tiny_inputs.job("policy", settings(loss, micro_tokens=1), "small")
    large = tiny_inputs.job("policy", settings(loss, micro_tokens=100_000), "large")
    tune(small)
    tune(large)
    for name in ("loss", "grad_norm", "rewards/margins"):
        assert [e[name] for e in told(small)] == pytest.approx([e[name] for e in told(large)], rel=1e-5, abs=1e-5)


def test_policy_with_coupled_loss_uses_the_same_dropout_in_both_passes(tmp_path):
    """With a batch of one pair, aot_unpaired compares the pair with itself in the other pass.

    If both passes agree, its loss is -log s(beta (c - r)), the sigmoid loss.
    """
    inputs = build_tiny_inputs(tmp_path, attention_dropout=0.3)
    coupled, plain = (
        inputs.job("policy", settings({"type": kind}, batch_size=1, max_steps=4, disable_dropout=False), kind)
        for kind in ("aot_unpaired", "sigmoid")
    )
    tune(coupled)
    tune(plain)
    assert losses(coupled) == pytest.approx(losses(plain), abs=1e-9)


def test_policy_resumed_with_running_mean_gives_the_same_bits(tiny_inputs):
    """The test removes the last checkpoint, so the run resumes from the previous one, with its running mean."""
    loss = {"type": "bco_pair"}
    calm, disturbed = (
        tiny_inputs.job("policy", settings(loss, max_steps=12), name, checkpoint_every=4)
        for name in ("calm", "disturbed")
    )
    tune(calm)
    tune(disturbed)
    shutil.rmtree(next(disturbed.checkpoints.glob("*/step-00000012")))
    made = tune(disturbed)
    assert losses(disturbed) == losses(calm)
    weights = [(job.staging / "model.safetensors").read_bytes() for job in (calm, disturbed)]
    assert weights[0] == weights[1]
    assert made.details.objective == json.loads((calm.staging / "metrics.json").read_text())["objective"]
    assert made.details.objective["rewards"] == 2 * (4 * 8 + 6 + 4 * 8 + 6 + 2 * 8)


def test_policy_details_without_running_mean_lack_the_objective(tiny_inputs):
    assert tune(tiny_inputs.job("policy", settings({"type": "aot"}, max_steps=1))).details.objective is None


def test_policy_with_ld_alpha_scores_missing_tokens_once(tiny_inputs):
    """The tiny inputs have no log-prob cache: the first run scores all 90 sequences, the second none."""
    job = tiny_inputs.job("policy", settings({"ld_alpha": 0.3}, max_steps=2))
    tune(job)
    first = losses(job)
    [note] = [e["text"] for e in told(job, "note")]
    assert " 90 sequences" in note
    tune(job)
    assert losses(job) == first
    assert [e["text"] for e in told(job, "note")] == [note]


def test_read_table_with_tails_matches_plain_transformers(tiny_inputs):
    """The cache lacks the held-out pairs, so only their 14 sequences are scored."""
    job, pairs = tiny_inputs.job("policy", settings({"ld_alpha": 0.3})), Pairs.open(tiny_inputs.pairs)
    held_out = pairs.indices("validation")
    table = LogProbTable.read(tiny_inputs.reference, len(pairs))
    context = factories.context(job, events=EventWriter(job.events))
    found = read_table(context, pairs, held_out, context.settings.loss).tails_P2
    model, expected = AutoModelForCausalLM.from_pretrained(tiny_inputs.model), np.full((len(pairs), 2), np.nan)
    for at in held_out:
        common = table.tokens_P2[at].min()
        for column, side in enumerate(SIDES):
            ids, mask = (torch.tensor(tiny_inputs.examples[at][f"{side}_{part}"]) for part in ("ids", "mask"))
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            tokens = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0][mask[1:]]
            expected[at, column] = tokens[common:].sum()
    assert found == pytest.approx(expected, abs=1e-4, nan_ok=True)
    [note] = [e["text"] for e in told(job, "note")]
    assert " 14 sequences" in note


def test_policy_with_wrong_table_raises_without_reference_in_the_loss(tiny_inputs):
    """SimPO has no reference, but the table must still have the policy's log-probs before the first step."""
    table = LogProbTable.read(tiny_inputs.reference, 45)
    table.logprobs_P2[:, 1] += 0.5
    table.write(tiny_inputs.reference)
    with pytest.raises(TrainingError, match=r"(?s) 8 of 8 pairs .*\[reference-check-failed\]"):
        tune(tiny_inputs.job("policy", settings({"type": "simpo"})))


def test_policy_eval_events_ignore_the_weights_of_pairs(tiny_inputs):
    job = tiny_inputs.job("policy", settings({"weighting": "wpo"}, max_steps=1))
    tune(job)
    assert told(job, "eval")[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert told(job)[0]["loss"] < 0.5 * math.log(2)


COUPLED: dict[str, dict[str, Any]] = {
    "aot": {"type": "aot", "ld_alpha": 0.3},
    "unpaired": {"type": "mixture", "of": [{"type": "aot_unpaired"}, *MPO]},
    "wpo": {"type": "bco_pair", "weighting": "wpo"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
@pytest.mark.parametrize(("size", "steps"), [(8, 4), (1, 1)])
def test_policy_on_two_ranks_with_coupled_loss_matches_one(tiny_inputs, forker, name: str, size: int, steps: int):
    """Coupled pairs are on two ranks. With a batch of one pair, one rank has no pairs."""
    fields = settings(COUPLED[name], batch_size=size, max_steps=steps)
    alone, both = (tiny_inputs.job("policy", fields, job) for job in ("alone", "both"))
    tune(alone)
    published(both, forker.run(both, 2))
    for metric in told(alone)[0].keys() - {"event", "rewards/accuracies", *TIMED}:
        tolerance = 1e-3 if metric.startswith(("logps", "grad")) else 1e-5
        found, expected = ([event[metric] for event in told(job)] for job in (both, alone))
        assert found == pytest.approx(expected, abs=tolerance), metric
    assert told(both, "eval")[-1]["eval/loss"] == pytest.approx(told(alone, "eval")[-1]["eval/loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["sigmoid", "aot_unpaired", "bco_pair"])
def test_policy_with_non_finite_loss_raises_with_rows(tiny_inputs, kind: str):
    """A learning rate of 1e30 breaks the weights in step 1. Coupled losses meet them in the pass without gradients."""
    job = tiny_inputs.job("policy", settings({"type": kind}, optimizer={"learning_rate": 1e30}))
    with pytest.raises(TrainingError, match=r"step 2: .*\(rank 0, rows 1\d\d, 1.*\[non-finite-loss\]"):
        tune(job)
    assert len(told(job)) == 1

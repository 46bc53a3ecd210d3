"""Jobs that balance a mixture of experts: compared with naive loops, and with other micro-batches and ranks.

Each token goes to two of four experts. No choice is so close that rounding decides it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import factories
from tests.training import runs
from tests.training.jobs import test_sft
from tests.training.jobs.test_sft import EPS
from tests.training.model.architectures import LOCAL, build
from tests.training.runs import BETA, RATE, SIDES, losses, published, timeless, told, tune
from tests.training.tiny_inputs import TinyInputs, build_tiny_inputs, write_reference
from training.contract.errors import ModelError
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import epoch_order
from training.model.expert_routing import Routing, routing_of

COEFFICIENT, STEPS = 0.1, 6


def world_of_experts(place: Path, kind: str) -> TinyInputs:
    found = build_tiny_inputs(place)
    (found.model / "model.safetensors").unlink()
    without_padding = {"pad_token_id": None}  # its zero embedding would make all experts equal
    build(kind, LOCAL | without_padding).save_pretrained(found.model)
    write_reference(found, AutoModelForCausalLM.from_pretrained(found.model))
    return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> TinyInputs:
    return world_of_experts(tmp_path_factory.mktemp("experts"), "mixtral")


def settings(**changes: Any) -> dict[str, Any]:
    optimizer = {"learning_rate": RATE, "eps": EPS}
    fields = {"router_aux_loss_coef": COEFFICIENT, "optimizer": optimizer, "max_steps": STEPS, "micro_tokens": 60}
    return runs.settings(**fields | changes)


def aux_loss(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    """Return the balance loss by transformers, of a padded batch. The last token of a sequence is not run."""
    ids = [torch.tensor(sequence[:-1]) for sequence in sequences]
    ids_ST, mask_ST = (pad_sequence(parts, batch_first=True) for parts in (ids, [torch.ones_like(run) for run in ids]))
    found: torch.Tensor = model(input_ids=ids_ST, attention_mask=mask_ST, output_router_logits=True).aux_loss
    return found


def naive(inputs: TinyInputs, own_loss: Callable[..., torch.Tensor], sides: tuple[str, ...]) -> list[list[float]]:
    """Return the loss and the balance of each step. The balance covers all sequences of a batch, with their prompts."""
    model, train, found = AutoModelForCausalLM.from_pretrained(inputs.model), inputs.split("train"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS, weight_decay=0.0, foreach=False)
    for step in range(STEPS):
        order = epoch_order(len(train), 0, step // 5)[step % 5 * 8 :][:8]
        balance = aux_loss(model, [train[i][f"{side}_ids"] for i in order for side in sides])
        loss = own_loss(model, order) + COEFFICIENT * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([loss.item(), balance.item()])
    return found


def test_policy_with_balance_matches_a_naive_loop(inputs: TinyInputs):
    table = LogProbTable.read(inputs.reference, len(inputs.examples)).logprobs_P2

    def dpo(model: Any, order: Any) -> torch.Tensor:
        margins = []
        for i in order:
            chosen, rejected = (inputs.plain_logprob(model, inputs.split("train")[i], side) for side in SIDES)
            margins.append(BETA * ((chosen - table[i, 0]) - (rejected - table[i, 1])))
        return -logsigmoid(torch.stack(margins)).mean()

    tune(job := inputs.job("policy", settings(), "naive"))
    expected = naive(inputs, dpo, SIDES)
    assert [[e["loss"], e["aux_loss"]] for e in told(job)] == [pytest.approx(both, abs=1e-5) for both in expected]
    evaluated = told(job, "eval")[-1]
    assert "eval/aux_loss" not in evaluated and "eval/loss" in evaluated


def test_sft_with_balance_matches_a_naive_loop(inputs: TinyInputs):
    def likelihood(model: Any, order: Any) -> torch.Tensor:
        batch = [inputs.split("train")[i] for i in order]
        tokens = sum(sum(example["chosen_mask"]) for example in batch)
        return -torch.stack([inputs.plain_logprob(model, example, "chosen") for example in batch]).sum() / tokens

    constant = {"type": "constant", "warmup_ratio": 0.0}
    fields = test_sft.settings(router_aux_loss_coef=COEFFICIENT, schedule=constant)
    test_sft.tune(job := inputs.job("sft", fields, "naive-sft"))
    expected = naive(inputs, likelihood, ("chosen",))
    assert [[e["loss"], e["aux_loss"]] for e in told(job)][:STEPS] == [
        pytest.approx(both, abs=1e-5) for both in expected
    ]


def test_sft_before_a_balanced_policy_has_the_same_events(inputs: TinyInputs):
    """The sft job checks the policy's settings first, with a pass that reports the routing."""
    fields = test_sft.settings(router_aux_loss_coef=COEFFICIENT, epochs=1)
    alone, both = (inputs.job("sft", fields, name) for name in ("tuned", "tuned-and-trained"))
    both = both.model_copy(update={"recipe": factories.recipe(training={"router_aux_loss_coef": 0.5})})
    for job in (alone, both):
        test_sft.tune(job)
    assert timeless(told(both)) == timeless(told(alone))


def test_evaluation_during_training_computes_no_routing(inputs: TinyInputs, monkeypatch: pytest.MonkeyPatch):
    """The routing costs a softmax over the experts for every token and layer, and the evaluation does not use it."""
    rows: list[int] = []

    def counted(model: PreTrainedModel, layers: Sequence[torch.Tensor], sequences_T: torch.Tensor) -> Routing:
        rows[-1] += 1
        return routing_of(model, layers, sequences_T)

    monkeypatch.setattr("training.model.logprobs.response_logprobs.routing_of", counted)
    for every, evaluations in ((1, 4), (100, 2)):
        rows.append(0)
        tune(job := inputs.job("policy", settings(max_steps=3), f"evaluated-{every}", evaluate_every=every))
        assert len(told(job, "eval")) == evaluations
    assert rows[0] == rows[1] > 0


OTHERWISE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a pair a row": ({"micro_tokens": 1}, {}),
    "one row": ({"micro_tokens": 100_000}, {}),
    "activation checkpointing": ({}, {"activation_checkpointing": True}),
    "a coupled loss": ({"loss": {"type": "aot_unpaired", "beta": BETA}, "micro_tokens": 1}, {}),
    "an adapter": ({"adapter": {"rank": 2, "target_modules": ["q_proj"]}, "micro_tokens": 1}, {}),
}


@pytest.mark.parametrize("way", OTHERWISE)
def test_policy_with_balance_does_not_depend_on_micro_batches(inputs: TinyInputs, way: str):
    """Each case is compared with micro-batches of two or three pairs."""
    changes, compute = OTHERWISE[way]
    same = {name: value for name, value in changes.items() if name != "micro_tokens"}
    jobs = [
        inputs.job("policy", settings(**same), f"{way}-usual"),
        inputs.job("policy", settings(**changes), way, **compute),
    ]
    for job in jobs:
        tune(job)
    for name in ("loss", "aux_loss", "grad_norm"):
        usual, other = ([e[name] for e in told(job)] for job in jobs)
        assert other == pytest.approx(usual, rel=1e-5, abs=1e-5)


def test_policy_with_large_balance_evens_the_experts(inputs: TinyInputs):
    """Even experts have a loss of two, because each token goes to two experts."""
    tune(without := inputs.job("policy", settings(router_aux_loss_coef=1e-9, max_steps=12), "hardly"))
    tune(within := inputs.job("policy", settings(router_aux_loss_coef=1.0, max_steps=12), "much"))
    first, last = (told(job)[-1]["aux_loss"] for job in (without, within))
    assert abs(last - 2) < abs(first - 2) and told(without)[0]["aux_loss"] == told(within)[0]["aux_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), [("mixtral", "ddp"), ("mixtral", "fsdp"), ("gpt_oss", "fsdp")])
def test_policy_with_balance_on_three_ranks_matches_one(tmp_path: Path, forker: Any, kind: str, way: str):
    """With sharded weights, a rank with fewer rows runs padding rows, and these must not count.

    Cases: two pairs left after batches of six; eight pairs on three ranks with one sequence per row.
    """
    rows = {"batch_size": 8} if kind == "gpt_oss" else {"batch_size": 6, "micro_tokens": 30}
    inputs, of_one = world_of_experts(tmp_path, kind), settings(max_steps=7, **rows)
    tune(alone := inputs.job("policy", of_one, "alone"))
    found = published(job := inputs.job("policy", of_one, way, parallel=way), forker.run(job, 3))
    assert losses(found) == pytest.approx(losses(alone), abs=1e-5)
    assert [e["aux_loss"] for e in told(found)] == pytest.approx([e["aux_loss"] for e in told(alone)], abs=1e-5)


def test_policy_with_balance_on_model_without_experts_raises(tiny_inputs: TinyInputs):
    job = tiny_inputs.job("policy", settings())
    with pytest.raises(ModelError, match=r"^`training\.router_aux_loss_coef`: LlamaForCausalLM .*\[no-routing\]$"):
        tune(job)
    assert told(job, "step", "eval") == []

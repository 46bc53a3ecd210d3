"""The self-check: silent for a sound model, a note where prompts cannot be shared, an error where numbers differ."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.training.model.architectures import build
from tests.training.runs import settings
from tests.training.worlds import VOCABULARY, TinyWorld
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter, read_events
from training.contract.protocol.job import JobKind
from training.distributed import ALONE
from training.main import WORK
from training.model.logprobs.self_check import check_exact, tiny_groups


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, initializer_range=0.3, **shape, **changes)).eval()


@pytest.fixture
def told(tmp_path: Path):
    """Run the self-check, and what it told."""

    def check(model: PreTrainedModel, training: bool = False) -> list[str]:
        check_exact(model, EventWriter(tmp_path / "events.jsonl"), training=training)
        return [event["text"] for event in read_events(tmp_path / "events.jsonl")]

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_model_passes_silently_and_stays_as_it_was(told, dtype):
    model = llama().to(dtype)
    assert told(model) == []
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert told(model.train()) == [] and model.training


def test_dropout_is_told_where_the_model_will_train_with_it(told):
    """It is off in the self-check itself, whatever the mode of the model."""
    model = llama(attention_dropout=0.2).train()
    assert told(model) == [] and model.training
    (note,) = told(model, training=True)
    assert "row of its own" in note and "attention dropout of 0.2" in note


def test_a_head_that_does_more_than_its_config_says_is_refused(told):
    """As of an architecture whose logits are scaled by something this program does not know of."""
    model = llama()
    model.register_forward_hook(lambda module, given, out: out.__setitem__("logits", out["logits"] * 0.9) or out)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM \(llama\) differ .* nats a token, expected at most 0\.001"):
        told(model)


def test_errors_that_cancel_in_the_mean_are_refused(told):
    """All tokens are equally likely; of two that stand in the responses once each, the own pass makes one too likely by 0.1
    nats and the other too unlikely by as much."""
    model, shift_V = llama(), torch.zeros(61)
    torch.nn.init.zeros_(model.lm_head.weight)
    counts_V = torch.cat([each.ids_T[each.mask_T] for each in tiny_groups(61)[0]]).bincount()
    shift_V[(counts_V == 1).nonzero()[:2, 0]] = torch.tensor([0.1, -0.1])
    model.register_forward_hook(lambda module, given, out: out.__setitem__("logits", out["logits"] + shift_V) or out)
    with pytest.raises(ModelError, match=r"forward pass by 0\.02\d+ nats a token, expected at most 0\.001"):
        told(model)


def test_a_pass_that_gives_no_numbers_where_the_own_one_does_is_refused(told):
    def spoil(module: Any, _: Any, given: dict[str, Any], out: Any) -> None:
        out["last_hidden_state"] *= float("nan") if "plan" in given else 1.0

    model = llama()
    model.model.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(ModelError, match="forward pass by nan nats a token"):
        told(model)


def test_an_attention_that_looks_elsewhere_is_refused(told):
    """Absolute positions that are off by one in the model's own forward pass only."""
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    own = model.transformer.forward

    def shifted(*tokens: Any, **given: Any) -> Any:
        return own(*tokens, **(given | {"position_ids": given["position_ids"] + 1} if "plan" in given else given))

    model.transformer.forward = shifted
    with pytest.raises(ModelError, match="differ from those of its own forward pass"):
        told(model)


@pytest.mark.parametrize("training", [False, True])
def test_an_attention_that_looks_ahead_is_refused(told, training: bool):
    """A token that sees what comes after it has no log-prob."""
    model = build("gemma3_text", {"use_bidirectional_attention": True})
    with pytest.raises(ModelError, match="differ from those of its own forward pass"):
        told(model, training=training)


JOBS: list[tuple[JobKind, dict[str, Any]]] = [
    ("reference", {"dtype": "float32"}),
    ("policy", settings()),
    ("proof", {"rows": 3}),
]


@pytest.mark.parametrize(("kind", "given"), JOBS, ids=[kind for kind, _ in JOBS])
def test_a_job_checks_the_model_it_loads(tiny_world: TinyWorld, kind: JobKind, given: dict[str, Any]):
    for file in tiny_world.model.iterdir():
        file.unlink()
    build("gemma3_text", {"use_bidirectional_attention": True, "vocab_size": VOCABULARY}).save_pretrained(
        tiny_world.model
    )
    with pytest.raises(ModelError, match="differ from those of its own forward pass"):
        importlib.import_module(WORK[kind]).run(tiny_world.job(kind, given), ALONE, EventWriter(None))


def test_a_model_that_gives_no_numbers_is_left_to_the_job(told):
    """Which can say in which row of the data it meets them."""
    model = llama()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    assert told(model) == []

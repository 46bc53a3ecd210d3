"""The self-check: silent for an exact model, a note if prompts cannot be shared, an error if log-probs differ."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests import factories
from tests.training.model.architectures import build
from tests.training.runs import settings
from tests.training.tiny_inputs import VOCABULARY, TinyInputs
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter, read_events
from training.contract.protocol.job import JobKind
from training.main import WORK
from training.model.logprobs.self_check import check_exact, tiny_groups


def llama(**fields: Any) -> PreTrainedModel:
    return factories.llama(**{"vocab_size": 61, "initializer_range": 0.3, "num_key_value_heads": 4, **fields})


@pytest.fixture
def check_notes(tmp_path: Path):
    """Return a function that runs the self-check and returns its notes."""

    def check(model: PreTrainedModel, training: bool = False) -> list[str]:
        check_exact(model, EventWriter(tmp_path / "events.jsonl"), training=training)
        return [event["text"] for event in read_events(tmp_path / "events.jsonl")]

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_model_passes_silently_and_is_unchanged(check_notes, dtype):
    model = llama().to(dtype)
    assert check_notes(model) == []
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert check_notes(model.train()) == [] and model.training


def test_attention_dropout_writes_a_note_only_for_training(check_notes):
    """The self-check itself runs without dropout, in any mode of the model."""
    model = llama(attention_dropout=0.2).train()
    assert check_notes(model) == [] and model.training
    (note,) = check_notes(model, training=True)
    assert "row of its own" in note and "attention dropout of 0.2" in note


def test_a_head_with_an_undeclared_scale_raises(check_notes):
    """For example an architecture with an unknown name of a logit scale."""
    model = llama()
    model.register_forward_hook(lambda module, args, out: out.__setitem__("logits", out["logits"] * 0.9) or out)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM \(llama\) .* 0\.001 .* \[self-check\]"):
        check_notes(model)


def test_errors_that_cancel_in_the_mean_raise(check_notes):
    """All tokens are equally likely. The own pass shifts two tokens, each once in the responses, by 0.1 and -0.1 nats."""
    model, shift_V = llama(), torch.zeros(61)
    torch.nn.init.zeros_(model.lm_head.weight)
    counts_V = torch.cat([sequence.ids_T[sequence.mask_T] for sequence in tiny_groups(61)[0]]).bincount()
    shift_V[(counts_V == 1).nonzero()[:2, 0]] = torch.tensor([0.1, -0.1])
    model.register_forward_hook(lambda module, args, out: out.__setitem__("logits", out["logits"] + shift_V) or out)
    with pytest.raises(ModelError, match=r" 0\.02\d+ nats .* 0\.001 .* \[self-check\]"):
        check_notes(model)


def test_nan_log_probs_raise_if_the_own_pass_is_finite(check_notes):
    def set_nan(module: Any, _: Any, kwargs: dict[str, Any], out: Any) -> None:
        out["last_hidden_state"] *= float("nan") if "plan" in kwargs else 1.0

    model = llama()
    model.model.register_forward_hook(set_nan, with_kwargs=True)
    with pytest.raises(ModelError, match=r" nan nats .* \[self-check\]"):
        check_notes(model)


def test_shifted_positions_raise(check_notes):
    """Absolute positions are off by one with shared prefixes."""
    config = GPT2Config(vocab_size=61, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    forward = model.transformer.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        shift = {"position_ids": kwargs["position_ids"] + 1} if "plan" in kwargs else {}
        return forward(*args, **(kwargs | shift))

    model.transformer.forward = shifted
    with pytest.raises(ModelError, match=r"\[self-check\]"):
        check_notes(model)


@pytest.mark.parametrize("training", [False, True])
def test_bidirectional_attention_raises(check_notes, training: bool):
    """A token that attends to later tokens has no log-prob."""
    model = build("gemma3_text", {"use_bidirectional_attention": True})
    with pytest.raises(ModelError, match=r"\[self-check\]"):
        check_notes(model, training=training)


JOBS: list[tuple[JobKind, dict[str, Any]]] = [
    ("reference", {"dtype": "float32"}),
    ("policy", settings()),
    ("proof", {"rows": 3}),
]


@pytest.mark.parametrize(("kind", "job_settings"), JOBS, ids=[kind for kind, _ in JOBS])
def test_jobs_run_the_self_check_on_their_model(tiny_inputs: TinyInputs, kind: JobKind, job_settings: dict[str, Any]):
    for file in tiny_inputs.model.iterdir():
        file.unlink()
    build("gemma3_text", {"use_bidirectional_attention": True, "vocab_size": VOCABULARY}).save_pretrained(
        tiny_inputs.model
    )
    with pytest.raises(ModelError, match=r"\[self-check\]"):
        importlib.import_module(WORK[kind]).run(factories.context(tiny_inputs.job(kind, job_settings)))


def test_a_model_with_nan_log_probs_passes(check_notes):
    """The job can report the rows with NaN."""
    model = llama()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    assert check_notes(model) == []

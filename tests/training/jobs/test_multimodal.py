"""The language model of a multimodal model is trained like a plain one, and the rest of the model stays unchanged.

The oracle is the same job on the language model alone: a Llama, and a Llava around that Llama.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.training.model.architectures import LINEAR, build_multimodal, groups
from tests.training.runs import losses, published, settings, told, tune
from tests.training.tiny_inputs import TinyInputs, build_tiny_inputs
from training.contract.config.recipe import Compute
from training.contract.config.training import Adapter, SupervisedTuning
from training.contract.protocol.events import EventWriter, read_events
from training.distributed import ALONE
from training.evaluation.generate import greedy
from training.loop.model_io import load_for_training
from training.model.adapter import add_adapter
from training.model.attention.prefix_support import why_not_shared
from training.model.attention.shared_prefix import TokenSequence
from training.model.backbone import body_of, text_modules
from training.model.load import load_model
from training.model.logprobs.response_logprobs import response_logprobs
from training.model.training_setup import prepare_for_training
from training.parallel.model_specs import TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.replicated import Replicated

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]}


@pytest.fixture
def both_inputs(tmp_path: Path) -> tuple[TinyInputs, TinyInputs]:
    """Return tiny inputs with a Llama, and the same one with a Llava around it."""
    plain = build_tiny_inputs(tmp_path / "plain", tied=False)
    larger = plain.copied_to(tmp_path / "larger")
    llama = AutoModelForCausalLM.from_pretrained(plain.model)
    llava = build_multimodal("llava", {**llama.config.to_dict(), "dtype": "float32"})
    body_of(llava).load_state_dict(llama.model.state_dict())
    llava.lm_head.load_state_dict(llama.lm_head.state_dict())
    for file in larger.model.iterdir():
        file.unlink()
    llava.save_pretrained(larger.model)
    (larger.model / "processor_config.json").write_text(json.dumps({"image_token": "<image>"}))
    return plain, larger


def test_multimodal_policy_matches_the_plain_one_and_keeps_the_rest(both_inputs: tuple[TinyInputs, TinyInputs]):
    plain, larger = (inputs.job("policy", settings(), "job") for inputs in both_inputs)
    tune(plain), tune(larger)
    assert losses(larger) == losses(plain) and len(losses(plain)) == 12
    before, after = (load_file(folder / "model.safetensors") for folder in (both_inputs[1].model, larger.staging))
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if "vision" in name or "projector" in name} != set()
    alone = load_file(plain.staging / "model.safetensors")
    assert sum(any(torch.equal(tensor, other) for other in after.values()) for tensor in alone.values()) == len(alone)
    assert (larger.staging / "processor_config.json").read_bytes() == (
        both_inputs[1].model / "processor_config.json"
    ).read_bytes()
    base, tuned = (load_model(folder, "float32", CPU) for folder in (both_inputs[1].model, larger.staging))
    picture = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    seen = [model.get_image_features(picture, return_dict=True).pooler_output[0] for model in (base, tuned)]
    assert len(seen[0]) and torch.equal(*seen), "image features are those of the base"
    trained, frozen = (sum(t.numel() for n, t in before.items() if (n in kept) is is_kept) for is_kept in (False, True))
    [note] = [e["text"] for job in (plain, larger) for e in told(job, "note") if "language model" in e["text"]]
    assert f" {trained:,} parameters" in note and f" {frozen:,}," in note


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "shards": ({}, {"parallel": "fsdp"}, 1e-5),
    "shards in bfloat16": ({"precision": "bfloat16", "micro_tokens": 1}, {"parallel": "fsdp"}, 3e-4),
    "an adapter in shards": ({"adapter": LORA}, {"parallel": "fsdp"}, 1e-5),
    "Muon, activation checkpointing": (
        {"optimizer": {"type": "muon", "learning_rate": 3e-3, "adamw": {"learning_rate": 3e-3}}},
        {"activation_checkpointing": True},
        1e-5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_multimodal_policy_with_each_option_matches_the_plain_one(
    both_inputs: tuple[TinyInputs, TinyInputs], forker: Any, option: str
):
    training, compute, tolerance = OPTIONS[option]
    jobs = [inputs.job("policy", settings(max_steps=4, **training), "job", **compute) for inputs in both_inputs]
    plain, larger = (published(job, forker.run(job, 2)) for job in jobs)
    assert losses(larger) == pytest.approx(losses(plain), abs=tolerance)
    before, after = (load_file(folder / "model.safetensors") for folder in (both_inputs[1].model, larger.folder))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    for name, tensor in before.items():
        if "vision" in name or "projector" in name:
            assert torch.equal(tensor.to(after[name].dtype), after[name]), name


@pytest.mark.slow
def test_multimodal_policy_stopped_and_resumed_has_the_same_bits(
    both_inputs: tuple[TinyInputs, TinyInputs], forker: Any
):
    """A checkpoint holds the trained weights. The others come from the base."""
    inputs = both_inputs[1]
    whole, first = (
        inputs.job("policy", settings(max_steps=6), name, checkpoint_every=2) for name in ("whole", "parts")
    )
    expected = published(whole, forker.run(whole))
    assert forker.run(first, 1, stop=3) == [1]
    found = published(first, forker.run(first))
    assert found.fingerprint == expected.fingerprint


@pytest.mark.slow
def test_multimodal_sft_matches_the_plain_one(both_inputs: tuple[TinyInputs, TinyInputs], forker: Any):
    fields = SupervisedTuning.model_validate({"epochs": 1, "batch_size": 8}).model_dump(mode="json")
    plain, larger = (inputs.job("sft", fields) for inputs in both_inputs)
    published(plain, forker.run(plain)), published(larger, forker.run(larger))
    assert losses(larger) == losses(plain) and len(losses(plain)) == 5


@pytest.mark.system
@pytest.mark.slow
def test_compiled_multimodal_model_has_the_same_logprobs(both_inputs: tuple[TinyInputs, TinyInputs]):
    model = load_model(both_inputs[1].model, "float32", CPU)
    sequences = [TokenSequence(each.ids_T.remainder(60), each.mask_T) for group in groups() for each in group]
    before = response_logprobs(model, sequences).tokens_N
    prepare_for_training(model, Compute(device="cpu", compile=True), EventWriter(None), own_dropout=False)
    torch.testing.assert_close(response_logprobs(model, sequences).tokens_N, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_adapter_is_added_to_text_layers_only(targets: Any):
    """Layers for images have the name q_proj too."""
    model = build_multimodal("llava", {"model_type": "llama"})
    assert sum(name.endswith("q_proj") for name, _ in model.named_modules()) > 2
    add_adapter(model, Adapter(target_modules=targets), seed=0)
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted and adapted <= text_modules(model).keys()
    if targets != "all-linear":
        assert {name.rsplit(".", 1)[-1] for name in adapted} == set(targets) and len(adapted) == 3


def test_greedy_of_multimodal_model_matches_the_plain_one(both_inputs: tuple[TinyInputs, TinyInputs]):
    plain, larger = (load_model(inputs.model, "float32", CPU) for inputs in both_inputs)
    prompt = groups()[0][0].ids_T.remainder(60).tolist()
    assert greedy(larger, prompt, [], 8) == greedy(plain, prompt, [], 8) != []
    assert greedy(larger, prompt * 6, [], 80) == greedy(plain, prompt * 6, [], 80), "positions of the language model"


def test_load_with_unused_weights_writes_a_note(tmp_path: Path):
    """An example is the multi-token prediction of Qwen 3.5."""
    build_multimodal("qwen3_5", LINEAR).save_pretrained(tmp_path)
    file, events = tmp_path / "model.safetensors", tmp_path / "events.jsonl"
    trainable = TrainModelSpec(tmp_path, "float32")
    for unused, names in (({}, []), ({"mtp.fc.weight": torch.ones(3)}, ["mtp.fc.weight (1 in all)"])):
        save_file(load_file(file) | unused, file, metadata={"format": "pt"})
        load_for_training(trainable, Compute(device="cpu"), ALONE, EventWriter(events))
        notes = [event["text"] for event in read_events(events) if event["event"] == "note"]
        assert [text.rpartition(": ")[2] for text in notes if "in all)" in text] == names


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_own_dropout_counts_text_layers_only(tmp_path: Path, rate: float):
    """Prompts are not shared in training mode, which is needed only for dropout in text layers."""
    model = build_multimodal("internvl", {"model_type": "qwen2", "attention_dropout": rate})
    model.config.vision_config.hidden_dropout_prob = 0.1
    model.save_pretrained(tmp_path)
    params = Replicated(TrainModelSpec(tmp_path, "float32"), Placement(ALONE, copies=1))
    assert any(isinstance(module, torch.nn.Dropout) and module.p for module in params.model.modules())
    assert params.own_dropout == (rate > 0)
    assert (why_not_shared(params.model, training=True) is None) == (rate == 0)

"""The language model of a larger one is trained as it would be by itself, and nothing else of it is touched.

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
from tests.training.worlds import TinyWorld, build_world
from training.contract.config.recipe import Adapter, Compute, SupervisedTuning
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
def worlds(tmp_path: Path) -> tuple[TinyWorld, TinyWorld]:
    """A world of a Llama, and the same one with a Llava around it."""
    plain = build_world(tmp_path / "plain", tied=False)
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


def test_it_is_trained_as_by_itself_and_the_rest_is_kept(worlds: tuple[TinyWorld, TinyWorld]):
    plain, larger = (world.job("policy", settings(), "job") for world in worlds)
    tune(plain), tune(larger)
    assert losses(larger) == losses(plain) and len(losses(plain)) == 12
    before, after = (load_file(folder / "model.safetensors") for folder in (worlds[1].model, larger.staging))
    assert before.keys() == after.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if "vision" in name or "projector" in name} != set()
    alone = load_file(plain.staging / "model.safetensors")
    assert sum(any(torch.equal(tensor, other) for other in after.values()) for tensor in alone.values()) == len(alone)
    assert (larger.staging / "processor_config.json").read_bytes() == (
        worlds[1].model / "processor_config.json"
    ).read_bytes()
    base, tuned = (load_model(folder, "float32", CPU) for folder in (worlds[1].model, larger.staging))
    picture = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
    seen = [model.get_image_features(picture, return_dict=True).pooler_output[0] for model in (base, tuned)]
    assert len(seen[0]) and torch.equal(*seen), "it sees what the base sees"
    trained, frozen = (sum(t.numel() for n, t in before.items() if (n in kept) is asked) for asked in (False, True))
    [note] = [e["text"] for job in (plain, larger) for e in told(job, "note") if "language model" in e["text"]]
    assert f"{trained:,} parameters; the other {frozen:,}" in note


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "shards": ({}, {"parallel": "fsdp"}, 1e-5),
    "shards in bfloat16": ({"precision": "bfloat16", "micro_tokens": 1}, {"parallel": "fsdp"}, 3e-4),
    "an adapter in shards": ({"adapter": LORA}, {"parallel": "fsdp"}, 1e-5),
    "Muon, activations made again": (
        {"optimizer": {"type": "muon", "learning_rate": 3e-3, "adamw": {"learning_rate": 3e-3}}},
        {"activation_checkpointing": True},
        1e-5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_it_goes_with_every_other_option(worlds: tuple[TinyWorld, TinyWorld], forker: Any, option: str):
    training, compute, tolerance = OPTIONS[option]
    jobs = [world.job("policy", settings(max_steps=4, **training), "job", **compute) for world in worlds]
    plain, larger = (published(job, forker.run(job, 2)) for job in jobs)
    assert losses(larger) == pytest.approx(losses(plain), abs=tolerance)
    before, after = (load_file(folder / "model.safetensors") for folder in (worlds[1].model, larger.folder))
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    for name, tensor in before.items():
        if "vision" in name or "projector" in name:
            assert torch.equal(tensor.to(after[name].dtype), after[name]), name


@pytest.mark.slow
def test_a_run_that_stopped_goes_on(worlds: tuple[TinyWorld, TinyWorld], forker: Any):
    """A checkpoint holds what is trained; the rest comes from the base again."""
    world = worlds[1]
    whole, first = (world.job("policy", settings(max_steps=6), name, checkpoint_every=2) for name in ("whole", "parts"))
    expected = published(whole, forker.run(whole))
    assert forker.run(first, 1, stop=3) == [1]
    found = published(first, forker.run(first))
    assert found.fingerprint == expected.fingerprint


@pytest.mark.slow
def test_so_is_supervised_tuning(worlds: tuple[TinyWorld, TinyWorld], forker: Any):
    fields = SupervisedTuning.model_validate({"epochs": 1, "batch_size": 8}).model_dump(mode="json")
    plain, larger = (world.job("sft", fields) for world in worlds)
    published(plain, forker.run(plain)), published(larger, forker.run(larger))
    assert losses(larger) == losses(plain) and len(losses(plain)) == 5


@pytest.mark.system
@pytest.mark.slow
def test_compiled_layers_are_the_same(worlds: tuple[TinyWorld, TinyWorld]):
    model = load_model(worlds[1].model, "float32", CPU)
    sequences = [TokenSequence(each.ids_T.remainder(60), each.mask_T) for group in groups() for each in group]
    before = response_logprobs(model, sequences).tokens_N
    prepare_for_training(model, Compute(device="cpu", compile=True), EventWriter(None), own_dropout=False)
    torch.testing.assert_close(response_logprobs(model, sequences).tokens_N, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
def test_an_adapter_is_put_where_text_goes(targets: Any):
    """Layers for images are called q_proj as well."""
    model = build_multimodal("llava", {"model_type": "llama"})
    assert sum(name.endswith("q_proj") for name, _ in model.named_modules()) > 2
    add_adapter(model, Adapter(target_modules=targets), seed=0)
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted and adapted <= text_modules(model).keys()
    if targets != "all-linear":
        assert {name.rsplit(".", 1)[-1] for name in adapted} == set(targets) and len(adapted) == 3


def test_it_answers_as_by_itself(worlds: tuple[TinyWorld, TinyWorld]):
    plain, larger = (load_model(world.model, "float32", CPU) for world in worlds)
    prompt = groups()[0][0].ids_T.remainder(60).tolist()
    assert greedy(larger, prompt, [], 8) == greedy(plain, prompt, [], 8) != []
    assert greedy(larger, prompt * 6, [], 80) == greedy(plain, prompt * 6, [], 80), "the language model's own room"


def test_what_is_not_saved_again_is_told(tmp_path: Path):
    """Heads of Qwen 3.5 that predict several tokens at once, for example."""
    build_multimodal("qwen3_5", LINEAR).save_pretrained(tmp_path)
    file, events = tmp_path / "model.safetensors", tmp_path / "events.jsonl"
    trainable = TrainModelSpec(tmp_path, "float32")
    for more, told_of in (({}, []), ({"mtp.fc.weight": torch.ones(3)}, ["mtp.fc.weight (1 in all)"])):
        save_file(load_file(file) | more, file, metadata={"format": "pt"})
        load_for_training(trainable, Compute(device="cpu"), ALONE, EventWriter(events))
        notes = [event["text"] for event in read_events(events) if event["event"] == "note"]
        assert [text.rpartition(": ")[2] for text in notes if "not saved again" in text] == told_of


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_only_dropout_that_text_meets_counts(tmp_path: Path, rate: float):
    """A config of the whole says nothing of either; training mode, in which prompts cannot be shared, is for text's alone."""
    model = build_multimodal("internvl", {"model_type": "qwen2", "attention_dropout": rate})
    model.config.vision_config.hidden_dropout_prob = 0.1
    model.save_pretrained(tmp_path)
    params = Replicated(TrainModelSpec(tmp_path, "float32"), Placement(ALONE, copies=1))
    assert any(isinstance(module, torch.nn.Dropout) and module.p for module in params.model.modules())
    assert params.own_dropout == (rate > 0)
    assert (why_not_shared(params.model, training=True) is None) == (rate == 0)

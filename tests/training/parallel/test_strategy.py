"""What `auto` chooses, by the bytes a parameter takes and those a device has, worked out by hand."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.runs import on_two_ranks
from training.contract.config.recipe import Adapter, Parallel
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input
from training.distributed import ALONE, Group
from training.parallel.model_specs import InferenceModelSpec, ModelSource, TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.strategy import choose, choose_layout, device_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """100 x 8 embeddings and head, and a layer of 4 x 8 x 8 for attention, 3 x 8 x 4 and two norms of 8, and a last norm:
    800 + 800 + 256 + 96 + 16 + 8 = 1,976 parameters, which the files alone tell."""
    place: Path = tmp_path_factory.mktemp("model")
    config = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    LlamaForCausalLM(LlamaConfig(**config, **heads)).save_pretrained(place)
    return place


def source(folder: Path, kind: str) -> ModelSource:
    weights = Input(kind="reference_model", fingerprint="0" * 64, folder=folder)
    sources: dict[str, ModelSource] = {
        "trained in float32": TrainModelSpec(folder, "float32"),
        "trained in bfloat16": TrainModelSpec(folder, "bfloat16"),
        "with an adapter": TrainModelSpec(folder, "bfloat16", Adapter()),
        "scored in float32": InferenceModelSpec(weights, "float32"),
        "scored in bfloat16": InferenceModelSpec(weights, "bfloat16"),
    }
    return sources[kind]


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("trained in float32", 16 * 1976),
        ("trained in bfloat16", 18 * 1976),
        ("with an adapter", 2 * 1976),
        ("scored in float32", 4 * 1976),
        ("scored in bfloat16", 2 * 1976),
    ],
)
def test_it_shards_what_takes_more_than_seven_tenths_of_a_device(folder: Path, kind: str, needed: int):
    enough = -(-needed * 10 // 7)
    assert choose(source(folder, kind), "auto", ALONE, enough + 1)[0] == "ddp"
    assert choose(source(folder, kind), "auto", ALONE, enough - 2)[0] == "fsdp"


def test_ranks_of_unequal_memory_choose_alike_by_the_least(folder: Path, tmp_path: Path):
    """Chosen by each for itself, one would wait for ever for the other's part of a tensor."""
    scored = source(folder, "scored in float32")
    chosen = on_two_ranks(tmp_path, lambda group: choose(scored, "auto", group, [3 << 30, 1 << 10][group.rank]))
    assert chosen[0] == chosen[1] == ["fsdp", "scoring takes 0.00 GiB besides activations, a device has 0.00 GiB"]


def test_it_says_how_much_that_is(folder: Path):
    _, why = choose(source(folder, "scored in float32"), "auto", ALONE, 3 << 30)
    assert why == "scoring takes 0.00 GiB besides activations, a device has 3.00 GiB"


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp"])
def test_what_the_recipe_says_is_not_weighed(folder: Path, way: Parallel):
    assert choose(source(folder, "trained in float32"), way, ALONE, 1) == (way, "as the recipe says")


def test_an_adapter_takes_what_its_base_takes(folder: Path, tmp_path: Path):
    """A policy that is an adapter has no weights to count but those of the model below it."""
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter, base = (Input(kind=k, fingerprint="0" * 64, folder=f) for k, f in (("policy", tmp_path), ("base", folder)))
    assert InferenceModelSpec(adapter, "float32", base).folder == folder
    assert InferenceModelSpec(base, "float32", adapter).folder == folder


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path):
    with pytest.raises(ModelError, match="no weights at all"):
        choose(TrainModelSpec(tmp_path, "float32"), "auto", ALONE, 1)


@pytest.mark.parametrize(
    ("parallel", "nodes", "copies"),
    [("ddp", 2, 6), ("fsdp", 2, 1), ("hsdp", 2, 2), ("hsdp", 6, 6)],
)
def test_how_often_six_ranks_hold_the_weights(folder: Path, parallel: Parallel, nodes: int, copies: int):
    """In all, once, or once a machine; where each machine has one rank, that is whole on each."""
    group = Group(0, 6, torch.device("cpu"), nodes)
    found = choose_layout(source(folder, "scored in float32"), parallel, group, EventWriter(None))
    assert found == Placement(group, copies)
    assert (found.shards, found.is_sharded) == (6 // copies, copies < 6)


def test_ranks_of_a_machine_share_its_memory():
    whole = device_bytes(ALONE)
    assert device_bytes(Group(0, 4, torch.device("cpu"))) == whole // 4
    assert device_bytes(Group(0, 4, torch.device("cpu"), nodes=2)) == whole // 2

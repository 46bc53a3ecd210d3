"""The choice of `auto`, with bytes per parameter and per device computed by hand."""

from pathlib import Path

import pytest
import torch

from tests import factories
from tests.training.runs import on_two_ranks
from training.contract.config.recipe import Parallel
from training.contract.config.training import Adapter
from training.contract.errors import ModelError
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input
from training.distributed import ALONE, Group
from training.parallel.model_specs import InferenceModelSpec, ModelSource, TrainModelSpec
from training.parallel.placement import Placement
from training.parallel.strategy import choose, choose_layout, device_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a model of 1,976 parameters: embeddings and head of 100 x 8, attention of 4 x 8 x 8, an MLP of 3 x 8 x 4 and
    three norms of 8."""
    model_folder: Path = tmp_path_factory.mktemp("model")
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1}
    model = factories.llama(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    model.save_pretrained(model_folder)
    return model_folder


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
def test_auto_shards_models_over_seventy_percent_of_a_device(folder: Path, kind: str, needed: int):
    enough = -(-needed * 10 // 7)
    assert choose(source(folder, kind), "auto", ALONE, enough + 1)[0] == "ddp"
    assert choose(source(folder, kind), "auto", ALONE, enough - 2)[0] == "fsdp"


def test_ranks_of_unequal_memory_choose_by_the_smallest(folder: Path, tmp_path: Path):
    """With different choices a rank would wait forever for the other."""
    scored = source(folder, "scored in float32")
    choices = on_two_ranks(tmp_path, lambda group: choose(scored, "auto", group, [3 << 30, 1 << 10][group.rank]))
    assert choices[0] == choices[1] == ["fsdp", "scoring takes 0.00 GiB besides activations, a device has 0.00 GiB"]


def test_auto_gives_needed_and_available_memory_as_reason(folder: Path):
    _, reason = choose(source(folder, "scored in float32"), "auto", ALONE, 3 << 30)
    assert reason == "scoring takes 0.00 GiB besides activations, a device has 3.00 GiB"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_a_placement_in_the_recipe_is_used_for_any_memory(folder: Path, parallel: Parallel):
    assert choose(source(folder, "trained in float32"), parallel, ALONE, 1) == (parallel, "set by the recipe")


def test_an_adapter_is_counted_by_its_base(folder: Path, tmp_path: Path):
    """The folder of an adapter lacks the weights of the model."""
    (tmp_path / "adapter_config.json").write_text("{}")
    adapter, base = (Input(kind=k, fingerprint="0" * 64, folder=f) for k, f in (("policy", tmp_path), ("base", folder)))
    assert InferenceModelSpec(adapter, "float32", base).folder == folder
    assert InferenceModelSpec(base, "float32", adapter).folder == folder


def test_a_folder_without_weights_raises(tmp_path: Path):
    with pytest.raises(ModelError, match=r"\[no-weights\]"):
        choose(TrainModelSpec(tmp_path, "float32"), "auto", ALONE, 1)


@pytest.mark.parametrize(
    ("parallel", "nodes", "copies"),
    [("ddp", 2, 6), ("fsdp", 2, 1), ("hsdp", 2, 2), ("hsdp", 6, 6)],
)
def test_choose_layout_gives_the_copies_of_each_strategy(folder: Path, parallel: Parallel, nodes: int, copies: int):
    """For six ranks: a copy per rank, one copy, or a copy per node. With one rank per node each rank has a copy."""
    group = Group(0, 6, torch.device("cpu"), nodes)
    found = choose_layout(source(folder, "scored in float32"), parallel, group, EventWriter(None))
    assert found == Placement(group, copies)
    assert (found.shards, found.is_sharded) == (6 // copies, copies < 6)


def test_device_bytes_are_shared_by_the_ranks_of_a_node():
    total = device_bytes(ALONE)
    assert device_bytes(Group(0, 4, torch.device("cpu"))) == total // 4
    assert device_bytes(Group(0, 4, torch.device("cpu"), nodes=2)) == total // 2

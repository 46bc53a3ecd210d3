"""No value of a loaded model lies in a file that somebody else may overwrite; /proc/self/maps says what is mapped."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.training.worlds import build_world
from training.contract.config.recipe import Adapter
from training.contract.identity.model_identity import adapter_fingerprint
from training.contract.protocol.job import Input
from training.model.adapter import add_adapter, load_policy, save_adapter
from training.model.load import load_model, own_values
from training.parallel.model_specs import TrainModelSpec

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_world(tmp_path, train=1, validation=1, tied=request.param).model


def mapped(folder: Path) -> list[str]:
    """The files in `folder` that this process maps."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def overwritten(folder: Path) -> None:
    """Truncated, then filled, as by `cp`: the kernel then also takes back pages that a process changed for itself."""
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with open(file, "r+b") as opened:
            opened.truncate()
            opened.write(b"\xff" * size)


def values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def in_shards(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="5KB")
    (folder / WEIGHTS).unlink(missing_ok=True)
    assert len(list(folder.glob("*.safetensors"))) > 2


LOADS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "in the dtype of the file": lambda folder: load_model(folder, "float32", CPU),
    "in another": lambda folder: load_model(folder, "bfloat16", CPU),
    "master weights": lambda folder: TrainModelSpec(folder, "bfloat16").load(CPU, master_weights=True),
    "below an adapter": lambda folder: TrainModelSpec(folder, "float32", Adapter(type="lora", rank=2)).load(CPU),
}


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("arrange", [lambda folder: None, in_shards], ids=["one file", "shards"])
def test_a_model_keeps_its_values_whatever_becomes_of_its_files(
    folder: Path, load: Callable[[Path], PreTrainedModel], arrange: Callable[[Path], None]
) -> None:
    """What is trained of it stays trained: the first half of each tensor, which has pages of its own by then."""
    arrange(folder)
    model = load(folder)
    assert mapped(folder) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[: parameter.numel() // 2] += 1
    before = values(model)
    ids = torch.arange(8)[None]
    logits = model(input_ids=ids).logits
    overwritten(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_what_is_loaded_is_what_is_in_the_file(folder: Path) -> None:
    model = load_model(folder, "float32", CPU).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in load_file(folder / WEIGHTS).items())


def test_values_are_copied_out_of_a_map(folder: Path) -> None:
    """Whatever a later transformers does: by itself this one maps the file, which the test would notice if it no longer did."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert mapped(folder)
    before, tied = values(model), model.get_input_embeddings().weight is model.get_output_embeddings().weight
    own_values(model, folder)
    assert mapped(folder) == []
    overwritten(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tied == model.config.tie_word_embeddings
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_an_adapter_keeps_its_values_too(folder: Path, tmp_path: Path) -> None:
    adapted = load_model(folder, "float32", CPU)
    add_adapter(adapted, Adapter(type="lora", rank=2), seed=0)
    (place := tmp_path / "adapter").mkdir()
    save_adapter(adapted, {name: torch.randn_like(p) for name, p in adapted.named_parameters()}, place)
    base = Input(kind="reference_model", fingerprint="0" * 64, folder=folder)
    policy = Input(kind="policy", fingerprint=adapter_fingerprint(place, base.fingerprint), folder=place)
    model = load_policy(policy, base, "float32", CPU)
    assert mapped(folder) == mapped(place) == []
    before = values(model)
    overwritten(folder)
    overwritten(place)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

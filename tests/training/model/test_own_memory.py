"""The values of a loaded model are not mapped from files, which others may overwrite; /proc/self/maps lists mapped files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.training import Adapter
from training.contract.identity.model_identity import adapter_fingerprint
from training.contract.protocol.job import Input
from training.model.adapter import add_adapter, load_policy, save_adapter
from training.model.load import load_model, own_values
from training.parallel.model_specs import TrainModelSpec

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return build_tiny_inputs(tmp_path, train=1, validation=1, tied=request.param).model


def mapped(folder: Path) -> list[str]:
    """Return the files in `folder` that this process maps."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def overwrite(folder: Path) -> None:
    """Truncate and fill the files, as `cp` does. The kernel then also drops modified pages of a private mapping."""
    for file in folder.glob("*.safetensors"):
        size = file.stat().st_size
        with open(file, "r+b") as opened:
            opened.truncate()
            opened.write(b"\xff" * size)


def values(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def split_into_shards(folder: Path) -> None:
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
@pytest.mark.parametrize("arrange", [lambda folder: None, split_into_shards], ids=["one file", "shards"])
def test_a_model_keeps_its_values_after_its_files_are_overwritten(
    folder: Path, load: Callable[[Path], PreTrainedModel], arrange: Callable[[Path], None]
) -> None:
    """Also trained values: the first half of each tensor."""
    arrange(folder)
    model = load(folder)
    assert mapped(folder) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[: parameter.numel() // 2] += 1
    before = values(model)
    ids = torch.arange(8)[None]
    logits = model(input_ids=ids).logits
    overwrite(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_a_loaded_model_has_the_values_of_the_file(folder: Path) -> None:
    model = load_model(folder, "float32", CPU).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in load_file(folder / WEIGHTS).items())


def test_own_values_copies_mapped_values(folder: Path) -> None:
    """transformers maps the file by default; the test fails if a later version does not."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert mapped(folder)
    before, tied = values(model), model.get_input_embeddings().weight is model.get_output_embeddings().weight
    own_values(model, folder)
    assert mapped(folder) == []
    overwrite(folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tied == model.config.tie_word_embeddings
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied


def test_an_adapter_keeps_its_values_after_its_files_are_overwritten(folder: Path, tmp_path: Path) -> None:
    adapted = load_model(folder, "float32", CPU)
    add_adapter(adapted, Adapter(type="lora", rank=2), seed=0)
    (adapter := tmp_path / "adapter").mkdir()
    save_adapter(adapted, {name: torch.randn_like(p) for name, p in adapted.named_parameters()}, adapter)
    base = Input(kind="reference_model", fingerprint="0" * 64, folder=folder)
    policy = Input(kind="policy", fingerprint=adapter_fingerprint(adapter, base.fingerprint), folder=adapter)
    model = load_policy(policy, base, "float32", CPU)
    assert mapped(folder) == mapped(adapter) == []
    before = values(model)
    overwrite(folder)
    overwrite(adapter)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

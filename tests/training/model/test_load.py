"""Loading raises errors where transformers only warns; saving keeps every bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import factories
from tests.training.model.architectures import GPT2, MULTIMODAL, build, build_multimodal
from training.contract.config.training import Adapter
from training.contract.errors import ModelError
from training.model.adapter import add_adapter
from training.model.load import left_out, load_model, save_model

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = factories.llama(vocab_size=32, hidden_size=16, attention_dropout=0.3, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / WEIGHTS) | {k: v for k, v in changes.items() if v is not None}
    for name in [name for name, value in changes.items() if value is None]:
        del tensors[name]
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_a_loaded_model_has_the_tensors_of_the_file_and_is_in_evaluation_mode(folder):
    model = load_model(folder, "float32", CPU)
    for name, tensor in load_file(folder / WEIGHTS).items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert not model.training and model.config.use_cache is True


def test_the_dtype_of_a_loaded_model_is_the_requested_one(folder):
    assert {p.dtype for p in load_model(folder, "bfloat16", CPU).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        (
            {"model.layers.1.self_attn.q_proj.weight": None},
            r"missing keys: model\.layers\.1\.self_attn\.q_proj\.weight",
        ),
        ({"lm_head.weight": None}, r"missing keys: lm_head\.weight \(1\)"),
        ({"model.layers.7.extra.weight": torch.ones(3)}, r"unexpected keys: model\.layers\.7\.extra\.weight"),
        ({"model.norm.weight": torch.ones(17)}, r"model\.norm\.weight"),
    ],
    ids=["missing", "missing head", "surplus", "shape"],
)
def test_missing_surplus_or_misshapen_tensors_raise_with_their_names(folder, changes, values):
    rewrite(folder, **changes)
    with pytest.raises(ModelError, match=values + r".* \[weights-mismatch\]") as caught:
        load_model(folder, "float32", CPU)
    assert str(folder) in str(caught.value)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("beside_safetensors", [False, True])
def test_a_bin_file_is_never_opened(folder, tmp_path, beside_safetensors):
    torch.save({"model.norm.weight": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    if beside_safetensors:
        load_model(folder, "float32", CPU)
    else:
        (folder / WEIGHTS).unlink()
        with pytest.raises(ModelError, match=r"pytorch_model\.bin.*\*\.safetensors"):
            load_model(folder, "float32", CPU)
    assert not (tmp_path / "ran").exists()


def test_code_from_the_folder_is_never_run(folder, tmp_path):
    (folder / "mine.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"auto_map.* \[custom-code\]"):
        load_model(folder, "float32", CPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "damage", [lambda p: p.write_bytes(p.read_bytes()[:-8]), lambda p: p.write_bytes(b"\xff" * 64)]
)
def test_a_truncated_or_foreign_file_raises(folder, damage):
    damage(folder / WEIGHTS)
    with pytest.raises(ModelError, match=str(folder)):
        load_model(folder, "float32", CPU)


def test_a_missing_folder_raises(tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        load_model(tmp_path / "nowhere", "float32", CPU)


def test_a_saved_model_keeps_every_bit_and_records_no_path(folder, tmp_path):
    model = load_model(folder, "float32", CPU)
    save_model(model, tmp_path / "saved")
    before, after = load_file(folder / WEIGHTS), load_file(tmp_path / "saved" / WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    written = "".join(p.read_text() for p in (tmp_path / "saved").glob("*.json"))
    assert str(tmp_path) not in written
    load_model(tmp_path / "saved", "float32", CPU)


@pytest.mark.parametrize(("kind", "changes"), [pytest.param(k, c, id=k) for k, _, c in MULTIMODAL])
def test_all_parts_of_a_multimodal_model_are_loaded_and_saved(tmp_path, kind, changes):
    """For Qwen 3.5 and Llama 4, transformers also has a causal language model without images."""
    build_multimodal(kind, changes).save_pretrained(tmp_path / "model")
    save_model(load_model(tmp_path / "model", "float32", CPU), tmp_path / "saved")
    before, after = load_file(tmp_path / "model" / WEIGHTS), load_file(tmp_path / "saved" / WEIGHTS)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "saved")]
    assert configs[0]["architectures"] == configs[1]["architectures"]


def test_architectures_in_the_config_decide_whether_other_parts_are_loaded(tmp_path):
    """Somebody may extract the language model of a multimodal model, and keep the multimodal config."""
    changes = next(changes for kind, _, changes in MULTIMODAL if kind == "qwen3_5")
    multimodal = build_multimodal("qwen3_5", changes)
    multimodal.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    assert type(load_model(tmp_path, "float32", CPU)) is type(multimodal)
    language_model = AutoModelForCausalLM.from_pretrained(tmp_path)
    language_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3_5ForCausalLM"]}))
    assert type(load_model(tmp_path, "float32", CPU)) is type(language_model) is not type(multimodal)


def test_left_out_returns_tensors_that_transformers_ignores(tmp_path):
    """For example heads that predict several tokens at once."""
    changes = next(changes for kind, _, changes in MULTIMODAL if kind == "qwen3_5")
    build_multimodal("qwen3_5", changes).save_pretrained(folder := tmp_path / "model")
    assert left_out(load_model(folder, "float32", CPU)) == []
    rewrite(folder, **{"mtp.fc.weight": torch.ones(3)})
    assert left_out(load_model(folder, "float32", CPU)) == ["mtp.fc.weight"]


def test_left_out_returns_the_causal_masks_of_published_gpt2(tmp_path):
    """Their pattern `attn.bias` also matches a part of a loaded bias's name. Published names lack the body's prefix."""
    build("gpt2", GPT2).save_pretrained(folder := tmp_path / "model")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    assert "h.0.attn.c_attn.bias" in tensors
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, folder / WEIGHTS, metadata={"format": "pt"})
    model = load_model(folder, "float32", CPU)
    assert left_out(model) == ["h.0.attn.bias"]
    add_adapter(model, Adapter(type="lora", rank=2), seed=0)
    assert left_out(model) == ["h.0.attn.bias"]


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"model_type": "vit", "architectures": ["ViTModel"]}, r"ViTConfig.* \[unsupported-architecture\]"),
        ({"hidden_size": "wide"}, r"hidden_size.* \[model-load\]"),
        ({"num_attention_heads": 3}, r"attention heads.* \[model-load\]"),
    ],
    ids=["not of language", "no number", "no shape"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_config_that_transformers_cannot_use_raises_a_short_error(folder, changes, values, device):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=values) as caught:
        load_model(folder, "float32", torch.device(device))
    assert len(str(caught.value)) < 400 + len(str(folder))

"""Adapters, compared with plain transformers, plain autograd and peft; their files and errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests import factories
from tests.training.model.architectures import GPT2, alone, build, gradients, groups
from training.contract.config.training import Adapter
from training.contract.errors import ModelError
from training.contract.identity.model_identity import adapter_fingerprint, weights_identity
from training.contract.protocol.job import Input
from training.model.adapter import (
    adapter_parameters,
    add_adapter,
    load_policy,
    merge_adapter,
    save_adapter,
    train_mode,
    write_merged,
)
from training.model.load import load_model, save_model
from training.model.logprobs.head import head_of
from training.model.logprobs.response_logprobs import response_logprobs
from training.model.training_setup import check_trainable

CPU = torch.device("cpu")
SEQUENCES = [sequence for group in groups() for sequence in group]
SIZES = [len(group) for group in groups()]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "gpt2": ("gpt2", GPT2),
    "phi": ("phi", {}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "gemma3_text": ("gemma3_text", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
ATTENTION = {"llama": "q_proj", "llama, tied": "v_proj", "gpt2": "c_attn", "phi": "dense", "gemma3_text": "o_proj"}


def adapted(name: str, trained: bool = True, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return one of the models with an adapter; `trained`: with random A and B (B of a new adapter is zero)."""
    model = build(*MODELS[name]).to(dtype)
    add_adapter(model, Adapter(rank=4, **changes), seed=1)
    if trained:
        random = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
    return model


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    return response_logprobs(model, SEQUENCES, SIZES).tokens_N


def plain(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([alone(model, sequence) for sequence in SEQUENCES])


@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, "all-linear") for name in MODELS]
    + [(name, (part, _head)) for name, part in ATTENTION.items() for _head in ["lm_head"]],
)
def test_shared_prefixes_and_the_head_are_exact_with_an_adapter(name: str, targets: Any):
    """Log-probs and gradients equal the model's own forward pass and autograd. Only A and B have gradients."""
    model = adapted(name, target_modules=targets)
    found, expected = logprobs(model), plain(model)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    found_gradients, exact = gradients(model, found), gradients(model, expected)
    trained = {n for n, _ in model.named_parameters() if "lora_A" in n or "lora_B" in n}
    assert found_gradients.keys() == exact.keys() == trained
    assert ("lm_head.lora_B.default.weight" in found_gradients) == ("lm_head" in targets)
    for name, gradient in exact.items():
        assert (found_gradients[name] - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "lm_head")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_new_or_disabled_adapter_changes_no_bit(targets: Any, dtype: torch.dtype):
    reference = logprobs(build(*MODELS["llama"]).to(dtype))
    assert torch.equal(logprobs(adapted("llama", trained=False, dtype=dtype, target_modules=targets)), reference)
    model = adapted("llama", dtype=dtype, target_modules=targets)
    assert not torch.equal(logprobs(model), reference)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    assert torch.equal(logprobs(model), reference)


def test_initial_values_equal_peft_and_depend_only_on_the_seed():
    base = build(*MODELS["llama"])
    torch.manual_seed(1)
    expected = get_peft_model(base, LoraConfig(r=4, lora_alpha=32, target_modules="all-linear")).base_model.model
    first, second = adapted("llama", trained=False), build(*MODELS["llama"])
    values = [{n: p.tolist() for n, p in model.named_parameters()} for model in (first, expected)]
    assert values[0] == values[1]
    before = torch.get_rng_state()
    add_adapter(second, Adapter(rank=4), seed=3)
    assert torch.equal(torch.get_rng_state(), before), "the global generator is unchanged"
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(second.get_parameter(name), first.get_parameter(name))


# A model, its targets, and values in the message: target, class, kind of the layer, expected names.
REFUSED = [
    ("llama", ("q_prj",), "'q_prj'.* LlamaForCausalLM .*down_proj, gate_proj"),
    ("llama", ("embed_tokens",), "'embed_tokens'.* LlamaForCausalLM .*type Embedding"),
    ("llama", ("q_proj", "self_attn"), "'self_attn'.* LlamaAttention"),
    ("qwen3_moe", ("experts",), "'experts'.* Qwen3MoeExperts.* k_proj, lm_head, o_proj, q_proj, v_proj"),
]


@pytest.mark.parametrize(("name", "targets", "values"), REFUSED, ids=[str(targets) for _, targets, _ in REFUSED])
def test_target_modules_that_are_not_linear_raise_and_list_linear_layers(name, targets, values):
    with pytest.raises(ModelError, match=values + r".* \[adapter-target\]"):
        adapted(name, target_modules=targets)


SHARED_EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1}


@pytest.mark.parametrize(
    ("targets", "values"),
    [
        (
            "all-linear",
            r"down_proj, gate_proj, up_proj.* \[k_proj, o_proj, q_proj, v_proj\]` \[adapter-in-experts\]",
        ),
        (("gate_proj",), r"gate_proj without also targeting up_proj because they are fused .*\[adapter-unsupported\]"),
    ],
    ids=["all", "some"],
)
def test_target_modules_that_peft_takes_for_experts_raise(targets: Any, values: str):
    """A shared expert's layers have the names of the fused experts' parts. peft would wrap these, and a merge would lose them.

    Jobs before training raise the same error, and do not change the model.
    """
    model = build("ernie4_5_moe", SHARED_EXPERTS | {"moe_layer_start_index": 0, "moe_layer_end_index": 1})
    names, settings = list(model.state_dict()), Adapter(target_modules=targets)
    with pytest.raises(ModelError, match=values):
        check_trainable(model, factories.recipe(training={"adapter": settings.model_dump()}))
    assert list(model.state_dict()) == names
    with pytest.raises(ModelError, match=values):
        add_adapter(model, settings, seed=0)


def test_a_router_of_another_class_is_not_a_linear_layer():
    """phimoe's router is a subclass of torch's linear layer that returns a tuple."""
    model = build("phimoe", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2})
    add_adapter(model, Adapter(), seed=0)
    assert {n.split(".")[-4] for n, p in model.named_parameters() if p.requires_grad} == {f"{p}_proj" for p in "kqvo"}
    assert logprobs(model).isfinite().all()


@pytest.mark.parametrize("targets", ["all-linear", ("0.self_attn.q_proj",), ("down_proj", "lm_head")])
def test_targets_match_the_same_layers_as_in_peft(targets: Any):
    """Names or ends of names."""
    peft_model = get_peft_model(
        build(*MODELS["llama"]), LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    )
    expected = {n.removeprefix("base_model.model.") for n, p in peft_model.named_parameters() if p.requires_grad}
    model = adapted("llama", target_modules=targets)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == expected


Saved = tuple[Path, Path, PreTrainedModel]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Saved]:
    """Return a function that saves a base model and an adapter on it. It returns both folders and the adapted model."""

    def save(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Saved:
        base, adapter = tmp_path / "base", tmp_path / "adapter"
        save_model(build(*MODELS[name]).to(dtype), base)
        adapter.mkdir()
        model = adapted(name, dtype=dtype, **changes)
        save_adapter(model, model.state_dict(), adapter)
        return base, adapter, model

    return save


def fingerprint_of(folder: Path) -> str:
    return weights_identity(folder).fingerprint


def inputs(base: Path, adapter: Path) -> tuple[Input, Input]:
    base_fingerprint = fingerprint_of(base)
    policy = Input(kind="policy", fingerprint=adapter_fingerprint(adapter, base_fingerprint), folder=adapter)
    return policy, Input(kind="reference_model", fingerprint=base_fingerprint, folder=base)


def test_target_modules_are_written_as_in_the_recipe(saved):
    """They are part of an adapter's fingerprint."""
    _, adapter, _ = saved("llama", target_modules=("q_proj", "0.mlp.down_proj"))
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["target_modules"] == ["0.mlp.down_proj", "q_proj"]


@pytest.mark.parametrize("targets", ["all-linear", ("lm_head",)], ids=["layers", "head"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_a_saved_adapter_gives_the_same_log_probs_here_and_in_peft(saved, name: str, targets: Any):
    base, adapter, model = saved(name, target_modules=targets)
    expected = logprobs(model)
    assert torch.equal(logprobs(load_policy(*inputs(base, adapter), "float32", CPU)), expected)
    peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(plain(peft_model), expected, atol=2e-5, rtol=0)
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA" and written["r"] == 4 and written["task_type"] == "CAUSAL_LM"
    assert str(adapter.parent) not in json.dumps(written) and written["target_modules"] == sorted(
        written["target_modules"]
    )


@pytest.mark.parametrize("targets", ["all-linear", ("lm_head",)], ids=["layers", "head"])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2"])
def test_a_merged_adapter_is_a_plain_model_with_the_same_log_probs(saved, tmp_path, name: str, targets: Any):
    """Each layer's matrix is the same too. An adapted head is no longer tied to the embeddings."""
    base, adapter, model = saved(name, target_modules=targets)
    expected, layers = logprobs(model), matrices(model)
    merge_adapter(model)
    save_model(model, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", "float32", CPU)
    assert not any("lora" in n or "base_layer" in n for n, _ in merged.named_parameters())
    ends = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert merged.config.tie_word_embeddings == torch.equal(*ends)
    torch.testing.assert_close(logprobs(merged), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(matrices(merged), layers, atol=1e-5, rtol=0)
    other = load_policy(*inputs(base, adapter), "float32", CPU)
    merge_adapter(other)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), merged.parameters(), strict=True))


def matrices(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the matrix of each linear layer, adapted or not: its outputs for the identity."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D, LoraLinear)) and not {"base_layer", "default"} & {
            *name.split(".")
        }:
            base = module.get_base_layer() if isinstance(module, LoraLinear) else module
            size = base.weight.shape[0 if isinstance(base, Conv1D) else 1]
            found[name] = module(torch.eye(size)) - module(torch.zeros(1, size))
    return found


def test_bfloat16_is_merged_in_float32_and_rounded_once(saved):
    _, _, model = saved("llama", torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    exact = (
        layer.base_layer.weight.float() + 8 * layer.lora_B.default.weight.float() @ layer.lora_A.default.weight.float()
    )
    merge_adapter(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, exact.bfloat16())


def test_a_layer_kept_in_float32_is_float32_after_the_merge(tmp_path):
    """These experts' router stays in float32. Its adapter is float32 too; all other adapters are bfloat16."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    save_model(build("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16}), base)
    model = load_model(base, "bfloat16", CPU)
    add_adapter(model, Adapter(rank=4, target_modules=("q_proj", "wg")), seed=1)
    adapter.mkdir()
    save_adapter(model, model.state_dict(), adapter)
    write_merged(*inputs(base, adapter), merged)
    written = load_file(merged / "model.safetensors")
    kept = {f"model.layers.{layer}.mlp.gate.wg.weight" for layer in (0, 1)}
    assert {name for name, tensor in written.items() if tensor.dtype == torch.float32} == kept


def test_an_adapter_on_another_base_or_with_other_tensors_raises(saved):
    base, adapter, _ = saved("llama")
    policy, reference = inputs(base, adapter)
    other = reference.model_copy(update={"fingerprint": "f" * 64})
    with pytest.raises(ModelError, match=r"reference_model ffffffffffff.* \[adapter-base\]"):
        load_policy(policy, other, "float32", CPU)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(tensors))
    value = tensors.pop(name)
    for changed in (tensors, tensors | {name: value, f"more.{name}": value.clone()}):
        save_file(changed, adapter / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors .*lora_A\.weight \(1 .* \[adapter-tensors\]"):
            load_policy(*inputs(base, adapter), "float32", CPU)


def test_fingerprint_of_an_adapter_depends_on_tensors_rule_and_base(saved):
    base, adapter, _ = saved("llama")
    base_fingerprint, config = fingerprint_of(base), json.loads((adapter / "adapter_config.json").read_text())
    before = adapter_fingerprint(adapter, base_fingerprint)

    def configured(**changes: Any) -> str:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
        return adapter_fingerprint(adapter, base_fingerprint)

    ignored = {"base_model_name_or_path": "/x", "peft_version": "9", "inference_mode": False, "lora_dropout": 0.5}
    assert configured(**ignored) == before
    assert (
        len({before, configured(lora_alpha=31), configured(use_rslora=True), configured(target_modules=["q_proj"])})
        == 4
    )
    assert configured() == before != adapter_fingerprint(adapter, "f" * 64)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1e-3}, adapter / "adapter_model.safetensors")
    assert adapter_fingerprint(adapter, base_fingerprint) != before


def test_an_adapter_in_a_model_folder_raises(saved):
    """transformers silently adds such an adapter, as the first assertion shows. The fingerprint would not cover it."""
    base, adapter, model = saved("llama")
    for file in adapter.iterdir():
        (base / file.name).write_bytes(file.read_bytes())
    torch.testing.assert_close(plain(AutoModelForCausalLM.from_pretrained(base)), logprobs(model), atol=2e-5, rtol=0)
    for read in (
        lambda: load_model(base, "float32", CPU),
        lambda: weights_identity(base),
        lambda: weights_identity(adapter),
    ):
        with pytest.raises(ModelError, match=r"adapter_config\.json"):
            read()


def test_training_mode_draws_dropout_of_the_adapter_and_of_the_config_only_on_request():
    """With dropout two passes differ. A new adapter adds nothing until B is not zero, even with dropout."""
    ids = torch.arange(8)[None]
    model = build("gpt2", GPT2 | {"resid_pdrop": 0.5})

    def varies(own_dropout: bool) -> bool:
        train_mode(model, own_dropout)
        first, again = (model(input_ids=ids).logits for _ in range(2))
        return not torch.equal(first, again)

    assert varies(True) and not varies(False)
    add_adapter(model, Adapter(rank=2, dropout=0.5), seed=0)
    assert varies(True) and not varies(False)
    with torch.no_grad():
        for tensor in adapter_parameters(model).values():
            tensor.fill_(0.1)
    assert varies(False)
    model.eval()
    assert torch.equal(*(model(input_ids=ids).logits for _ in range(2)))


def test_the_head_has_the_dropout_of_its_adapter():
    model = adapted("llama", target_modules=("lm_head",), dropout=0.5).train()
    torch.manual_seed(0)
    low_rank = head_of(model).low_rank
    assert low_rank is not None
    hidden = torch.ones(400, 32)
    assert float((low_rank.dropout(hidden) == 0).float().mean()) == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(low_rank.project(hidden[:1]), low_rank.project(hidden[:1]))

"""Low-rank adaptation (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685): a policy that is its base and little more.

    y = W x + b + alpha / rank * B A dropout(x)         in every targeted linear layer

W and b are frozen. A (rank x in) starts random and B (out x rank) zero, so before the first step the policy equals its base
to the last bit; gradients, optimizer state and checkpoints are those of A and B alone.

peft makes these layers, in place. So the model keeps its class, its config and the names of its parts, which attention,
head and self-check rely on; a PeftModel would wrap them all.

A finished adapter is either merged: `W + alpha / rank * B A`, summed in float32 and rounded once to the dtype of W, is a
plain model; or written by itself in peft's format. It is only ever loaded onto the weights it was trained on, whose
fingerprint is part of its own.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load, save_file
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from training.contract.config.recipe import Adapter
from training.contract.errors import ModelError
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_fingerprint,
    weights_fingerprint,
    weights_identity,
)
from training.contract.protocol.input_files import reading
from training.contract.protocol.job import Input
from training.model.backbone import takes_only_text, text_modules
from training.model.load import load_model, save_model

# peft's name of a model's one adapter, part of its parameters' names; and the prefix of their names in files.
_NAME, _FILE_PREFIX = "default", "base_model.model."
_LINEAR = (torch.nn.Linear.forward, Conv1D.forward)


def add_adapter(model: PreTrainedModel, settings: Adapter, seed: int, float32: bool = False) -> None:
    """Freeze `model` and add a new adapter, initialized from `seed`. Raises ModelError for targets it does not have.

    It has the dtype of its layers; with `float32` it stays as it was drawn, as the masters of a rounded copy do.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets(model, settings),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    asked = {name.rsplit(".", 1)[-1] for name in config.target_modules}
    with _seen_in_float32(model) if float32 else contextlib.nullcontext():
        _inject(model, config, seed)
    if config.target_parameters:  # peft takes names of layers of older transformers for what replaced them
        kept = {name.rsplit(".", 1)[-1] for name in config.target_modules}
        raise ModelError(
            f"peft puts an adapter on {', '.join(sorted(asked - kept))} of {type(model).__name__} into its experts, which lie "
            f"in one tensor together, and not into these layers: leave them out, "
            f"`training.adapter.target_modules: [{', '.join(sorted(kept))}]`"
        )


def train_mode(model: PreTrainedModel, own_dropout: bool) -> None:
    """Have `model` draw the dropout of its adapter and, with `own_dropout`, that of its config, until it is set to `eval`."""
    model.train(own_dropout)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.lora_dropout.train()


def merge_adapter(model: PreTrainedModel) -> None:
    """Merge the adapter into the weights of `model`, in place. A head that had one is no longer tied to the embeddings."""
    head = model.get_output_embeddings()
    if isinstance(head, LoraLinear) and head.weight is model.get_input_embeddings().weight:
        head.get_base_layer().weight = Parameter(head.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLinear)]:
        base, dtype = layer.get_base_layer(), layer.weight.dtype
        layer.float().merge()
        model.set_submodule(name, base.to(dtype))
    del model.peft_config


def save_adapter(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapter of `model` as peft does, from the model's `weights`; the path of the base model is not recorded."""
    tensors = {_file_name(name): weights[name].detach().contiguous() for name in adapter_parameters(model)}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_NAME])
    config.target_modules, config.inference_mode = sorted(config.target_modules), True
    config.save_pretrained(folder)


def load_policy(policy: Input, base: Input | None, dtype: str, device: torch.device) -> PreTrainedModel:
    """The policy, ready to score: a whole model, or an adapter on `base`, the model it was trained from.

    Raises ModelError where either cannot be loaded, or the adapter was trained on other weights.
    """
    if not (policy.folder / ADAPTER_CONFIG).is_file():
        return load_model(policy.folder, dtype, device)
    assert base is not None, "an adapter needs its base"
    with reading(policy.folder):
        if adapter_fingerprint(policy.folder, base.fingerprint) != policy.fingerprint:
            raise ModelError(
                f"the policy {short(policy.fingerprint)} is an adapter that was not trained on the {base.kind} "
                f"{short(base.fingerprint)}, and means nothing on other weights; materialize policy again"
            )
        model = load_model(base.folder, dtype, device)
        _inject(model, LoraConfig.from_pretrained(str(policy.folder)), seed=0)
        _load_weights(model, policy.folder / ADAPTER_WEIGHTS)
    return model.eval()


def write_merged(policy: Input, base: Input, folder: Path) -> str:
    """Merge the adapter `policy` into `base` and write the model, of the adapter's dtype, into `folder`; its fingerprint.

    Always on the CPU, so that the result does not depend on where the adapter was trained. Raises ModelError.
    """
    # On a layer that a bfloat16 model keeps in float32 (training.model.load) the adapter is float32, too.
    dtypes = {tensor.dtype for tensor in _read(policy.folder / ADAPTER_WEIGHTS).values()}
    dtype = str(min(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    model = load_policy(policy, base, dtype, torch.device("cpu"))
    merge_adapter(model)
    save_model(model, folder)
    return weights_fingerprint(weights_identity(folder))


@contextlib.contextmanager
def _seen_in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Within the block the weights look like float32, taking no memory: peft rounds a new adapter to the dtype of its layer."""
    values = {parameter: parameter.data for parameter in model.parameters()}
    for parameter in values:
        parameter.data = torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, value in values.items():
            parameter.data = value


def _inject(model: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, _NAME)
        except ValueError as error:
            raise ModelError(f"peft cannot put this adapter into {type(model).__name__}: {error}") from error


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    """Copy the tensors of `file` into the adapter of `model`. Raises ModelError unless the names are the same."""
    found, own = _read(file), adapter_parameters(model)
    expected = {_file_name(name): tensor for name, tensor in own.items()}
    if wrong := sorted(expected.keys() ^ found.keys()):
        raise ModelError(
            f"{file} does not fit its {ADAPTER_CONFIG}: {', '.join(wrong[:5])} in only one of them ({len(wrong)})"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(found[name])


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a small file, in memory of their own."""
    tensors: dict[str, Tensor] = load(file.read_bytes())
    return tensors


def adapter_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of the adapter of `model` by their names in it; none where it has no adapter."""
    return {name: p for name, p in model.named_parameters() if f".{_NAME}." in name}


def _file_name(parameter: str) -> str:
    return _FILE_PREFIX + parameter.replace(f".{_NAME}.", ".")


def targets(model: PreTrainedModel, settings: Adapter) -> list[str]:
    """Names for peft: of all linear layers but the head, or the given ones. Raises ModelError for one that matches none.

    Experts that share one tensor are not linear layers, and get no adapter.
    """
    modules = text_modules(model)
    linear = {name for name, module in modules.items() if type(module).forward in _LINEAR}
    if settings.target_modules == "all-linear":
        head = model.get_output_embeddings()
        return sorted(linear - {name for name, module in modules.items() if module is head})
    for target in settings.target_modules:
        fitting = {name: module for name, module in modules.items() if _fits(name, target)}
        if not fitting or fitting.keys() - linear:
            raise ModelError(_wrong_target(model, target, fitting, linear))
    if takes_only_text(model):
        return list(settings.target_modules)
    # A short name fits layers for images as well, which often are called the same.
    return sorted(name for name in linear if any(_fits(name, target) for target in settings.target_modules))


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _wrong_target(model: PreTrainedModel, target: str, fitting: dict[str, Module], linear: set[str]) -> str:
    kinds = ", ".join(sorted({type(module).__name__ for module in fitting.values()}))
    found = f"these are of type {kinds}" if fitting else "there is no layer of that name"
    return (
        f"`training.adapter.target_modules` names {target!r}, and in {type(model).__name__} {found}; expected "
        f"`all-linear` or names of linear layers, which here are {', '.join(sorted({n.rsplit('.', 1)[-1] for n in linear}))}"
    )

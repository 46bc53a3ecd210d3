"""Low-rank adaptation (LoRA, Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    y = W x + b + alpha / rank * B A dropout(x)         in every targeted linear layer

W and b are frozen. A (rank x in) starts random and B (out x rank) zero: before the first step the policy equals its base
to the last bit. Only A and B have gradients, optimizer state and checkpoints.

peft injects these layers in place. A PeftModel would wrap the model, but attention, head and self-check rely on the
model's class, config and module names.

A finished adapter is merged or saved in peft's format. Merging sums `W + alpha / rank * B A` in float32 and rounds once to
the dtype of W. An adapter is only loaded onto the weights it was trained on: their fingerprint is part of its fingerprint.
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

from training.contract.config.training import Adapter
from training.contract.errors import ModelError
from training.contract.identity.fingerprint import short
from training.contract.identity.model_identity import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_fingerprint,
    weights_identity,
)
from training.contract.protocol.input_files import reading
from training.contract.protocol.job import Input
from training.model.backbone import takes_only_text, text_modules
from training.model.load import load_model, save_model

# peft's name of a model's only adapter, a part of parameter names; and the prefix of these names in files.
_NAME, _FILE_PREFIX = "default", "base_model.model."
_LINEAR = (torch.nn.Linear.forward, Conv1D.forward)


def add_adapter(model: PreTrainedModel, settings: Adapter, seed: int, float32: bool = False) -> None:
    """Freeze `model` and add a new adapter, initialized from `seed`. Raise ModelError for unknown targets.

    The adapter has the dtype of its layers. With `float32` it keeps the float32 values drawn: these are the master weights
    of a rounded copy.
    """
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets(model, settings),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    requested = {name.rsplit(".", 1)[-1] for name in config.target_modules}
    with _report_float32(model) if float32 else contextlib.nullcontext():
        _inject(model, config, seed)
    if config.target_parameters:  # peft maps layer names of older transformers to the expert tensors that replaced them
        kept = {name.rsplit(".", 1)[-1] for name in config.target_modules}
        raise ModelError(
            f"peft adapts the fused experts of {type(model).__name__} instead of the layers "
            f"{', '.join(sorted(requested - kept))}: leave these out, "
            f"`training.adapter.target_modules: [{', '.join(sorted(kept))}]`",
            "adapter-in-experts",
        )


def train_mode(model: PreTrainedModel, own_dropout: bool) -> None:
    """Enable the dropout of the adapter and, with `own_dropout`, the dropout of the config, until `model.eval()`."""
    model.train(own_dropout)
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.lora_dropout.train()


def merge_adapter(model: PreTrainedModel) -> None:
    """Merge the adapter into the weights of `model`, in place. Untie an adapted head from the embeddings."""
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
    """Write the adapter of `model` in peft's format, from the model's `weights`. The base model's path is not recorded."""
    tensors = {_file_name(name): weights[name].detach().contiguous() for name in adapter_parameters(model)}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_NAME])
    config.target_modules, config.inference_mode = sorted(config.target_modules), True
    config.save_pretrained(folder)


def load_policy(policy: Input, base: Input | None, dtype: str, device: torch.device) -> PreTrainedModel:
    """Return the policy in evaluation mode: a full model, or an adapter on `base`, the model it was trained from.

    Raise ModelError if either cannot be loaded, or if the adapter was trained on other weights.
    """
    if not (policy.folder / ADAPTER_CONFIG).is_file():
        return load_model(policy.folder, dtype, device)
    assert base is not None, "an adapter needs its base"
    with reading(policy.folder):
        if adapter_fingerprint(policy.folder, base.fingerprint) != policy.fingerprint:
            raise ModelError(
                f"the policy {short(policy.fingerprint)} is an adapter trained on other weights than the {base.kind} "
                f"{short(base.fingerprint)}: materialize policy again",
                "adapter-base",
            )
        model = load_model(base.folder, dtype, device)
        _inject(model, LoraConfig.from_pretrained(str(policy.folder)), seed=0)
        _load_weights(model, policy.folder / ADAPTER_WEIGHTS)
    return model.eval()


def write_merged(policy: Input, base: Input, folder: Path) -> str:
    """Merge the adapter `policy` into `base`, write the model to `folder` in the adapter's dtype, return its fingerprint.

    This runs on the CPU, so that the result does not depend on the device of the training. Raise ModelError.
    """
    # A bfloat16 model keeps some layers in float32 (training.model.load). Their adapter is float32, too.
    dtypes = {tensor.dtype for tensor in _read_tensors(policy.folder / ADAPTER_WEIGHTS).values()}
    dtype = str(min(dtypes, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    model = load_policy(policy, base, dtype, torch.device("cpu"))
    merge_adapter(model)
    save_model(model, folder)
    return weights_identity(folder).fingerprint


@contextlib.contextmanager
def _report_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let the weights look like float32 within the block, without memory: peft rounds a new adapter to its layer's dtype."""
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
            raise ModelError(f"peft cannot adapt {type(model).__name__}: {error}", "adapter-unsupported") from error


def _load_weights(model: PreTrainedModel, file: Path) -> None:
    """Copy the tensors of `file` into the adapter of `model`. Raise ModelError unless the names match."""
    stored = _read_tensors(file)
    expected = {_file_name(name): tensor for name, tensor in adapter_parameters(model).items()}
    if unmatched := sorted(expected.keys() ^ stored.keys()):
        raise ModelError(
            f"{file} does not fit its {ADAPTER_CONFIG}: only one of them has {', '.join(unmatched[:5])} "
            f"({len(unmatched)} tensors differ); materialize policy again",
            "adapter-tensors",
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a small file. They do not map the file."""
    tensors: dict[str, Tensor] = load(file.read_bytes())
    return tensors


def adapter_parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the adapter's tensors by their names in `model`; an empty dict without an adapter."""
    return {name: p for name, p in model.named_parameters() if f".{_NAME}." in name}


def _file_name(parameter: str) -> str:
    return _FILE_PREFIX + parameter.replace(f".{_NAME}.", ".")


def targets(model: PreTrainedModel, settings: Adapter) -> list[str]:
    """Return target names for peft: all linear layers except the head, or those of `settings`.

    Raise ModelError for a name that matches no linear layer. Fused experts are not linear layers and get no adapter.
    """
    modules = text_modules(model)
    linear = {name for name, module in modules.items() if type(module).forward in _LINEAR}
    if settings.target_modules == "all-linear":
        head = model.get_output_embeddings()
        return sorted(linear - {name for name, module in modules.items() if module is head})
    for target in settings.target_modules:
        matching = {name: module for name, module in modules.items() if _matches(name, target)}
        if not matching or matching.keys() - linear:
            raise ModelError(_describe_wrong_target(model, target, matching, linear), "adapter-target")
    if takes_only_text(model):
        return list(settings.target_modules)
    # A short name also matches the layers for images, which often have the same names.
    return sorted(name for name in linear if any(_matches(name, target) for target in settings.target_modules))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _describe_wrong_target(model: PreTrainedModel, target: str, matching: dict[str, Module], linear: set[str]) -> str:
    kinds = ", ".join(sorted({type(module).__name__ for module in matching.values()}))
    mismatch = f"has layers of type {kinds} there" if matching else "lacks such a layer"
    return (
        f"`training.adapter.target_modules` names {target!r}, but {type(model).__name__} {mismatch}; expected "
        f"`all-linear` or names of linear layers: {', '.join(sorted({n.rsplit('.', 1)[-1] for n in linear}))}"
    )

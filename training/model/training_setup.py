"""Preparing a loaded model for training: faster or smaller, with the same log-probs.

Activation checkpointing (Chen et al. 2016) keeps only the inputs of each layer, and runs the layer again in the backward
pass. By then the model's forward pass has returned, so the attention implementation is set once more for the second run;
dropout is drawn again from the generator's earlier state.

Compiling makes fused kernels of a layer, which all layers share: attention is left out (its plan is plain Python), lengths of
rows are symbolic, and dropout is drawn as it would be without. The head (logprob_tiles.py) is compiled too. Kernels
are made at the first call, the best for sizes like those of that call, so a small batch is run before the first step, forward
and backward, and once without gradients as held-out pairs are. This warm-up changes nothing: its loss is multiplied by zero,
and random generators, mode and buffers of the model are restored.

Both replace `forward` of the layers' instances, below any FSDP hooks; checkpointing goes around the compiled code. No
parameter is renamed, so a saved model does not differ.
"""

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from training.contract.config.recipe import Adapter, Compute
from training.contract.errors import ModelError, TrainingError
from training.contract.protocol.events import EventWriter
from training.model.adapter import add_adapter, train_mode
from training.model.attention.packed_attention import use_attention
from training.model.backbone import architecture, body_of, text_config
from training.model.expert_routing import NoRouting, check_experts
from training.model.load import without_values
from training.model.logprobs.float8 import check_float8
from training.model.logprobs.head import HEAD_OPTIONS, HeadOptions
from training.model.logprobs.logprob_tiles import COMPILE_OPTIONS, compile_tiles
from training.model.logprobs.response_logprobs import response_logprobs
from training.model.logprobs.self_check import LONGEST, tiny_groups

# Draw dropout as without compiling: the compiler's own random numbers would change the run. And fuse no reductions of two
# orders on a GPU: whether that pays depends on the number of tokens (torch/_inductor/scheduler.py, `MixOrderReduction`), so a
# graph would be compiled again for batches of other sizes.
_LAYER_OPTIONS = {**COMPILE_OPTIONS, "fallback_random": True, "triton.mix_order_reduction": False}
# How much longer than the self-check's are the sequences of the warm-up: kernels for 36 tokens are slow ones for thousands.
# An odd number, so that a row is as long as no size of a model: the compiler takes equal sizes for one.
_TIMES = 31


def check_trainable(model: PreTrainedModel, recipe: Mapping[str, Any]) -> None:
    """Raise ModelError or TrainingError where training by `recipe` would: for jobs before it, which may take long.

    It puts the adapter into a copy without values, looks for layers to checkpoint or compile, and for float8 on the device;
    it runs a few tokens to see which experts they go to, and compiles the tiles of the head, to see whether this machine can.
    """
    training, compute = recipe.get("training", {}), recipe.get("compute", {})
    if compute.get("activation_checkpointing") or compute.get("compile"):
        _layers(model)
    if adapter := training.get("adapter"):
        add_adapter(without_values(model.config, model.dtype), Adapter.model_validate(adapter), seed=0)
    if training.get("head_precision") == "float8":
        check_float8(model.device)
    if training.get("router_aux_loss_coef"):
        _check_routing(model, "training")
    if compute.get("compile"):
        with _compiler_explained():
            compile_tiles(model.device, model.dtype)


def prepare_for_training(
    model: PreTrainedModel,
    compute: Compute,
    events: EventWriter,
    own_dropout: bool,
    float8_head: bool = False,
    routing: str | None = None,
) -> None:
    """Make `model` run as `compute` says; `own_dropout`: whether it will draw what its config asks for.

    `routing`: the section of the recipe for which the passes of training will tell where their tokens went, if any does. Raises
    ModelError where the model has no layers to prepare, or then no experts, or where the device has no float8; TrainingError
    where torch cannot compile.
    """
    if routing is not None:
        _check_routing(model, routing)
    if float8_head:
        check_float8(model.device)
    setattr(model, HEAD_OPTIONS, HeadOptions(float8=float8_head, compiled=compute.compile))
    if compute.compile:
        events.phase("compiling")
        for layer in _layers(model):
            layer.forward = torch.compile(layer.forward, dynamic=True, options=_LAYER_OPTIONS)
    if compute.activation_checkpointing:
        for layer in _layers(model):
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, context_fn=partial(_same_attention, model)
            )
    if compute.compile:
        with _compiler_explained():
            _warm_up(model, own_dropout, routing is not None)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    layers = [module for module in body_of(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{architecture(model)} has no layers that `compute.activation_checkpointing` and `compute.compile` could "
            f"work on (transformers' GradientCheckpointingLayer): leave both false"
        )
    return layers


def _same_attention(
    model: PreTrainedModel,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Contexts for a layer's first run, which needs none, and for its second, which uses the same attention."""
    return contextlib.nullcontext(), use_attention(model, body_of(model).config._attn_implementation)


@contextlib.contextmanager
def _compiler_explained() -> Iterator[None]:
    """Raise TrainingError where torch's compiler raises; the log gets all that the compiler said."""
    try:
        yield
    except TorchDynamoException as error:
        traceback.print_exception(error)
        said = str(error)
        complaint = next((line for line in said.splitlines() if " error: " in line), None)
        telling = complaint or " ".join(said.partition("\n\n")[0].split())
        raise TrainingError(
            f"`compute.compile`: torch cannot compile on this machine: {telling}; install what is missing of a C++ compiler "
            "and the headers of Python (on Debian: apt-get install -y g++ python3-dev), or set it to false"
        ) from error


def _check_routing(model: PreTrainedModel, section: str) -> None:
    """Raise ModelError unless passes can tell where their tokens went; some models have experts that do not."""
    try:
        check_experts(model)
        sequences, sizes = tiny_groups(text_config(model).vocab_size)
        with _undisturbed(model), torch.no_grad():
            model.eval()
            response_logprobs(model, sequences, sizes, routing=True)
    except NoRouting as error:
        raise ModelError(f"`{section}.router_aux_loss_coef`: {error}: set it to 0") from error


def _warm_up(model: PreTrainedModel, own_dropout: bool, routing: bool) -> None:
    """Run what a step and what an evaluation runs, on a thousand made-up tokens, or fewer where positions end before."""
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None) or _TIMES * LONGEST
    sequences, sizes = tiny_groups(config.vocab_size, max(1, min(_TIMES, positions // LONGEST)))
    with _undisturbed(model):
        train_mode(model, own_dropout)
        (0.0 * response_logprobs(model, sequences, sizes, routing).sums_S.sum()).backward()
        model.eval()
        with torch.no_grad():
            response_logprobs(model, sequences, sizes)
    compile_tiles(model.device, model.dtype)


@contextlib.contextmanager
def _undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Restore random generators, mode and buffers of `model`, and remove gradients that were not there before."""
    mode, buffers = model.training, {name: buffer.clone() for name, buffer in model.named_buffers()}
    without = [parameter for parameter in model.parameters() if parameter.grad is None]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        yield
    model.train(mode)
    for parameter in without:
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

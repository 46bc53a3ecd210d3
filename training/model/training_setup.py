"""Preparing a loaded model for training: less time or memory, same log-probs.

Activation checkpointing (Chen et al. 2016) keeps only the inputs of each layer and runs the layer again in the backward pass.
The model's forward pass has returned by then, so the attention implementation is set again for the second run. Dropout is
drawn again from the generator's earlier state.

Compiling fuses the kernels of a layer; all layers share them. Attention is left out (its plan is plain Python), row lengths
are symbolic, and dropout is drawn as without compiling. The head (logprob_tiles.py) is compiled too. Kernels are compiled at
the first call, and chosen for sizes like those of this call. So a small batch runs before the first step: forward and
backward, and once without gradients, as for held-out pairs. This warm-up changes nothing: its loss is multiplied by zero, and
the model's random generators, mode and buffers are restored.

Both replace `forward` of the layer instances, below any FSDP hooks. Checkpointing wraps the compiled code. Parameter names,
and thus saved models, stay the same.
"""

import contextlib
import traceback
from collections.abc import Iterator
from functools import partial

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from training.contract.config.recipe import Compute, Recipe
from training.contract.errors import ModelError, TrainingError, without_code
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

# `fallback_random` draws dropout as without compiling: the compiler's random numbers would change the run. Mixed-order
# reductions depend on the number of tokens (torch/_inductor/scheduler.py, `MixOrderReduction`): a GPU would compile a graph
# again for batches of other sizes.
_LAYER_OPTIONS = {**COMPILE_OPTIONS, "fallback_random": True, "triton.mix_order_reduction": False}
# The warm-up's sequences are so many times longer than the self-check's: kernels chosen for 36 tokens are slow for thousands.
# The number is odd, so that no row is as long as a dimension of a model: the compiler would take equal sizes for one.
_TIMES = 31


def check_trainable(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise ModelError or TrainingError if training by `recipe` would. Long jobs before the training call this.

    It adds the adapter to a copy without values, and checks layers, experts, float8 and the compiler. The checks run a few
    tokens and compile the tiles of the head.
    """
    training, compute = recipe.training, recipe.compute
    if compute.activation_checkpointing or compute.compile:
        _layers(model)
    if training.adapter is not None:
        add_adapter(without_values(model.config, model.dtype), training.adapter, seed=0)
    if training.head_precision == "float8":
        check_float8(model.device)
    if training.router_aux_loss_coef:
        _check_routing(model, "training")
    if compute.compile:
        with _explain_compiler_errors():
            compile_tiles(model.device, model.dtype)


def prepare_for_training(
    model: PreTrainedModel,
    compute: Compute,
    events: EventWriter,
    own_dropout: bool,
    float8_head: bool = False,
    routing: str | None = None,
) -> None:
    """Apply the settings `compute` to `model`. `own_dropout`: whether training draws the dropout of its config.

    `routing`: the section of the recipe that needs the routing of training passes, if any. Raise ModelError if the model
    lacks layers to prepare or experts, or if the device lacks float8. Raise TrainingError if torch cannot compile.
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
        with _explain_compiler_errors():
            _warm_up(model, own_dropout, routing is not None)


def _layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    layers = [module for module in body_of(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{architecture(model)} lacks layers for `compute.activation_checkpointing` and `compute.compile`; expected "
            "transformers' GradientCheckpointingLayer: set both to false",
            "no-layers",
        )
    return layers


def _same_attention(
    model: PreTrainedModel,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return contexts for a layer's first run (empty) and second run (sets the current attention)."""
    return contextlib.nullcontext(), use_attention(model, body_of(model).config._attn_implementation)


@contextlib.contextmanager
def _explain_compiler_errors() -> Iterator[None]:
    """Turn exceptions of torch's compiler into TrainingError. The log gets the full traceback."""
    try:
        yield
    except TorchDynamoException as error:
        traceback.print_exception(error)
        text = str(error)
        error_line = next((line for line in text.splitlines() if " error: " in line), None)
        summary = error_line or " ".join(text.partition("\n\n")[0].split())
        raise TrainingError(
            f"`compute.compile`: torch cannot compile on this machine: {summary}; install a C++ compiler and the headers of "
            "Python (on Debian: apt-get install -y g++ python3-dev), or set it to false",
            "compiler",
        ) from error


def _check_routing(model: PreTrainedModel, section: str) -> None:
    """Raise ModelError unless passes of `model` report their routing; some models have experts but report none."""
    try:
        check_experts(model)
        sequences, sizes = tiny_groups(text_config(model).vocab_size)
        with _restoring_state(model), torch.no_grad():
            model.eval()
            response_logprobs(model, sequences, sizes, routing=True)
    except NoRouting as error:
        message = f"`{section}.router_aux_loss_coef`: {without_code(str(error))}: set it to 0"
        raise ModelError(message, error.code) from error


def _warm_up(model: PreTrainedModel, own_dropout: bool, routing: bool) -> None:
    """Run the passes of a step and of an evaluation, on about a thousand random tokens, or fewer if positions are limited."""
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None) or _TIMES * LONGEST
    sequences, sizes = tiny_groups(config.vocab_size, max(1, min(_TIMES, positions // LONGEST)))
    with _restoring_state(model):
        train_mode(model, own_dropout)
        (0.0 * response_logprobs(model, sequences, sizes, routing).sums_S.sum()).backward()
        model.eval()
        with torch.no_grad():
            response_logprobs(model, sequences, sizes)
    compile_tiles(model.device, model.dtype)


@contextlib.contextmanager
def _restoring_state(model: PreTrainedModel) -> Iterator[None]:
    """Restore random generators, mode and buffers after the block, and remove new gradients."""
    mode, buffers = model.training, {name: buffer.clone() for name, buffer in model.named_buffers()}
    without_gradient = [parameter for parameter in model.parameters() if parameter.grad is None]
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        yield
    model.train(mode)
    for parameter in without_gradient:
        parameter.grad = None
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

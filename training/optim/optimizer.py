"""The optimizer and its learning rate.

AdamW decays only weight matrices and embeddings, not norms and biases. It uses torch's fused kernel, for CPU and CUDA.

Muon (Jordan 2024) updates the matrices between embeddings and head. It replaces a matrix's momentum by the nearest orthogonal
matrix, so that all directions move equally far. Newton-Schulz iterations in bfloat16 compute it. AdamW updates vectors,
embeddings and heads (one vector per token), as the author advises. We classify by module, not by name (`hidden_matrices`).
Several processes share the work (training.optim.distributed_muon).

The learning rate of step n (1, 2, ... N) is a pure function of n, so that resuming needs no scheduler state:

    n <= W       n / (W + 1)                              warm-up, W = ceil(warmup_ratio * N) steps
    n > W        1, or falling with p = (n-1-W) / (N-W)   constant; linear 1-p; cosine (1 + cos(pi p)) / 2

The first and the last step have a learning rate above zero. Step W+1 is the first with the full rate. After the warm-up the
factor equals transformers' `get_scheduler`.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from training.contract.config.optimizer import AdamW, Muon, Optimizer, Schedule
from training.optim.distributed_muon import DistributedMuon, MatrixAssignment

# In floats 0.07 * 100 is 7.000000000000001; the intended result is 7.
_ROUNDING = 1e-9


class Optimizers:
    """Optimizers over disjoint named parameters, stepped together. Their state is stored by parameter name."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by the flat keys `<state>/<parameter>`."""
        states = ((name, part.state[p]) for part, name, p in self._named_parameters() if p in part.state)
        return {f"{key}/{name}": value for name, state in states for key, value in state.items()}

    def restore(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the state that `tensors()` of Optimizers with the same settings returned."""
        owners = {name: (part, p) for part, name, p in self._named_parameters()}
        for state_key, value in tensors:
            key, name = state_key.split("/", 1)
            part, parameter = owners[name]
            part.state[parameter][key] = value.to(parameter.device)

    def _named_parameters(self) -> Iterator[tuple[torch.optim.Optimizer, str, Parameter]]:
        for part in self._parts:
            for group in part.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    yield part, name, parameter


def build_optimizer(
    settings: Optimizer,
    parameters: Mapping[str, Parameter],
    matrices: Container[str],
    norms: Container[str] = (),
    turns: MatrixAssignment | None = None,
) -> Optimizers:
    """Return the recipe's optimizer over named parameters. Muon updates those in `matrices`, AdamW the rest.

    Parameters in `norms` are not decayed, even if they are matrices. With `turns` several processes share Muon's work; a
    parameter may then hold only this process's rows of a tensor.
    """
    if isinstance(settings, AdamW):
        return Optimizers(_adamw(settings, parameters, norms))
    hidden = {name: parameter for name, parameter in parameters.items() if name in matrices}
    rest = {name: parameter for name, parameter in parameters.items() if name not in matrices}
    return Optimizers(_muon(settings, hidden, turns) + _adamw(settings.adamw, rest, norms))


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """Return the names of the matrices between embeddings and head.

    Embeddings are the model's input embeddings, tied or not, and all other `torch.nn.Embedding`s, for example of positions. A
    mixture of experts has tensors of three dimensions, unsupported by Muon, and stacked biases of two dimensions.
    """
    excluded_modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    excluded_modules += [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    excluded = {id(parameter) for module in excluded_modules if module is not None for parameter in module.parameters()}
    norms = norm_weights(model)
    named = model.named_parameters()
    return {n for n, p in named if p.ndim == 2 and id(p) not in excluded and n not in norms and not _is_bias(n)}


def norm_weights(model: PreTrainedModel) -> set[str]:
    """Return the names of norm parameters, found by module: some of Cohere's are matrices with a row per head."""
    norms = [(name, module) for name, module in model.named_modules() if "Norm" in type(module).__name__]
    return {name for prefix, module in norms for name, _ in module.named_parameters(prefix, recurse=False)}


def set_learning_rate(optimizer: Optimizers, factor: float) -> None:
    """Set the learning rate of each group to `factor` times its initial one."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor of the recipe's learning rate at `step`, counted from 1 to `steps`; in (0, 1]."""
    assert 1 <= step <= steps, f"step {step} of {steps}"
    warmup = warmup_steps(schedule, steps)
    if step <= warmup:
        return step / (warmup + 1)
    progress = (step - 1 - warmup) / (steps - warmup)
    match schedule.type:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - progress
        case "cosine":
            return (1.0 + math.cos(math.pi * progress)) / 2


def warmup_steps(schedule: Schedule, steps: int) -> int:
    return math.ceil(schedule.warmup_ratio * steps - _ROUNDING)


def _adamw(settings: AdamW, parameters: Mapping[str, Parameter], norms: Container[str]) -> list[torch.optim.Optimizer]:
    """Return AdamW with two groups, with and without weight decay; an empty list without parameters."""
    decayed = {n: p for n, p in parameters.items() if p.ndim >= 2 and n not in norms and not _is_bias(n)}
    undecayed = {name: p for name, p in parameters.items() if name not in decayed}
    groups = [_group(settings, decayed, settings.weight_decay), _group(settings, undecayed, 0.0)]
    filled = [group for group in groups if group["params"]]
    return [torch.optim.AdamW(filled, betas=settings.betas, eps=settings.eps, fused=True)] if filled else []


def _muon(
    settings: Muon, matrices: Mapping[str, Parameter], turns: MatrixAssignment | None
) -> list[torch.optim.Optimizer]:
    if not matrices:
        return []
    groups = [_group(settings, matrices, settings.weight_decay)]
    if turns is not None:
        return [DistributedMuon(groups, settings, turns)]
    muon = torch.optim.Muon(
        groups,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.ns_steps,
        adjust_lr_fn=settings.adjust_lr,
    )
    return [muon]


def _group(settings: AdamW | Muon, parameters: Mapping[str, Parameter], weight_decay: float) -> dict[str, Any]:
    rate = settings.learning_rate
    return {"params": list(parameters.items()), "weight_decay": weight_decay, "lr": rate, "initial_lr": rate}


def _is_bias(name: str) -> bool:
    # By name, because a mixture of experts stacks its biases in matrices.
    return name.endswith("bias")

"""The optimizer and its learning rate.

AdamW decays weight matrices and embeddings only: norms and biases, vectors of scale and offset, are left alone. The
kernel is torch's fused one, which exists for CPUs and for CUDA.

Muon (Jordan 2024) is for the matrices between embeddings and head: it replaces the momentum of a matrix by the nearest
orthogonal one, found by Newton-Schulz iterations in bfloat16, so that all directions move equally far. Vectors, and
embeddings and heads, which are a vector for each token, are left to AdamW, as the author advises. The model's modules say
which is which, not the names (`hidden_matrices`). Several processes share the work (training.optim.distributed_muon).

The learning rate of step n (1, 2, ... N) is a pure function of n, so that resuming needs no scheduler state:

    n <= W       n / (W + 1)                              warm-up, W = ceil(warmup_ratio * N) steps
    n > W        1, or falling with p = (n-1-W) / (N-W)   constant; linear 1-p; cosine (1 + cos(pi p)) / 2

so no step is wasted: the learning rate of the first and of the last step is above zero; step W+1 is the first with the full
one. After the warm-up it is what transformers' `get_scheduler` gives.
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

# In floats 0.07 * 100 is 7.000000000000001, and 7 is meant.
_ROUNDING = 1e-9


class Optimizers:
    """Optimizers over disjoint named parameters, stepped as one. State is kept by the parameters' names."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def tensors(self) -> dict[str, Tensor]:
        """The state, flat: `<state>/<parameter>`."""
        named = ((name, part.state[p]) for part, name, p in self._named() if p in part.state)
        return {f"{key}/{name}": value for name, state in named for key, value in state.items()}

    def restore(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take what `tensors` of Optimizers built in the same way gave, one after the other."""
        owners = {name: (part, p) for part, name, p in self._named()}
        for path, value in tensors:
            key, name = path.split("/", 1)
            part, parameter = owners[name]
            part.state[parameter][key] = value.to(parameter.device)

    def _named(self) -> Iterator[tuple[torch.optim.Optimizer, str, Parameter]]:
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
    """What the recipe asks for over named parameters; Muon takes those of `matrices`, AdamW all the others.

    Those of `norms` are not decayed, whatever their shape. With `turns` a parameter is the rows of a tensor that this process
    holds, and several share Muon's work.
    """
    if isinstance(settings, AdamW):
        return Optimizers(_adamw(settings, parameters, norms))
    hidden = {name: parameter for name, parameter in parameters.items() if name in matrices}
    others = {name: parameter for name, parameter in parameters.items() if name not in matrices}
    return Optimizers(_muon(settings, hidden, turns) + _adamw(settings.adamw, others, norms))


def hidden_matrices(model: PreTrainedModel) -> set[str]:
    """The names of the matrices between embeddings and head.

    Embeddings are those of the model's input, tied to the head or not, and every other `torch.nn.Embedding` (of
    positions, for example). A mixture of experts stacks its matrices in tensors of three dimensions, which Muon does not take,
    and its biases in tensors of two, which are vectors.
    """
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    ends += [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    spared = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    others = norm_weights(model)
    named = model.named_parameters()
    return {n for n, p in named if p.ndim == 2 and id(p) not in spared and n not in others and not _is_bias(n)}


def norm_weights(model: PreTrainedModel) -> set[str]:
    """The names of the parameters of norms, by module: Cohere's norms of queries and keys have a row for each head."""
    norms = [(name, module) for name, module in model.named_modules() if "Norm" in type(module).__name__]
    return {name for prefix, module in norms for name, _ in module.named_parameters(prefix, recurse=False)}


def set_learning_rate(optimizer: Optimizers, factor: float) -> None:
    """Set the learning rate of each group to `factor` times the one it was built with."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor


def schedule_factor(schedule: Schedule, step: int, steps: int) -> float:
    """What the recipe's learning rate is multiplied by at `step`, counted from 1 to `steps`; in (0, 1]."""
    assert 1 <= step <= steps, f"step {step} of {steps}"
    warmup = warmup_steps(schedule, steps)
    if step <= warmup:
        return step / (warmup + 1)
    done = (step - 1 - warmup) / (steps - warmup)
    match schedule.type:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1.0 + math.cos(math.pi * done)) / 2


def warmup_steps(schedule: Schedule, steps: int) -> int:
    return math.ceil(schedule.warmup_ratio * steps - _ROUNDING)


def _adamw(settings: AdamW, parameters: Mapping[str, Parameter], norms: Container[str]) -> list[torch.optim.Optimizer]:
    """AdamW in two groups, with weight decay and without; no optimizer where there are no parameters."""
    decayed = {n: p for n, p in parameters.items() if p.ndim >= 2 and n not in norms and not _is_bias(n)}
    others = {name: p for name, p in parameters.items() if name not in decayed}
    groups = [_group(settings, decayed, settings.weight_decay), _group(settings, others, 0.0)]
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
    # A mixture of experts keeps its biases in matrices, so the name counts where the shape says nothing.
    return name.endswith("bias")

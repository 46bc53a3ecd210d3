"""A step waits for the device only in its middle, in `sync_step`; checked with torch's own operators.

On a GPU the CPU runs ahead of the device until it needs a number, or a size that depends on numbers. torch tags the operators
that wait, independent of the device, so a real step on the CPU shows them. Copies from the host show on the device "meta",
whose tensors have no content. There each copy is between two devices, and the first read of content fails.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from tests import factories
from tests.training.model.architectures import LOCAL, build
from tests.training.tiny_inputs import build_tiny_inputs
from training.contract.config.loss import LossType
from training.contract.config.recipe import Compute
from training.contract.config.training import SupervisedTuning, Training
from training.contract.protocol.events import EventWriter
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import BatchSampler, TokenCounts, train_items
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.jobs.sft import ResponseObjective
from training.loop import rank_sync
from training.loop.objective import PreferenceObjective, pair_tokens
from training.loop.rank_sync import Flags
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep
from training.loop.trainer import Trainer
from training.model import device_prefetch
from training.model.expert_routing import ExpertBalance, routing_of
from training.model.training_setup import prepare_for_training
from training.parallel.model_specs import TrainModelSpec
from training.parallel.strategy import build_params

pytestmark = pytest.mark.slow

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
SILENT = EventWriter(None)
MPO = [{"type": "sigmoid", "weight": 0.8}, {"type": "bco_pair", "weight": 0.2}, {"type": "sft", "weight": 0.5}]
EVERY: list[dict[str, Any]] = [{"type": kind} for kind in LossType if kind.traits.compares_responses]
FILLED: dict[str, dict[str, Any]] = {"exo_pair": {"label_smoothing": 0.01}, "mixture": {"of": MPO}}
LOSSES = [loss | FILLED.get(loss["type"], {}) for loss in EVERY]
LOSSES += [{"ld_alpha": 0.3}, {"weighting": "wpo"}, {"divergence": {"type": "js"}}, {"type": "aot", "ld_alpha": 0.5}]


class Waiting(AssertionError):
    """The CPU would wait for this operator."""


class NoNumbers(TorchFunctionMode):
    """Make `torch.tensor(numbers, device=...)` raise Waiting within the block: its copy is below torch's operators."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device"):
            raise Waiting(f"{function.__name__} on {kwargs['device']}")
        return function(*args, **kwargs)


class NoWaiting(TorchDispatchMode):
    """Make operators raise Waiting within the block if they read from the device or copy to it.

    Functions in `allowed` and other threads are exempt. `operators` counts the operators.
    """

    def __init__(self, *allowed: Callable[..., Any]) -> None:
        super().__init__()
        self._allowed = [function.__code__ for function in allowed]
        self.operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, self.operators = kwargs or {}, self.operators + 1
        if not self._within_allowed() and (_reads(function, args, kwargs) or _copies(function, args, kwargs)):
            raise Waiting(f"{function} of {[t.shape for t in args if torch.is_tensor(t)]}")
        return function(*args, **kwargs)

    def _within_allowed(self) -> bool:
        frame = sys._getframe()
        while frame is not None and frame.f_code not in self._allowed:
            frame = frame.f_back
        return frame is not None


def _reads(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host has to read the value or the shape of the operator's result."""
    if function in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if function is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags))


def _copies(function: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operator copies from the host to the device, for example a number instead of a tensor."""
    devices = {tensor.device for tensor in args if torch.is_tensor(tensor)}
    if function is aten._to_copy.default:
        return kwargs.get("device") not in (None, *devices)
    return function in (aten.copy_.default, aten.where.self, aten.index_put_.default) and len(devices) > 1


SOME = torch.tensor([3.0, 0.0, 1.0])
WAITS: list[Callable[[], object]] = [
    lambda: SOME.sum().item(),
    lambda: bool(SOME[1] > 0),
    lambda: SOME.nonzero(),
    lambda: SOME[SOME > 0],
    lambda: SOME.clone().__setitem__(SOME > 0, SOME[:2]),
    lambda: SOME.masked_select(SOME > 0),
    lambda: SOME.unique(),
    lambda: torch.repeat_interleave(SOME.long()),
    lambda: torch.equal(SOME, SOME),
    lambda: torch.arange(3).bincount(),
    lambda: SOME.to(META),
    lambda: torch.zeros(3, device=META).copy_(SOME),
    lambda: torch.tensor([1.0], device=META),
    lambda: torch.where(torch.zeros(3, device=META, dtype=torch.bool), torch.zeros(3, device=META), torch.tensor(0.0)),
]


@pytest.mark.parametrize("wait", WAITS)
def test_no_waiting_with_waiting_operator_raises(wait: Callable[[], object]):
    with NoNumbers(), NoWaiting(), pytest.raises(Waiting):
        wait()


def stepper_of(inputs: Any, device: torch.device, **changes: Any) -> TrainStep:
    """Return the train step of the `policy` job, in micro-batches of a few pairs."""
    changes = {"batch_size": 8, "micro_tokens": 60} | changes
    compute, settings = Compute(**changes.pop("compute", {})), Training.model_validate(changes)
    group, pairs = Group(0, 1, device), Pairs.open(inputs.pairs)
    trainable = TrainModelSpec(
        inputs.model, settings.precision, settings.adapter, disable_dropout=settings.disable_dropout
    )
    params = build_params(trainable, "ddp", group, SILENT)
    prepare_for_training(params.model, compute, SILENT, params.own_dropout)
    table = LogProbTable.read(inputs.reference, len(pairs))
    if settings.loss.needs_token_logprobs:
        table = replace(table, tails_P2=np.full((len(pairs), 2), -0.5))
    objective = PreferenceObjective(pairs, table, settings.loss, group)
    batches = BatchSampler(train_items(pairs), pair_tokens(pairs), settings.batch_size, settings.micro_tokens, 0)
    return TrainStep(params, objective, batches, settings, 10)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms as in a job, because they use other operators."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return build_tiny_inputs(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Inputs with a model with attention dropout, so that each sequence runs in its own row."""
    return build_tiny_inputs(tmp_path_factory.mktemp("dropping"), attention_dropout=0.3)


WAYS: list[dict[str, Any]] = [
    {"precision": "bfloat16"},
    {"adapter": {"type": "lora", "rank": 2, "dropout": 0.1}},
    {"optimizer": {"type": "muon", "learning_rate": 1e-3}},
    {"compute": {"activation_checkpointing": True}},
]


def take_steps(stepper: TrainStep, *allowed: Callable[..., Any]) -> None:
    for step in (1, 2):
        with NoNumbers(), NoWaiting(rank_sync.sync_step, *allowed) as watch:
            taken = stepper.step(step, Flags())
        assert np.isfinite(taken.metrics["loss"]) and watch.operators > 500


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_step_with_each_loss_waits_in_sync_step_only(inputs: Any, loss: dict[str, Any]):
    take_steps(stepper_of(inputs, CPU, loss=loss))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_step_with_each_setting_waits_in_sync_step_only(inputs: Any, way: dict[str, Any]):
    take_steps(stepper_of(inputs, CPU, **way))


def test_trainer_between_steps_does_not_wait(inputs: Any):
    """The running mean of `bco_pair` is read when it is saved, not in each step."""
    stepper = stepper_of(inputs, CPU, loss={"type": "bco_pair"})
    context = factories.context(inputs.job("policy", {}), stepper.group, SILENT)
    trainer = Trainer(context, stepper, RunState(context, ("loss",)))
    for step in (1, 2):
        with NoNumbers(), NoWaiting(rank_sync.sync_step) as watch:
            trainer._step(step)
        assert watch.operators > 500


def test_step_with_unshared_rows_waits_in_masks_of_transformers_too(dropping: Any):
    take_steps(stepper_of(dropping, CPU, disable_dropout=False), masking_utils.find_packed_sequence_indices)


def test_step_of_sft_waits_in_sync_step_only(inputs: Any):
    group, pairs = Group(0, 1, CPU), Pairs.open(inputs.pairs)
    params = build_params(TrainModelSpec(inputs.model, "float32"), "ddp", group, SILENT)
    lengths_I = pairs.lengths("chosen").astype(np.int64)
    batches = BatchSampler(train_items(pairs), TokenCounts(lengths_I, lengths_I), 8, 60, 0)
    stepper = TrainStep(params, ResponseObjective(pairs), batches, SupervisedTuning(), 10)
    take_steps(stepper, ResponseObjective.count)  # it counts on the host


@pytest.mark.parametrize("device", [CPU, META], ids=str)
def test_expert_balance_does_not_wait(device: torch.device):
    """This covers our code only: the experts of transformers wait in float32."""
    model, balance = build("mixtral", LOCAL), ExpertBalance(0.1, Group(0, 1, device))
    layers, sequences_T = [torch.rand(9, 4, device=device) for _ in range(2)], torch.ones(9, device=device)
    values_I2 = torch.zeros(3, 2, dtype=torch.float64, device=device)
    with NoNumbers(), NoWaiting() as watch:
        routing = routing_of(model, layers, sequences_T)
        balance.measure(model, [routing], 3)
        assert balance.added(values_I2, routing).shape == (3, 3)
    assert watch.operators > 20


@pytest.mark.parametrize("loss", [{}, {"ld_alpha": 0.3}, {"weighting": "wpo"}, {"type": "bco_pair"}], ids=str)
def test_step_copies_to_the_device_by_to_device_only(inputs: Any, loss: dict[str, Any]):
    """On tensors without content a step runs up to `sync_step`, the first read of a number."""
    stepper, watch = stepper_of(inputs, META, loss=loss), NoWaiting(rank_sync.sync_step, device_prefetch.to_device)
    with NoNumbers(), watch, pytest.raises(NotImplementedError) as stopped:
        stepper.step(1, Flags())
    assert "sync_step" in [entry.name for entry in stopped.traceback] and watch.operators > 300

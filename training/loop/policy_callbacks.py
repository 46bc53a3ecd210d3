"""The callbacks of a `policy` job: the reference check before the first step, and held-out metrics."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from training.contract.protocol.events import EventWriter
from training.data.tokenization.batch_sampler import Positions
from training.distributed import Group
from training.loop.callbacks import Callback
from training.loop.policy_data import PolicyData
from training.loop.run_state import RunState
from training.parallel.train_state import TrainableParams
from training.scoring.pairs import ScoredPairs, score_pairs
from training.scoring.reference_check import ReferenceCheck, check_zero_margin, evenly_spaced, logprob_difference

_CHECKED_PAIRS = 16


@dataclass(frozen=True)
class ReferenceChecker:
    """Compares models with the table of reference log-probs."""

    data: PolicyData
    group: Group
    events: EventWriter
    state: RunState

    def score(self, model: PreTrainedModel, positions: Positions) -> ScoredPairs:
        """Return the pairs under `model` as it is now. Progress is not reported: it would hide that of the training."""
        model.eval()
        data = self.data
        return score_pairs(
            model, data.pairs, positions, data.table, data.settings.loss, self.group, events=EventWriter(None)
        )

    def check(self, model: PreTrainedModel) -> None:
        """Check the table against `model`, which made it, on some pairs of either split. Raise TrainingError."""
        data = self.data
        self.events.phase("reference check")
        first = data.batches.batch(1)
        others = evenly_spaced(np.setdiff1d(data.batches.items, first), _CHECKED_PAIRS)
        held_out = evenly_spaced(data.held_out, _CHECKED_PAIRS)
        with self.state.timed("proof"):
            found = self._check(model, first, "the first batch")
            figures = self.state.figures
            figures.step0_loss, figures.step0_expected, figures.step0_allowed = (
                found.loss,
                found.expected,
                found.allowed,
            )
            if len(others):
                self._check(model, others, f"{len(others)} pairs spread over those after the first batch")
            if len(held_out) and not data.starts_as_reference:  # otherwise the first evaluation checks all of them
                self._check(model, held_out, "held-out pairs")

    def _check(self, model: PreTrainedModel, positions: Positions, pairs: str) -> ReferenceCheck:
        return check_zero_margin(self.score(model, positions), self.data.table, self.data.settings.loss, pairs)

    def note_rounding(self, model: PreTrainedModel) -> None:
        """Note how far the policy is from a table of another dtype. Rounding cancels in rewards within one dtype only."""
        positions = evenly_spaced(self.data.batches.batch(1), _CHECKED_PAIRS)
        with self.state.timed("proof"):
            difference = logprob_difference(self.score(model, positions))
        self.state.figures.step0_apart = difference
        dtype = self.data.settings.precision
        self.events.note(
            f"the policy runs in {dtype}, and the reference log-probs were computed in {self.data.table.dtype}: before "
            f"training they differ by {difference:.2g} nats a response, and so do all rewards; `reference.dtype: {dtype}` "
            "avoids it"
        )


@dataclass(frozen=True)
class CheckStart(Callback):
    """Before the first step, check that the policy is the reference model, or note how far it is from the table."""

    checker: ReferenceChecker
    params: TrainableParams

    def on_train_begin(self, step: int) -> None:
        if step == 0 and self.checker.data.starts_as_reference:
            self.checker.check(self.params.model)
        elif step == 0 and self.checker.data.settings.champion is None:
            self.checker.note_rounding(self.params.model)


@dataclass(frozen=True)
class EvaluateHeldOut(Callback):
    """Emit the metrics of the held-out pairs before the first step, every `evaluate_every` steps, and after the last."""

    checker: ReferenceChecker
    params: TrainableParams

    def on_train_begin(self, step: int) -> None:
        self.on_step_end(step)

    def on_step_end(self, step: int) -> None:
        data = self.checker.data
        if len(data.held_out) and (step % data.evaluate_every == 0 or step == data.steps):
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        data, state = self.checker.data, self.checker.state
        with state.timed("evaluation"):
            scored = self.checker.score(self.params.model, data.held_out)
            if step == 0 and data.starts_as_reference:
                check_zero_margin(scored, data.table, data.settings.loss, "the held-out pairs")
        state.figures.eval = metrics = scored.metrics()
        self.checker.events.emit("eval", step=step, **metrics)

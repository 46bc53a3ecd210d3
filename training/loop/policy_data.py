"""The data of a `policy` job: settings, pairs, batches, and the table of reference log-probs."""

import math
from dataclasses import dataclass

import numpy as np

from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.events import EventWriter
from training.contract.protocol.locations import PolicyLocations
from training.contract.protocol.settings import TrainingSpec
from training.contract.store.logprob_table import LogProbTable
from training.data.tokenization.batch_sampler import BatchSampler, Positions, train_items
from training.data.tokenization.pair_dataset import Pairs
from training.job_context import JobContext
from training.loop.objective import pair_tokens
from training.scoring.logprob_tails import read_table

# The default number of steps between evaluations. It grows until evaluations cost at most this share of the steps. A step costs
# three forward passes, because a backward pass makes twice as many products as a forward pass.
_EVALUATE_EVERY = 50
_EVALUATION_SHARE = 0.1
_PASSES_OF_A_STEP = 3


@dataclass(frozen=True)
class PolicyData:
    """What the run reads. `held_out` are positions in `pairs`; `steps` is the length of the run."""

    settings: TrainingSpec
    pairs: Pairs
    held_out: Positions
    batches: BatchSampler
    steps: int
    evaluate_every: int
    table: LogProbTable

    @property
    def starts_as_reference(self) -> bool:
        """Whether the policy, before the first step, is the model that made the table, in the same dtype."""
        return self.settings.champion is None and self.settings.precision == self.table.dtype


def read_data(context: JobContext[TrainingSpec, PolicyLocations]) -> PolicyData:
    settings, events = context.settings, context.events
    pairs = Pairs.open(context.inputs[AssetName.TOKENIZED_PAIRS].folder)
    held_out = pairs.indices("validation")
    items, tokens = train_items(pairs), pair_tokens(pairs)
    batches = BatchSampler(items, tokens, settings.batch_size, settings.micro_tokens, settings.seed)
    steps = settings.max_steps or settings.epochs * batches.steps_per_epoch
    evaluate_every = context.job.compute.evaluate_every or _affordable_interval(batches, held_out, steps, events)
    table = read_table(context, pairs, np.arange(len(pairs)), settings.loss)
    return PolicyData(settings, pairs, held_out, batches, steps, evaluate_every, table)


def _affordable_interval(batches: BatchSampler, held_out: Positions, steps: int, events: EventWriter) -> int:
    """Return the number of steps between evaluations; note it if it is more than the default."""
    run_I = batches.lengths.run_I
    passes = _PASSES_OF_A_STEP * min(batches.batch_size, len(batches.items))
    tokens_of_a_step = passes * float(run_I[batches.items].mean())
    affordable = math.ceil(int(run_I[held_out].sum()) / (_EVALUATION_SHARE * tokens_of_a_step))
    if affordable > _EVALUATE_EVERY and steps > _EVALUATE_EVERY:
        interval = f"every {affordable:,} of {steps:,} steps" if affordable < steps else "at both ends of the run"
        events.note(
            f"held-out metrics are computed {interval}, so that they cost at most a tenth of the steps; "
            "`compute.evaluate_every` sets another number"
        )
    return max(_EVALUATE_EVERY, affordable)

"""The `sft` job: supervised tuning on the chosen responses of the train split, which makes the reference model.

The loss is the mean negative log-prob over all response tokens of the global batch, so long responses weigh more than
short ones, as everywhere in language modelling. Stepping, resuming and saving are those of preference tuning. An item is
the pair that carries a chosen response; a response that several pairs share is trained on as often.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from training.contract.config.recipe import SupervisedTuning
from training.contract.protocol.events import EventWriter
from training.contract.protocol.input_files import check_inputs_unchanged
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult
from training.data.tokenization.batch_sampler import BatchSampler, MicroBatch, Positions, TokenCounts, train_items
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.loop.model_io import load_for_training, write_trained
from training.loop.objective import Objective
from training.loop.run_state import RunState
from training.loop.train_step import TrainStep
from training.loop.trainer import Trainer
from training.model.backbone import check_positions, text_config
from training.model.expert_routing import ExpertBalance
from training.model.logprobs.response_logprobs import CollatedRows, LogProbs, collate, logprobs_of
from training.model.training_setup import check_trainable
from training.parallel.model_specs import TrainModelSpec


class ResponseObjective(Objective[CollatedRows]):
    """The mean negative log-prob of the chosen responses' tokens."""

    def __init__(self, pairs: Pairs, balance: ExpertBalance | None = None) -> None:
        super().__init__(pairs, ("loss",), balance)
        self._tokens = pairs.trained_lengths("chosen")

    def count(self, items: Positions) -> int:
        """Response tokens. None of them is the first of its sequence: every prompt has a token."""
        return int(self._tokens[items].sum())

    def prepare(self, model: PreTrainedModel, batch: Positions, parts: Sequence[MicroBatch]) -> None:
        if self._balance:
            routed = [found.routing for _, found in self.score_batch_no_grad(model, parts)]
            self._balance.measure(model, routed, self.count(batch))

    def collate(self, model: PreTrainedModel, items: Positions) -> CollatedRows:
        return collate(model, [self.pairs.sequence(int(item), "chosen") for item in items])

    def score(self, model: PreTrainedModel, collated: CollatedRows) -> LogProbs:
        return logprobs_of(model, collated, routing=self._balance is not None)

    def per_item_values_IM(self, collated: CollatedRows, found: LogProbs) -> Tensor:
        return -found.sums_S[:, None]


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Tune the base model and write it into `job.staging`. Raises TrainingError where the run must not go on."""
    settings = SupervisedTuning.model_validate(job.settings)
    base = job.inputs["base_model"]
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    record = RunState(job, group, events, ("loss",))
    events.phase("loading the base model")
    balance = ExpertBalance(settings.router_aux_loss_coef, group) if settings.router_aux_loss_coef else None
    with record.timed("loading"):
        trainable = TrainModelSpec(base.folder, settings.precision)
        routing = "reference.sft" if balance else None
        masters = load_for_training(trainable, job.compute, group, events, routing)
    pairs.check_known_tokens(text_config(masters.model).vocab_size)
    check_positions(masters.model, pairs.longest, events)
    check_trainable(masters.model, job.recipe)
    lengths_I = pairs.lengths("chosen")
    batches = BatchSampler(
        train_items(pairs), TokenCounts(lengths_I, lengths_I), settings.batch_size, settings.micro_tokens, settings.seed
    )
    steps = settings.epochs * batches.steps_per_epoch
    stepper = TrainStep(masters, ResponseObjective(pairs, balance), batches, settings, steps)
    Trainer(job, events, stepper, record).run(lambda step: check_inputs_unchanged())
    events.phase("saving the reference model")
    with record.timed("saving"):
        fingerprint = write_trained(job, masters, base)
    return JobResult(fingerprint, record.facts | {"pairs": len(batches.items), "world": group.world})

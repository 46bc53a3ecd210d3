"""The `sft` job: supervised tuning on the chosen responses of the train split. It makes the reference model.

The loss is the mean negative log-prob over all response tokens of the global batch. So long responses weigh more than short
ones, as is usual in language modelling. Steps, resuming and saving work as in preference tuning. An item is a pair. A chosen
response that several pairs share is trained on that often.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import ReferenceModelDetails
from training.contract.protocol.settings import SupervisedTuningSettings
from training.contract.store.artifact import JobResult
from training.data.tokenization.batch_sampler import BatchSampler, MicroBatch, Positions, TokenCounts, train_items
from training.data.tokenization.pair_dataset import Pairs
from training.job_context import JobContext
from training.loop.callbacks import CheckInputs
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
        """Return the number of response tokens. All count, since every prompt has a token before them."""
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


def run(context: JobContext[SupervisedTuningSettings]) -> JobResult[ReferenceModelDetails]:
    """Tune the base model and write it into the staging folder. Raise TrainingError if the run must not go on."""
    job, group, events, settings = context.job, context.group, context.events, context.settings
    base = job.inputs[AssetName.BASE_MODEL]
    pairs = Pairs.open(job.inputs[AssetName.TOKENIZED_PAIRS].folder)
    state = RunState(context, ("loss",))
    events.phase("loading the base model")
    balance = ExpertBalance(settings.router_aux_loss_coef, group) if settings.router_aux_loss_coef else None
    with state.timed("loading"):
        trainable = TrainModelSpec(base.folder, settings.precision)
        routing = "reference.sft" if balance else None
        params = load_for_training(trainable, job.compute, group, events, routing)
    pairs.check_known_tokens(text_config(params.model).vocab_size)
    check_positions(params.model, pairs.longest, events)
    check_trainable(params.model, job.recipe)
    lengths_I = pairs.lengths("chosen")
    batches = BatchSampler(
        train_items(pairs), TokenCounts(lengths_I, lengths_I), settings.batch_size, settings.micro_tokens, settings.seed
    )
    steps = settings.epochs * batches.steps_per_epoch
    train_step = TrainStep(params, ResponseObjective(pairs, balance), batches, settings, steps)
    Trainer(context, train_step, state, [CheckInputs()]).run()
    events.phase("saving the reference model")
    with state.timed("saving"):
        fingerprint = write_trained(job, params, base)
    figures = state.figures.to_json() | {"pairs": len(batches.items), "world": group.world}
    return JobResult(fingerprint, ReferenceModelDetails.model_validate(figures))

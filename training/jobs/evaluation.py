"""The `evaluation` job: score the policy on held-out pairs.

1. Score every held-out pair with the policy, in the dtype of the reference log-probs. The loss function is the one of training.
2. Give the accuracy a 95% interval: a few hundred pairs do not support two digits. Give it also by the longer response,
   because policies learn length first, and by named source.
3. Answer a few prompts with the policy (after) and the reference model (before), up to the stop tokens of the released model.
   Score the tokens of a few pairs with both, for the report.
4. On rank 0, write the metrics, one row per pair, the samples and an HTML report. `samples.json` has decoded tokens and is in
   the fingerprint. The report and the details show the messages of the prompts instead. With `disclosure: votes`, they show
   the accuracy by votes alone. It is in the fingerprint with the key, because each draw is an artifact of its own.

Legend: V held-out pairs.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.contract.config.loss import Loss
from training.contract.config.release import Generation
from training.contract.errors import DataError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import EvaluationDetails, SampledAnswer
from training.contract.protocol.job import Job
from training.contract.protocol.settings import EvaluationSpec
from training.contract.protocol.spec_files import TOKENIZER_FOLDER
from training.contract.protocol.votes import ACCURACY_VOTES, VOTES, vote
from training.contract.store.artifact import JobResult, write_json
from training.data.reading.pair_writer import PREFERENCES_FILE, PREFERENCES_SCHEMA
from training.data.templates.tokenizer import load_tokenizer
from training.data.tokenization.message_text import read_message_text
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.evaluation.examples import Sample, examined_positions, worst_pairs
from training.evaluation.generate import answers, decode, spread_prompts, stop_tokens
from training.evaluation.report import Report, render, render_votes
from training.evaluation.token_rewards import ExaminedPairs, TokenLogProbs, score_tokens
from training.job_context import JobContext
from training.losses.preference import preference_loss
from training.model.logprobs.self_check import check_exact
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import choose_layout
from training.scoring.accuracy import Accuracy
from training.scoring.logprob_tails import read_table
from training.scoring.pairs import ScoredPairs, score_pairs

_SHOWN_CHARACTERS = 500


@dataclass(frozen=True)
class _Outputs:
    """The outputs of one model: an answer to each prompt, and the log-probs of the tokens of the examined pairs."""

    answers: list[str]
    logprobs: TokenLogProbs


@dataclass(frozen=True)
class _Prompting:
    """What policy and reference model are both asked. `examined` are positions of pairs."""

    prompts: Sequence[Sequence[int]]
    stops: list[int]
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    drawing: Generation
    pairs: Pairs
    examined: Sequence[int]

    def outputs_of(self, model: PreTrainedModel, group: Group) -> _Outputs:
        """Return the outputs of `model`, on every rank. Collective."""
        length = self.max_new_tokens
        texts = answers(model, self.prompts, self.stops, self.tokenizer, length, group, self.drawing)
        return _Outputs(texts, score_tokens(model, self.pairs, self.examined, group))


def run(context: JobContext[EvaluationSpec]) -> JobResult[EvaluationDetails]:
    job, group, events, settings = context.job, context.group, context.events, context.settings
    pairs = Pairs.open(job.inputs[AssetName.TOKENIZED_PAIRS].folder)
    positions_V = held_out_positions(pairs)
    loss = settings.loss
    reference = read_table(context, pairs, positions_V, loss)
    tokenizer = load_tokenizer(job.inputs[AssetName.TOKENIZED_PAIRS].folder / TOKENIZER_FOLDER)
    shown = spread_prompts(pairs, positions_V, settings.samples)
    prompts, length = [pairs.prompt_ids(index) for index in shown], settings.max_new_tokens

    after_training = InferenceModelSpec(
        job.inputs[AssetName.POLICY], reference.dtype, job.inputs[AssetName.REFERENCE_MODEL]
    )
    before_training = InferenceModelSpec(job.inputs[AssetName.REFERENCE_MODEL], reference.dtype)
    layout = choose_layout(after_training, job.compute.parallel, group, events)
    policy = layout.place(after_training.load)
    check_exact(policy, events)
    events.phase("score the held-out pairs with the policy")
    held_out = score_pairs(policy, pairs, positions_V, reference, loss, group, events)
    events.phase("sample answers of the policy and of the reference model")
    stops = stop_tokens(policy.config, tokenizer, settings)
    examined = examined_positions(held_out, shown)
    prompting = _Prompting(prompts, stops, tokenizer, length, settings.generation, pairs, examined)
    after = prompting.outputs_of(policy, group)
    del policy
    gc.collect()  # the model is in reference cycles, and memory may hold one model only
    before = prompting.outputs_of(layout.place(before_training.load), group)
    if not group.is_main:
        return JobResult()
    samples = [
        Sample(int(pairs.rows[i]), decode(tokenizer, prompt), old, new, decode(tokenizer, pairs.response_ids(i)))
        for i, prompt, old, new in zip(shown, prompts, before.answers, after.answers, strict=True)
    ]
    tokens = ExaminedPairs(pairs, examined, after.logprobs, before.logprobs)
    return _write(job, settings, held_out, samples, tokens, tokenizer)


def held_out_positions(pairs: Pairs) -> npt.NDArray[np.int64]:
    """Return the positions of the validation pairs. Raises DataError if the split is empty."""
    positions_V = pairs.indices("validation")
    if not len(positions_V):
        raise DataError(
            f"0 of the {len(pairs):,} tokenized pairs are held out, so the policy cannot be evaluated; "
            "raise data.validation_fraction (0.1 holds out one prompt in ten) or add a source with `held_out`",
            "no-held-out-pairs",
        )
    return positions_V


def _source_names(job: Job, rows_V: npt.NDArray[np.int64]) -> list[str | None]:
    """Return the source name of each held-out pair."""
    raw = job.inputs.get(AssetName.RAW_PREFERENCES)  # an input only if the recipe names a source
    if raw is None:
        return [None] * len(rows_V)
    table = pq.read_table(raw.folder / PREFERENCES_FILE, columns=["source_name"], schema=PREFERENCES_SCHEMA)
    names: list[str | None] = table["source_name"].take(pa.array(rows_V)).to_pylist()
    return names


def _write(
    job: Job,
    settings: EvaluationSpec,
    held_out: ScoredPairs,
    samples: list[Sample],
    examined: ExaminedPairs,
    tokenizer: PreTrainedTokenizerBase,
) -> JobResult[EvaluationDetails]:
    """Write the four files into the staging folder. The report is not in the fingerprint, so its layout may change."""
    names_V = _source_names(job, held_out.pairs.rows[held_out.positions_V])
    names = sorted({name for name in names_V if name is not None})
    sources = {name: torch.tensor([name_of_pair == name for name_of_pair in names_V]) for name in names}
    source_metrics = {name: held_out.metrics_of(pairs_V) for name, pairs_V in sources.items()}
    metrics, columns = held_out.metrics(), held_out.columns()
    for name, values in source_metrics.items():
        metrics |= {f"eval/sources/{name}/{metric}": value for metric, value in values.items()}
    if sources:
        columns["source_name"] = names_V
    texts = [asdict(sample) for sample in samples]
    write_json(job.staging / "metrics.json", metrics)
    write_json(job.staging / "samples.json", texts)
    pq.write_table(pa.table(columns), job.staging / "pairs.parquet")
    content = {"metrics": metrics, "pairs": columns, "samples": texts}
    by_source = {name: held_out.accuracy_of(pairs_V) for name, pairs_V in sources.items()}
    report = _report(job, settings.loss, held_out, metrics, by_source, samples, examined, tokenizer)
    details = EvaluationDetails(
        metrics=metrics,
        sources=tuple({"source": name, **values} for name, values in source_metrics.items()),
        interval=held_out.accuracy().interval,
        samples=tuple(SampledAnswer(**asdict(sample.abridged(_SHOWN_CHARACTERS))) for sample in report.samples),
    )
    if settings.is_exact:
        page = render(report)
    else:
        share = vote(held_out.outcome.accuracies_B.double().numpy(), ACCURACY_VOTES, job.derivation.key)
        content["votes"] = {"key": job.derivation.key, "accuracy": share}
        details = details.model_copy(update={"accuracy_votes": share, "samples": ()})
        page = render_votes(report, share, VOTES)
    (job.staging / "report.html").write_text(page, encoding="utf-8")
    return JobResult(fingerprint(AssetName.EVALUATION.value, content), details)


def _report(
    job: Job,
    loss: Loss,
    held_out: ScoredPairs,
    metrics: Mapping[str, float],
    by_source: Mapping[str, Accuracy],
    samples: Sequence[Sample],
    examined: ExaminedPairs,
    tokenizer: PreTrainedTokenizerBase,
) -> Report:
    """Return the content of the report, with the messages of the pairs if they are known."""
    worst = worst_pairs(held_out, tokenizer)
    messages = read_message_text(job, {sample.row for sample in samples} | {pair.row for pair in worst})
    prompts = {row: text.prompt for row, text in messages.items()}
    unmoved = held_out.logprobs.with_policy_at(held_out.logprobs.reference_B2)
    tokens_B2 = held_out.logprobs.tokens_B2
    return Report(
        policy=short(job.inputs[AssetName.POLICY].fingerprint),
        reference=short(job.inputs[AssetName.REFERENCE_MODEL].fingerprint),
        pairs=short(job.inputs[AssetName.TOKENIZED_PAIRS].fingerprint),
        model_name=job.recipe.release.model_name,
        date=datetime.now(UTC),
        loss=loss,
        reference_loss=float(preference_loss(loss, unmoved).losses_B.mean()),
        metrics=metrics,
        accuracy=held_out.accuracy(),
        by_length={kind.replace("_", " "): value for kind, value in held_out.accuracy_by_length().items()},
        by_source=by_source,
        margins=held_out.outcome.margins_B.tolist(),
        length_differences=(tokens_B2[:, 0] - tokens_B2[:, 1]).tolist(),
        samples=[replace(sample, prompt=prompts.get(sample.row, sample.prompt)) for sample in samples],
        worst=[pair.with_messages(messages).abridged(_SHOWN_CHARACTERS) for pair in worst],
        rewards=examined.rewards(loss, tokenizer, prompts),
    )

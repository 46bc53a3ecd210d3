"""One sentence of result for each asset, the first line of its page in Dagster's UI.

A sentence is made from the details in the manifest. Artifacts of earlier versions lack some of them; then it is shorter.
"""

import math
from collections.abc import Mapping, Sequence

from training.contract.protocol.details import (
    EvaluationDetails,
    ModelDetails,
    PairCounts,
    PairsDetails,
    PolicyDetails,
    PrequentialDetails,
    ReferenceModelDetails,
    RowCounts,
    RowsDetails,
)
from training.contract.protocol.settings import EvaluationSpec, TrainingSpec
from training.contract.protocol.spec_files import TokenizationSpec
from training.contract.protocol.votes import VOTES

_UNITS = ("kB", "MB", "GB", "TB")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 pair`, `1,204 pairs`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sized(size_bytes: int) -> str:
    """Return a size with three digits: `850 B`, `1.09 MB`."""
    if size_bytes < 1000:
        return f"{size_bytes} B"
    thousands = min(int(math.log10(size_bytes)) // 3, len(_UNITS))
    value = size_bytes / 1000**thousands
    return f"{value:.3g} {_UNITS[thousands - 1]}" if value < 999.5 else f"{value:,.0f} {_UNITS[thousands - 1]}"


def of_files(files: int, size_bytes: int, rows: Mapping[str, int | None]) -> str:
    """`rows`: by file; None if they are known only after reading."""
    known = [count for count in rows.values() if count is not None]
    of_rows = f" with {counted(sum(known), 'row')}" if known and len(known) == len(rows) else ""
    return f"{counted(files, 'file')}{of_rows}, {sized(size_bytes)}."


def of_model(architecture: str, details: ModelDetails) -> str:
    return f"{architecture}, {sized(details.bytes)} in {counted(details.tensors, 'tensor')}."


def of_tokenization(spec: TokenizationSpec) -> str:
    lines = counted(len(spec.template.splitlines()), "line")
    return (
        f"A vocabulary of {spec.vocabulary:,} tokens, a chat template of {lines}, at most {spec.max_length:,} tokens a "
        "sequence."
    )


def of_training(spec: TrainingSpec) -> str:
    loss, optimizer = spec.loss, spec.optimizer
    length = counted(spec.max_steps, "step") if spec.max_steps else counted(spec.epochs, "epoch")
    return (
        f"{length} in batches of {counted(spec.batch_size, 'pair')}, {optimizer.type} at {optimizer.learning_rate:g}, loss "
        f"{loss.type} with beta {loss.beta:g}."
    )


def of_evaluation_settings(spec: EvaluationSpec) -> str:
    answers = f"{counted(spec.samples, 'sampled answer')} of up to {counted(spec.max_new_tokens, 'token')}"
    return f"Every held-out pair is scored, with {answers}."


def of_release_files(files: Sequence[str]) -> str:
    return f"{counted(len(files), 'file')} beside the weights of a version: {', '.join(files)}."


def of_rows(details: RowsDetails) -> str:
    """The rows of `raw_preferences`."""
    counts = details.counts
    kinds = {"quarantined": counts.quarantined, "duplicates": counts.duplicates, "conflicting": counts.conflicting}
    left = [f"{count:,} {name}" for name, count in kinds.items() if count]
    return f"{_of_splits(counts)}; {', '.join(left) if left else 'no row was left out'}."


def of_pairs(details: PairsDetails) -> str:
    """The pairs of `tokenized_pairs`."""
    counts, longest = details.counts, [side["p100"] for side in details.percentiles.values()]
    dropped = f"{counted(counts.dropped, 'pair')} dropped" if counts.dropped else "no pair was dropped"
    return f"{_of_splits(counts)}; the longest sequence has {max(longest):,.0f} tokens; {dropped}."


def _of_splits(counts: RowCounts | PairCounts) -> str:
    return f"{counted(counts.pairs, 'pair')}: {counts.train:,} to train, {counts.validation:,} held out"


def of_supervised_tuning(details: ReferenceModelDetails) -> str:
    """The reference model after supervised tuning. Losses are means of the first and the last step."""
    losses = details.series["loss"]
    return (
        f"Tuned on the chosen responses of {counted(details.pairs, 'pair')} for {counted(details.steps, 'step')}: "
        f"loss {losses[0]:.3g} to {losses[-1]:.3g} nats a token."
    )


def of_logprobs(hits: int, scored: int) -> str:
    total = counted(hits + scored, "distinct sequence")
    return f"{total}: {hits:,} taken from the cache, {scored:,} scored."


def of_arrival(details: PrequentialDetails) -> str:
    """The pairs that arrived since the training of the champion."""
    champion = next((found for found in details.policies if found.policy == details.champion), None)
    if champion is None:
        return "No pair has arrived since the training of the champion, or there is none to score it."
    others = len(details.policies) - 1
    beside = f", beside {counted(others, 'waiting candidate')}" if others else ""
    return (
        f"{counted(champion.pairs, 'pair')} arrived since the training of the champion. It ranks {champion.accuracy:.1%} of "
        f"them as the data do{beside}."
    )


def of_policy(details: PolicyDetails, held_out: Mapping[str, float]) -> str:
    """`held_out`: the metrics of held-out pairs, if they are shown."""
    trained = f"Trained for {counted(details.steps, 'step')} on {counted(details.pairs.train, 'pair')}"
    if not held_out:
        return f"{trained}."
    return f"{trained}. {_of_metrics(held_out)}."


def of_evaluation(details: EvaluationDetails, changed: int, samples: int) -> str:
    """`changed`: the number of `samples` with another answer than before."""
    low, high = details.interval
    answers = f" {changed} of {counted(samples, 'sampled answer')} changed." if samples else ""
    return f"{_of_metrics(details.metrics)}; 95% interval of the share {low:.1%} to {high:.1%}.{answers}"


def of_votes(accuracy: float) -> str:
    return f"By {VOTES} votes, the chosen response has the higher reward in {accuracy:.0%} of held-out pairs."


def _of_metrics(metrics: Mapping[str, float]) -> str:
    share, loss = metrics["eval/rewards/accuracies"], metrics["eval/loss"]
    pairs = f" of {counted(int(metrics['eval/pairs']), 'held-out pair')}" if "eval/pairs" in metrics else ""
    return f"The chosen response has the higher reward in {share:.1%}{pairs or ' of held-out pairs'}; loss {loss:.4g}"


def of_release(model: str, version: int, is_champion: bool, reasons: str) -> str:
    state = "is champion" if is_champion else "is not champion"
    return f"Version {version} of {model} {state}: {reasons}" if reasons else f"Version {version} of {model} {state}."

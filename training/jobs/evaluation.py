"""The `evaluation` job: score the policy on held-out pairs.

1. Score every held-out pair with the policy, in the dtype of the reference log-probs. The loss function is the one of training.
2. Give the accuracy a 95% interval: a few hundred pairs do not support two digits. Give it also by the longer response,
   because policies learn length first, and by named source.
3. Answer a few prompts with the policy (after) and the reference model (before), up to the stop tokens of the released model.
4. On rank 0, write the metrics, one row per pair, the samples and an HTML report. `samples.json` has decoded tokens and is in
   the fingerprint. The report and the details show the messages of the prompts instead.

Legend: V held-out pairs.
"""

import gc
from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from training.contract.config.loss import Loss
from training.contract.config.recipe import Generation
from training.contract.errors import DataError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult, write_json
from training.data.reading.pair_writer import PREFERENCES_FILE, PREFERENCES_SCHEMA
from training.data.templates.tokenization_spec import TOKENIZER_FOLDER
from training.data.templates.tokenizer import load_tokenizer
from training.data.tokenization.message_text import PairText, read_message_text
from training.data.tokenization.pair_dataset import Pairs
from training.distributed import Group
from training.evaluation.generate import answers, decode, spread_prompts, stop_tokens
from training.evaluation.report import Report, Sample, WorstPair, render
from training.model.logprobs.self_check import check_exact
from training.parallel.model_specs import InferenceModelSpec
from training.parallel.strategy import choose_layout
from training.scoring.logprob_tails import read_table
from training.scoring.pairs import ScoredPairs, score_pairs

_SHOWN_CHARACTERS = 500
_WORST_PAIRS = 10


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    pairs = Pairs.open(job.inputs["tokenized_pairs"].folder)
    positions_V = held_out_positions(pairs)
    loss = Loss.model_validate(job.settings["loss"])
    reference = read_table(job, pairs, positions_V, loss, group, events)
    tokenizer = load_tokenizer(job.inputs["tokenized_pairs"].folder / TOKENIZER_FOLDER)
    shown = spread_prompts(pairs, positions_V, job.settings["samples"])
    prompts, length = [pairs.prompt_ids(index) for index in shown], job.settings["max_new_tokens"]

    after_training = InferenceModelSpec(job.inputs["policy"], reference.dtype, job.inputs["reference_model"])
    before_training = InferenceModelSpec(job.inputs["reference_model"], reference.dtype)
    layout = choose_layout(after_training, job.compute.parallel, group, events)
    policy = layout.place(after_training.load)
    check_exact(policy, events)
    events.phase("score the held-out pairs with the policy")
    held_out = score_pairs(policy, pairs, positions_V, reference, loss, group, events)
    events.phase("sample answers of the policy and of the reference model")
    stops = stop_tokens(policy.config, tokenizer, job.settings)
    drawing = Generation.model_validate(job.settings.get("generation", {}))
    after = answers(policy, prompts, stops, tokenizer, length, group, drawing)
    del policy
    gc.collect()  # the model is in reference cycles, and memory may hold one model only
    before = answers(layout.place(before_training.load), prompts, stops, tokenizer, length, group, drawing)
    if not group.is_main:
        return JobResult("")
    samples = [
        Sample(int(pairs.rows[i]), decode(tokenizer, prompt), old, new, decode(tokenizer, pairs.response_ids(i)))
        for i, prompt, old, new in zip(shown, prompts, before, after, strict=True)
    ]
    return _write(job, held_out, samples, tokenizer)


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
    raw = job.inputs.get("raw_preferences")  # an input only if the recipe names a source
    if raw is None:
        return [None] * len(rows_V)
    table = pq.read_table(raw.folder / PREFERENCES_FILE, columns=["source_name"], schema=PREFERENCES_SCHEMA)
    names: list[str | None] = table["source_name"].take(pa.array(rows_V)).to_pylist()
    return names


def _write(job: Job, held_out: ScoredPairs, samples: list[Sample], tokenizer: PreTrainedTokenizerBase) -> JobResult:
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
    worst = _worst_pairs(held_out, tokenizer)
    messages = read_message_text(job, {sample.row for sample in samples} | {pair.row for pair in worst})
    readable = [
        replace(sample, prompt=messages[sample.row].prompt) if sample.row in messages else sample for sample in samples
    ]
    write_json(job.staging / "metrics.json", metrics)
    write_json(job.staging / "samples.json", texts)
    pq.write_table(pa.table(columns), job.staging / "pairs.parquet")
    report = Report(
        policy=short(job.inputs["policy"].fingerprint),
        reference=short(job.inputs["reference_model"].fingerprint),
        pairs=short(job.inputs["tokenized_pairs"].fingerprint),
        metrics=metrics,
        accuracy=held_out.accuracy(),
        by_length={kind.replace("_", " "): value for kind, value in held_out.accuracy_by_length().items()},
        by_source={name: held_out.accuracy_of(pairs_V) for name, pairs_V in sources.items()},
        margins=columns["margin"],
        samples=readable,
        worst=[_with_messages(pair, messages).abridged(_SHOWN_CHARACTERS) for pair in worst],
    )
    (job.staging / "report.html").write_text(render(report), encoding="utf-8")
    details = {
        "metrics": metrics,
        "sources": [{"source": name, **values} for name, values in source_metrics.items()],
        "interval": list(held_out.accuracy().interval),
        "samples": [asdict(sample.abridged(_SHOWN_CHARACTERS)) for sample in readable],
    }
    return JobResult(fingerprint("evaluation", {"metrics": metrics, "pairs": columns, "samples": texts}), details)


def _with_messages(pair: WorstPair, messages: Mapping[int, PairText]) -> WorstPair:
    """Return the pair with its messages instead of decoded tokens, if the messages are known."""
    if (text := messages.get(pair.row)) is None:
        return pair
    return replace(pair, prompt=text.prompt, chosen=text.chosen, rejected=text.rejected)


def _worst_pairs(held_out: ScoredPairs, tokenizer: PreTrainedTokenizerBase) -> list[WorstPair]:
    """Return the pairs with the greatest loss, worst first. They show wrong labels and weaknesses of the policy."""
    order = np.argsort(-held_out.outcome.losses_B.numpy(), kind="stable")[:_WORST_PAIRS]
    pairs, worst = held_out.pairs, []
    for place in order:
        index = int(held_out.positions_V[place])
        worst.append(
            WorstPair(
                row=int(pairs.rows[index]),
                loss=float(held_out.outcome.losses_B[place]),
                margin=float(held_out.outcome.margins_B[place]),
                prompt=decode(tokenizer, pairs.prompt_ids(index)),
                chosen=decode(tokenizer, pairs.response_ids(index)),
                rejected=decode(tokenizer, pairs.response_ids(index, "rejected")),
            )
        )
    return worst

"""The `evaluation` job: how the policy does on pairs it was not trained on.

1. The policy scores every held-out pair in the dtype in which the reference did; the reference's values come from the
   table. Loss, rewards and margins come from the function that training uses.
2. The accuracy has a 95% interval, since a few hundred pairs do not support two digits. It is also given by which
   response is longer, since length is what preference data teaches first, and by the sources to which the recipe gives names.
3. A few prompts are answered by the policy (after) and by the reference model (before), up to the tokens at which the
   released model stops.
4. Rank 0 writes the metrics, a row a pair, the samples, and a report for people. `samples.json` has decoded tokens, of which
   the fingerprint is made; the report and the details have the messages of the prompts.

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
from training.data.tokenization.message_text import PairText, read_said
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
    gc.collect()  # its parts form cycles, and two models need never fit at once
    before = answers(layout.place(before_training.load), prompts, stops, tokenizer, length, group, drawing)
    if not group.is_main:
        return JobResult("")
    samples = [
        Sample(int(pairs.rows[i]), decode(tokenizer, prompt), was, now, decode(tokenizer, pairs.response_ids(i)))
        for i, prompt, was, now in zip(shown, prompts, before, after, strict=True)
    ]
    return _write(job, held_out, samples, tokenizer)


def held_out_positions(pairs: Pairs) -> npt.NDArray[np.int64]:
    """The positions of the validation pairs. Raises DataError if there is none."""
    positions_V = pairs.indices("validation")
    if not len(positions_V):
        raise DataError(
            f"none of the {len(pairs):,} tokenized pairs is held out, so there is nothing to evaluate on; "
            f"raise data.validation_fraction (0.1 holds out one prompt in ten) or add a source that is `held_out`"
        )
    return positions_V


def _source_names(job: Job, rows_V: npt.NDArray[np.int64]) -> list[str | None]:
    """The names of the sources of the held-out pairs."""
    raw = job.inputs.get("raw_preferences")  # only where the recipe names a source
    if raw is None:
        return [None] * len(rows_V)
    names = pq.read_table(raw.folder / PREFERENCES_FILE, columns=["source_name"], schema=PREFERENCES_SCHEMA)
    found: list[str | None] = names["source_name"].take(pa.array(rows_V)).to_pylist()
    return found


def _write(job: Job, held_out: ScoredPairs, samples: list[Sample], tokenizer: PreTrainedTokenizerBase) -> JobResult:
    """Write the four files into the staging folder. The report is not in the fingerprint: its layout may change."""
    names_V = _source_names(job, held_out.pairs.rows[held_out.positions_V])
    named = sorted({name for name in names_V if name is not None})
    sources = {name: torch.tensor([own == name for own in names_V]) for name in named}
    of_sources = {name: held_out.metrics_of(pairs_V) for name, pairs_V in sources.items()}
    metrics, columns = held_out.metrics(), held_out.columns()
    for name, found in of_sources.items():
        metrics |= {f"eval/sources/{name}/{metric}": value for metric, value in found.items()}
    if sources:
        columns["source_name"] = names_V
    texts = [asdict(sample) for sample in samples]
    worst = _worst_pairs(held_out, tokenizer)
    said = read_said(job, {sample.row for sample in samples} | {pair.row for pair in worst})
    readable = [replace(sample, prompt=said[sample.row].prompt) if sample.row in said else sample for sample in samples]
    write_json(job.staging / "metrics.json", metrics)
    write_json(job.staging / "samples.json", texts)
    pq.write_table(pa.table(columns), job.staging / "pairs.parquet")
    report = Report(
        policy=short(job.inputs["policy"].fingerprint),
        reference=short(job.inputs["reference_model"].fingerprint),
        pairs=short(job.inputs["tokenized_pairs"].fingerprint),
        metrics=metrics,
        accuracy=held_out.accuracy(),
        by_length={kind.replace("_", " "): found for kind, found in held_out.accuracy_by_length().items()},
        by_source={name: held_out.accuracy_of(pairs_V) for name, pairs_V in sources.items()},
        margins=columns["margin"],
        samples=readable,
        worst=[_in_words(pair, said).abridged(_SHOWN_CHARACTERS) for pair in worst],
    )
    (job.staging / "report.html").write_text(render(report), encoding="utf-8")
    details = {
        "metrics": metrics,
        "sources": [{"source": name, **found} for name, found in of_sources.items()],
        "interval": list(held_out.accuracy().interval),
        "samples": [asdict(sample.abridged(_SHOWN_CHARACTERS)) for sample in readable],
    }
    return JobResult(fingerprint("evaluation", {"metrics": metrics, "pairs": columns, "samples": texts}), details)


def _in_words(pair: WorstPair, said: Mapping[int, PairText]) -> WorstPair:
    """Return the pair with its messages in place of decoded tokens, if they are known."""
    if (found := said.get(pair.row)) is None:
        return pair
    return replace(pair, prompt=found.prompt, chosen=found.chosen, rejected=found.rejected)


def _worst_pairs(held_out: ScoredPairs, tokenizer: PreTrainedTokenizerBase) -> list[WorstPair]:
    """The pairs of greatest loss, worst first: where wrong labels and blind spots show."""
    order = np.argsort(-held_out.outcome.losses_B.numpy(), kind="stable")[:_WORST_PAIRS]
    pairs, worst = held_out.pairs, []
    for at in order:
        index = int(held_out.positions_V[at])
        worst.append(
            WorstPair(
                row=int(pairs.rows[index]),
                loss=float(held_out.outcome.losses_B[at]),
                margin=float(held_out.outcome.margins_B[at]),
                prompt=decode(tokenizer, pairs.prompt_ids(index)),
                chosen=decode(tokenizer, pairs.response_ids(index)),
                rejected=decode(tokenizer, pairs.response_ids(index, "rejected")),
            )
        )
    return worst

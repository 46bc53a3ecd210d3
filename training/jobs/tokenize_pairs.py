"""The `pairs` job: tokenize every preference pair into token ids and masks, in one memory-mapped file.

    pairs.arrow       the pairs (training/data/tokenization/pair_dataset.py has the columns and the reader)
    tokenizer/        the tokenizer that made them

The fingerprint covers rows, splits, ids, masks, prompt lengths, and the token that ends a sampled answer. So an edit of
template or data does not change later artifacts if it changes no token. Derivations with the same tokens share the files, but
not the details: each has its own counts and reasons of dropped rows.
"""

import hashlib
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from training.contract.errors import DataError, TemplateError
from training.contract.identity.fingerprint import (
    canonical_json,
    fingerprint_of_stream,
    sequence_key,
    short,
    value_digest,
)
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult
from training.data.reading.pair_writer import PREFERENCES_FILE
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.tokenization_spec import TOKENIZER_FOLDER, read_spec
from training.data.templates.tokenizer import load_tokenizer, tokenizer_fingerprint
from training.data.tokenization.pair_dataset import PAIRS_FILE, PAIRS_SCHEMA, SIDES, Pairs
from training.data.tokenization.retokenize import made_before
from training.data.tokenization.tokenize_pair import Dropped, DropReason, EncodedPair, OverLength, PairEncoder
from training.data.tokenization.tokenizer_pool import Outcomes, Rows, encode_batches
from training.distributed import Group

_BATCH_ROWS = 256
_BINS = 24
_PERCENTILES = (50, 90, 95, 99, 100)
_BY_TEMPLATE = (DropReason.TEMPLATE, DropReason.LEFT_OUT, DropReason.PREFIX, DropReason.EMPTY_PROMPT)
_LEFT_OUT = (DropReason.TEMPLATE, DropReason.LEFT_OUT, DropReason.SEVERAL)
_EXAMPLES, _DROPPED_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 20, 2000

SourceRow = Mapping[str, Any]


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Tokenize `raw_preferences` by `tokenization_spec`.

    Raises TemplateError if the spec holds another tokenizer than it was made with, DataError if no pair is left or one is
    too long.
    """
    assert group.world == 1, "the pairs job runs in one process"
    specification = job.inputs["tokenization_spec"].folder
    spec = read_spec(specification)
    tokenizer = load_tokenizer(specification / TOKENIZER_FOLDER)
    if (found := tokenizer_fingerprint(tokenizer)) != spec["tokenizer_fingerprint"]:
        expected = spec["tokenizer_fingerprint"]
        raise TemplateError(
            f"the tokenizer in {specification} has the fingerprint {short(found)}, expected {short(expected)}: another version "
            "of transformers or tokenizers saved it; move that folder away and run again to recompute it",
            "tokenizer-changed",
        )
    encoder = PairEncoder(tokenizer, ChatTemplate(tokenizer, spec["template_kwargs"], spec.get("date")), spec)
    tally = _Tally(OverLength(spec["over_length"]), job.locations["named"]["chat_template"])
    if (known := made_before(job, encoder, events)) is not None:
        return known
    events.phase("tokenizing")
    _write(job.inputs["raw_preferences"].folder / PREFERENCES_FILE, job.staging, encoder, tally, events)
    shutil.copytree(specification / TOKENIZER_FOLDER, job.staging / TOKENIZER_FOLDER)
    tally.check_not_empty()
    pairs = Pairs.open(job.staging)
    details = {**tally.details(), **_length_statistics(pairs), "largest_token": pairs.largest_token}
    for reason, count in tally.reasons.most_common():
        events.note(f"{count} pairs dropped: {reason.value}, the first: {tally.first(reason)}")
    details["examples"] = [_example(tokenizer, row, pair) for row, pair in tally.examples]
    end = canonical_json({"eos_token_id": tokenizer.eos_token_id})
    return JobResult(fingerprint_of_stream("tokenized_pairs", [end, *tally.digests]), details)


@dataclass
class _Tally:
    """Counts, digests and examples of the rows so far. `template` is the place of the chat template in the recipe."""

    over_length: OverLength
    template: str
    digests: list[bytes] = field(default_factory=list)
    splits: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[DropReason] = field(default_factory=Counter)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    prompts: dict[str, dict[bytes, int]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # by split and digest, the first row of each prompt
    examples: list[tuple[int, EncodedPair]] = field(default_factory=list)

    def keep(self, row: SourceRow, pair: EncodedPair) -> dict[str, Any]:
        """Count a pair and return its line of the file."""
        line = _build_line(row, pair)
        head = canonical_json([row["row"], row["split"], len(pair.prompt)])
        self.digests.append(hashlib.sha256(head + line["chosen_key"] + line["rejected_key"]).digest())
        self.splits[row["split"]] += 1
        self.tokens.update(
            prompt=len(pair.prompt),
            chosen=len(pair.chosen.ids),
            rejected=len(pair.rejected.ids),
            trained=sum(pair.chosen.mask) + sum(pair.rejected.mask),
        )
        self.prompts[row["split"]].setdefault(value_digest(pair.prompt), row["row"])
        if len(self.examples) < _EXAMPLES:
            self.examples.append((row["row"], pair))
        return line

    def drop(self, row: SourceRow, dropped: Dropped, encoder: PairEncoder) -> None:
        """Count a dropped row. Raises DataError for a row that is too long if `over_length` is `error`."""
        if dropped.reason is DropReason.TOO_LONG and self.over_length is OverLength.ERROR:
            raise DataError(
                f"`tokenization.over_length: error`: row {row['row']} ({row['source']}, line {row['line']}) has "
                f"{dropped.detail}; raise `tokenization.max_length`, or set `over_length` to drop, truncate_prompt or "
                "truncate_response",
                "pair-too-long",
            )
        self.reasons[dropped.reason] += 1
        detail, is_first = dropped.detail, self.reasons[dropped.reason] == 1
        if dropped.reason is DropReason.PREFIX and is_first and (switch := encoder.remedy(row)):
            detail += f"; with `{switch}` in `tokenization.template_kwargs` they agree"
        self.dropped.append({"row": row["row"], "reason": dropped.reason.value, "detail": detail})

    def check_not_empty(self) -> None:
        """Raise DataError if no pair was kept."""
        if self.digests:
            return
        first = self.dropped[0] if self.dropped else {"reason": "no row at all", "detail": ""}
        by_template = first["reason"] in _BY_TEMPLATE
        advice = f"repair the chat template ({self.template})" if by_template else "check `tokenization` in the recipe"
        raise DataError(
            f"0 of {len(self.dropped)} pairs can be used; the first: {first['reason']}, {first['detail']}; {advice}",
            "all-pairs-dropped",
        )

    def details(self) -> dict[str, Any]:
        train, validation = self.prompts["train"], self.prompts["validation"]
        shared = sorted((train[prompt], validation[prompt]) for prompt in train.keys() & validation.keys())
        counts = {"pairs": len(self.digests), "train": self.splits["train"], "validation": self.splits["validation"]}
        tokens = {f"{part}_tokens": count for part, count in self.tokens.items()}
        return {
            "counts": {**counts, "dropped": len(self.dropped), **tokens},
            "reasons": {reason.value: count for reason, count in self.reasons.most_common()},
            "dropped_examples": self.dropped[:_DROPPED_EXAMPLES],
            "empty_masks": self.reasons[DropReason.EMPTY_MASK],
            "prefix_violations": self.reasons[DropReason.PREFIX],
            "first_prefix_violation": self.first(DropReason.PREFIX),
            "left_out": sum(self.reasons[reason] for reason in _LEFT_OUT),
            "first_left_out": self.first(*_LEFT_OUT),
            "shared_prompts": len(shared),
            "first_shared_prompt": "row {} (train) and row {} (validation)".format(*shared[0]) if shared else "",
        }

    def first(self, *reasons: DropReason) -> str:
        """Return row and detail of the first pair that was dropped for one of these reasons, or ""."""
        drops = (f"row {drop['row']}, {drop['detail']}" for drop in self.dropped if drop["reason"] in reasons)
        return next(drops, "")


def _write(source: Path, folder: Path, encoder: PairEncoder, tally: _Tally, events: EventWriter) -> None:
    with (
        pq.ParquetFile(source) as file,
        pa.OSFile(str(folder / PAIRS_FILE), "wb") as sink,
        pa.ipc.new_stream(sink, PAIRS_SCHEMA) as stream,
    ):
        count = file.metadata.num_rows
        progress = Progress(events, count, "pairs")
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=_BATCH_ROWS))
        for rows, outcomes in encode_batches(encoder, batches, count):
            lines = list(_kept_lines(rows, outcomes, encoder, tally))
            stream.write_batch(pa.RecordBatch.from_pylist(lines, PAIRS_SCHEMA))
            progress.advance(len(rows))


def _kept_lines(rows: Rows, outcomes: Outcomes, encoder: PairEncoder, tally: _Tally) -> Iterator[dict[str, Any]]:
    for row, outcome in zip(rows, outcomes, strict=True):
        if isinstance(outcome, Dropped):
            tally.drop(row, outcome, encoder)
        else:
            yield tally.keep(row, outcome)


def _build_line(row: SourceRow, pair: EncodedPair) -> dict[str, Any]:
    line: dict[str, Any] = {"row": row["row"], "split": row["split"], "prompt_length": len(pair.prompt)}
    for side, response in zip(SIDES, (pair.chosen, pair.rejected), strict=True):
        ids, mask = pair.ids(response), pair.mask(response)
        line |= {f"{side}_ids": ids, f"{side}_mask": mask, f"{side}_key": sequence_key(ids, mask)}
    return line


def _length_statistics(pairs: Pairs) -> dict[str, Any]:
    """Return percentiles and histograms of the lengths, in tokens."""
    lengths: dict[str, NDArray[np.integer[Any]]] = {"prompt": pairs.prompt_lengths}
    lengths.update({side: pairs.lengths(side) for side in SIDES})
    edges = np.histogram_bin_edges(np.concatenate([lengths[side] for side in SIDES]), bins=_BINS)
    histograms = {side: np.histogram(lengths[side], bins=edges)[0].tolist() for side in SIDES}
    percentiles = {name: _percentiles(values) for name, values in lengths.items()}
    return {"percentiles": percentiles, "histogram": {"edges": edges.tolist(), **histograms}}


def _percentiles(lengths: NDArray[np.integer[Any]]) -> dict[str, float]:
    values = np.percentile(lengths, _PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(_PERCENTILES, values, strict=True)}


def _example(tokenizer: PreTrainedTokenizerFast, row: int, pair: EncodedPair) -> dict[str, Any]:
    """Return the tokens of a pair as text, control tokens included."""
    parts = {"prompt": pair.prompt, "chosen": pair.chosen.ids, "rejected": pair.rejected.ids}
    return {"row": row, **{name: tokenizer.decode(ids)[:_EXAMPLE_CHARACTERS] for name, ids in parts.items()}}

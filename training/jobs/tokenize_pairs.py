"""The `pairs` job: tokenize every preference pair into token ids and masks, in one memory-mapped file.

    pairs.arrow       the pairs (training/data/tokenization/pair_dataset.py has the columns and the reader)
    tokenizer/        the tokenizer that made them

1. Find the rows that the token cache lacks. Tokenize them into the cache, on all cores. A killed job loses the rows of the last
   half minute.
2. Read all rows from the cache, in order, and write the pairs. New rows take the same path as old ones.

The fingerprint covers rows, splits, ids, masks, prompt lengths, and the token that ends a sampled answer. So an edit of
template or data does not change later artifacts if it changes no token. Derivations with the same tokens share the files, but
not the details: each has its own counts and reasons of dropped rows.
"""

import hashlib
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from training.contract.errors import DataError, TemplateError
from training.contract.identity.fingerprint import canonical_json, fingerprint_of_stream, short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.details import DroppedRow, LengthHistogram, PairCounts, PairsDetails, PairText
from training.contract.protocol.events import EventWriter, Progress
from training.contract.protocol.locations import PairsLocations
from training.contract.protocol.settings import PairsSettings
from training.contract.protocol.spec_files import TOKENIZER_FOLDER, TokenizationSpec
from training.contract.store.artifact import JobResult
from training.contract.store.row_cache import TokenCache
from training.contract.store.store import Store
from training.data.reading.pair_writer import PREFERENCES_FILE
from training.data.templates.chat_template import ChatTemplate
from training.data.templates.tokenizer import load_tokenizer, tokenizer_fingerprint
from training.data.tokenization.cached_tokens import CachedTokens
from training.data.tokenization.encoded_pair import DropReason, OverLength
from training.data.tokenization.pair_dataset import PAIRS_FILE, PAIRS_SCHEMA, SIDES, Pairs
from training.data.tokenization.retokenize import made_before
from training.data.tokenization.token_rows import pair_lines, token_rule
from training.data.tokenization.tokenize_pair import PairEncoder
from training.job_context import JobContext

_BINS = 24
_PERCENTILES = (50, 90, 95, 99, 100)
_BY_TEMPLATE = (DropReason.TEMPLATE, DropReason.LEFT_OUT, DropReason.PREFIX, DropReason.EMPTY_PROMPT)
_LEFT_OUT = (DropReason.TEMPLATE, DropReason.LEFT_OUT, DropReason.SEVERAL)
_EXAMPLES, _DROPPED_EXAMPLES, _EXAMPLE_CHARACTERS = 3, 20, 2000

SourceRow = Mapping[str, Any]


def run(context: JobContext[PairsSettings, PairsLocations]) -> JobResult[PairsDetails]:
    """Tokenize `raw_preferences` by `tokenization_spec`.

    Raises TemplateError if the spec holds another tokenizer than it was made with, DataError if no pair is left or one is
    too long.
    """
    job, events = context.job, context.events
    assert context.group.world == 1, "the pairs job runs in one process"
    specification = job.inputs[AssetName.TOKENIZATION_SPEC].folder
    spec = TokenizationSpec.read(specification)
    tokenizer = load_tokenizer(specification / TOKENIZER_FOLDER)
    if (found := tokenizer_fingerprint(tokenizer)) != (expected := spec.tokenizer_fingerprint):
        raise TemplateError(
            f"the tokenizer in {specification} has the fingerprint {short(found)}, expected {short(expected)}: another version "
            "of transformers or tokenizers saved it; move that folder away and run again to recompute it",
            "tokenizer-changed",
        )
    encoder = PairEncoder(tokenizer, ChatTemplate(tokenizer, spec.template_kwargs, spec.date), spec)
    tally = _Tally(OverLength(spec.over_length), job.locations.named.chat_template)
    if (known := made_before(job, encoder, events)) is not None:
        return known
    rule = token_rule(spec, job.code_version, job.settings.software)
    cache = TokenCache(Store(job.store), rule, events.note)
    tokens = CachedTokens(job.inputs[AssetName.RAW_PREFERENCES].folder / PREFERENCES_FILE, encoder, cache, events)
    events.phase("tokenizing")
    tokens.fill(tally.check_length)
    events.phase("writing the pairs")
    _write(tokens, job.staging, tally, events)
    shutil.copytree(specification / TOKENIZER_FOLDER, job.staging / TOKENIZER_FOLDER)
    tally.check_not_empty()
    pairs = Pairs.open(job.staging)
    examples = tuple(_example(tokenizer, pairs, position) for position in range(min(_EXAMPLES, len(pairs))))
    of_cache = {"tokenized": tokens.tokenized, "cached_rows": tokens.cached, "cache_bytes": cache.bytes()}
    details = tally.details().model_copy(update={**of_cache, "token_rules": (rule,), "examples": examples})
    for reason, count in tally.reasons.most_common():
        events.note(f"{count} pairs dropped: {reason}, the first: {tally.first(reason)}")
    end = canonical_json({"eos_token_id": tokenizer.eos_token_id})
    return JobResult(fingerprint_of_stream(AssetName.TOKENIZED_PAIRS.value, chain([end], _digests(pairs))), details)


@dataclass
class _PromptSplits:
    """Finds prompts that are in both splits. It holds 17 bytes for each pair."""

    _keys: list[NDArray[np.uint64]] = field(default_factory=list)
    _rows: list[NDArray[np.int64]] = field(default_factory=list)
    _in_train: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, lines: pa.RecordBatch, prompt_keys: pa.ChunkedArray) -> None:
        keys = b"".join(key[:8] for key in prompt_keys.to_pylist())
        self._keys.append(np.frombuffer(keys, np.uint64))
        self._rows.append(lines.column("row").to_numpy())
        self._in_train.append(np.array([split == "train" for split in lines.column("split").to_pylist()], np.bool_))

    def shared(self) -> list[tuple[int, int]]:
        """Return the first row in train and in validation of each such prompt, ascending."""
        if not self._keys:
            return []
        keys, rows, in_train = np.concatenate(self._keys), np.concatenate(self._rows), np.concatenate(self._in_train)
        train, train_rows = _first_rows(keys[in_train], rows[in_train])
        validation, validation_rows = _first_rows(keys[~in_train], rows[~in_train])
        _, at_train, at_validation = np.intersect1d(train, validation, assume_unique=True, return_indices=True)
        return sorted(zip(train_rows[at_train].tolist(), validation_rows[at_validation].tolist(), strict=True))


def _first_rows(keys: NDArray[np.uint64], rows: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Return the distinct keys and the first row of each."""
    distinct, first = np.unique(keys, return_index=True)
    return distinct, rows[first]


@dataclass
class _Tally:
    """Counts and examples of the rows so far. `template` is the place of the chat template in the recipe."""

    over_length: OverLength
    template: str
    splits: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    first_drops: dict[str, str] = field(default_factory=dict)  # by reason: row and detail
    dropped: list[DroppedRow] = field(default_factory=list)
    prompts: _PromptSplits = field(default_factory=_PromptSplits)
    lengths: dict[str, list[NDArray[np.int32]]] = field(default_factory=lambda: defaultdict(list))  # of each sequence
    largest_token: int = 0

    def keep(self, lines: pa.RecordBatch, tokens: pa.Table) -> None:
        """Count pairs: their lines in the file and their rows in the cache."""
        self.splits.update(lines.column("split").to_pylist())
        lengths = {name: _sum(pc.list_value_length(tokens.column(name))) for name in ("prompt", *SIDES)}
        trained = sum(_sum(pc.list_flatten(tokens.column(f"{side}_mask"))) for side in SIDES)
        self.tokens.update(lengths | {"trained": trained})
        self.prompts.add(lines, tokens.column("prompt_key"))
        self.lengths["prompt"].append(lines.column("prompt_length").to_numpy())
        for side in SIDES:
            ids = lines.column(f"{side}_ids")
            self.lengths[side].append(pc.list_value_length(ids).to_numpy())
            self.largest_token = max(self.largest_token, pc.max(ids.flatten()).as_py() or 0)

    def check_length(self, row: SourceRow, reason: str, detail: str) -> None:
        """Raise DataError for a row that is too long if `over_length` is `error`."""
        if reason == DropReason.TOO_LONG and self.over_length is OverLength.ERROR:
            raise DataError(
                f"`tokenization.over_length: error`: row {row['row']} ({row['source']}, line {row['line']}) has "
                f"{detail}; raise `tokenization.max_length`, or set `over_length` to drop, truncate_prompt or "
                "truncate_response",
                "pair-too-long",
            )

    def drop(self, number: int, reason: str, detail: str) -> None:
        """Count a dropped row."""
        self.reasons[reason] += 1
        self.first_drops.setdefault(reason, f"row {number}, {detail}")
        if len(self.dropped) < _DROPPED_EXAMPLES:
            self.dropped.append(DroppedRow(row=number, reason=reason, detail=detail))

    def check_not_empty(self) -> None:
        """Raise DataError if no pair was kept."""
        if self.splits:
            return
        first = self.dropped[0] if self.dropped else DroppedRow(row=0, reason="no row at all", detail="")
        by_template = first.reason in _BY_TEMPLATE
        advice = f"repair the chat template ({self.template})" if by_template else "check `tokenization` in the recipe"
        raise DataError(
            f"0 of {self.reasons.total()} pairs can be used; the first: {first.reason}, {first.detail}; {advice}",
            "all-pairs-dropped",
        )

    def details(self) -> PairsDetails:
        shared = self.prompts.shared()
        lengths = {name: np.concatenate(parts) for name, parts in self.lengths.items()}
        return PairsDetails(
            counts=self.counts(),
            reasons=dict(self.reasons.most_common()),
            dropped_examples=tuple(self.dropped),
            empty_masks=self.reasons[DropReason.EMPTY_MASK],
            prefix_violations=self.reasons[DropReason.PREFIX],
            first_prefix_violation=self.first(DropReason.PREFIX),
            left_out=sum(self.reasons[reason] for reason in _LEFT_OUT),
            first_left_out=self.first(*_LEFT_OUT),
            shared_prompts=len(shared),
            first_shared_prompt="row {} (train) and row {} (validation)".format(*shared[0]) if shared else "",
            percentiles={name: _percentiles(values) for name, values in lengths.items()},
            histogram=_length_histogram(lengths),
            largest_token=self.largest_token,
        )

    def counts(self) -> PairCounts:
        return PairCounts(
            pairs=self.splits.total(),
            train=self.splits["train"],
            validation=self.splits["validation"],
            dropped=self.reasons.total(),
            **{f"{part}_tokens": count for part, count in self.tokens.items()},
        )

    def first(self, *reasons: str) -> str:
        """Return row and detail of the first pair that was dropped for one of these reasons, or ""."""
        drops = (text for reason, text in self.first_drops.items() if reason in reasons)
        return next(drops, "")


def _write(tokens: CachedTokens, folder: Path, tally: _Tally, events: EventWriter) -> None:
    progress = Progress(events, len(tokens), "pairs")
    with pa.OSFile(str(folder / PAIRS_FILE), "wb") as sink, pa.ipc.new_stream(sink, PAIRS_SCHEMA) as stream:
        for group, table in tokens.groups():
            is_kept = pc.is_null(table.column("reason"))
            for row, token_row in zip(
                group.filter(pc.invert(is_kept)).to_pylist(), table.filter(pc.invert(is_kept)).to_pylist(), strict=True
            ):
                reason, detail = token_row["reason"], token_row["detail"]
                tally.check_length(row, reason, detail)
                if reason == DropReason.PREFIX and not tally.reasons[reason]:
                    detail += tokens.remedy(row["row"])
                tally.drop(row["row"], reason, detail)
            kept, kept_rows = table.filter(is_kept), group.filter(is_kept)
            lines = pair_lines(kept, kept_rows.column("row"), kept_rows.column("split"))
            tally.keep(lines, kept)
            stream.write_batch(lines)
            progress.advance(len(group))


def _sum(values: pa.ChunkedArray) -> int:
    return pc.sum(values).as_py() or 0


def _digests(pairs: Pairs) -> Iterator[bytes]:
    """Yield the digest of each pair: row, split, length of the prompt, and both sequences."""
    for batch in pairs.batches("row", "split", "prompt_length", *(f"{side}_key" for side in SIDES)):
        for row, split, length, *keys in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield hashlib.sha256(b'[%d,"%s",%d]' % (row, split.encode(), length) + b"".join(keys)).digest()


def _length_histogram(lengths: Mapping[str, NDArray[np.int32]]) -> LengthHistogram:
    edges = np.histogram_bin_edges(np.concatenate([lengths[side] for side in SIDES]), bins=_BINS)
    chosen, rejected = (np.histogram(lengths[side], bins=edges)[0].tolist() for side in SIDES)
    return LengthHistogram(edges=edges.tolist(), chosen=chosen, rejected=rejected)


def _percentiles(lengths: NDArray[np.integer[Any]]) -> dict[str, float]:
    values = np.percentile(lengths, _PERCENTILES)
    return {f"p{p}": float(value) for p, value in zip(_PERCENTILES, values, strict=True)}


def _example(tokenizer: PreTrainedTokenizerFast, pairs: Pairs, position: int) -> PairText:
    """Return the tokens of a pair as text, control tokens included."""
    parts = {"prompt": pairs.prompt_ids(position)}
    parts |= {side: pairs.response_ids(position, side) for side in SIDES}
    texts = {name: tokenizer.decode(ids)[:_EXAMPLE_CHARACTERS] for name, ids in parts.items()}
    return PairText(row=int(pairs.rows[position]), **texts)

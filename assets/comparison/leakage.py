"""Leakage: held-out prompts that the policy was trained on before, by a policy that it started from.

The two splits of one recipe share no prompt. But weights remember what they were trained on before: those of a champion that
training started from, or of a released model that is the reference. A higher `data.validation_fraction` since then, or a
source that is held out now, holds out prompts that were trained on, whose losses and accuracies look better than they are.
What a policy was trained on follows from its ancestors in the store, whichever recipe trained it.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from assets.comparison.paired_metrics import Row, prompt_messages
from model_registry.model_version import MERGED
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import value_digest
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


@dataclass(frozen=True)
class Leakage:
    """`pairs`: the names of the held-out pairs whose prompts leaked. `policies`: those before, by weights, the latest first.

    `unknown`: the weights of those that the store does not have, or without the data they were trained on.
    """

    pairs: frozenset[str]
    policies: tuple[str, ...]
    unknown: tuple[str, ...]


def find_leakage(store: Store, policies: Collection[str], rows: Mapping[str, Row], raw_preferences: str) -> Leakage:
    """Which of the held-out pairs `rows` have prompts that a policy was trained on from which one of `policies` started.

    Directly or not. `raw_preferences`: the fingerprint of what the pairs were made from. Raises StoreError if that is gone.
    """
    before, unknown = _policies_before(store, policies)
    if not before:
        return Leakage(frozenset(), (), tuple(unknown))
    said = prompt_messages(rows, store.open("raw_preferences", raw_preferences))
    held_out = {pair: _identity(prompt) for pair, prompt in said.items()}
    wanted, leaked = set(held_out.values()), set[bytes]()
    for weights, how in before.items():
        try:
            leaked.update(prompt for prompt in _trained_on(store, how) if prompt in wanted)
        except StoreError:
            unknown.append(weights)
    pairs = frozenset(pair for pair, prompt in held_out.items() if prompt in leaked)
    return Leakage(pairs, tuple(weights for weights in before if weights not in unknown), tuple(unknown))


def _policies_before(store: Store, policies: Collection[str]) -> tuple[dict[str, Derivation], list[str]]:
    """How those were trained that `policies` started from, directly or not, by weights; and the weights of unknown ones."""
    before: dict[str, Derivation] = {}
    unknown: list[str] = []
    waiting = deque((weights, False) for weights in policies)
    while waiting:
        weights, is_before = waiting.popleft()
        if weights in before or weights in unknown:
            continue
        try:
            how = _training(store, weights)
            if is_before:
                before[weights] = how
            waiting += ((start, True) for start in _started_from(store, how))
        except StoreError:
            unknown.append(weights)
    return before, unknown


def _training(store: Store, weights: str) -> Derivation:
    """How the policy with these weights was trained; the weights are its own, or those of an adapter merged into its base."""
    if store.folder(MERGED, weights).is_dir():
        return _training(store, _made_from(store, MERGED, weights).inputs["policy"].fingerprint)
    return _made_from(store, "policy", weights)


def _started_from(store: Store, how: Derivation) -> Iterator[str]:
    """The weights of the champion that training started from, and those of its base model if a recipe has released them."""
    if (champion := how.settings.get("champion")) is not None:
        yield champion
    reference = _made_from(store, "reference_model", how.inputs["reference_model"].fingerprint)
    base = reference.inputs["base_model"].fingerprint
    if any(store.folder(kind, base).is_dir() for kind in ("policy", MERGED)):
        yield base


def _trained_on(store: Store, how: Derivation) -> Iterator[bytes]:
    """The identities of the prompts in the training split."""
    pairs = _made_from(store, "tokenized_pairs", how.inputs["tokenized_pairs"].fingerprint)
    said = store.open("raw_preferences", pairs.inputs["raw_preferences"].fingerprint)
    with pq.ParquetFile(said.file("preferences.parquet")) as file:
        for batch in file.iter_batches(columns=["prompt", "split"]):
            yield from map(_identity, batch.filter(pc.equal(batch["split"], "train"))["prompt"].to_pylist())


def _identity(prompt: Sequence[Mapping[str, Any]]) -> bytes:
    """Of roles and contents alone, since these decide the split of a prompt."""
    return value_digest([[turn["role"], turn["content"]] for turn in prompt])


def _made_from(store: Store, kind: str, fingerprint: str) -> Derivation:
    return store.open(kind, fingerprint, hashes=False).derivation

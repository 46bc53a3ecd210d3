"""Leakage: held-out prompts in the training data of an earlier policy, from which this one started.

The two splits of one recipe share no prompt. But training may start from a champion, or from a released model as reference.
The recipe may then hold out prompts of the earlier training, after a higher `data.validation_fraction` or with a source held
out since. Their losses and accuracies look too good. A policy's training data follow from its ancestors in the store, under
any recipe.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from assets.comparison.paired_metrics import Row, prompt_messages
from model_registry.model_version import MERGED
from training.contract.errors import StoreError
from training.contract.files.prompt_digests import prompt_digest, prompt_digests
from training.contract.protocol.artifacts import RAW_PREFERENCES, AssetName
from training.contract.protocol.settings import RecordedSettings
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


@dataclass(frozen=True)
class Leakage:
    """Leaked held-out pairs, and the earlier policies.

    `pairs`: names of the held-out pairs with leaked prompts. `policies`: fingerprints of earlier policies' weights, the latest
    first. `unknown`: weights that are missing from the store, or whose training data are.
    """

    pairs: frozenset[str]
    policies: tuple[str, ...]
    unknown: tuple[str, ...]


def find_leakage(store: Store, policies: Collection[str], rows: Mapping[str, Row], raw_preferences: str) -> Leakage:
    """Return the leakage of the held-out pairs `rows` from earlier policies, the direct and indirect starts of `policies`.

    `raw_preferences`: the fingerprint of the pairs' rows. Raise StoreError if it is missing.
    """
    earlier, unknown = earlier_policies(store, policies)
    if not earlier:
        return Leakage(frozenset(), (), tuple(unknown))
    prompts = prompt_messages(rows, store.open(RAW_PREFERENCES, raw_preferences))
    held_out = {pair: prompt_digest(prompt) for pair, prompt in prompts.items()}
    held_out_digests, leaked = set(held_out.values()), set[bytes]()
    for weights, derivation in earlier.items():
        try:
            leaked.update(digest for digest in _training_prompts(store, derivation) if digest in held_out_digests)
        except StoreError:
            unknown.append(weights)
    pairs = frozenset(pair for pair, digest in held_out.items() if digest in leaked)
    return Leakage(pairs, tuple(weights for weights in earlier if weights not in unknown), tuple(unknown))


def earlier_policies(store: Store, policies: Collection[str]) -> tuple[dict[str, Derivation], list[str]]:
    """Return the derivations, by weights, of the direct and indirect starts of `policies`, and the unknown weights."""
    earlier: dict[str, Derivation] = {}
    unknown: list[str] = []
    queue = deque((weights, False) for weights in policies)
    while queue:
        weights, is_earlier = queue.popleft()
        if weights in earlier or weights in unknown:
            continue
        try:
            derivation = policy_derivation(store, weights)
            if is_earlier:
                earlier[weights] = derivation
            queue += ((start, True) for start in _starting_weights(store, derivation))
        except StoreError:
            unknown.append(weights)
    return earlier, unknown


def policy_derivation(store: Store, weights: str) -> Derivation:
    """Return the derivation of the policy with these weights, which may be an adapter merged into its base."""
    if store.folder(MERGED, weights).is_dir():
        return policy_derivation(store, _open_derivation(store, MERGED, weights).inputs[AssetName.POLICY].fingerprint)
    return _open_derivation(store, AssetName.POLICY, weights)


def _starting_weights(store: Store, derivation: Derivation) -> Iterator[str]:
    """Yield the weights of the champion from which training started, and of the base model if a recipe trained it."""
    if (champion := RecordedSettings.model_validate(derivation.settings).champion) is not None:
        yield champion
    reference = _open_derivation(
        store, AssetName.REFERENCE_MODEL, derivation.inputs[AssetName.REFERENCE_MODEL].fingerprint
    )
    base = reference.inputs[AssetName.BASE_MODEL].fingerprint
    if any(store.folder(kind, base).is_dir() for kind in ("policy", MERGED)):
        yield base


def _training_prompts(store: Store, derivation: Derivation) -> Iterator[bytes]:
    """Yield the digests of the prompts in the training split."""
    pairs = _open_derivation(store, AssetName.TOKENIZED_PAIRS, derivation.inputs[AssetName.TOKENIZED_PAIRS].fingerprint)
    rows = store.open(RAW_PREFERENCES, pairs.inputs[AssetName.RAW_PREFERENCES].fingerprint)
    yield from prompt_digests(rows.folder, "train")


def _open_derivation(store: Store, kind: str, fingerprint: str) -> Derivation:
    return store.open(kind, fingerprint, hashes=False).derivation

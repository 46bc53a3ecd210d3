"""The policies that score arriving pairs: the champion and the waiting candidates, with all data that they have seen."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from assets.comparison.leakage import earlier_policies, policy_derivation
from assets.pipeline.pipeline import Pipeline, Services
from model_registry.gate.ledger import Hypothesis, Ledger
from model_registry.model_version import Version
from training.contract.config.loss import Loss
from training.contract.errors import StoreError, without_code
from training.contract.files.prompt_digests import fresh_prompts
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.prequential import scored_split
from training.contract.protocol.settings import RecordedSettings
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store

WAITING = 5  # the newest candidates of a recipe that are tested on arriving pairs


@dataclass(frozen=True)
class Contestant:
    """A policy that can be scored. All fields but the version and the loss are fingerprints.

    `seen_pairs`, `seen_rows`: the tokenized pairs and rows that it, an ancestor or its reference model was trained or judged
    on. For a candidate, `seen_rows` has the rows of its earlier bets too: a pair counts once.
    """

    version: Version
    policy: str
    reference: str
    spec: str
    loss: Loss
    seen_pairs: tuple[str, ...]
    seen_rows: tuple[str, ...]


@dataclass(frozen=True)
class Contestants:
    """`skipped`: sentences about versions that cannot be scored."""

    champion: Contestant | None
    candidates: tuple[Contestant, ...]
    skipped: tuple[str, ...]

    @property
    def all(self) -> tuple[Contestant, ...]:
        """The champion first."""
        return () if self.champion is None else (self.champion, *self.candidates)


def fresh_rows(pipeline: Pipeline, store: Store, contestant: Contestant, rows: str) -> dict[int, bytes]:
    """Return the rows of the `raw_preferences` with the fingerprint `rows` whose prompts the contestant has not seen."""
    seen = [store.folder(AssetName.RAW_PREFERENCES, digest) for digest in contestant.seen_rows]
    return fresh_prompts(store.folder(AssetName.RAW_PREFERENCES, rows), seen, scored_split(pipeline.recipe))


class _UnscorableError(Exception):
    """A version cannot be scored; the text says why."""


def find_contestants(pipeline: Pipeline, services: Services, base_model: str) -> Contestants:
    """Return the policies to score for the recipe. `base_model`: the fingerprint of its base model. Raise RegistryError."""
    name, registry = pipeline.recipe.release.model_name, services.registry
    if pipeline.recipe.release.gate.type != "anytime" or (champion := registry.champion(name)) is None:
        return Contestants(None, (), ())
    skipped: list[str] = []
    found = _try_version(services.store, champion, base_model, skipped)
    if found is None:
        return Contestants(None, (), tuple(skipped))
    versions = {version.number: version for version in registry.versions(name)}
    candidates = []
    ledger = Ledger.read(registry.connection, name)
    for entry in ledger.waiting(pipeline.name)[:WAITING]:
        version = versions.get(entry.candidate)
        if version is None or entry.champions_policy != found.policy:
            continue
        candidate = _try_version(services.store, version, base_model, skipped, ledger.of_policy(entry.policy))
        if candidate is not None:
            candidates.append(candidate)
    return Contestants(found, tuple(candidates), tuple(skipped))


def _try_version(
    store: Store, version: Version, base_model: str, skipped: list[str], entries: Sequence[Hypothesis] = ()
) -> Contestant | None:
    """Return the version's policy with its data; None, and a sentence in `skipped`, if it cannot be scored."""
    try:
        return _describe(store, version, base_model, entries)
    except (_UnscorableError, StoreError) as error:
        skipped.append(
            f"version {version.number} of {version.name} cannot be scored on arriving pairs: {without_code(str(error))}"
        )
        return None


def _describe(store: Store, version: Version, base_model: str, entries: Sequence[Hypothesis]) -> Contestant:
    policy = version.fingerprint_of(AssetName.POLICY)
    if policy is None:
        raise _UnscorableError("it was not released by a recipe")
    if not store.folder(AssetName.POLICY, policy).is_dir():
        raise _UnscorableError(
            f"its policy {short(policy)} is missing from this store; copy it from the home that released it"
        )
    derivation = policy_derivation(store, policy)
    earlier, unknown = earlier_policies(store, [policy])
    if unknown:
        raise _UnscorableError(f"the training data of its ancestor {short(unknown[0])} are missing from this store")
    reference = derivation.inputs[AssetName.REFERENCE_MODEL].fingerprint
    _check_reference(store, reference, base_model)
    seen = list(dict.fromkeys(pairs for made in (derivation, *earlier.values()) for pairs in _seen_pairs(store, made)))
    tokenized = [_derivation(store, AssetName.TOKENIZED_PAIRS, pairs) for pairs in seen]
    rows = [made.inputs[AssetName.RAW_PREFERENCES].fingerprint for made in tokenized]
    seen_rows = tuple(dict.fromkeys([*rows, *_rows_of_bets(store, entries)]))
    if missing := [digest for digest in seen_rows if not store.folder(AssetName.RAW_PREFERENCES, digest).is_dir()]:
        raise _UnscorableError(f"the rows {short(missing[0])} that it has seen are missing from this store")
    return Contestant(
        version=version,
        policy=policy,
        reference=reference,
        spec=tokenized[0].inputs[AssetName.TOKENIZATION_SPEC].fingerprint,
        loss=RecordedSettings.model_validate(derivation.settings).loss,
        seen_pairs=tuple(seen),
        seen_rows=seen_rows,
    )


def _check_reference(store: Store, reference: str, base_model: str) -> None:
    """Raise if the reference model is a base model that is not the recipe's: its folder is unknown."""
    artifact = store.open(AssetName.REFERENCE_MODEL, reference, hashes=False)
    if "pointer.json" in artifact.manifest.files and artifact.fingerprint != base_model:
        raise _UnscorableError(
            f"its reference model {short(reference)} is not the recipe's base model {short(base_model)}"
        )


def _seen_pairs(store: Store, policy: Derivation) -> Iterator[str]:
    """Yield the pairs of a policy's training and evaluation, then the pairs on which its reference model was tuned, if any."""
    yield policy.inputs[AssetName.TOKENIZED_PAIRS].fingerprint
    reference = _derivation(store, AssetName.REFERENCE_MODEL, policy.inputs[AssetName.REFERENCE_MODEL].fingerprint)
    if (tuned := reference.inputs.get(AssetName.TOKENIZED_PAIRS)) is not None:
        yield tuned.fingerprint


def _rows_of_bets(store: Store, entries: Sequence[Hypothesis]) -> Iterator[str]:
    """Yield the rows at the start of each hypothesis about a candidate, and of the arriving pairs that it used."""
    for entry in entries:
        yield entry.rows
        for source in entry.arrivals:
            yield (
                _derivation(store, AssetName.PREQUENTIAL_SCORES, source).inputs[AssetName.RAW_PREFERENCES].fingerprint
            )


def _derivation(store: Store, kind: str, fingerprint: str) -> Derivation:
    return store.open(kind, fingerprint, hashes=False).derivation

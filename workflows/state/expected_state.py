"""The expected result of a run, asset by asset: the artifact in the store, else only its derivation.

Sources and specs are read. From them follow the derivations of all assets, in the order of the graph, as a run computes them.
If an input is not made yet, its fingerprint is unknown, and so is everything downstream.
"""

from dataclasses import dataclass, replace

from assets.execution.materialize import is_irreplaceable
from assets.inputs.current import ROOTS, ResolvedInput, resolve_root
from assets.lineage.diff import CORRUPT_RECORD
from assets.pipeline.graph import GRAPH, derive, read_settings
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import CorruptArtifact, CorruptRecord
from training.contract.protocol.artifacts import AssetName
from training.contract.protocol.spec_files import SPEC_FILE
from training.contract.store.manifest import Derivation, read_manifest
from training.contract.store.store import Store


@dataclass(frozen=True)
class ExpectedArtifact:
    """The expected derivation (None if an input is unknown) and the fingerprint, if known.

    `found`: for a source or a spec; `fault`: the problem of the artifact in the store. `presumed`: the fingerprint under
    other versions of the libraries; a run gives it again if a compared sample agrees.
    """

    derivation: Derivation | None
    fingerprint: str | None
    found: ResolvedInput | None = None
    fault: str | None = None
    presumed: str | None = None


ExpectedState = dict[str, ExpectedArtifact]


def expect_state(pipeline: Pipeline, services: Services, presume: bool = False) -> ExpectedState:
    """Return the expected artifact of every asset, in the order of the graph. Raises the errors of reading sources.

    With `presume`, assets downstream of a presumed artifact are resolved as if it existed.
    """
    expected: ExpectedState = {}
    for asset in GRAPH:
        if asset in ROOTS:
            expected[asset] = _root(asset, pipeline, services)
        else:
            derivation = _derivation(asset, pipeline, expected, presume)
            expected[asset] = (
                ExpectedArtifact(None, None) if derivation is None else _find_in_store(services, derivation)
            )
    return expected


def _root(asset: str, pipeline: Pipeline, services: Services) -> ExpectedArtifact:
    found = resolve_root(pipeline, services, asset, services.hashes)
    if found.fingerprint is not None:
        return ExpectedArtifact(found.derivation, found.fingerprint, found)
    return replace(_find_in_store(services, found.derivation), found=found)


def _derivation(asset: str, pipeline: Pipeline, above: ExpectedState, presume: bool) -> Derivation | None:
    """Return the derivation of an asset in a run; None if an input is not made yet."""
    node = GRAPH[asset]
    expected = {name: above[name] for name in node.inputs(pipeline.recipe)}
    inputs = {name: item.fingerprint or (item.presumed if presume else None) for name, item in expected.items()}
    known = {name: value for name, value in inputs.items() if value is not None}
    if len(known) < len(inputs):
        return None
    spec = None if node.spec is None else above[node.spec].found
    if spec is None:
        return derive(asset, known, read_settings(asset, pipeline.recipe, pipeline.name))
    return derive(asset, known).model_copy(update={"settings": spec.files[SPEC_FILE]})


def _find_in_store(services: Services, derivation: Derivation) -> ExpectedArtifact:
    if derivation.kind == AssetName.RELEASED_MODEL:
        return ExpectedArtifact(derivation, derivation.key)
    try:
        artifact = services.store.find(derivation.kind, derivation.key, cache=services.hashes)
    except CorruptRecord:
        return ExpectedArtifact(derivation, None, fault=CORRUPT_RECORD)
    except CorruptArtifact as error:
        return ExpectedArtifact(derivation, None, fault=_fault(services.store, derivation, error))
    if artifact is not None:
        return ExpectedArtifact(derivation, artifact.fingerprint)
    return ExpectedArtifact(derivation, None, presumed=_presumed(services.store, derivation))


def _presumed(store: Store, derivation: Derivation) -> str | None:
    """Return the fingerprint of the same derivation under other versions of the libraries, if its artifact exists."""
    if derivation.of_any_software.key == derivation.key:
        return None
    try:
        record = store.record(derivation.kind, derivation.of_any_software.key)
    except CorruptRecord:
        return None
    is_there = record is not None and store.folder(derivation.kind, record.fingerprint).is_dir()
    return record.fingerprint if record is not None and is_there else None


def _fault(store: Store, derivation: Derivation, error: CorruptArtifact) -> str:
    record = store.record(derivation.kind, derivation.key)
    assert record is not None, "a corrupt artifact has a record"
    text = corrupt_file(store, derivation.kind, record.fingerprint, error)
    return (
        f"{text}; it is not used until its folder is restored or moved away" if is_irreplaceable(derivation) else text
    )


def corrupt_file(store: Store, kind: str, fingerprint: str, error: CorruptArtifact) -> str:
    """Return a short text on the corrupt file of an artifact, from `error`."""
    folder = store.folder(kind, fingerprint)
    try:
        names = read_manifest(folder).files
    except CorruptArtifact:
        return "the manifest of its artifact is corrupt"
    name = next((name for name in names if str(error).startswith(f"{folder / name} ")), None)
    return f"its artifact is corrupt: {error}" if name is None else f"file {name} of its artifact is corrupt"

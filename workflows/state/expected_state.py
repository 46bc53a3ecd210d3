"""What a run would give, asset by asset: the artifact in the store if it is there, else only how it would be made.

Sources and specs are looked at; from them every asset's derivation follows, in the order of the graph, as its body would
compute it. While an input has yet to be made its fingerprint is unknown, and so is everything that depends on it.
"""

from dataclasses import dataclass, replace

from assets.execution.materialize import is_irreplaceable
from assets.inputs.current import ROOTS, ResolvedInput, resolve_root
from assets.lineage.diff import CORRUPT_RECORD
from assets.pipeline.graph import GRAPH, derive
from assets.pipeline.pipeline import Pipeline, Services
from training.contract.errors import CorruptArtifact, CorruptRecord
from training.contract.store.manifest import Derivation, read_manifest
from training.contract.store.store import Store


@dataclass(frozen=True)
class ExpectedArtifact:
    """What a run would give: the derivation (None if an input is unknown) and the fingerprint, if it is known.

    `found`: for a source or a spec; `fault`: what is wrong with the artifact in the store. `presumed`: the fingerprint that
    other versions of the libraries gave, which a run will give again if a sample of it compares.
    """

    derivation: Derivation | None
    fingerprint: str | None
    found: ResolvedInput | None = None
    fault: str | None = None
    presumed: str | None = None


ExpectedState = dict[str, ExpectedArtifact]


def expect_state(pipeline: Pipeline, services: Services, presume: bool = False) -> ExpectedState:
    """What a run would give for every asset, in the order of the graph. Raises what looking at the sources raises.

    With `presume`, what lies below a presumed artifact is judged as if that were there.
    """
    expected: ExpectedState = {}
    for asset in GRAPH:
        if asset in ROOTS:
            expected[asset] = _root(asset, pipeline, services)
        else:
            how = _derivation(asset, pipeline, expected, presume)
            expected[asset] = ExpectedArtifact(None, None) if how is None else _look_up(services, how)
    return expected


def _root(asset: str, pipeline: Pipeline, services: Services) -> ExpectedArtifact:
    found = resolve_root(pipeline, services, asset, services.hashes)
    if found.fingerprint is not None:
        return ExpectedArtifact(found.derivation, found.fingerprint, found)
    return replace(_look_up(services, found.derivation), found=found)


def _derivation(asset: str, pipeline: Pipeline, above: ExpectedState, presume: bool) -> Derivation | None:
    """How a run would make an asset from others; None if one of them has yet to be made."""
    node = GRAPH[asset]
    expected = {name: above[name] for name in node.inputs(pipeline.recipe)}
    inputs = {name: of.fingerprint or (of.presumed if presume else None) for name, of in expected.items()}
    known = {name: value for name, value in inputs.items() if value is not None}
    if len(known) < len(inputs):
        return None
    spec = None if node.spec is None else above[node.spec].found
    return derive(asset, known, node.reads(pipeline.recipe) if spec is None else spec.files["spec.json"])


def _look_up(services: Services, how: Derivation) -> ExpectedArtifact:
    if how.kind == "released_model":
        return ExpectedArtifact(how, how.key)
    try:
        artifact = services.store.find(how.kind, how.key, cache=services.hashes)
    except CorruptRecord:
        return ExpectedArtifact(how, None, fault=CORRUPT_RECORD)
    except CorruptArtifact as error:
        return ExpectedArtifact(how, None, fault=_fault(services.store, how, error))
    if artifact is not None:
        return ExpectedArtifact(how, artifact.fingerprint)
    return ExpectedArtifact(how, None, presumed=_presumed(services.store, how))


def _presumed(store: Store, how: Derivation) -> str | None:
    """What the same derivation gave under other versions of the libraries, if it is still there."""
    if how.of_any_software.key == how.key:
        return None
    try:
        record = store.record(how.kind, how.of_any_software.key)
    except CorruptRecord:
        return None
    is_there = record is not None and store.folder(how.kind, record.fingerprint).is_dir()
    return record.fingerprint if record is not None and is_there else None


def _fault(store: Store, how: Derivation, error: CorruptArtifact) -> str:
    record = store.record(how.kind, how.key)
    assert record is not None, "what was never made cannot be corrupt"
    text = corrupt_file(store, how.kind, record.fingerprint, error)
    return f"{text}; it is refused until its folder is restored or moved away" if is_irreplaceable(how) else text


def corrupt_file(store: Store, kind: str, fingerprint: str, error: CorruptArtifact) -> str:
    """Which file of an artifact `error` is about, in a few words."""
    folder = store.folder(kind, fingerprint)
    try:
        names = read_manifest(folder).files
    except CorruptArtifact:
        return "the manifest of its artifact is corrupt"
    name = next((name for name in names if str(error).startswith(f"{folder / name} ")), None)
    return f"its artifact is corrupt: {error}" if name is None else f"file {name} of its artifact is corrupt"

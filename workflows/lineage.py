"""What of a recipe is fresh, stale or missing, and why, as the world is at this moment.

The sources are looked at and hashed; from there every asset's derivation follows, in the order of the graph, as its body
would compute it. An asset is fresh if the artifact that derivation gives is the one that was last materialized. Where
something above has still to be made, what it will be is unknown, and so is everything below that reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import dagster as dg

from assets.graph import GRAPH, derivation
from assets.locate import locate_base_model, locate_data, locate_tokenizer
from assets.pipeline import Pipeline, Services
from assets.realize import data_version, latest_metadata
from assets.specs import tokenization_settings
from training.contract.errors import CorruptArtifact
from training.contract.fingerprint import fingerprint, short
from training.contract.manifest import Derivation, Source

State = Literal["fresh", "stale", "missing"]


@dataclass(frozen=True)
class AssetStatus:
    """`fingerprint` is that of the last materialization; `causes` say why it is not what a run would give now."""

    asset: str
    state: State
    causes: tuple[str, ...]
    fingerprint: str | None


@dataclass(frozen=True)
class _Outcome:
    """What a run would give: the derivation (None if an input is unknown) and, if it is known, the fingerprint."""

    derivation: Derivation | None
    fingerprint: str | None
    fault: str | None = None


def status(pipeline: Pipeline, services: Services, instance: dg.DagsterInstance) -> list[AssetStatus]:
    """The state of every asset, in the order of the graph. Raises what looking at the sources raises."""
    outcomes: dict[str, _Outcome] = {}
    found = []
    for asset in GRAPH:
        outcomes[asset] = _outcome(asset, pipeline, services, outcomes)
        found.append(_judge(asset, pipeline, services, instance, outcomes))
    return found


def _outcome(asset: str, pipeline: Pipeline, services: Services, above: dict[str, _Outcome]) -> _Outcome:
    recipe = pipeline.recipe
    if asset == "preference_source":
        data = locate_data(recipe)
        return _Outcome(derivation(asset, {}, {"sources": data.identity}), data.fingerprint)
    if asset == "base_model":
        model = locate_base_model(recipe, services.registry)
        return _Outcome(derivation(asset, {}, model.identity), model.fingerprint)
    settings = GRAPH[asset].reads(recipe)
    if asset in ("training_spec", "evaluation_spec"):
        return _Outcome(derivation(asset, {}, settings), fingerprint(asset, settings))
    if asset == "tokenization_spec":
        settings = tokenization_settings(pipeline, locate_tokenizer(recipe, services.registry))
    inputs = {name: above[name].fingerprint for name in GRAPH[asset].needed_by(recipe)}
    known = {name: value for name, value in inputs.items() if value is not None}
    if len(known) < len(inputs):
        return _Outcome(None, None)
    return _look_up(services, derivation(asset, known, {**settings, **_spec_settings(asset, pipeline)}))


def _spec_settings(asset: str, pipeline: Pipeline) -> dict[str, Any]:
    """What a body reads from its frozen spec, which holds these fields of the recipe and no others."""
    spec = {"policy": "training_spec", "evaluation": "evaluation_spec"}.get(asset)
    return GRAPH[spec].reads(pipeline.recipe) if spec else {}


def _look_up(services: Services, how: Derivation) -> _Outcome:
    if how.kind == "released_model":
        return _Outcome(how, how.key)
    try:
        artifact = services.store.find(how.kind, how.key)
    except CorruptArtifact as error:
        return _Outcome(how, None, str(error))
    return _Outcome(how, None if artifact is None else artifact.fingerprint)


def _judge(
    asset: str, pipeline: Pipeline, services: Services, instance: dg.DagsterInstance, outcomes: dict[str, _Outcome]
) -> AssetStatus:
    materialized = data_version(instance, pipeline.key(asset))
    outcome = outcomes[asset]
    if materialized is None:
        return AssetStatus(asset, "missing", ("never materialized",), None)
    if outcome.fault is not None:
        return AssetStatus(asset, "stale", (outcome.fault,), materialized)
    if outcome.fingerprint == materialized:
        return AssetStatus(asset, "fresh", (), materialized)
    if outcome.derivation is None:
        unknown = [n for n in GRAPH[asset].needed_by(pipeline.recipe) if outcomes[n].fingerprint is None]
        return AssetStatus(asset, "stale", tuple(f"{name} must be made first" for name in unknown), materialized)
    known_key = latest_metadata(instance, pipeline.key(asset)).get("key")
    before = services.store.derivation(asset, str(known_key))
    causes = tuple(_differences(before, outcome.derivation)) if before else ()
    return AssetStatus(asset, "stale", causes or ("its files are no longer in the store",), materialized)


def _differences(before: Derivation, now: Derivation) -> Iterator[str]:
    if before.code_version != now.code_version:
        yield f"code version {before.code_version} -> {now.code_version}"
    for name in sorted(before.inputs.keys() | now.inputs.keys()):
        old, new = before.inputs.get(name), now.inputs.get(name)
        if old != new:
            yield f"{name} {_source(old)} -> {_source(new)}"
    old_fields, new_fields = dict(_leaves(before.settings)), dict(_leaves(now.settings))
    for field in sorted(old_fields.keys() | new_fields.keys()):
        if old_fields.get(field) != new_fields.get(field):
            yield f"{field} {_shown(old_fields.get(field))} -> {_shown(new_fields.get(field))}"


def _source(source: Source | None) -> str:
    return "none" if source is None else short(source.fingerprint)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}[{index}]")
    else:
        yield prefix, value


def _shown(value: Any) -> str:
    text = str(value)
    return short(text) if len(text) == 64 else text

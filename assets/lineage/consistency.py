"""Consistency of an asset's inputs: their common ancestors must be the same artifacts.

A full run always satisfies this. But a user may materialize any assets in Dagster's UI, and a run may end early. The latest
inputs of an asset may then be a policy and the evaluation of another policy, or pairs and a policy trained on other pairs.
An artifact made from them would be recorded, and released, with a wrong lineage.
"""

from collections import deque
from collections.abc import Mapping

from assets.lineage.history import History
from assets.pipeline.graph import GRAPH, with_upstream
from assets.pipeline.pipeline import Pipeline
from training.contract.config.recipe import Recipe
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import short
from training.contract.protocol.artifacts import AssetName

# Assets that read the same files and must be materialized together.
_READ_TOGETHER: dict[str, tuple[AssetName, ...]] = {AssetName.TOKENIZATION_SPEC: (AssetName.RELEASE_SPEC,)}


def check_one_lineage(history: History, asset: str, inputs: Mapping[str, str]) -> None:
    """Raise StoreError if the `inputs` of `asset` (fingerprints by name), or their ancestors, are inconsistent."""
    fingerprints, queue = dict(inputs), deque(inputs)
    origins = {name: f"{history.pipeline.name}/{name} is {short(version)} now" for name, version in inputs.items()}
    while queue:
        maker = queue.popleft()
        for name, source in history.derivation(maker, fingerprints[maker]).inputs.items():
            origin = f"{maker} {short(fingerprints[maker])} was made from {name} {short(source.fingerprint)}"
            if name not in fingerprints:
                fingerprints[name], origins[name] = source.fingerprint, origin
                queue.append(name)
            elif fingerprints[name] != source.fingerprint:
                raise StoreError(
                    f"{history.pipeline.name}/{asset} would be made from inconsistent inputs: {origin}, and "
                    f"{origins[name]}; materialize {_list_assets(history.pipeline, name, maker, asset)} in one run",
                    "inconsistent-inputs",
                )


def _list_assets(pipeline: Pipeline, ancestor: str, maker: str, asset: str) -> str:
    """List the assets to make from one `ancestor`: `maker`, `asset`, and all between `ancestor` and `asset`."""
    *names, last = (
        f"{pipeline.name}/{name}"
        for name in _affected_assets(pipeline.recipe, {ancestor, maker}, asset)
        if name != ancestor
    )
    return f"{', '.join(names)} and {last}" if names else last


def _affected_assets(recipe: Recipe, changed: set[str], asset: str) -> list[str]:
    """Return `asset` and its ancestors, if in `changed` or made from it; in the graph's order."""
    affected = changed | {other for name in changed for other in _READ_TOGETHER.get(name, ())}
    for name, node in GRAPH.items():
        if affected.intersection(node.inputs(recipe)):
            affected.add(name)
    return [name for name in with_upstream(recipe, asset) if name in affected]

"""Whether artifacts go together: whatever two of them were made from has to be the same.

In a run of everything it is. But a person may materialize any assets in Dagster's UI, and a run may end early; the inputs of
an asset are then the latest of each, say a policy and the evaluation of another policy, or pairs and a policy that was
trained on others. What was made of those would be recorded, and released, with a lineage that it does not have.
"""

from collections import deque
from collections.abc import Mapping

from assets.lineage.history import History
from assets.pipeline.graph import GRAPH, with_upstream
from assets.pipeline.pipeline import Pipeline
from training.contract.config.recipe import Recipe
from training.contract.errors import StoreError
from training.contract.identity.fingerprint import short

# What is read from the same files, and has to be of the same moment.
_READ_TOGETHER = {"tokenization_spec": ("release_spec",)}


def check_one_lineage(history: History, asset: str, inputs: Mapping[str, str]) -> None:
    """Raises StoreError if the `inputs` of `asset` (fingerprints by name), or their ancestors, do not go together."""
    met, waiting = dict(inputs), deque(inputs)
    told = {name: f"{history.pipeline.name}/{name} is {short(found)} now" for name, found in inputs.items()}
    while waiting:
        maker = waiting.popleft()
        for name, source in history.derivation(maker, met[maker]).inputs.items():
            words = f"{maker} {short(met[maker])} was made from {name} {short(source.fingerprint)}"
            if name not in met:
                met[name], told[name] = source.fingerprint, words
                waiting.append(name)
            elif met[name] != source.fingerprint:
                raise StoreError(
                    f"{history.pipeline.name}/{asset} would be made of what does not go together: {words}, and "
                    f"{told[name]}; materialize {_listed(history.pipeline, name, maker, asset)} in one run"
                )


def _listed(pipeline: Pipeline, above: str, maker: str, asset: str) -> str:
    """What has to be made of one and the same `above`: `maker` and whatever lies between `above` and `asset`, with `asset`."""
    *names, last = (
        f"{pipeline.name}/{name}" for name in _between(pipeline.recipe, {above, maker}, asset) if name != above
    )
    return f"{', '.join(names)} and {last}" if names else last


def _between(recipe: Recipe, above: set[str], asset: str) -> list[str]:
    """`asset` and what it is made of, directly or not, as far as that is in `above` or made from it; in the graph's order."""
    affected = above | {other for name in above for other in _READ_TOGETHER.get(name, ())}
    for name, node in GRAPH.items():
        if affected.intersection(node.inputs(recipe)):
            affected.add(name)
    return [name for name in with_upstream(recipe, asset) if name in affected]

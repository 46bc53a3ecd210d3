"""Whether the base model has an embedding for every token of the pairs: told before rows are tokenized if possible.

A tokenizer that got tokens of its own, for a chat template say, belongs to a model whose embeddings were resized.
"""

import json
from pathlib import Path

import pyarrow.compute as pc

from assets.inputs.model_ref import base_model_of
from assets.inputs.recipe_location import written
from assets.inputs.resolve import RemoteModel
from assets.inputs.shipped_files import locate_shipping
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import SIDES, read_pairs
from training.contract.errors import ModelError
from training.contract.store.store import Artifact

_SHOWN = 8


def check_embeddings(pipeline: Pipeline, services: Services, spec: Artifact, pairs: Artifact | None = None) -> None:
    """Raise ModelError if a token that the template of `spec` writes, or one of `pairs`, has no embedding in the base model.

    A base model of the hub that is not on this machine is not downloaded for it.
    """
    located = locate_shipping(pipeline, services.registry, services.hashes)
    if isinstance(located, RemoteModel) or (count := _embeddings(located.folder)) is None:
        return
    tokens = [token for token, id_ in spec.details.get("template_tokens", {}).items() if id_ >= count]
    where = "the chat template writes"
    if not tokens and pairs is not None and (largest := _largest_token(pairs)) >= count:
        tokens, where = _tokens_from(pairs, count, largest), "the pairs have"
    if not tokens:
        return
    listed = ", ".join(tokens[:_SHOWN]) + (f" and {len(tokens) - _SHOWN} more" if tokens[_SHOWN:] else "")
    with written(pipeline, base_model_of(pipeline.recipe).field):
        raise ModelError(
            f"{where} {listed}, for which the model in {located.folder} has no embeddings: its config.json has `vocab_size: "
            f"{count}`. Resize the embeddings (`model.resize_token_embeddings(len(tokenizer))`) and save the model again, or "
            "use the tokenizer that it was trained with"
        )


def _embeddings(folder: Path) -> int | None:
    """How many tokens the model has embeddings for; None if its config.json leaves that to the model's code."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config")
    found = inner.get("vocab_size") if isinstance(inner, dict) and "vocab_size" in inner else config.get("vocab_size")
    return found if isinstance(found, int) else None


def _largest_token(pairs: Artifact) -> int:
    """Pairs that were made before do not say it in their details."""
    if (known := pairs.details.get("largest_token")) is not None:
        return int(known)
    table = read_pairs(pairs)
    return max(pc.max(pc.list_flatten(table[f"{side}_ids"])).as_py() or 0 for side in SIDES)


def _tokens_from(pairs: Artifact, first: int, last: int) -> list[str]:
    """The spellings of the tokens with the ids `first` to `last`."""
    serialized = json.loads(pairs.file("tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token["content"] for token in serialized.get("added_tokens", [])}
    return [added.get(id_, str(id_)) for id_ in range(first, last + 1)]

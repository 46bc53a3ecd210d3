"""Check of the base model's embeddings: it needs one for every token of the pairs. Done before tokenization if possible.

A tokenizer with added tokens, for example for a chat template, needs a model with resized embeddings.
"""

import json
from pathlib import Path

import pyarrow.compute as pc

from assets.inputs.model_ref import base_model_of
from assets.inputs.recipe_location import written
from assets.inputs.shipped_files import locate_shipping
from assets.pipeline.pipeline import Pipeline, Services
from assets.views.pair_reader import SIDES, read_pairs
from training.contract.errors import ModelError
from training.contract.protocol.details import PairsDetails, TokenizationDetails
from training.contract.protocol.settings import RemoteModel
from training.contract.store.artifact import Artifact

_SHOWN = 8


def check_embeddings(
    pipeline: Pipeline,
    services: Services,
    spec: Artifact[TokenizationDetails],
    pairs: Artifact[PairsDetails] | None = None,
) -> None:
    """Raise ModelError if a token of the template in `spec`, or of `pairs`, lacks an embedding in the base model.

    Skip the check if the base model is on the hub and not downloaded yet.
    """
    located = locate_shipping(pipeline, services.registry, services.hashes)
    if isinstance(located, RemoteModel) or (count := _count_embeddings(located.folder)) is None:
        return
    tokens = [token for token, id_ in spec.details.template_tokens.items() if id_ >= count]
    origin = "the chat template writes"
    if not tokens and pairs is not None and (largest := _largest_token(pairs)) >= count:
        tokens, origin = _token_texts(pairs, count, largest), "the pairs have"
    if not tokens:
        return
    token_list = ", ".join(tokens[:_SHOWN]) + (f" and {len(tokens) - _SHOWN} more" if tokens[_SHOWN:] else "")
    with written(pipeline, base_model_of(pipeline.recipe).field):
        raise ModelError(
            f"{origin} {token_list}, but the model in {located.folder} lacks embeddings for them: its config.json has "
            f"`vocab_size: {count}`. Resize the embeddings (`model.resize_token_embeddings(len(tokenizer))`) and save the "
            "model again, or use the tokenizer from the model's training",
            "missing-embeddings",
        )


def _count_embeddings(folder: Path) -> int | None:
    """Return the model's number of embeddings; None if its config.json leaves it to the model's code."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inner = config.get("text_config")
    size = inner.get("vocab_size") if isinstance(inner, dict) and "vocab_size" in inner else config.get("vocab_size")
    return size if isinstance(size, int) else None


def _largest_token(pairs: Artifact[PairsDetails]) -> int:
    """Return the largest token id. Read the pairs if their details lack it, as in earlier versions."""
    if (largest := pairs.details.largest_token) is not None:
        return largest
    table = read_pairs(pairs)
    return max(pc.max(pc.list_flatten(table[f"{side}_ids"])).as_py() or 0 for side in SIDES)


def _token_texts(pairs: Artifact, first: int, last: int) -> list[str]:
    """Return the texts of the tokens with the ids `first` to `last`, or ids without a text."""
    serialized = json.loads(pairs.file("tokenizer/tokenizer.json").read_text(encoding="utf-8"))
    added = {token["id"]: token["content"] for token in serialized.get("added_tokens", [])}
    return [added.get(id_, str(id_)) for id_ in range(first, last + 1)]

"""Build the objects that many tests need: jobs, tiny Llamas, tokenizers, and the inputs of a small recipe."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.workflows.question_pairs import VOCABULARY, pairs, write_data
from training.contract.config.key_settings import Settings
from training.contract.config.recipe import Compute, Recipe
from training.contract.identity.software import SCORING_VERSION
from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Input, Job, JobKind
from training.contract.protocol.settings import TokenizerIdentity
from training.contract.protocol.spec_files import TokenizationSpec
from training.contract.store.artifact import Artifact
from training.contract.store.artifact_kind import Details, DetailsT
from training.contract.store.manifest import Derivation, Source
from training.distributed import ALONE, Group
from training.job_context import JobContext

_NAMED = {"named": {"tokenizer": "recipe.yaml:7: tokenizer", "chat_template": "recipe.yaml:7: chat_template"}}
_TOKENIZER = {**_NAMED, "tokenizer": "tokenizer", "chat_template": None}
_IDENTITY: dict[str, Any] = {"files": {}, "chat_template": None, "config": {}}
# By kind of job, the fields without a default.
_SETTINGS: dict[JobKind, dict[str, Any]] = {
    "preferences": {"formats": ["auto"], "held_out": [False], "validation_fraction": 0.1, "duplicates": "keep"},
    "tokenizer": {**_IDENTITY, "train_on": "last_response", "max_length": 1024, "over_length": "drop"},
    "release_files": {**_IDENTITY, "base_generation": {}, "eos_token_ids": [], "processors": {}, "base_config": {}},
    "reference": {"dtype": "float32", "scoring": SCORING_VERSION},
    "prequential": {"champion": "c" * 64, "policies": [], "dtype": "float32", "scoring": SCORING_VERSION},
    "evaluation": {"samples": 2, "max_new_tokens": 4, "loss": {}},
    "proof": {"rows": 1},
}
_LOCATIONS: dict[JobKind, dict[str, Any]] = {
    "preferences": {"sources": [{"path": "rows.jsonl"}], "files": [[]]},
    "tokenizer": _TOKENIZER,
    "release_files": {**_TOKENIZER, "base": "base"},
    "pairs": _NAMED,
}
# Of details, the fields without a default.
_REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("bytes", "tensors", "sequences", "hits", "scored", "pairs", "finite", "tokens"), 0),
    "counts": dict.fromkeys(("pairs", "quarantined", "train", "validation", "rows_read"), 0),
    "rule": "f" * 64,
    "rewards_finite": True,
    **dict.fromkeys(("step0_loss", "step0_expected", "step0_allowed"), 0.0),
    "metrics": {},
    "interval": (0.0, 1.0),
}
PAIRS = 24  # of a small recipe
ON_CPU = Compute(device="cpu")
_SECTIONS = {
    "data": {"sources": [{"path": "rows.jsonl"}]},
    "reference": {"model": "base"},
    "release": {"model_name": "tiny"},
}
# The kind of the artifact that a job makes.
ARTIFACT_KINDS: dict[JobKind, str] = {
    "preferences": "raw_preferences",
    "tokenizer": "tokenization_spec",
    "release_files": "release_files",
    "pairs": "tokenized_pairs",
    "sft": "reference_model",
    "reference": "reference_logprobs",
    "prequential": "prequential_scores",
    "policy": "policy",
    "evaluation": "evaluation",
    "merge": "merged_policy",
    "proof": "proof",
}


def recipe(**sections: dict[str, Any]) -> Recipe:
    """Return a recipe with these sections. Its files need not exist."""
    return Recipe.model_validate(_SECTIONS | sections)


def job(
    kind: JobKind,
    root: Path,
    settings: dict[str, Any] | Settings | None = None,
    inputs: Mapping[str, Input | Artifact[Any] | Path] | None = None,
    compute: Compute = ON_CPU,
    folder: str = "job",
    **fields: Any,
) -> Job:
    """Return a job with its store in `root/store` and its folder in `root/<folder>`. `fields` are other fields of `Job`.

    Settings that the job requires have a default here.
    """
    job_fields = {
        "artifact": ARTIFACT_KINDS[kind],
        "code_version": "1",
        "locations": _LOCATIONS.get(kind, {}),
        "recipe": recipe(),
        "store": root / "store",
        "folder": root / folder,
    }
    found = {name: job_input(name, source) for name, source in (inputs or {}).items()}
    given = {
        "kind": kind,
        "settings": settings if isinstance(settings, Settings) else {**_SETTINGS.get(kind, {}), **(settings or {})},
        "inputs": found,
        "compute": compute,
        **job_fields,
        **fields,
    }
    return Job.model_validate(given)


def context(job: Job, group: Group = ALONE, events: EventWriter | None = None) -> JobContext[Any, Any]:
    """Return the context of `job` in this process."""
    return JobContext(job, group, events or EventWriter(None))


def derivation(kind: str, inputs: Mapping[str, str] | None = None, version: str = "1", **settings: Any) -> Derivation:
    """Return a derivation with these inputs (fingerprints by kind) and settings."""
    sources = {name: Source(kind=name, fingerprint=fingerprint) for name, fingerprint in (inputs or {}).items()}
    return Derivation(kind=kind, code_version=version, inputs=sources, settings=settings)


def tokenization_spec(**fields: Any) -> TokenizationSpec:
    """Return a frozen spec without a limit of tokens that matters, with these fields changed."""
    rules = {"train_on": "last_response", "max_length": 99999, "over_length": "drop"}
    frozen = {"template": "", "tokenizer_fingerprint": "0" * 64, "template_fingerprint": "0" * 64, "vocabulary": 64}
    return TokenizationSpec.model_validate({**rules, **frozen, **fields})


def tokenizer_identity(**fields: Any) -> TokenizerIdentity:
    """Return the identity of a tokenizer without files, with these fields changed."""
    return TokenizerIdentity.model_validate(_IDENTITY | fields)


def details(model: type[DetailsT], **fields: Any) -> DetailsT:
    """Return details of an artifact. Fields that the model requires, also in `counts`, have a default here."""
    required: dict[str, Any] = {
        name: _REQUIRED[name] for name, field in model.model_fields.items() if field.is_required()
    }
    counts = required.get("counts", {}) | fields.get("counts", {})
    return model.model_validate({**required, **fields, **({"counts": counts} if counts else {})})


def differing(details: Details, other: Details) -> set[str]:
    """Return the names of the stored fields of which only one has a value, or whose values differ."""
    one, two = details.to_json(), other.to_json()
    return {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}


def job_input(kind: str, source: Input | Artifact[Any] | Path) -> Input:
    """Return an artifact or a folder as an input. The fingerprint of a folder is made from its name."""
    if isinstance(source, Input):
        return source
    if isinstance(source, Path):
        return Input(kind=kind, fingerprint=source.name.encode().hex()[:64].ljust(64, "0"), folder=source)
    return Input(kind=source.manifest.kind, fingerprint=source.fingerprint, folder=source.folder)


def llama_config(**fields: Any) -> LlamaConfig:
    """Return the config of a Llama with 64 tokens and two layers of width 32, with these fields changed."""
    tiny = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**tiny | fields)


def llama(**fields: Any) -> LlamaForCausalLM:
    """Return a random Llama in evaluation mode. `fields` change the config of `llama_config`."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(**fields)).eval()


def word_tokenizer(words: Sequence[str], **special_tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `words`, which are separated by spaces. The id of a word is its index."""
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)


def write_inputs(folder: Path) -> None:
    """Write the inputs of a small recipe: 24 pairs, 16 of opposites and then 8 of capitals, a tokenizer, and a tiny Llama."""
    tokenizer = write_data(folder, list(itertools.islice(pairs(), 0, 400, 17))[:PAIRS])
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    llama(**sizes, **heads, **special, tie_word_embeddings=False).save_pretrained(folder / "base")

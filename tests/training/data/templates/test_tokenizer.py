"""The fingerprint of a tokenizer follows its behaviour: one test for each ingredient, and for each part that does not count."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import tokenization_utils_base as library
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name
from transformers.utils import CHAT_TEMPLATE_DIR, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE

from training.contract.identity.file_hashing import hash_files
from training.contract.identity.tokenizer_files import TOKENIZER_FILES, VOCABULARIES, tokenizer_files
from training.data.templates.tokenizer import load_tokenizer, save_tokenizer, tokenizer_fingerprint

Change = Callable[[dict[str, Any]], None]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("o", "w"), ("hell", "o")]
# Luke and Whisper have these files beside their vocabularies.
WITHOUT_TEXT = ("entity_vocab.json", "normalizer.json")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def build() -> Tokenizer:
    """Build a byte-level BPE tokenizer with a few merges, so that the test does not depend on a file."""
    letters = sorted(ByteLevel.alphabet())
    words = [*SPECIAL.values(), *letters, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(BPE({word: number for number, word in enumerate(words)}, MERGES, unk_token="<unk>"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL.values()])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    PreTrainedTokenizerFast(tokenizer_object=build(), **SPECIAL).save_pretrained(tmp_path / "built")
    return tmp_path / "built"


def test_tokenizer_files_are_all_files_that_transformers_reads():
    """Oracle: the library's file names of all fast tokenizers, and two formats that it converts."""
    named = {getattr(library, name) for name in dir(library) if name.endswith("_FILE")}
    classes = {tokenizer_class_from_name(name) for name in TOKENIZER_MAPPING_NAMES.values() if name}
    fast = [each for each in classes if each is not None and issubclass(each, PreTrainedTokenizerFast)]
    vocabularies = {name for each in fast for name in each.vocab_files_names.values()} - {*named, *WITHOUT_TEXT}
    assert vocabularies | {"tekken.json", "tiktoken.model", "tokenizer.json"} == set().union(*VOCABULARIES)
    patterns = {f"{CHAT_TEMPLATE_DIR}/*.jinja", "tokenizer.*.json"}
    others = {*vocabularies, *set().union(*VOCABULARIES), LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE}
    assert {*named, *others, *patterns} == set(TOKENIZER_FILES)


def test_tokenizer_files_include_a_vocabulary_without_tokenizer_json(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    loaded = []
    for tokens in ("[PAD] [UNK] [CLS] [SEP] [MASK] a b", "[PAD] [UNK] [CLS] [SEP] [MASK] b a"):
        (tmp_path / "vocab.txt").write_text(tokens.replace(" ", "\n"))
        loaded.append((hash_files(list(tokenizer_files(tmp_path).values())), load_tokenizer(tmp_path)("a b").input_ids))
    assert [ids for _, ids in loaded] == [[2, 5, 6, 3], [2, 6, 5, 3]]
    assert loaded[0][0] != loaded[1][0]


def identity(folder: Path) -> str:
    return tokenizer_fingerprint(load_tokenizer(folder))


def rewrite(folder: Path, change: Change, name: str = "tokenizer.json") -> None:
    content = json.loads((folder / name).read_text(encoding="utf-8"))
    change(content)
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def add_token(content: dict[str, Any]) -> None:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1000, "content": "<new>"})


def prepend_bos(content: dict[str, Any]) -> None:
    template = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)])
    content["post_processor"] = json.loads(template.__getstate__())


CHANGES: dict[str, Change] = {
    "a merge less": lambda content: content["model"]["merges"].pop(),
    "merges in another order": lambda content: content["model"]["merges"].insert(0, content["model"]["merges"].pop(1)),
    "two words change ids": lambda content: content["model"]["vocab"].update(
        a=content["model"]["vocab"]["b"], b=content["model"]["vocab"]["a"]
    ),
    "a token more": add_token,
    "a token that eats the space before it": lambda content: content["added_tokens"][0].update(lstrip=True),
    "a token that is a word of its own": lambda content: content["added_tokens"][1].update(single_word=True),
    "a normalizer": lambda content: content.update(normalizer={"type": "Lowercase"}),
    "another pre-tokenizer": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "a BOS before each text": prepend_bos,
    "words are looked up before merging": lambda content: content["model"].update(ignore_merges=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_fingerprint_of_a_changed_tokenizer_changes(folder, change):
    before = identity(folder)
    rewrite(folder, change)
    assert identity(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        {"bos_token": "</s>"},
        {"eos_token": "<s>"},
        {"unk_token": "<s>"},
        {"bos_token": None},
        {"split_special_tokens": True},
    ],
    ids=str,
)
def test_fingerprint_of_another_special_token_changes(folder, change):
    before = identity(folder)
    rewrite(folder, lambda content: content.update(change), "tokenizer_config.json")
    assert identity(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        {"model_max_length": 7},
        {"pad_token": "<s>"},
        {"padding_side": "left"},
        {"truncation_side": "left"},
        {"name_or_path": "somewhere/else"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"clean_up_tokenization_spaces": True},
        {"chat_template": "{{ messages }}"},
    ],
    ids=str,
)
def test_fingerprint_ignores_settings_that_change_no_token(folder, change):
    """The chat template has its own fingerprint. `clean_up_tokenization_spaces` only affects decoding."""
    before = identity(folder)
    rewrite(folder, lambda content: content.update(change), "tokenizer_config.json")
    assert identity(folder) == before


def add_processor_without_effect(content: dict[str, Any]) -> None:
    content["post_processor"] = json.loads(TemplateProcessing(single="$A", pair="$A $B").__getstate__())


def merges_as_text(content: dict[str, Any]) -> None:
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]


REWRITINGS: dict[str, Change] = {
    "padding": lambda content: content.update(
        padding={
            "strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None,
            "pad_id": 3, "pad_type_id": 0, "pad_token": "<pad>",
        }
    ),
    "truncation": lambda content: content.update(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    ),
    "a post-processor that adds nothing": add_processor_without_effect,
    "merges in their older form": merges_as_text,
    "empty affixes": lambda content: content["model"].update(continuing_subword_prefix="", end_of_word_suffix=""),
    "vocabulary in another order": lambda content: content["model"].update(
        vocab=dict(reversed(content["model"]["vocab"].items()))
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", REWRITINGS.values(), ids=REWRITINGS.keys())
def test_fingerprint_ignores_other_forms_of_the_same_tokenizer(folder, change):
    before = identity(folder)
    rewrite(folder, change)
    assert identity(folder) == before


def test_fingerprint_covers_offsets_because_masks_use_them(folder):
    """Byte-level post-processing adds no token, but decides whether offsets include the space before a word."""
    before = identity(folder)
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    rewrite(folder, lambda content: content.update(post_processor=trimming))
    ids, offsets = (
        load_tokenizer(folder)("he he", return_offsets_mapping=True)[n] for n in ("input_ids", "offset_mapping")
    )
    assert len(ids) == 3 and offsets[1][0] == offsets[1][1], "a space alone is trimmed to zero length"
    assert identity(folder) != before


def test_fingerprint_of_a_moved_and_saved_tokenizer_stays(folder, tmp_path):
    before = identity(folder)
    moved = folder.rename(tmp_path / "another name")
    assert identity(moved) == before
    for number in range(3):
        again = tmp_path / f"again{number}"
        AutoTokenizer.from_pretrained(moved).save_pretrained(again)
        assert identity(again) == before
        moved = again


REAL = ("models/tiny-chat", "models/stories260K", "tokenizers/gpt2", "tokenizers/phi-3-mini")
LARGE = ("tokenizers/mistral-v3", "tokenizers/qwen2.5")


@pytest.mark.shared
@pytest.mark.parametrize("name", [*REAL, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_fingerprint_of_real_saved_tokenizers_stays(shared_data, tmp_path, name):
    """Qwen2, Llama, GPT-2 and plain classes. Several are saved as other bytes than the published ones."""
    tokenizer = load_tokenizer(shared_data / name)
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path / "by-transformers")
    save_tokenizer(tokenizer, tmp_path / "by-us")
    assert identity(tmp_path / "by-transformers") == identity(tmp_path / "by-us") == before


@pytest.mark.shared
def test_fingerprints_of_real_tokenizers_differ(shared_data, tmp_path):
    fingerprints = {identity(shared_data / name) for name in REAL}
    assert len(fingerprints) == len(REAL)
    copy = shutil.copytree(shared_data / "tokenizers" / "gpt2", tmp_path / "copy")
    rewrite(copy, lambda content: content["model"]["merges"].pop(), "tokenizer.json")
    assert identity(copy) not in fingerprints

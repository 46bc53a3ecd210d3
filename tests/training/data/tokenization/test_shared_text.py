"""Tokens of a text equal those of its pieces. Oracle: the tokenizer on the whole text."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from training.data.tokenization.shared_text import Splitter, cutting_tokens

WORDS = [
    "Hello",
    " ",
    "  ",
    "\n",
    "é",
    "東京",
    "▁",
    "x" * 9,
    "<",
    ">",
    "|",
    "</s>",
    "<s>",
    "im_end",
    "'s",
    "1234",
    "\u0301",
    "\t",
]


def splitter_of(tokenizer: PreTrainedTokenizerFast) -> Splitter:
    tokens = cutting_tokens(tokenizer)
    return Splitter(tokens, tokenizer.convert_tokens_to_ids(tokens))


def check_pieces(tokenizer: PreTrainedTokenizerFast, splitter: Splitter, texts: list[str]) -> None:
    """Check that each text has the tokens of its pieces, although pieces of several texts are tokenized together."""
    backend = tokenizer.backend_tokenizer
    pieces_of = [splitter.pieces(text) for text in texts]
    for text, pieces in zip(texts, pieces_of, strict=True):
        assert "".join(pieces) == text and (all(pieces) or not text)
    distinct = sorted({piece for pieces in pieces_of for piece in pieces}, reverse=True)
    ids_of = splitter.encode(backend, distinct)
    for text, pieces in zip(texts, pieces_of, strict=True):
        whole = backend.encode(text, add_special_tokens=False).ids
        assert [id_ for piece in pieces for id_ in ids_of[piece]] == whole


@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "phi-3-mini", "qwen2.5"])
def test_pieces_have_the_tokens_of_the_text(shared_data, name):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
    splitter = splitter_of(tokenizer)
    added = [token.content for token in tokenizer.added_tokens_decoder.values()][:40]

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(
            st.lists(st.sampled_from([*WORDS, *added]) | st.text(max_size=4), max_size=15).map("".join), max_size=3
        )
    )
    def check(texts: list[str]) -> None:
        check_pieces(tokenizer, splitter, texts)

    check()


def small(pre_tokenizer=None, normalizer=None, tokens=()) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes, with some merges, that also merges across blanks."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁"]
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = [("a", "b"), ("▁", "a"), ("Ġ", "a"), ("ab", "ab")]
    vocabulary |= {"".join(pair): len(vocabulary) + number for number, pair in enumerate(merges)}
    backend = Tokenizer(BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(tokens) or ["<a>", "<b>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


PIECES = ["a", "b", " ", "ab", "<a>", "<b>", "<a><b>", "<", ">", "▁"]
SEVERAL = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)])


@pytest.mark.parametrize(
    ("tokenizer", "cuts"),
    [
        (small(), True),
        (small(SEVERAL), True),
        (small(pre_tokenizers.Metaspace(prepend_scheme="always")), True),
        (small(pre_tokenizers.Metaspace(prepend_scheme="never")), True),
        (small(pre_tokenizers.Metaspace(prepend_scheme="first")), False),
        (small(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])), True),
        (small(normalizer=normalizers.Strip()), True),
        (small(tokens=[AddedToken("<a>", lstrip=True), AddedToken("<b>", rstrip=True)]), False),
        (small(tokens=[AddedToken("<a>", single_word=True), "<b>"]), True),
        (small(tokens=["<a>", "<a><b>", "<b>"]), False),
        (small(tokens=["<a>", ">a"]), True),
        (small(tokens=[AddedToken("<a>", normalized=True)]), False),
    ],
)
def test_small_tokenizers_of_each_kind(tokenizer: PreTrainedTokenizerFast, cuts: bool):
    assert bool(cutting_tokens(tokenizer)) is cuts
    splitter = splitter_of(tokenizer)

    @settings(max_examples=120, deadline=None)
    @given(texts=st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=3))
    @example(texts=["a <a> a<b> a<a><b>a"])
    @example(texts=["<a>a", "<b>b<a>ab", "<a>"])
    def check(texts: list[str]) -> None:
        check_pieces(tokenizer, splitter, texts)

    check()

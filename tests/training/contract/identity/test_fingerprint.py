"""Fingerprints, compared with sha256 and JSON by hand: equal content gives an equal fingerprint, other content another."""

import hashlib
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.contract.identity.fingerprint import (
    canonical_json,
    fingerprint,
    fingerprint_of_stream,
    sequence_key,
    short,
    shortened,
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aäñ\n\"'", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_fingerprint_is_sha256_of_schema_version_kind_and_content():
    expected = hashlib.sha256('[1,"demo",{"a":"é","b":[1,2.5,null,true]}]'.encode()).hexdigest()
    assert fingerprint("demo", {"b": [1, 2.5, None, True], "a": "é"}) == expected


@given(JSON)
def test_canonical_json_parses_to_the_same_value(value):
    assert json.loads(canonical_json(value)) == value


@given(st.dictionaries(st.text(max_size=4).filter(str.isascii), JSON, min_size=2, max_size=4))
def test_fingerprint_ignores_the_order_of_keys(content):
    assert fingerprint("demo", dict(reversed(content.items()))) == fingerprint("demo", content)


@pytest.mark.parametrize(
    "other",
    [
        {"a": 2, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 1},
        {"a": 1, "b": "x", "c": None},
        {"a": 1.5, "b": "x"},
        {"a": "1", "b": "x"},
    ],
)
def test_fingerprint_of_other_content_differs(other):
    assert fingerprint("demo", other) != fingerprint("demo", {"a": 1, "b": "x"})


def test_fingerprint_of_another_kind_differs():
    assert fingerprint("spec", {"a": 1}) != fingerprint("model", {"a": 1})
    assert fingerprint_of_stream("spec", [b"a"]) != fingerprint_of_stream("model", [b"a"])


def test_fingerprint_depends_on_the_order_of_a_list():
    assert fingerprint("demo", [1, 2]) != fingerprint("demo", [2, 1])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_fingerprint_of_non_finite_number_raises(number):
    with pytest.raises(ValueError, match="JSON"):
        fingerprint("demo", {"a": number})


def test_fingerprint_of_bytes_raises():
    with pytest.raises(TypeError):
        fingerprint("demo", {"a": b"bytes"})


def test_fingerprint_of_stream_depends_on_the_ends_of_items():
    streams = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"abc", b""], [b"c", b"ab"], []]
    assert len({fingerprint_of_stream("demo", stream) for stream in streams}) == len(streams)
    assert fingerprint_of_stream("demo", iter([b"ab", b"c"])) == fingerprint_of_stream("demo", [b"ab", b"c"])


def test_sequence_key_depends_on_ids_and_mask():
    ids, mask = [5, 6, 7], [False, True, True]
    others = [
        ([5, 6, 8], mask),
        ([5, 7, 6], mask),
        (ids, [False, False, True]),
        (ids[:2], mask[:2]),
        ([5, 6, 7, 0], [*mask, False]),
    ]
    assert sequence_key(ids, mask) == sequence_key(list(ids), list(mask))
    assert len({sequence_key(ids, mask), *(sequence_key(*other) for other in others)}) == 1 + len(others)
    assert len(sequence_key([], [])) == 32


def test_short_is_twelve_digits():
    assert short("0123456789abcdef") == "0123456789ab" and short(None) == "-"
    assert shortened("0123456789abcdef" * 4) == "0123456789ab" and shortened("5e-07") == "5e-07"

"""Files of another kind than their name says: the message about the file or about each row.

Oracle: bytes that Python's codecs and csv module write.
"""

import codecs
import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from training.contract.errors import DataError
from training.contract.files.local_files import data_files
from training.data.reading.readers import ParsedRow, read_records

NAMES = ("prompt", "chosen", "rejected")
ROWS = [
    dict(zip(NAMES, (f"What is in hall {n}?", f"Hall {n} has the café.", f"I do not know {n}."), strict=True))
    for n in range(4)
]


def _csv(separator: str = ",", quoting: Literal[0, 1] = csv.QUOTE_MINIMAL) -> str:
    """The rows as the csv module writes them, which is what spreadsheets read."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator, quoting=quoting)
    writer.writerows([NAMES, *(row.values() for row in ROWS)])
    return file.getvalue()


def _json(indent: int | None = None) -> str:
    return json.dumps(ROWS, indent=indent, ensure_ascii=False)


def _lines() -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


TEXTS = {
    "rows.csv": _csv(),
    "rows.json": _json(),
    "lines.json": _lines(),
    "rows.jsonl": _lines(),
    "rows.ndjson": _lines(),
}


def _records(path: Path) -> list[ParsedRow]:
    return [record for file in data_files(str(path)) for record in read_records(file)]


def _refused(path: Path, content: bytes) -> str:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(DataError) as caught:
        _records(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize(("separator", "shown"), [(";", "';'"), ("\t", "a tab"), ("|", "'|'")])
def test_read_csv_of_another_separator_names_it(tmp_path, separator, shown, encoding, quoting):
    for name in ("rows.csv", "rows.csv.gz"):
        told = _refused(tmp_path / name, _csv(separator, quoting).encode(encoding))
        assert (
            f"found the separator {shown}, expected ','; with it the columns are 'prompt', 'chosen', 'rejected'" in told
        )
        assert "save the file with commas" in told


def test_read_csv_of_commas_may_have_other_separators_in_its_names(tmp_path):
    (tmp_path / "rows.csv").write_text('"prompt;of;a;customer",chosen,rejected\na,b,c\n')
    [record] = _records(tmp_path / "rows.csv")
    assert record.value == {"prompt;of;a;customer": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_read_text_in_utf_16_or_32_names_the_mark(tmp_path, name, encoding):
    """Python writes a mark for `utf-16` and `utf-32`; for the big endian ones it is put in front here."""
    big = {"utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}.get(encoding, b"")
    for file in (name, f"{name}.gz"):
        told = _refused(tmp_path / file, big + TEXTS[name].encode(encoding))
        assert f"begins with a {encoding[:6].upper()} byte order mark, expected UTF-8: save it as UTF-8" in told


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_read_text_in_utf_16_or_32_without_a_mark_is_known_by_its_zeros(tmp_path, name, encoding):
    content = TEXTS[name].encode(encoding)
    told = _refused(tmp_path / name, content)
    assert f"begins with the bytes {content[:4].hex(' ')}, as {encoding[:6].upper()} does, expected UTF-8" in told


@pytest.mark.parametrize("content", [b"", b"\n", b"[]", b"\xff", b"\0", b"\xef\xbb\xbf"])
def test_read_short_file_is_not_taken_for_utf_16(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert len(_records(tmp_path / "rows.jsonl")) == (content not in (b"", b"\n", b"\xef\xbb\xbf"))


# By hand: 18 characters of the answer stand before the byte. Before the answer stand 12 + 18 + 14 of a row of JSON, which are
# `{"prompt": "`, the question, and `", "chosen": "`.
IN_CELL, IN_ROW = "byte 0xe9 at position 18 of `chosen`", "byte 0xe9 at position 62 of the {}"


@pytest.mark.parametrize(
    ("name", "place", "first"),
    [
        ("rows.csv", IN_CELL, 2),
        ("rows.json", IN_ROW.format("row"), 1),
        ("lines.json", IN_ROW.format("line"), 1),
        ("rows.jsonl", IN_ROW.format("line"), 1),
    ],
)
def test_preferences_in_cp1252_sets_each_row_aside_with_its_byte(workshop, tmp_path, name, place, first):
    """Beside a source that can be read, rows are in quarantine; alone, the error says the same."""
    (tmp_path / name).write_bytes(TEXTS[name].encode("cp1252"))
    source = {"path": str(tmp_path / name), "format": "strings"}
    done = workshop.preferences(workshop.source(ROWS), source)
    expected = f"{place} is not UTF-8, it looks like cp1252 or Latin-1: save the file as UTF-8"
    assert [(row["line"], row["reason"], row["detail"]) for row in done.table("quarantine.parquet")] == [
        (first + n, "invalid unicode", expected) for n in range(4)
    ]
    with pytest.raises(DataError) as caught:
        workshop.preferences({**source, "format": "auto"})
    assert expected in str(caught.value) and f"line {first}" in str(caught.value)


def test_preferences_in_cp1252_reads_rows_whose_texts_are_ascii(workshop, tmp_path):
    """A column that is not read may be in any encoding."""
    content = "prompt,chosen,rejected,note\nWhy?,Because.,No idea.,café\nWho?,Me.,Zoë.,\n"
    (tmp_path / "rows.csv").write_bytes(content.encode("cp1252"))
    done = workshop.preferences({"path": str(tmp_path / "rows.csv")})
    assert [row["prompt"][0]["content"] for row in done.table("preferences.parquet")] == ["Why?"]
    [row] = done.table("quarantine.parquet")
    assert (row["line"], row["detail"].partition(" is")[0]) == (3, "byte 0xeb at position 2 of `rejected`")


@pytest.mark.parametrize(
    ("content", "looks_like_cp1252"),
    [
        ("Привет".encode("cp1251"), False),
        ("日本".encode("shift_jis"), False),
        ("中文".encode("gbk"), False),
        (b"a\x81b", False),  # cp1252 has no such character
        ("a\u2019b".encode("cp1252"), True),
        ("naïve".encode("latin-1"), True),
    ],
)
def test_read_line_of_another_encoding_is_said_to_be_cp1252_only_if_it_may_be(tmp_path, content, looks_like_cp1252):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": "' + content + b'"}\n')
    [record] = _records(tmp_path / "rows.jsonl")
    assert record.problem is not None and "is not UTF-8" in record.problem.detail
    assert ("looks like cp1252" in record.problem.detail) == looks_like_cp1252


def test_read_line_that_was_cut_within_a_character_is_not_said_to_be_cp1252(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"a": "café'.encode()[:-1])
    [record] = _records(tmp_path / "rows.jsonl")
    assert record.problem is not None
    assert record.problem.detail == "byte 0xc3 at position 10 of the line is not UTF-8: save the file as UTF-8"


def test_preferences_with_a_surrogate_of_json_does_not_speak_of_bytes(workshop):
    """It is in the text: another encoding of the file would not help."""
    done = workshop.rows([ROWS[0], {**ROWS[1], "chosen": "a\udce9"}])
    assert [row["detail"] for row in done.table("quarantine.parquet")] == ["`chosen` has a lone surrogate at 1"]


def test_preferences_with_a_header_in_cp1252_names_the_byte(workshop, tmp_path):
    (tmp_path / "rows.csv").write_bytes("prompt,réponse,rejected\nWhy?,a,b\n".encode("cp1252"))
    words = r"rows\.csv: byte 0xe9 at position 1 of the name of a column is not UTF-8, it looks like cp1252"
    with pytest.raises(DataError, match=words):
        workshop.preferences({"path": str(tmp_path / "rows.csv")})
    with pytest.raises(DataError, match=words):
        workshop.preferences({"path": str(tmp_path / "rows.csv"), "columns": {"chosen": "réponse"}})


SPLITS: list[tuple[dict[str, Any], str]] = [
    ({"train": ROWS}, "`train` holds a list of 4 rows; expected a JSON list of objects: save that list"),
    (
        {"train": ROWS, "test": ROWS[:1]},
        "`train` holds a list of 4 rows and `test` holds a list of 1 rows; expected a JSON",
    ),
    ({"version": 1, "data": ROWS, "license": None}, "`data` holds a list of 4 rows; expected"),
    ({"data": [{"q": "Why?", "a": "b", "c": "d"}]}, "`data` holds a list of 1 rows; expected"),
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(("content", "words"), SPLITS)
def test_read_json_object_of_splits_names_its_fields(tmp_path, content, words, indent):
    assert words in _refused(tmp_path / "rows.json", json.dumps(content, indent=indent).encode())


def test_preferences_of_json_lines_that_are_one_object_of_splits_names_its_fields(workshop):
    with pytest.raises(
        DataError, match="`train` holds a list of 4 rows; expected a JSON list of objects: save that list,"
    ):
        workshop.rows([{"train": ROWS}])


SINGLE: list[dict[str, Any]] = [
    ROWS[0],
    {"chosen": [{"role": "user", "content": "Why?"}], "rejected": [{"role": "user", "content": "Who?"}]},
    {**ROWS[0], "tools": [{"name": "weather", "parameters": {}}]},
    {"q": [{"role": "user", "content": "Why?"}]},
    {"conversations": [{"from": "human", "value": "Why?"}]},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("row", SINGLE)
def test_read_json_of_one_row_is_that_row(tmp_path, row, indent):
    (tmp_path / "rows.json").write_text("\n" + json.dumps(row, indent=indent))
    [record] = _records(tmp_path / "rows.json")
    assert record.value == row and record.problem is None


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("semicolon.csv", "found the separator ';', expected ','"),
        ("utf16.csv", "begins with a UTF-16 byte order mark, expected UTF-8"),
        (
            "cp1252.csv",
            "line 2: byte 0xe9 at position 18 of `chosen` is not UTF-8, it looks like cp1252 or Latin-1: save",
        ),
        ("splits.json", "`train` holds a list of 4 rows; expected a JSON list of objects"),
    ],
)
def test_preferences_of_a_spreadsheet_names_the_cause(workshop, shared_data, file, words):
    with pytest.raises(DataError) as caught:
        workshop.preferences({"path": str(shared_data.parent / "cases" / "06-excel-exports" / file)})
    assert words in str(caught.value)

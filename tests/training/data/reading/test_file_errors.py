"""Files in another encoding, layout or separator than expected. Oracle: bytes from Python's codecs and csv module."""

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
from training.data.reading.readers import read_records
from training.data.reading.rows import ParsedRow

NAMES = ("prompt", "chosen", "rejected")
ROWS = [
    dict(zip(NAMES, (f"What is in hall {n}?", f"Hall {n} has the café.", f"I do not know {n}."), strict=True))
    for n in range(4)
]


def _csv(separator: str = ",", quoting: Literal[0, 1] = csv.QUOTE_MINIMAL) -> str:
    """Return the rows as the csv module writes them, for spreadsheets."""
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


def _error(path: Path, content: bytes, code: str) -> str:
    """Write the file. Return the message of the error with this code that reading it raises."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(DataError, match=rf"\[{code}\]") as caught:
        _records(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252"])
@pytest.mark.parametrize(("separator", "shown"), [(";", "';'"), ("\t", "a tab"), ("|", "'|'")])
def test_read_csv_of_another_separator_names_it(tmp_path, separator, shown, encoding, quoting):
    for name in ("rows.csv", "rows.csv.gz"):
        message = _error(tmp_path / name, _csv(separator, quoting).encode(encoding), "csv-separator")
        assert all(value in message for value in (f"{shown}, expected ','", "'prompt', 'chosen', 'rejected'"))


def test_read_csv_of_commas_allows_other_separators_in_its_names(tmp_path):
    (tmp_path / "rows.csv").write_text('"prompt;of;a;customer",chosen,rejected\na,b,c\n')
    [record] = _records(tmp_path / "rows.csv")
    assert record.value == {"prompt;of;a;customer": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_read_text_in_utf_16_or_32_names_the_mark(tmp_path, name, encoding):
    """Python writes a mark for `utf-16` and `utf-32`. The test adds it for big endian."""
    mark = {"utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}.get(encoding, b"")
    for file in (name, f"{name}.gz"):
        message = _error(tmp_path / file, mark + TEXTS[name].encode(encoding), "file-encoding")
        assert f"{encoding[:6].upper()} byte order mark, expected UTF-8" in message


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_read_text_in_utf_16_or_32_without_a_mark_names_the_bytes(tmp_path, name, encoding):
    content = TEXTS[name].encode(encoding)
    message = _error(tmp_path / name, content, "file-encoding")
    assert all(value in message for value in (content[:4].hex(" "), encoding[:6].upper(), "expected UTF-8"))


@pytest.mark.parametrize("content", [b"", b"\n", b"[]", b"\xff", b"\0", b"\xef\xbb\xbf"])
def test_read_short_file_is_not_taken_for_utf_16(tmp_path, content):
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert len(_records(tmp_path / "rows.jsonl")) == (content not in (b"", b"\n", b"\xef\xbb\xbf"))


# By hand: the byte is after 18 characters of the response. In JSON, the response is after 12 + 18 + 14 characters:
# `{"prompt": "`, the question, and `", "chosen": "`.
IN_CELL, IN_ROW = "byte 0xe9 at position 18 of `chosen`", "byte 0xe9 at position 62 of the {}"


@pytest.mark.parametrize(
    ("name", "position", "first"),
    [
        ("rows.csv", IN_CELL, 2),
        ("rows.json", IN_ROW.format("row"), 1),
        ("lines.json", IN_ROW.format("line"), 1),
        ("rows.jsonl", IN_ROW.format("line"), 1),
    ],
)
def test_preferences_in_cp1252_quarantine_each_row_with_its_byte(job_runner, tmp_path, name, position, first):
    """With a readable source, the rows are in quarantine. Without one, the error has the same detail."""
    (tmp_path / name).write_bytes(TEXTS[name].encode("cp1252"))
    source = {"path": str(tmp_path / name), "format": "strings"}
    done = job_runner.preferences(job_runner.source(ROWS), source)
    rows = done.table("quarantine.parquet")
    assert [(row["line"], row["reason"]) for row in rows] == [(first + n, "invalid unicode") for n in range(4)]
    assert all(position in row["detail"] and "cp1252" in row["detail"] for row in rows)
    with pytest.raises(DataError, match=rf"line {first}\b") as caught:
        job_runner.preferences({**source, "format": "auto"})
    assert rows[0]["detail"] in str(caught.value)


def test_preferences_in_cp1252_with_ascii_texts_are_read(job_runner, tmp_path):
    """Columns that are not read may have any encoding."""
    content = "prompt,chosen,rejected,note\nWhy?,Because.,No idea.,café\nWho?,Me.,Zoë.,\n"
    (tmp_path / "rows.csv").write_bytes(content.encode("cp1252"))
    done = job_runner.preferences({"path": str(tmp_path / "rows.csv")})
    assert [row["prompt"][0]["content"] for row in done.table("preferences.parquet")] == ["Why?"]
    [row] = done.table("quarantine.parquet")
    assert (row["line"], row["detail"].partition(" is")[0]) == (3, "byte 0xeb at position 2 of `rejected`")


@pytest.mark.parametrize(
    ("content", "looks_like_cp1252"),
    [
        ("Привет".encode("cp1251"), False),
        ("日本".encode("shift_jis"), False),
        ("中文".encode("gbk"), False),
        (b"a\x81b", False),  # cp1252 lacks this character
        ("a\u2019b".encode("cp1252"), True),
        ("naïve".encode("latin-1"), True),
    ],
)
def test_read_line_of_another_encoding_guesses_cp1252_only_if_possible(tmp_path, content, looks_like_cp1252):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": "' + content + b'"}\n')
    [record] = _records(tmp_path / "rows.jsonl")
    assert record.problem is not None and "is not UTF-8" in record.problem.detail
    assert ("cp1252" in record.problem.detail) == looks_like_cp1252


def test_read_line_cut_within_a_character_does_not_guess_cp1252(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"a": "café'.encode()[:-1])
    [record] = _records(tmp_path / "rows.jsonl")
    assert record.problem is not None
    assert "byte 0xc3 at position 10" in record.problem.detail and "cp1252" not in record.problem.detail


def test_preferences_with_a_lone_surrogate_in_json_name_it(job_runner):
    """It is in the text, so another encoding of the file would not help."""
    done = job_runner.rows([ROWS[0], {**ROWS[1], "chosen": "a\udce9"}])
    assert [row["detail"] for row in done.table("quarantine.parquet")] == ["`chosen` has a lone surrogate at 1"]


def test_preferences_with_a_header_in_cp1252_name_the_byte(job_runner, tmp_path):
    (tmp_path / "rows.csv").write_bytes("prompt,réponse,rejected\nWhy?,a,b\n".encode("cp1252"))
    error = r"rows\.csv: byte 0xe9 at position 1 .*\[column-name-encoding\]"
    with pytest.raises(DataError, match=error):
        job_runner.preferences({"path": str(tmp_path / "rows.csv")})
    with pytest.raises(DataError, match=error):
        job_runner.preferences({"path": str(tmp_path / "rows.csv"), "columns": {"chosen": "réponse"}})


SPLITS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"train": ROWS}, {"train": 4}),
    ({"train": ROWS, "test": ROWS[:1]}, {"train": 4, "test": 1}),
    ({"version": 1, "data": ROWS, "license": None}, {"data": 4}),
    ({"data": [{"q": "Why?", "a": "b", "c": "d"}]}, {"data": 1}),
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(("content", "counts"), SPLITS)
def test_read_json_object_of_splits_names_its_fields(tmp_path, content, counts, indent):
    message = _error(tmp_path / "rows.json", json.dumps(content, indent=indent).encode(), "rows-in-object")
    assert all(f"`{field}` holds a list of {count} rows" in message for field, count in counts.items())
    assert message.count("holds a list") == len(counts)


def test_preferences_of_one_json_line_of_splits_name_its_fields(job_runner):
    with pytest.raises(DataError, match=r"`train` .* 4 rows.*\[rows-in-object\]"):
        job_runner.rows([{"train": ROWS}])


SINGLE: list[dict[str, Any]] = [
    ROWS[0],
    {"chosen": [{"role": "user", "content": "Why?"}], "rejected": [{"role": "user", "content": "Who?"}]},
    {**ROWS[0], "tools": [{"name": "weather", "parameters": {}}]},
    {"q": [{"role": "user", "content": "Why?"}]},
    {"conversations": [{"from": "human", "value": "Why?"}]},
]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("row", SINGLE)
def test_read_json_of_one_row_returns_it(tmp_path, row, indent):
    (tmp_path / "rows.json").write_text("\n" + json.dumps(row, indent=indent))
    [record] = _records(tmp_path / "rows.json")
    assert record.value == row and record.problem is None


@pytest.mark.shared
@pytest.mark.parametrize(
    ("file", "error"),
    [
        ("semicolon.csv", r"';'.*\[csv-separator\]"),
        ("utf16.csv", r"UTF-16.*\[file-encoding\]"),
        ("cp1252.csv", r"line 2\b.* byte 0xe9 at position 18 of `chosen` .*cp1252.*\[no-pairs\]"),
        ("splits.json", r"`train` .* 4 rows.*\[rows-in-object\]"),
    ],
)
def test_preferences_of_a_spreadsheet_name_the_cause(job_runner, shared_data, file, error):
    with pytest.raises(DataError, match=error):
        job_runner.preferences({"path": str(shared_data.parent / "cases" / "06-excel-exports" / file)})

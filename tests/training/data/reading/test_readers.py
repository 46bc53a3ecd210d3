"""Read each kind of file: its rows, bad rows with their lines, and errors that name unusable paths."""

import contextlib
import gzip
import hashlib
import json
import re
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.privileges import without_privileges
from training.contract.errors import DataError
from training.contract.files.local_files import DataFile, data_files
from training.data.formats.quarantine import QuarantineReason
from training.data.reading.readers import read_records

LONGEST = 200
ROWS = [{"prompt": f"Question {n}?\u2028\r", "chosen": 'yes, "really"\nyes', "rejected": "no"} for n in range(3)]


def _records(path):
    return [record for file in data_files(str(path)) for record in read_records(file)]


def _jsonl(path: Path) -> None:
    path.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in ROWS))


def _csv(path: Path) -> None:
    quoted = [",".join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in ROWS]
    path.write_bytes("\r\n".join(["prompt,chosen,rejected", *quoted, ""]).encode("utf-8-sig"))


def _duplicate_columns() -> bytes:
    """Return a Parquet file with two columns of one name."""
    pq.write_table(
        pa.table([["a"], ["b"], ["c"]], names=["chosen", "prompt", "chosen"]), sink := pa.BufferOutputStream()
    )
    return bytes(sink.getvalue())


def _compress(rows) -> bytes:
    return gzip.compress("\n".join(map(json.dumps, rows)).encode())


def _arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


WRITERS = {
    "a.jsonl": _jsonl,
    "b.ndjson": lambda path: path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(row).encode() for row in ROWS)),
    "c.json": lambda path: path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8-sig"),
    "d.json": _jsonl,
    "e.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "f.csv": _csv,
    "h.arrow": _arrow,
    "g.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(json.dumps(ROWS[0]).encode() + b"\n") + _compress(ROWS[1:])
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_read_every_kind_of_file_returns_the_written_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    records = _records(tmp_path / name)
    assert [dict(record.value) for record in records] == ROWS
    # In CSV, the rows are after the header, and two cells of each row have a line end.
    assert [record.line for record in records] == ([2, 5, 8] if name == "f.csv" else [1, 2, 3])
    assert not any(record.problem for record in records)


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"g.jsonl.gz"}))
def test_read_every_kind_of_compressed_file_returns_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert _records(tmp_path / f"{name}.gz") == _records(tmp_path / name)


def test_read_invalid_compressed_file_names_it(tmp_path):
    for name, content, code in (
        ("a.json.gz", b"3", "not-json"),
        ("b.csv.gz", b'p\n"', "invalid-csv"),
        ("c.parquet.gz", b"PAR1", "unreadable-table"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match=rf"^{re.escape(str(tmp_path / name))} .*\[{code}\]"):
            _records(tmp_path / name)


def test_read_folder_of_save_to_disk_returns_only_its_data_set(tmp_path):
    """Oracle: the rows of the library's data set, in its order. `map` leaves a cache beside its files."""
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=1)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    _arrow(tmp_path / "saved" / "cache-0123.arrow")
    assert [dict(record.value) for record in _records(tmp_path / "saved")] == dataset.to_list()


def test_read_saved_data_set_of_several_splits_names_them(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"saved/test, saved/train \[dataset-dict\]"):
        _records(tmp_path / "saved")
    assert len(_records(tmp_path / "saved" / "test")) == len(ROWS)


@pytest.mark.parametrize("state", ["{", "{}", '{"_data_files": [{}]}'])
def test_read_saved_data_set_with_an_invalid_state_raises(tmp_path, state):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json .*\[bad-dataset-state\]"):
        _records(tmp_path)


BAD_LINES = [
    (b'{"a": 1', QuarantineReason.BAD_JSON),
    (b'{"a": NaN}', QuarantineReason.BAD_JSON),
    (b'{"a": -Infinity}', QuarantineReason.BAD_JSON),
    (b'{"a": ' + b"9" * 5000 + b"}", QuarantineReason.BAD_JSON),
    (b"[" * 100_000 + b"]" * 100_000, QuarantineReason.BAD_JSON),
    (b'{"a": 1, "a": 2}', QuarantineReason.DUPLICATE_KEY),
    (b'{"x": [{"a": 1, "a": 1}]}', QuarantineReason.DUPLICATE_KEY),
    (b"[1, 2]", QuarantineReason.NOT_AN_OBJECT),
    (b'"text"', QuarantineReason.NOT_AN_OBJECT),
    (b"null", QuarantineReason.NOT_AN_OBJECT),
    (b'{"a": "\xff"}', QuarantineReason.BAD_UNICODE),
]


@pytest.mark.parametrize(("line", "reason"), BAD_LINES, ids=lambda value: str(value)[:30])
def test_read_bad_line_fails_only_this_row(tmp_path, line, reason):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + line + b'\n{"a": 2}')
    first, bad, last = _records(path)
    assert (first.value, last.value, last.line) == ({"a": 1}, {"a": 2}, 4)
    assert bad.problem is not None
    assert (bad.problem.reason, bad.line) == (reason, 3)
    assert bad.text.encode()


@pytest.mark.parametrize(
    ("line", "reason"), [case for case in BAD_LINES if case[1] is not QuarantineReason.BAD_UNICODE][1:4:2]
)
def test_read_bad_element_of_a_list_fails_only_this_row(tmp_path, line, reason):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n ' + line + b' , {"a": 2}]\n')
    first, bad, last = _records(path)
    assert (first.value, last.value, last.line) == ({"a": 1}, {"a": 2}, 3)
    assert bad.problem is not None
    assert bad.problem.reason is reason


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_read_duplicate_key_is_found_in_one_pass(tmp_path, name):
    """Quadratic time would be 11 seconds for a row of 400,000 bytes, and 18 minutes for ten times as many."""
    names, calls = [f"k{n}" for n in range(1000)], []
    for repeated in (names[0], names[0], names[-1]):  # the first reading of a process imports and caches
        row, header = json.dumps(dict.fromkeys(names))[:-1] + f', "{repeated}": 1}}', ",".join([*names, repeated])
        (tmp_path / name).write_text(row if name.endswith("jsonl") else header)
        calls.append(_count_calls(tmp_path / name))
    assert calls[1] == calls[2]


def _count_calls(path: Path) -> int:
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        with contextlib.suppress(DataError):
            _records(path)
    finally:
        sys.setprofile(None)
    return calls


def test_read_csv_row_with_another_number_of_cells_has_a_problem(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"2\n"\n\n3\n4,5,6\n')
    assert [(record.line, record.problem and record.problem.reason) for record in _records(path)] == [
        (2, None), (5, QuarantineReason.MISSING_FIELD), (6, QuarantineReason.MISSING_FIELD),
    ]  # fmt: skip


def test_data_files_of_folders_and_globs_are_in_name_order(tmp_path):
    names = ["a/1.jsonl", "a/z/2.jsonl", "b/3.jsonl", "c.jsonl", "d.ndjson", "e/4.jsonl", "state.json"]
    (tmp_path / "a" / "folder.jsonl").mkdir(parents=True)
    for name in (*names[2::-1], *names[3:], ".hidden.jsonl", ".cache/e.jsonl", "a/.cache/f.json", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text('{"a": 1}\n')
    assert [file.name for file in data_files(str(tmp_path))] == names
    assert [file.name for file in data_files(str(tmp_path / "*/*.jsonl"))] == [names[at] for at in (0, 2, 5)]
    assert [file.name for file in data_files(str(tmp_path / "**/[12].jsonl"))] == names[:2], "at any depth"


@pytest.mark.parametrize("path", ["data", "data/**/*.jsonl", "data/*/*.jsonl", "d*/b/2.jsonl"])
@pytest.mark.parametrize("mode", [0, 0o444, 0o111])
def test_data_files_with_an_unreadable_folder_raises(path, mode):
    """Training would silently use fewer pairs."""
    with without_privileges() as folder:
        for name in ("a/1.jsonl", "b/2.jsonl", ".hidden/3.jsonl", "lost+found/4"):
            (folder / "data" / name).parent.mkdir(parents=True)
            (folder / "data" / name).write_text("{}\n")
        for name in (".hidden", "lost+found"):
            (folder / "data" / name).chmod(0)
        names = [file.path.name for file in data_files(str(folder / path))]
        (folder / "data" / "b").chmod(mode)
        with pytest.raises(DataError, match=r"/data/b .*Permission denied.*\[unreadable-file\]"):
            data_files(str(folder / path))
        for name in (".hidden", "lost+found", "b"):
            (folder / "data" / name).chmod(0o755)
    assert names == (["2.jsonl"] if "/b/" in path else ["1.jsonl", "2.jsonl"])


def test_data_files_with_a_link_to_an_unreadable_folder_raises():
    with without_privileges() as folder:
        for name in ("private", "data"):
            (folder / name).mkdir()
            (folder / name / "1.jsonl").write_text("{}\n")
        (folder / "data" / "2.jsonl").symlink_to(folder / "private" / "1.jsonl")
        assert len(data_files(str(folder / "data"))) == 2
        (folder / "private").chmod(0)
        with pytest.raises(DataError, match=r"/data/2\.jsonl .*Permission denied.*\[unreadable-file\]"):
            data_files(str(folder / "data"))
        (folder / "private").chmod(0o755)


def test_data_files_of_a_glob_in_a_folder_with_brackets_finds_them(tmp_path):
    for folder in ("mine [1]", "mine 1"):
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "1.jsonl").write_text("{}\n")
    [file] = data_files(str(tmp_path / "mine [1]" / "p*" / "[12].jsonl"))
    assert (file.name, file.path) == ("part/1.jsonl", tmp_path / "mine [1]" / "part" / "1.jsonl")
    with pytest.raises(DataError, match=r"mine \[1\]/none\.jsonl .*\[no-files\]"):
        data_files(str(tmp_path / "mine [1]" / "none.jsonl"))


def test_read_file_that_changed_since_it_was_hashed_raises_at_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    file = DataFile(name=path.name, path=path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert [record.value for record in read_records(file)] == [{"a": 1}]
    path.write_text('{"a": 2}\n')
    current = hashlib.sha256(path.read_bytes()).hexdigest()
    values = rf"{re.escape(str(path))} .*{file.sha256[:12]} .*{current[:12]}.*\[file-changed\]"
    with pytest.raises(DataError, match=values):
        list(read_records(file))
    rows = read_records(file)
    next(rows)
    path.unlink()
    with pytest.raises(DataError, match=rf"{re.escape(str(path))} .*No such file or directory.*\[file-changed\]"):
        list(rows)


@pytest.mark.parametrize(
    ("name", "content", "code", "value"),
    [
        ("missing.jsonl", None, "no-files", "missing.jsonl"),
        ("*.jsonl", None, "no-files", "*.jsonl"),
        ("/dev/null", None, "no-files", "/dev/null"),
        ("notes.txt", "x", "unknown-extension", "'.txt'; expected one of .jsonl"),
        ("broken.json", '[{"a": 1}, {"a"', "incomplete-json", "char 15"),
        ("after.json", "[] []", "incomplete-json", "extra data"),
        ("text.json", "hello", "not-json", "'hello'"),
        ("fake.parquet", "hello", "unreadable-table", "as Parquet after row 0"),
        ("open.csv", 'a\n"x', "invalid-csv", "after line 1"),
        ("cut.csv.gz", gzip.compress(b"a" * 99, mtime=0)[:-9], "unreadable-file", "Compressed file ended"),
        ("twice.csv", "chosen,prompt,chosen\na,b,c\n", "duplicate-column", "`chosen`"),
        ("twice.parquet", _duplicate_columns(), "duplicate-column", "`chosen`"),
    ],
)
def test_read_unusable_path_names_it(tmp_path, name, content, code, value):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        _records(tmp_path / name)
    assert caught.value.code == code
    assert str(tmp_path / name) in str(caught.value) and value in str(caught.value)


def test_read_folder_without_data_lists_its_content(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(DataError, match=r"README\.md.*\[no-data-files\]"):
        _records(tmp_path)


def test_read_date_outside_of_pythons_range_raises(tmp_path):
    table = pa.table({"prompt": ["Why?"], "at": pa.array([2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet .*Parquet after row 0.*\[unreadable-table\]"):
        list(read_records(DataFile(name="rows.parquet", path=tmp_path / "rows.parquet")))


def test_read_arrow_with_a_flipped_bit_does_not_crash(tmp_path):
    """Arrow trusts offsets and lengths. A wrong one reads beyond the data and crashes the process."""
    _arrow(tmp_path / "intact.arrow")
    intact, file, errors = (tmp_path / "intact.arrow").read_bytes(), tmp_path / "rows.arrow", 0
    for at in range(len(intact)):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 0x40]) + intact[at + 1 :])
        try:
            list(read_records(DataFile(name="rows.arrow", path=file)))
        except DataError as error:
            errors += 1
            assert str(error).startswith(f"{file} ")
    assert 0 < errors < len(intact)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv"])
def test_row_longer_than_the_limit_is_a_problem_of_its_own(tmp_path, monkeypatch, suffix):
    """The reader skips the row without holding it; the rows before and after it, and their lines, are as in the file."""
    for module in ("rows", "json_reader", "table_reader"):
        monkeypatch.setattr(f"training.data.reading.{module}.LONGEST_ROW", LONGEST)
    prompts = ["Why?", "x" * (3 * LONGEST), "How?"]
    rows = [{"prompt": prompt, "chosen": "yes", "rejected": "no"} for prompt in prompts]
    content = "\n".join(map(json.dumps, rows)) + "\n"
    if suffix == ".json":
        content = json.dumps(rows)
    if suffix == ".csv":
        content = "\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)])
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(content.encode()) if suffix.endswith(".gz") else content.encode())
    first, long, last = _records(path)
    assert [first.value["prompt"], last.value["prompt"]] == ["Why?", "How?"]
    assert [record.problem for record in (first, last)] == [None, None]
    assert long.problem.reason is QuarantineReason.ENORMOUS and long.line == first.line + 1
    size = len(json.dumps(rows[1])) + (1 if suffix.startswith(".jsonl") else 0)
    assert f"{3 * LONGEST + 5 if suffix == '.csv' else size:,} " in str(long.problem)
    assert len(long.raw) <= 3 * LONGEST + 100

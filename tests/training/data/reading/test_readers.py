"""Reading: what each kind of file holds, bad rows named by their line, and unusable places refused by name."""

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

ROWS = [{"prompt": f"Question {n}?\u2028\r", "chosen": 'yes, "really"\nyes', "rejected": "no"} for n in range(3)]


def _records(path):
    return [record for file in data_files(str(path)) for record in read_records(file)]


def _jsonl(path: Path) -> None:
    path.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in ROWS))


def _csv(path: Path) -> None:
    quoted = [",".join('"' + value.replace('"', '""') + '"' for value in row.values()) for row in ROWS]
    path.write_bytes("\r\n".join(["prompt,chosen,rejected", *quoted, ""]).encode("utf-8-sig"))


def _twice() -> bytes:
    """A Parquet file with two columns of one name, which Arrow writes."""
    pq.write_table(
        pa.table([["a"], ["b"], ["c"]], names=["chosen", "prompt", "chosen"]), sink := pa.BufferOutputStream()
    )
    return bytes(sink.getvalue())


def _packed(rows) -> bytes:
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
        gzip.compress(json.dumps(ROWS[0]).encode() + b"\n") + _packed(ROWS[1:])
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_rows_written(tmp_path, name):
    WRITERS[name](tmp_path / name)
    records = _records(tmp_path / name)
    assert [dict(record.value) for record in records] == ROWS
    # Of CSV: behind the header, and two of the cells of each row end a line.
    assert [record.line for record in records] == ([2, 5, 8] if name == "f.csv" else [1, 2, 3])
    assert not any(record.problem for record in records)


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"g.jsonl.gz"}))
def test_every_kind_of_file_is_read_packed_as_it_is_plain(tmp_path, name):
    WRITERS[name](tmp_path / name)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert _records(tmp_path / f"{name}.gz") == _records(tmp_path / name)


def test_what_is_wrong_in_a_packed_file_is_told_of_that_file(tmp_path):
    for name, content in (("a.json.gz", b"3"), ("b.csv.gz", b'p\n"'), ("c.parquet.gz", b"PAR1")):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))} "):
            _records(tmp_path / name)


def test_a_folder_of_save_to_disk_holds_its_data_set_and_nothing_else(tmp_path):
    """Oracle: the rows of the library's data set, in its order. What is mapped later leaves a cache beside its files."""
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=1)
    dataset.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    _arrow(tmp_path / "saved" / "cache-0123.arrow")
    assert [dict(record.value) for record in _records(tmp_path / "saved")] == dataset.to_list()


def test_a_saved_data_set_of_several_splits_is_refused_with_their_names(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="name one split of it: saved/test, saved/train"):
        _records(tmp_path / "saved")
    assert len(_records(tmp_path / "saved" / "test")) == len(ROWS)


@pytest.mark.parametrize("state", ["{", "{}", '{"_data_files": [{}]}'])
def test_a_saved_data_set_without_its_state_is_refused(tmp_path, state):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json is not what `save_to_disk` writes"):
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
def test_a_bad_line_spoils_itself_only(tmp_path, line, reason):
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
def test_a_bad_element_of_a_list_spoils_itself_only(tmp_path, line, reason):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n ' + line + b' , {"a": 2}]\n')
    first, bad, last = _records(path)
    assert (first.value, last.value, last.line) == ({"a": 1}, {"a": 2}, 3)
    assert bad.problem is not None
    assert bad.problem.reason is reason


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_which_name_stands_twice_is_found_in_one_pass(tmp_path, name):
    """A row of 400,000 bytes, whose last key stood twice, took 11 seconds; one of ten times as many would take 18 minutes."""
    names, calls = [f"k{n}" for n in range(1000)], []
    for twice in (names[0], names[0], names[-1]):  # the first reading of a process imports and caches
        row, header = json.dumps(dict.fromkeys(names))[:-1] + f', "{twice}": 1}}', ",".join([*names, twice])
        (tmp_path / name).write_text(row if name.endswith("jsonl") else header)
        calls.append(_calls_of_reading(tmp_path / name))
    assert calls[1] == calls[2]


def _calls_of_reading(path: Path) -> int:
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


def test_a_csv_row_with_other_cells_than_the_header_is_set_aside(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,"2\n"\n\n3\n4,5,6\n')
    assert [(record.line, record.problem and record.problem.reason) for record in _records(path)] == [
        (2, None), (5, QuarantineReason.MISSING_FIELD), (6, QuarantineReason.MISSING_FIELD),
    ]  # fmt: skip


def test_folders_and_globs_are_read_in_name_order(tmp_path):
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
def test_a_folder_that_may_not_be_read_is_not_left_out(path, mode):
    """Training on fewer pairs, and taking them for all."""
    with without_privileges() as folder:
        for name in ("a/1.jsonl", "b/2.jsonl", ".hidden/3.jsonl", "lost+found/4"):
            (folder / "data" / name).parent.mkdir(parents=True)
            (folder / "data" / name).write_text("{}\n")
        for name in (".hidden", "lost+found"):
            (folder / "data" / name).chmod(0)
        whole = [file.path.name for file in data_files(str(folder / path))]
        (folder / "data" / "b").chmod(mode)
        with pytest.raises(DataError, match=r"/data/b cannot be read: Permission denied"):
            data_files(str(folder / path))
        for name in (".hidden", "lost+found", "b"):
            (folder / "data" / name).chmod(0o755)
    assert whole == (["2.jsonl"] if "/b/" in path else ["1.jsonl", "2.jsonl"])


def test_a_link_to_where_the_user_may_not_go_is_told():
    with without_privileges() as folder:
        for name in ("private", "data"):
            (folder / name).mkdir()
            (folder / name / "1.jsonl").write_text("{}\n")
        (folder / "data" / "2.jsonl").symlink_to(folder / "private" / "1.jsonl")
        assert len(data_files(str(folder / "data"))) == 2
        (folder / "private").chmod(0)
        with pytest.raises(DataError, match=r"/data/2\.jsonl cannot be read: Permission denied"):
            data_files(str(folder / "data"))
        (folder / "private").chmod(0o755)


def test_the_folder_of_a_glob_may_have_brackets_in_its_own_name(tmp_path):
    for folder in ("mine [1]", "mine 1"):
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "1.jsonl").write_text("{}\n")
    [file] = data_files(str(tmp_path / "mine [1]" / "p*" / "[12].jsonl"))
    assert (file.name, file.path) == ("part/1.jsonl", tmp_path / "mine [1]" / "part" / "1.jsonl")
    with pytest.raises(DataError, match=r"mine \[1\]/none\.jsonl does not exist"):
        data_files(str(tmp_path / "mine [1]" / "none.jsonl"))


def test_a_file_that_is_no_longer_what_was_hashed_is_refused_once_it_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    file = DataFile(name=path.name, path=path, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    assert [record.value for record in read_records(file)] == [{"a": 1}]
    path.write_text('{"a": 2}\n')
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    words = f"{path} changed while it was read: it was {file.sha256[:12]} and is {now[:12]}"
    with pytest.raises(DataError, match=re.escape(words)):
        list(read_records(file))
    begun = read_records(file)
    next(begun)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} changed while it was read: No such file or directory; run again"):
        list(begun)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("*.jsonl", None, "matches no file"),
        ("/dev/null", None, "/dev/null is no regular file; expected a file, a folder or a glob"),
        ("notes.txt", "x", "'.txt'; expected one of .jsonl"),
        ("broken.json", '[{"a": 1}, {"a"', "not a complete JSON list"),
        ("after.json", "[] []", "extra data"),
        ("text.json", "hello", "expected a JSON list"),
        ("fake.parquet", "hello", "cannot be read as Parquet"),
        ("open.csv", 'a\n"x', "is not CSV"),
        ("cut.csv.gz", gzip.compress(b"a" * 99, mtime=0)[:-9], "cannot be read: Compressed file ended"),
        ("twice.csv", "chosen,prompt,chosen\na,b,c\n", "has two columns `chosen`"),
        ("twice.parquet", _twice(), "has two columns `chosen`"),
    ],
)
def test_an_unusable_place_is_refused_by_name(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        _records(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert words in str(caught.value)


def test_a_folder_without_data_is_refused_with_what_it_holds(tmp_path):
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(DataError, match=r"no file of the kinds .*README\.md"):
        _records(tmp_path)


def test_a_date_that_python_does_not_know_is_told(tmp_path):
    table = pa.table({"prompt": ["Why?"], "at": pa.array([2**62], pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows.parquet cannot be read as Parquet after row 0: .*; write it again"):
        list(read_records(DataFile(name="rows.parquet", path=tmp_path / "rows.parquet")))


def test_a_flipped_bit_ends_no_process(tmp_path):
    """Arrow trusts a stream's offsets and lengths: one that is wrong reads beyond the data, and ends the process."""
    _arrow(tmp_path / "whole.arrow")
    whole, file, refused = (tmp_path / "whole.arrow").read_bytes(), tmp_path / "rows.arrow", 0
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        try:
            list(read_records(DataFile(name="rows.arrow", path=file)))
        except DataError as error:
            refused += 1
            assert str(error).startswith(f"{file} ")
    assert 0 < refused < len(whole)

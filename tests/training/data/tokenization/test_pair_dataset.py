"""The reader of tokenized pairs: round trips in any number of batches, and errors for other files."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.contract.errors import DataError
from training.data.tokenization.pair_dataset import PAIRS_SCHEMA, Pairs

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=20)
PAIR = st.fixed_dictionaries({"prompt": TOKENS, "chosen": TOKENS, "rejected": TOKENS, "split": st.sampled_from("ab")})


def _write(folder: Path, batches: list[list[dict[str, Any]]]) -> None:
    with pa.ipc.new_stream(str(folder / "pairs.arrow"), PAIRS_SCHEMA) as stream:
        for batch in batches:
            stream.write_batch(pa.RecordBatch.from_pylist(batch, PAIRS_SCHEMA))


def _line(row: int, pair: dict[str, Any]) -> dict[str, Any]:
    line = {"row": row, "split": pair["split"], "prompt_length": len(pair["prompt"])}
    for side in ("chosen", "rejected"):
        tokens = pair["prompt"] + pair[side]
        line[f"{side}_ids"], line[f"{side}_mask"] = [i for i, _ in tokens], [m for _, m in tokens]
        line[f"{side}_key"] = (side[0] + str(row)).encode().ljust(32, b"\0")
    return line


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(PAIR, max_size=4), max_size=4))
def test_open_returns_the_written_pairs(batches):
    lines, row = [], 0
    for batch in batches:
        lines.append([_line(row + n, pair) for n, pair in enumerate(batch)])
        row += len(batch)
    flat = [line for batch in lines for line in batch]
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), lines)
        pairs = Pairs.open(Path(folder))
        assert len(pairs) == len(flat)
        assert pairs.rows.tolist() == [line["row"] for line in flat]
        assert pairs.indices("a").tolist() == [n for n, line in enumerate(flat) if line["split"] == "a"]
        for side in ("chosen", "rejected"):
            assert pairs.lengths(side).tolist() == [len(line[f"{side}_ids"]) for line in flat]
            assert pairs.trained_lengths(side).tolist() == [sum(line[f"{side}_mask"]) for line in flat]
            assert [key.tobytes() for key in pairs.keys(side)] == [line[f"{side}_key"] for line in flat]
            for index, line in enumerate(flat):
                sequence = pairs.sequence(index, side)
                assert sequence.ids_T.tolist() == line[f"{side}_ids"]
                assert sequence.mask_T.tolist() == line[f"{side}_mask"]
                assert pairs.prompt_ids(index) == line["chosen_ids"][: line["prompt_length"]]


def test_sequence_is_a_copy(tmp_path):
    pair = {"prompt": [(1, False)], "chosen": [(2, True)], "rejected": [(3, True)], "split": "train"}
    _write(tmp_path, [[_line(0, pair)]])
    Pairs.open(tmp_path).sequence(0, "chosen").ids_T[0] = 9
    assert Pairs.open(tmp_path).sequence(np.arange(1)[0], "chosen").ids_T.tolist() == [1, 2]


@pytest.mark.parametrize("index", [-1, 1])
def test_sequence_of_an_index_outside_raises(tmp_path, index):
    pair = {"prompt": [(1, False)], "chosen": [(2, True)], "rejected": [(3, True)], "split": "train"}
    _write(tmp_path, [[_line(0, pair)]])
    with pytest.raises(IndexError):
        Pairs.open(tmp_path).sequence(index, "chosen")


def test_open_other_files_names_them(tmp_path):
    with pytest.raises(DataError, match=r"pairs\.arrow .*\[not-tokenized-pairs\]"):
        Pairs.open(tmp_path)
    (tmp_path / "pairs.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(DataError, match=r"pairs\.arrow .*\[not-tokenized-pairs\]"):
        Pairs.open(tmp_path)
    with pa.ipc.new_stream(str(tmp_path / "pairs.arrow"), pa.schema([("row", pa.int64())])):
        pass
    with pytest.raises(DataError, match=r"pairs\.arrow .*\['row'\].*\[not-tokenized-pairs\]"):
        Pairs.open(tmp_path)

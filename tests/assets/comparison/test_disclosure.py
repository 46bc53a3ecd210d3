"""The meter of disclosure, with sums by hand, and its file after interruptions."""

import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.comparison.disclosure import Disclosed, DisclosureLog, Meter
from tests import factories
from tests.workflows.homes import check_error
from training.contract.errors import StoreError
from training.contract.protocol.artifacts import RAW_PREFERENCES
from training.contract.protocol.details import RowsDetails
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.store import Store


def rows_of(root: Path, prompts: Sequence[str]) -> Artifact[RowsDetails]:
    """Return `raw_preferences` with these held-out prompts, and the prompt `trained` in the training split."""
    store, name = Store(root / "store"), "-".join(prompts)
    splits = ["validation"] * len(prompts) + ["train"]
    turns = [[{"role": "user", "content": text}] for text in (*prompts, "trained")]
    with store.staging() as staging:
        pq.write_table(pa.table({"prompt": turns, "split": splits}), staging / "preferences.parquet")
        result = JobResult(name.encode().hex().ljust(64, "0")[:64], factories.details(RowsDetails))
        made = store.publish(staging, factories.derivation("raw_preferences", name=name), result)
    return made.of_kind(RAW_PREFERENCES)


def shown(of: str, rows: Artifact[Any], figure: str = "accuracy", **fields: Any) -> Disclosed:
    return Disclosed.model_validate({"of": of, "figure": figure, "held_out": rows.fingerprint, **fields})


def test_meter_adds_the_votes_of_all_evaluations_with_their_own_number_of_pairs(tmp_path: Path) -> None:
    """400 / 200 for an accuracy; the win not drawn yet counts the same, the drawn one 400 / 100."""
    log, rows = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab")
    log.add(shown("one", rows, pairs=200, value=0.5), rows)
    assert log.meter(rows.fingerprint, 200) == Meter(4.0, 200)
    log.add(shown("one", rows, "win", pairs=100, value=0.25), rows)
    assert log.meter(rows.fingerprint, 200) == Meter(6.0, 200)
    more = rows_of(tmp_path, "abc")
    log.add(shown("two", more, pairs=400, value=0.5), more)
    found = log.meter(more.fingerprint, 400)
    assert found == Meter(8.0, 400) and found.bound == pytest.approx(0.1)
    assert log.win("one") == 0.25 and log.win("two") is None


def test_only_held_out_pairs_with_an_earlier_prompt_count(tmp_path: Path) -> None:
    log = DisclosureLog(tmp_path, "demo")
    old, partly, new = rows_of(tmp_path, "ab"), rows_of(tmp_path, "bc"), rows_of(tmp_path, "de")
    log.add(shown("one", old, "exact"), old)
    assert math.isinf(log.meter(old.fingerprint, 2).nats)
    for rows, of in ((partly, "two"), (new, "three")):
        log.add(shown(of, rows, pairs=400, value=0.5), rows)
    assert math.isinf(log.meter(partly.fingerprint, 2).nats)
    assert log.meter(new.fingerprint, 2).nats == 2.0
    next(tmp_path.glob("disclosure/" + old.fingerprint + "*")).unlink()
    assert math.isinf(log.meter(new.fingerprint, 2).nats), "unknown prompts may be shared"


def test_same_figure_from_many_threads_is_one_line(tmp_path: Path) -> None:
    log, rows = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab")
    lines = [shown(str(number % 3), rows, pairs=10, value=0.5) for number in range(30)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda line: log.add(line, rows), lines))
    assert sorted(line.of for line in log.lines()) == ["0", "1", "2"]


def test_unfinished_line_is_replaced_and_damaged_line_is_refused(tmp_path: Path) -> None:
    log, rows = DisclosureLog(tmp_path, "demo"), rows_of(tmp_path, "ab")
    log.add(shown("one", rows, pairs=10, value=0.5), rows)
    with open(log.file, "a") as file:
        file.write('{"of": "tw')
    log.add(shown("two", rows, pairs=10, value=0.5), rows)
    assert [json.loads(line)["of"] for line in log.file.read_text().splitlines()] == ["one", "two"]
    log.file.write_text("{}\n" + log.file.read_text())
    with pytest.raises(StoreError) as refused:
        log.meter(rows.fingerprint, 10)
    check_error(refused.value, "corrupt-disclosure", log.file)

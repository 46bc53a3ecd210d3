"""The pair cache in the job: rows are converted once, and the result is that of an empty cache."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import factories
from tests.training.job_runner import JobRunner, locations_of
from tests.workflows.homes import flip
from training.contract.errors import DataError
from training.contract.store.artifact import Artifact

PARTS = {"formats": ["auto"], "held_out": [False], "duplicates": "keep", "validation_fraction": 0.3}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OF_THE_PASS = {"cached_rows", "cache_bytes", "provenance"}


def rows(count: int) -> list[dict[str, Any]]:
    """Return rows with tools, reasoning, system messages, letters of other alphabets, and some that go to quarantine."""
    made: list[dict[str, Any]] = []
    for n in range(count):
        prompt = [{"role": "user", "content": f'Question {n}? \u2028 東京 \\ " \u007f'}]
        row: dict[str, Any] = {"prompt": prompt, "chosen": [answer(f"Yes {n}")], "rejected": [answer("No")]}
        match n % 5:
            case 1:
                row["tools"] = [TOOL]
            case 2:
                row["chosen"][0]["reasoning_content"] = "Let me see."
            case 3:
                row["prompt"].insert(0, {"role": "system", "content": "Be kind."})
            case 4 if n % 2:
                row["rejected"] = row["chosen"]
        made.append(row)
    return made


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


class Setup:
    """One store, in which files are read."""

    def __init__(self, folder: Path) -> None:
        self.job_runner, self.folder = JobRunner(folder), folder

    def write(self, made: list[dict[str, Any]], suffix: str = ".jsonl", **columns: str) -> Path:
        """Write always the same file: its name is part of the artifact."""
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"rows{suffix}"
        renamed = [{columns.get(name, name): value for name, value in row.items()} for row in made]
        match suffix:
            case ".jsonl":
                file.write_text("".join(json.dumps(row) + "\n" for row in renamed))
            case ".json":
                file.write_text(json.dumps(renamed, indent=1))
            case ".parquet":
                pq.write_table(pa.Table.from_pylist(renamed), file)
        return file

    def read(self, made: list[dict[str, Any]], suffix: str = ".jsonl", **settings: Any) -> Artifact[Any]:
        columns = settings.pop("mapped", {})
        file = self.write(made, suffix, **columns)
        settings = PARTS | {"columns": [columns], "roles": [{}]} | settings
        where = locations_of([{"path": str(file), "format": "auto"}])
        job = self.job_runner.job("preferences", "raw_preferences", self.job_runner.source(), settings, where)
        for key in (job.store / "keys" / "raw_preferences").glob("*.json"):
            key.unlink()  # the files are not part of the keys in this store
        return self.job_runner.run(job)


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "world")


@pytest.fixture
def cold(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "cold")


def assert_same(made: Artifact[Any], other: Artifact[Any]) -> None:
    assert made.fingerprint == other.fingerprint
    for name in ("preferences.parquet", "quarantine.parquet"):
        assert pq.read_table(made.file(name)).equals(pq.read_table(other.file(name)))
    assert factories.differing(made.details, other.details) <= OF_THE_PASS


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_only_new_rows_are_converted(setup: Setup, cold: Setup, suffix: str):
    first = setup.read(rows(300), suffix)
    good = first.details.counts.pairs
    assert first.details.cached_rows == 0 and good < 300
    second = setup.read(rows(320), suffix)
    assert second.details.cached_rows == good
    assert_same(second, cold.read(rows(320), suffix))


def test_rows_elsewhere_in_a_file_are_known(setup: Setup, cold: Setup):
    """On other lines, twice, in other splits, and without duplicates."""
    made = rows(200)
    setup.read(made)
    moved = random.Random(0).sample([*made, *made[:40]], 220)
    changes: list[dict[str, Any]] = [{}, {"validation_fraction": 0.8}, {"duplicates": "drop"}, {"fractions": [0.5]}]
    for settings in (*changes, {"names": ["a"]}):
        defaults: dict[str, Any] = {"fractions": [1.0], "names": [None]}
        second = setup.read(moved, **defaults | settings)
        assert second.details.cached_rows > 150
        assert_same(second, cold.read(moved, **defaults | settings))


def test_a_mapped_column_is_checked_although_all_rows_are_known(setup: Setup, cold: Setup):
    mapped = {"chosen": "better"}
    setup.read(rows(50), mapped=mapped)
    second = setup.read(rows(60), mapped=mapped)
    assert second.details.cached_rows > 40
    assert_same(second, cold.read(rows(60), mapped=mapped))
    assert setup.read(rows(50)).details.cached_rows == 0, "another mapping"
    for _ in range(2):
        with pytest.raises(DataError, match=r"nothere.*\[unknown-column\]$"):
            setup.read(rows(50), columns=[{"prompt": "nothere"}])


def test_rows_of_a_corrupt_shard_are_converted_again(setup: Setup, cold: Setup):
    setup.read(rows(50))
    [shard] = (setup.job_runner.store / "pairs").glob("*/*/rows.arrow")
    flip(shard)
    assert_same(setup.read(rows(51)), cold.read(rows(51)))
    assert list((setup.job_runner.store / "corrupt" / "pairs").glob("*/*"))


def test_a_line_that_is_not_utf8_is_not_taken_for_the_text_that_describes_it(setup: Setup):
    """Its byte is shown as \\xff, and another row has these letters."""
    bad = b'{"prompt": "Why \xff?", "chosen": "a", "rejected": "b"}\n'
    shown = json.dumps({"prompt": "Why \\xff?", "chosen": "a", "rejected": "b"}).replace("\\\\", "\\")
    assert shown.encode() in bad.replace(b"\xff", b"\\xff")
    good = json.dumps({"prompt": "Why?", "chosen": "a", "rejected": "b"}) + "\n"
    file = setup.write([])
    where = locations_of([{"path": str(file), "format": "auto"}])
    for _ in range(2):
        file.write_bytes(good.encode() + bad)
        where = locations_of([{"path": str(file), "format": "auto"}])
        job = setup.job_runner.job("preferences", "raw_preferences", setup.job_runner.source(), PARTS, where)
        for key in (job.store / "keys" / "raw_preferences").glob("*.json"):
            key.unlink()
        made = setup.job_runner.run(job)
        assert made.details.counts.pairs == made.details.counts.quarantined == 1

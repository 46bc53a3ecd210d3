"""The token cache in the job: rows are tokenized once, and the result is that of an empty cache."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import factories
from tests.training.job_runner import NAMED, JobRunner, hashes_of
from tests.workflows.homes import flip
from training.contract.errors import DataError
from training.contract.protocol.job import Job
from training.contract.store.artifact import Artifact

pytestmark = [pytest.mark.shared, pytest.mark.slow]
RULES = {"template_kwargs": {}, "train_on": "last_response", "max_length": 90, "over_length": "drop"}
OF_THE_PASS = {"tokenized", "cached_rows", "cache_bytes", "token_rules", "provenance"}
ODD = [("word " * 200, "a", "b"), ("q", "a<|im_end|>b", "c")]  # too long; with an end of turn in the data


def rows(count: int) -> list[tuple[str, str, str]]:
    return [*ODD, *((f"Question {n}?", f"Answer {n}.", f"No {n * n}.") for n in range(count))]


class Setup:
    """One store, in which rows are read and tokenized."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.job_runner, self.tokenizer, self.count = JobRunner(folder), tokenizer, 0

    def job(self, pairs: list[tuple[str, str, str]], template: Path | None = None, **rules: Any) -> Job:
        self.job_runner.folder.mkdir(parents=True, exist_ok=True)
        file = self.job_runner.folder / f"rows{self.count}.jsonl"
        self.count += 1
        file.write_text(
            "".join(json.dumps({"prompt": p, "chosen": c, "rejected": r}) + "\n" for p, c, r in pairs), encoding="utf-8"
        )
        raw = self.job_runner.read(file, 0.2)
        where = {"tokenizer": str(self.tokenizer), "chat_template": str(template) if template else None, "named": NAMED}
        settings = RULES | rules | hashes_of(self.tokenizer, template)
        spec = self.job_runner.run(self.job_runner.job("tokenizer", "tokenization_spec", {}, settings, where))
        inputs: dict[str, Artifact[Any] | Path] = {"raw_preferences": raw, "tokenization_spec": spec}
        return self.job_runner.job("pairs", "tokenized_pairs", inputs, {}, {"named": NAMED})

    def tokenize(self, pairs: list[tuple[str, str, str]], template: Path | None = None, **rules: Any) -> Artifact[Any]:
        return self.job_runner.run(self.job(pairs, template, **rules))


@pytest.fixture
def setup(tmp_path: Path, tiny_chat: Path) -> Setup:
    return Setup(tmp_path / "world", tiny_chat)


@pytest.fixture
def cold(tmp_path: Path, tiny_chat: Path) -> Setup:
    return Setup(tmp_path / "cold", tiny_chat)


def counted(made: Artifact[Any]) -> tuple[int, int]:
    return made.details.tokenized, made.details.cached_rows


def assert_same(made: Artifact[Any], other: Artifact[Any]) -> None:
    assert made.fingerprint == other.fingerprint
    assert made.file("pairs.arrow").read_bytes() == other.file("pairs.arrow").read_bytes()
    differing = factories.differing(made.details, other.details)
    assert differing <= OF_THE_PASS


def test_only_new_rows_are_tokenized(setup: Setup, cold: Setup):
    before, after = rows(400), rows(420)
    first = setup.tokenize(before)
    assert counted(first) == (402, 0)
    assert first.details.counts.dropped == 2 and len(first.details.reasons) == 2
    second = setup.tokenize(after)
    assert counted(second) == (20, 402)
    assert_same(second, cold.tokenize(after))


def test_rows_in_another_order_are_known(setup: Setup, cold: Setup):
    """Also twice, and with some rows missing."""
    before = rows(300)
    setup.tokenize(before)
    after = random.Random(0).sample([*before, *before[:50]], 250)
    second = setup.tokenize(after)
    assert counted(second) == (0, 250)
    assert_same(second, cold.tokenize(after))


def test_another_rule_shares_no_rows(setup: Setup):
    setup.tokenize(rows(30))
    assert counted(setup.tokenize(rows(30), max_length=80)) == (32, 0)
    assert counted(setup.tokenize(rows(30), template_kwargs={"unused": 1})) == (32, 0)
    assert counted(setup.tokenize(rows(31))) == (1, 32)


def test_rows_of_a_corrupt_shard_are_tokenized_again(setup: Setup, cold: Setup):
    setup.tokenize(rows(40))
    [shard] = (setup.job_runner.store / "tokens").glob("*/*/rows.arrow")
    flip(shard)
    assert_same(setup.tokenize(rows(41)), cold.tokenize(rows(41)))
    assert list((setup.job_runner.store / "corrupt" / "tokens").glob("*/*"))


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_pair_that_is_too_long_is_an_error_also_from_the_cache(setup: Setup, is_cached: bool):
    job = setup.job(rows(10), over_length="error")
    for _ in range(1 + is_cached):
        with pytest.raises(DataError, match=r"row 0 \(rows0.jsonl, line 1\) has .*\[pair-too-long\]$"):
            setup.job_runner.run(job)


PROGRAM = """
import sys, time
from pathlib import Path
from training import main
from training.contract.protocol.job import Job
from training.contract.store import row_cache
from training.data.tokenization import cached_tokens
from training.distributed import ALONE
row_cache.COMMIT_SECONDS, cached_tokens._BATCH_ROWS = 0.0, 16
encode = cached_tokens.encode_batches
def slowly(*given):
    for done in encode(*given):
        time.sleep(0.1)
        yield done
cached_tokens.encode_batches = slowly
main.make(Job.read(Path(sys.argv[1])), ALONE)
"""


def test_a_killed_pass_resumes(setup: Setup, cold: Setup):
    job = setup.job(rows(400))
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(job.path)]) as killed:
        shards = job.store / "tokens"
        while len(list(shards.glob("*/*"))) < 3 and killed.poll() is None:
            time.sleep(0.02)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL, "it ended before it could be killed"
    made = setup.job_runner.run(job)
    tokenized, cached = counted(made)
    assert tokenized + cached == 402 and 48 <= cached < 402
    assert_same(made, cold.tokenize(rows(400)))


def test_a_row_that_fills_the_memory_is_dropped(setup: Setup, tmp_path: Path):
    """The template is harmless for the probes."""
    template = tmp_path / "hostile.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'Question 7?' %}{{ 'a' * 10 ** 10 }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    made = setup.tokenize(rows(20), template)
    assert made.details.counts.dropped == 3 and made.details.counts.pairs == 19
    [detail] = [drop.detail for drop in made.details.dropped_examples if drop.row == 9]
    assert "more than 2 GiB of memory" in detail

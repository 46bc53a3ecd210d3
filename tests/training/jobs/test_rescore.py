"""Rescored pairs, compared with plain transformers and with a changed table."""

import json
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests import factories
from tests.training.runs import SIDES
from training.contract.errors import UsageError
from training.contract.store.logprob_table import LogProbTable
from training.jobs import rescore
from training.scoring.reference_check import evenly_spaced


def rescored(inputs: Any, rows: int | list[int]) -> list[dict[str, Any]]:
    job = inputs.job("proof", {"rows": rows})
    rescore.run(factories.context(job))
    found: list[dict[str, Any]] = json.loads((job.staging / "rescored.json").read_text())
    return found


def test_rescored_values_match_plain_transformers(tiny_inputs: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_inputs.model)
    for row in rescored(tiny_inputs, [103, 110, 144]):
        example = tiny_inputs.examples[row["row"] - 100]
        for side in SIDES:
            expected = float(tiny_inputs.plain_logprob(model, example, side))
            assert row[side]["live"] == pytest.approx(expected, abs=1e-4)
            assert abs(row[side]["live"] - row[side]["stored"]) <= row[side]["allowed"]
            assert row[side]["allowed"] == pytest.approx(0.001 * sum(example[f"{side}_mask"]) ** 0.5)


def test_rescore_of_a_number_takes_evenly_spaced_rows(tiny_inputs: Any) -> None:
    assert [row["row"] for row in rescored(tiny_inputs, 5)] == [100, 111, 122, 133, 144]
    assert len(rescored(tiny_inputs, 1000)) == 45


def test_rescore_with_changed_table_shows_the_difference(tiny_inputs: Any) -> None:
    table = LogProbTable.read(tiny_inputs.reference, len(tiny_inputs.examples))
    table.logprobs_P2[22, 1] += 0.02
    table.write(tiny_inputs.reference)
    wrong = [
        (row["row"], side)
        for row in rescored(tiny_inputs, 45)
        for side in SIDES
        if abs(row[side]["live"] - row[side]["stored"]) > row[side]["allowed"]
    ]
    assert wrong == [(122, "rejected")]


def test_rescore_of_unknown_row_raises(tiny_inputs: Any) -> None:
    with pytest.raises(UsageError, match=r"\[100\] of \[100, 7\].*\[row-not-tokenized\]"):
        rescored(tiny_inputs, [100, 7])


def test_evenly_spaced_includes_first_and_last() -> None:
    assert evenly_spaced(np.arange(0), 16).tolist() == []
    assert evenly_spaced(np.array([4, 7, 9]), 16).tolist() == [4, 7, 9]
    assert evenly_spaced(np.arange(101), 3).tolist() == [0, 50, 100]

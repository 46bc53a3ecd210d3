"""Difference between a policy and its reference model. Oracle: hand-written tables."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.bodies import checks
from assets.bodies.policy_difference import PolicyDifference, difference
from training.contract.store.artifact import Artifact, JobResult
from training.contract.store.manifest import Derivation
from training.contract.store.store import Store


def evaluation(folder: Path, columns: dict[str, Any], answers: list[tuple[str, str]]) -> Artifact[Any]:
    store = Store(folder / "store")
    with store.staging() as staging:
        pq.write_table(pa.table(columns), staging / "pairs.parquet")
        samples = [{"before": before, "after": after} for before, after in answers]
        (staging / "samples.json").write_text(json.dumps(samples))
        how = Derivation(kind="evaluation", code_version="1", inputs={}, settings={})
        return store.publish(staging, how, JobResult("e" * 64))


def test_difference_is_by_token_and_by_pair(tmp_path: Path) -> None:
    """Two pairs, by hand: log-ratios +2 (4 tokens), -1 (2), -3 (3) and 0 (8), so (.5 + .5 + 1 + 0) / 4 nats per token.

    The margins are 2 - (-3) and -1 - 0; their mean is 2.
    """
    columns = {
        "row": [0, 1],
        "chosen_tokens": [4, 2],
        "rejected_tokens": [3, 8],
        "policy_chosen_logprob": [-8.0, -6.0],
        "reference_chosen_logprob": [-10.0, -5.0],
        "policy_rejected_logprob": [-12.0, -20.0],
        "reference_rejected_logprob": [-9.0, -20.0],
    }
    result = difference(evaluation(tmp_path, columns, [("a", "a"), ("a", "b"), ("c", "")]))
    assert result == PolicyDifference(shift=0.5, margin=2.0, changed=2, samples=3)


@pytest.mark.parametrize(
    ("shift", "margin", "changed", "samples", "passes"),
    [
        (0.0099, 0.19, 1, 8, False),
        (0.0099, -0.19, 0, 0, False),
        (0.0101, 0.0, 0, 8, True),
        (0.0, 0.21, 0, 8, True),
        (0.0, -0.21, 0, 0, True),  # the policy changed in the wrong direction
        (0.0, 0.0, 2, 8, True),
    ],
)
def test_check_with_all_measures_near_zero_warns(
    shift: float, margin: float, changed: int, samples: int, passes: bool
) -> None:
    result = checks.differs(PolicyDifference(shift, margin, changed, samples))
    assert (result.passed, result.severity) == (passes, dg.AssetCheckSeverity.WARN)


def test_check_describes_all_measures() -> None:
    description = checks.differs(PolicyDifference(1.84e-5, 0.0048, 0, 8)).description or ""
    for value in ("hardly differs", "1.8e-05 nats", "0.0048 nats", "0 of 8 sampled answers", "learning rate"):
        assert value in description

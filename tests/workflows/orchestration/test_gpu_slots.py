"""The slots of the pool `gpu` follow engine.yaml, in a real instance of Dagster."""

from pathlib import Path

import dagster as dg
import pytest

from assets.pipeline.graph import GPU_POOL
from workflows.orchestration.resources import dagster_instance

pytestmark = pytest.mark.slow


def slots() -> int | None:
    with dagster_instance() as instance:
        limits = {limit.name: limit.limit for limit in instance.event_log_storage.get_pool_limits()}
        return limits.get(GPU_POOL, instance.global_op_concurrency_default_limit)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEDIGREE_HOME", str(tmp_path))
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    return tmp_path


def test_slots_of_the_pool_follow_engine_yaml(home: Path) -> None:
    """A wrong file changes nothing. Without the file, the limit of dagster.yaml holds again."""
    assert slots() == 1
    (engine := home / "engine.yaml").write_text("engine: slurm\nconcurrent: 4\n")
    assert slots() == 4
    engine.write_text("engine: [\n")
    assert slots() == 4
    engine.write_text("engine: slurm\n")
    assert slots() == 1
    engine.write_text("engine: slurm\nconcurrent: 3\n")
    assert slots() == 3
    engine.unlink()
    assert slots() == 1


def test_limit_that_the_user_set_in_dagster_stays_without_engine_yaml(home: Path) -> None:
    with dagster_instance() as instance:
        instance.event_log_storage.set_concurrency_slots(GPU_POOL, 2)
    assert slots() == 2


def test_two_runs_hold_slots_at_once(home: Path) -> None:
    (home / "engine.yaml").write_text("engine: slurm\nconcurrent: 2\n")
    with dagster_instance() as instance:
        claims = [
            instance.event_log_storage.claim_concurrency_slot(GPU_POOL, run, "step").is_claimed
            for run in ("a", "b", "c")
        ]
        assert claims == [True, True, False]
        assert isinstance(instance, dg.DagsterInstance)

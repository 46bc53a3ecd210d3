"""Wrong reference log-probs: the reference check refuses them, and one command has them scored again."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.workflows.homes import Home, check_error, check_values
from training.contract.protocol.artifacts import REFERENCE_LOGPROBS
from training.contract.store.artifact import JobResult
from training.contract.store.artifact_kind import ArtifactKind
from training.contract.store.logprob_cache import LogprobCache
from training.contract.store.logprob_shard import open_shard
from training.contract.store.logprob_table import TABLE_FILE
from training.contract.store.manifest import Source
from training.contract.store.shard_cache import ShardDetails
from training.contract.store.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def home(first_run, tmp_path):
    """Return a copy of the home before scoring and training, with a wrong shard of the log-prob cache."""
    home = Home(tmp_path / "home")
    shutil.copytree(first_run[0].path, home.path)
    poison(Store(home.path / "store"))
    for place in ("store/policy", "store/keys/policy", "jobs"):
        shutil.rmtree(home.path / place)
    return home


def poison(store: Store) -> None:
    """Publish log-probs that are half a nat too low at every token, as the scoring code would."""
    [rule] = [folder.name for folder in (store.root / "memo").iterdir()]
    shards = [
        open_shard(store.open(ArtifactKind(f"memo/{rule}", ShardDetails), name))
        for name in store.fingerprints(f"memo/{rule}")
    ]
    tokens_N = np.concatenate([load_file(shard.artifact.folder / "tokens.safetensors")["tokens"] for shard in shards])
    keys_SK = np.concatenate([shard.keys_SK for shard in shards])
    counts_S = np.concatenate([shard.counts_S for shard in shards])
    software = shards[0].artifact.details.software
    for place in (f"memo/{rule}", "reference_logprobs", "keys/reference_logprobs"):
        shutil.rmtree(store.root / place)
    LogprobCache(store, rule, software=software).add(keys_SK, counts_S, tokens_N - np.float32(0.5))


def fingerprints(report) -> dict[str, str]:
    return {asset["asset"]: asset["fingerprint"] for asset in report["assets"]}


@pytest.mark.system
def test_refuted_log_probs_are_scored_again_by_one_command(home: Home, first_run, small_recipe):
    undisturbed, sequences = fingerprints(first_run[1]), count(home)
    failed = home.pedigree("run", str(small_recipe), "--json")
    assert failed.returncode == 1
    [policy] = [asset for asset in json.loads(failed.stdout)["assets"] if asset["outcome"] == "failed"]
    assert policy["asset"] == "policy"
    check_error(policy["error"], "reference-check-failed", "`pedigree rescore RECIPE`")
    assert home.pedigree("run", str(small_recipe)).returncode == 1, "it would stay so for ever"

    done = home.pedigree("rescore", str(small_recipe), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["recipe"], answer["sequences"], answer["shards"]) == ("small", sequences, 1)
    kept = [path for folder in answer["folders"] for path in Path(folder).glob("*/*/manifest.json")]
    assert [path.parent.name for path in kept if "reference_logprobs" in str(path)] == answer["tables"]
    assert len(kept) == 2 and count(home) == 0

    again = home.run(str(small_recipe))
    assert fingerprints(again) == undisturbed
    outcomes = {asset["asset"]: asset["outcome"] for asset in again["assets"]}
    assert (
        outcomes["reference_logprobs"] == outcomes["policy"] == "computed" and outcomes["tokenized_pairs"] == "reused"
    )


def count(home: Home) -> int:
    """Return the number of cached sequences."""
    return sum(len(load_file(file)["counts"]) for file in (home.path / "store" / "memo").glob("*/*/index.safetensors"))


def test_tables_of_other_pairs_and_log_probs_of_other_models_stay(checkout):
    """Another recipe's table of the same log-probs may be right; its own reference check decides."""
    store, others = Store(checkout.home / "store"), "2" * 64
    [name] = store.fingerprints("reference_logprobs")
    [rule] = [folder.name for folder in (store.root / "memo").iterdir()]
    table = store.open(REFERENCE_LOGPROBS, name)
    pairs = Source(kind="tokenized_pairs", fingerprint="1" * 64)
    how = table.derivation.model_copy(update={"inputs": {**table.derivation.inputs, pairs.kind: pairs}})
    with store.staging() as staging:
        shutil.copyfile(table.file(TABLE_FILE), staging / TABLE_FILE)
        store.publish(staging, how, JobResult(others, table.details))
    LogprobCache(store, others).add(np.zeros((1, 32), np.uint8), np.ones(1, np.int32), np.zeros(1, np.float32))
    answer = Home(checkout.home).query("rescore", str(checkout.folder))
    assert answer["tables"] == [name] and store.fingerprints("reference_logprobs") == [others]
    assert store.fingerprints(f"memo/{rule}") == [] and len(store.fingerprints(f"memo/{others}")) == 1


def test_rescore_without_log_probs_sets_nothing_aside(checkout):
    home = Home(checkout.home)
    assert home.query("rescore", str(checkout.folder))["shards"] > 0
    again = home.invoke("rescore", str(checkout.folder), "--json")
    assert again.exit_code == 2
    check_error(json.loads(again.stdout.splitlines()[-1])["error"], "no-scores", "`pedigree run ")


def test_rescore_prints_counts_folder_and_next_step(checkout):
    sequences = count(Home(checkout.home))
    output = Home(checkout.home).invoke("rescore", str(checkout.folder)).output
    check_values(output, f"{sequences:,} sequences", "1 table ", checkout.home / "store" / "corrupt" / "memo")
    check_values(output, "`pedigree gc --delete`", f"`pedigree run {checkout.pipeline.argument}`")

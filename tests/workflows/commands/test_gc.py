"""Garbage collection of unreferenced things, and the effects of a rollback."""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import sqlite3
import time
from logging import getLogger

import dagster as dg
import mlflow
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from assets.execution.materialize import publish_resolved
from assets.execution.run_liveness import PROCESS_TAG
from assets.inputs.current import ResolvedInput
from assets.pipeline.graph import GRAPH
from model_registry.model_version import MERGED, ROLLED_BACK_TAG
from tests import factories
from tests.workflows.homes import Home, flip, latest
from training.contract.errors import CorruptRecord, RegistryError, StoreError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.artifacts import KINDS
from training.contract.protocol.details import LogProbsDetails
from training.contract.protocol.job import Input, Job
from training.contract.store.artifact import JobResult
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.manifest import Derivation, Source
from training.contract.store.row_cache import TokenCache, keys_of
from training.contract.system.locks import holding
from workflows.commands.gc import GarbageCollector, collect
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow
YEARS_AGO = 1_577_836_800


def named(checkout, kind, delete=False):
    found = collect(checkout.services, checkout.instance, delete)
    return [item.fingerprint for item in found.garbage if item.kind == kind]


def publish(checkout, text, kind="training_spec", **inputs):
    """Publish an unreferenced artifact."""
    how = Derivation(kind=kind, code_version="1", inputs=inputs, settings={"text": text})
    return publish_resolved(
        checkout.services, KINDS[kind], ResolvedInput(how, f"{len(text):064x}", {"spec.json": text}), getLogger()
    ).artifact


def score(checkout, rule):
    keys = np.arange(32, dtype=np.uint8)[None, :]
    return LogprobCache(checkout.services.store, rule).add(keys, np.array([1], np.int32), np.array([-1.0], np.float32))


def job_of(checkout, asset):
    """Return the job that made `asset`, in the copy of the home."""
    [path] = checkout.home.glob(f"jobs/{asset}-*/job.json")
    return Job.read(path).model_copy(update={"folder": path.parent, "store": checkout.home / "store"})


def test_gc_removes_only_unreferenced_items(checkout):
    orphan, shard = publish(checkout, "orphan"), score(checkout, "f" * 64)
    [model] = checkout.services.store.fingerprints("reference_model")
    of_a_model_that_stays = score(checkout, scoring_rule(model, "bfloat16"))
    aside = checkout.services.store.set_aside("training_spec", publish(checkout, "broken bytes").fingerprint)
    dry = collect(checkout.services, checkout.instance)
    kinds = {item.kind for item in dry.garbage}
    assert kinds == {"training_spec", "job", "corrupt", f"memo/{'f' * 64}"} and not dry.deleted
    assert orphan.folder.is_dir() and dry.bytes == sum(item.bytes for item in dry.garbage) > 0
    done = collect(checkout.services, checkout.instance, delete=True)
    assert done.deleted and done.garbage == dry.garbage and done.kept == len(GRAPH) - 1
    assert not orphan.folder.exists() and not shard.folder.exists() and not aside.exists()
    assert of_a_model_that_stays.folder.is_dir(), "though no table was made in this dtype"
    assert checkout.services.store.find("training_spec", orphan.derivation.key) is None
    assert collect(checkout.services, checkout.instance).garbage == []
    found = status(checkout.pipeline, checkout.services, checkout.instance)
    assert {asset.state for asset in found} == {"fresh"}


def test_gc_with_another_dagster_instance_removes_nothing(checkout):
    """This home's current artifacts are in the records of another Dagster instance."""
    [note] = (checkout.home / "records").iterdir()
    with dg.DagsterInstance.local_temp() as other:
        other.report_runless_asset_event(dg.AssetMaterialization(checkout.pipeline.key("policy")))
        with pytest.raises(StoreError, match=rf" \S+/home/dagster, .* {note} .*\[several-instances\]$"):
            collect(checkout.services, other, delete=True)
    assert list(checkout.home.glob("jobs/*"))
    with dg.DagsterInstance.from_config(str(checkout.home / "dagster")) as first:
        assert {item.kind for item in collect(checkout.services, first).garbage} == {"job"}


def test_gc_keeps_targets_of_links(checkout, tmp_path):
    """A link in place of a kind of artifact, a scoring rule, a downloaded model, or a set-aside artifact."""
    places = ["store/proof", f"store/memo/{'a' * 64}", "mlflow/downloads/other", "store/corrupt/policy"]
    for number, place in enumerate(places):
        (tmp_path / f"elsewhere{number}" / "folder").mkdir(parents=True)
        (tmp_path / f"elsewhere{number}" / "folder" / "file").write_text("somebody else's")
        (checkout.home / place).parent.mkdir(parents=True, exist_ok=True)
        (checkout.home / place).symlink_to(tmp_path / f"elsewhere{number}")
    found = collect(checkout.services, checkout.instance, delete=True)
    assert {item.kind for item in found.garbage} == {"job"}
    assert len(list(tmp_path.glob("elsewhere*/folder/file"))) == len(places)


def test_gc_with_corrupt_records_removes_nothing(checkout):
    """Their manifests have the same facts. Without a manifest too, an artifact's inputs are unknown and may be needed."""
    for path in checkout.home.glob("store/keys/*/*.json"):
        flip(path, 0)  # in the middle are measured figures, which no key covers
    assert {item.kind for item in collect(checkout.services, checkout.instance).garbage} == {"job"}
    [manifest] = checkout.home.glob("store/policy/*/manifest.json")
    flip(manifest)
    with pytest.raises(CorruptRecord, match=rf"^{checkout.home}/store/keys/policy/.*\[corrupt-record\]$"):
        collect(checkout.services, checkout.instance, delete=True)
    assert manifest.is_file()


def test_gc_with_a_corrupt_later_derivation_removes_nothing(checkout):
    """The manifest records only the first derivation. Its inputs may be others."""
    key, ways = checkout.pipeline.key("training_spec"), [publish(checkout, text) for text in ("old", "new")]
    assert ways[0].folder == ways[1].folder
    recorded = latest(checkout.instance, key).tags
    for way in ways:
        tags, metadata = {**recorded, "dagster/data_version": way.fingerprint}, {"key": way.derivation.key}
        checkout.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=tags, metadata=metadata))
        flip(checkout.services.store.record_file("training_spec", way.derivation.key))
        with contextlib.nullcontext() if way is ways[0] else pytest.raises(CorruptRecord):
            collect(checkout.services, checkout.instance)


def test_gc_keeps_lineage_and_log_prob_cache_of_a_version(checkout):
    """A Dagster instance without a single materialization, as after all records were deleted.

    `prequential_scores` says that nothing has arrived. Neither the lineage nor any evidence refers to it.
    """
    shutil.rmtree(checkout.home / "records")
    with dg.DagsterInstance.ephemeral() as instance:
        found = collect(checkout.services, instance)
    assert {item.kind for item in found.garbage} == {"job", "prequential_scores"}


def test_gc_with_another_registry_removes_nothing(checkout):
    """As in a shell without MLFLOW_TRACKING_URI: the references of the versions are unknown. Or all versions were deleted."""
    mlflow.MlflowClient(checkout.services.registry.tracking_uri).delete_registered_model("small")
    with pytest.raises(RegistryError, match=r"mlflow\.db .* small\. .*MLFLOW_TRACKING_URI.*\[releases-missing\]"):
        collect(checkout.services, checkout.instance, delete=True)
    assert list(checkout.home.glob("jobs/*"))
    released = checkout.pipeline.key("released_model")
    checkout.instance.wipe_assets([released])
    assert {item.kind for item in collect(checkout.services, checkout.instance).garbage} == {"job"}
    # Dagster knows it, as after a first run that ended before its release.
    checkout.instance.report_runless_asset_event(dg.AssetObservation(released))
    assert {item.kind for item in collect(checkout.services, checkout.instance).garbage} == {"job"}


def test_gc_with_another_registry_keeps_set_aside_artifacts(checkout):
    """Although nothing else is left: a command that a user has to fix must refuse before it deletes."""
    mlflow.MlflowClient(checkout.services.registry.tracking_uri).delete_registered_model("small")
    for kind in (*GRAPH, "memo", "proof"):
        shutil.rmtree(checkout.home / "store" / kind, ignore_errors=True)
    (aside := checkout.home / "store" / "corrupt" / "policy").mkdir(parents=True)
    with pytest.raises(RegistryError, match=r" small\. .*\[releases-missing\]"):
        collect(checkout.services, checkout.instance, delete=True)
    assert aside.is_dir()


def test_gc_keeps_folders_of_running_and_resumable_jobs(checkout):
    running, interrupted = (job_of(checkout, asset) for asset in ("reference_logprobs", "policy"))
    staging = [running.staging, checkout.home / "store" / "staging" / "policy-abandoned"]
    for folder in staging:
        folder.mkdir(parents=True)
    lock = checkout.home / "store" / "locks" / f"{running.artifact}-{running.derivation.key}.lock"
    interrupted = interrupted.model_copy(update={"settings": interrupted.settings.model_copy(update={"seed": 1})})
    interrupted.write()
    (interrupted.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = named(checkout, "job")
        assert running.folder.name not in found and interrupted.folder.name not in found and len(found) == 5
        assert named(checkout, "staging") == []
    assert running.folder.name in named(checkout, "job")
    assert named(checkout, "staging") == sorted(folder.name for folder in staging)


def test_gc_keeps_inputs_of_a_running_job_with_their_lineage(checkout):
    below, base = publish(checkout, "below"), publish(checkout, "a base", "base_model")
    read = publish(checkout, "read", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    shard = score(checkout, rule := scoring_rule(base.fingerprint, "float32"))
    job = job_of(checkout, "policy")
    inputs = {
        artifact.manifest.kind: Input(
            kind=artifact.manifest.kind, fingerprint=artifact.fingerprint, folder=artifact.folder
        )
        for artifact in (read, base)
    }
    job = job.model_copy(update={"inputs": {**job.inputs, **inputs}})
    job.write()
    with holding([checkout.services.store.lock_file(job.artifact, job.derivation.key)]):
        assert named(checkout, "training_spec", delete=True) == named(checkout, f"memo/{rule}") == []
    assert named(checkout, "training_spec") == sorted([below.fingerprint, read.fingerprint])
    assert named(checkout, f"memo/{rule}") == [shard.fingerprint]


def test_gc_keeps_the_cache_of_a_table_of_another_scoring(checkout):
    """Another version of the program made that table: no current rule, of any model, names its log-probs."""
    store, key, rule = checkout.services.store, checkout.pipeline.key("reference_logprobs"), "e" * 64
    shard, recorded = score(checkout, rule), latest(checkout.instance, key).tags
    how = Derivation(kind="reference_logprobs", code_version="0", inputs={}, settings={})
    with store.staging() as staging:
        table = store.publish(staging, how, JobResult("a" * 64, factories.details(LogProbsDetails, rule=rule)))
    for fingerprint_of_latest, garbage in (
        (table.fingerprint, []),
        (recorded["dagster/data_version"], [shard.fingerprint]),
    ):
        tags = {**recorded, "dagster/data_version": fingerprint_of_latest}
        checkout.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=tags))
        assert named(checkout, f"memo/{rule}") == garbage


@pytest.mark.parametrize("kind", [MERGED, "proof"])
def test_gc_removes_artifacts_of_auxiliary_kinds(checkout, kind):
    orphan = publish(checkout, f"a {kind}", kind)
    assert named(checkout, kind, delete=True) == [orphan.fingerprint] and not orphan.folder.exists()


def test_gc_removes_checkpoints_of_a_published_job(checkout):
    """Not while the published artifact is missing: a corrupt policy that was moved away is trained again."""
    job = job_of(checkout, "policy")
    (job.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    [policy] = checkout.home.glob("store/policy/*")
    policy.rename(away := checkout.home / "away")
    assert job.folder.name not in named(checkout, "job", delete=True)
    away.rename(policy)
    assert job.folder.name in named(checkout, "job", delete=True) and not job.folder.exists()


def test_gc_keeps_items_in_use_since_they_were_listed(checkout):
    job = job_of(checkout, "policy")
    job.staging.mkdir(parents=True)
    aside = checkout.home / "store" / "staging" / "claimed"
    aside.mkdir()
    store, spec = checkout.services.store, publish(checkout, "spec")
    sweep = GarbageCollector(checkout.services, checkout.instance)
    names = (job.folder.name, job.staging.name, aside.name, spec.fingerprint)
    items = [item for item in sweep.garbage() if item.fingerprint in names]
    assert len(items) == 4
    keys = [(job.artifact, job.derivation.key), ("training_spec", spec.derivation.key)]
    with holding([*(store.lock_file(*key) for key in keys), aside.with_name("claimed.lock")]) as free:
        assert free
        assert [sweep.remove(item) for item in items] == [False] * 4
    interrupted = job.model_copy(update={"settings": job.settings.model_copy(update={"seed": 1})})
    interrupted.write()
    (interrupted.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    assert [item.kind for item in items if sweep.remove(item)] == ["training_spec", "staging", "staging"]
    assert store.record("training_spec", spec.derivation.key) is None
    assert job.folder.is_dir() and not job.staging.exists() and not aside.exists()


@pytest.mark.parametrize("text", ["old", "new"], ids=["found in the store", "made again in another way"])
def test_gc_keeps_items_used_since_they_were_listed(checkout, text):
    """Its lock is free again: a run that took it may begin and end during the removal."""
    orphan, left = publish(checkout, "old"), publish(checkout, "left")
    sweep = GarbageCollector(checkout.services, checkout.instance)
    items = {item.fingerprint: item for item in sweep.garbage() if item.kind == "training_spec"}
    assert set(items) == {orphan.fingerprint, left.fingerprint}
    used = publish(checkout, text)
    assert used.folder == orphan.folder
    assert not sweep.remove(items[orphan.fingerprint]) and sweep.remove(items[left.fingerprint])
    for derivation in (orphan.derivation, used.derivation):
        assert checkout.services.store.find("training_spec", derivation.key) is not None
    assert named(checkout, "training_spec", delete=True) == [orphan.fingerprint]


def test_gc_keeps_an_artifact_being_published(checkout):
    """The derivation may be unknown: the record of its key is written last."""
    orphan = publish(checkout, "old")
    with holding([checkout.services.store.lock_file("training_spec", orphan.fingerprint)]):
        assert named(checkout, "training_spec", delete=True) == []
    assert named(checkout, "training_spec", delete=True) == [orphan.fingerprint]


def test_gc_keeps_artifacts_reused_by_a_running_run(checkout):
    """With its inputs. Dagster records it at the end of the step."""
    below = publish(checkout, "below")
    orphan = publish(checkout, "old", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    for artifact in (below, orphan):
        os.utime(artifact.folder, (YEARS_AGO, YEARS_AGO))
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    checkout.instance.add_run(run)
    assert named(checkout, "training_spec") == sorted([below.fingerprint, orphan.fingerprint])
    publish(checkout, "old", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    assert named(checkout, "training_spec", delete=True) == []
    checkout.instance.report_run_failed(run)
    assert named(checkout, "training_spec") == sorted([below.fingerprint, orphan.fingerprint])


def test_gc_keeps_the_folder_of_an_unreadable_job_for_a_day(checkout):
    job = job_of(checkout, "policy")
    job.path.write_text(job.path.read_text()[:100])
    assert job.folder.name not in named(checkout, "job", delete=True)
    yesterday = time.time() - 25 * 3600
    os.utime(job.folder, (yesterday, yesterday))
    with holding([checkout.services.store.lock_file(job.artifact, job.derivation.key)]):
        assert job.folder.name not in named(checkout, "job", delete=True)
    assert job.folder.name in named(checkout, "job", delete=True) and not job.folder.exists()


def test_gc_keeps_artifacts_made_by_a_running_run(checkout):
    """Artifacts of a run with a dead process may be removed, although the run still counts as started."""
    tags = {PROCESS_TAG: f"killed elsewhere 1 {checkout.home / 'processes' / 'gone.lock'}"}
    checkout.instance.add_run(dg.DagsterRun("small", "killed", status=dg.DagsterRunStatus.STARTED, tags=tags))
    orphan = publish(checkout, "before")
    os.utime(orphan.folder, (YEARS_AGO, YEARS_AGO))
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    checkout.instance.add_run(run)
    recent = publish(checkout, "while it runs")
    assert named(checkout, "training_spec") == [orphan.fingerprint]
    checkout.instance.report_run_failed(run)
    assert named(checkout, "training_spec") == sorted([orphan.fingerprint, recent.fingerprint])


def test_gc_keeps_earlier_inputs_of_a_running_run(checkout):
    """The run uses an earlier artifact, and another run has recorded another one since."""
    orphan, key, seen = publish(checkout, "before"), checkout.pipeline.key("training_spec"), []
    os.utime(orphan.folder, (YEARS_AGO, YEARS_AGO))
    current = latest(checkout.instance, key).tags

    @dg.asset(key=key)
    def reused():
        return dg.MaterializeResult(data_version=dg.DataVersion(orphan.fingerprint))

    @dg.asset(deps=[reused])
    def next_one():
        checkout.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=current))
        seen.append(named(checkout, "training_spec"))

    dg.materialize([reused, next_one], instance=checkout.instance)
    assert seen == [[]] and named(checkout, "training_spec") == [orphan.fingerprint]


def test_gc_removes_downloads_without_an_alias(checkout):
    """A home whose server stores the files: champion and candidate are version 1, of one origin."""
    downloads = checkout.home / "mlflow" / "downloads" / "small"
    current = f"1-{short(fingerprint('downloaded_version', checkout.services.registry.champion('small').source))}"
    for name in (current, "1-0123456789ab", "2-0123456789ab"):
        (downloads / name).mkdir(parents=True)
        (downloads / name / "model.safetensors").write_bytes(b"weights")
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    checkout.instance.add_run(run)
    assert named(checkout, "download") == [], "the run may be reading one"
    checkout.instance.report_run_failed(run)
    sweep = GarbageCollector(checkout.services, checkout.instance)
    outdated = [item for item in sweep.garbage() if item.kind == "download"]
    checkout.instance.add_run(later := dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED))
    assert [sweep.remove(item) for item in outdated] == [False, False], "so may one that has begun since"
    checkout.instance.report_run_failed(later)
    assert named(checkout, "download", delete=True) == ["small/1-0123456789ab", "small/2-0123456789ab"]
    assert [path.name for path in downloads.iterdir()] == [current]
    assert named(checkout, "download") == []


def test_gc_keeps_condition_evaluations_for_a_month(checkout):
    """Oracle: the table of Dagster's database."""
    evaluations = "asset_daemon_asset_evaluations"
    with contextlib.closing(sqlite3.connect(checkout.home / "dagster/schedules/schedules.db")) as database:
        for number, days in enumerate((60, 31, 29, 0)):
            database.execute(
                f"INSERT INTO {evaluations} (evaluation_id, asset_key, asset_evaluation_body, create_timestamp) "
                f"VALUES ({number}, 'small', '', datetime('now', '-{days} days'))"
            )
        database.commit()
        found = f"SELECT evaluation_id FROM {evaluations} ORDER BY evaluation_id"
        collect(checkout.services, checkout.instance)
        assert database.execute(found).fetchall() == [(0,), (1,), (2,), (3,)]
        collect(checkout.services, checkout.instance, delete=True)
        assert database.execute(found).fetchall() == [(2,), (3,)]


def test_a_version_that_was_rolled_back_is_not_promoted_again(checkout, monkeypatch):
    """The worst moment: promoted, rolled back by a user, and the decision was never recorded."""
    registry = checkout.services.registry
    client = mlflow.MlflowClient(registry.tracking_uri)
    source = client.get_model_version("small", "1")
    client.create_model_version("small", source.source, source.run_id)
    client.set_model_version_tag("small", "1", "pedigree.previous_champion", "2")
    answer = Home(checkout.home).query("rollback", "small")
    assert answer == {"model": "small", "champion": 2, "rolled_back": 1}
    client.delete_model_version_tag("small", "1", "pedigree.champion")
    monkeypatch.setenv("PEDIGREE_HOME", str(checkout.home))
    loaded = load_recipe(checkout.folder)
    report = materialize(loaded, checkout.services, checkout.instance, "released_model")
    assert report.succeeded, [asset.error for asset in report.assets]
    champion = registry.champion("small")
    assert champion is not None and champion.number == 2
    assert client.get_model_version("small", "1").tags[ROLLED_BACK_TAG] == "true"
    [released] = [asset for asset in report.assets if asset.asset == "released_model"]
    assert released.outcome == "reused"


def test_gc_keeps_shards_of_rows_in_use(checkout):
    """The rows are those of kept preferences. Those of other rules are unused."""
    store = checkout.services.store
    for cache in ("pairs", "tokens"):
        [folder] = (store.root / cache).glob("*/*")
        (other := folder.parents[1] / ("d" * 64)).mkdir()
        shutil.copytree(folder, other / folder.name)
        assert named(checkout, f"{cache}/{other.name}") == [folder.name]
        assert named(checkout, f"{cache}/{folder.parent.name}") == []


def test_gc_keeps_shards_of_tokens_of_which_half_are_in_use(checkout):
    store = checkout.services.store
    [rule] = [folder.name for folder in (store.root / "tokens").iterdir()]
    [in_use] = store.fingerprints(f"tokens/{rule}")
    cache, empty = (
        TokenCache(store, rule),
        {"prompt_key": bytes(32), "chosen_key": bytes(32), "rejected_key": bytes(32)},
    )
    rows = pq.read_table(next(store.root.glob("raw_preferences/*/preferences.parquet")))["identity"].to_pylist()
    others = ["f" * 31 + digit for digit in "0123"]

    def add(identities, rule=rule):
        batch = pa.RecordBatch.from_pylist([empty] * len(identities), cache.schema)
        return dataclasses.replace(cache, rule=rule).add(keys_of(identities), [batch]).fingerprint

    half, less, unused = add([*rows[:3], *others[:3]]), add([*rows[:3], *others]), add(rows[:2], rule="e" * 64)
    assert named(checkout, f"tokens/{rule}") == [less] and named(checkout, f"tokens/{'e' * 64}") == [unused]
    collect(checkout.services, checkout.instance, delete=True)
    assert store.fingerprints(f"tokens/{rule}") == sorted([in_use, half]) and not store.fingerprints(
        f"tokens/{'e' * 64}"
    )

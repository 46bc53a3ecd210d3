"""What goes and what stays when nobody refers to something any more, and what a rollback leaves behind."""

import contextlib
import fcntl
import os
import shutil
import sqlite3
import time
from logging import getLogger

import dagster as dg
import mlflow
import numpy as np
import pytest

from assets.execution.materialize import publish_resolved
from assets.execution.run_liveness import PROCESS_TAG
from assets.inputs.current import ResolvedInput
from assets.pipeline.graph import GRAPH
from model_registry.model_version import MERGED, ROLLED_BACK_TAG
from tests.workflows.homes import Home, flip, latest
from training.contract.errors import CorruptRecord, RegistryError, StoreError
from training.contract.identity.fingerprint import fingerprint, short
from training.contract.protocol.job import Input, Job
from training.contract.store.logprob_cache import LogprobCache, scoring_rule
from training.contract.store.manifest import Derivation, Source
from training.contract.store.store import JobResult
from training.contract.system.locks import holding
from workflows.commands.gc import GarbageCollector, collect
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow
YEARS_AGO = 1_577_836_800


def named(looking, kind, delete=False):
    found = collect(looking.services, looking.instance, delete)
    return [item.fingerprint for item in found.garbage if item.kind == kind]


def publish(looking, text, kind="training_spec", **inputs):
    """An artifact that nobody refers to."""
    how = Derivation(kind=kind, code_version="1", inputs=inputs, settings={"text": text})
    return publish_resolved(
        looking.services, ResolvedInput(how, f"{len(text):064x}", {"spec.json": text}), getLogger()
    ).artifact


def score(looking, rule):
    keys = np.arange(32, dtype=np.uint8)[None, :]
    return LogprobCache(looking.services.store, rule).add(keys, np.array([1], np.int32), np.array([-1.0], np.float32))


def job_of(looking, asset):
    """The job that made `asset`, in the copy of the home."""
    [path] = looking.home.glob(f"jobs/{asset}-*/job.json")
    return Job.read(path).model_copy(update={"folder": path.parent, "store": looking.home / "store"})


def test_what_is_referred_to_stays_and_the_rest_goes(looking):
    orphan, shard = publish(looking, "orphan"), score(looking, "f" * 64)
    [model] = looking.services.store.fingerprints("reference_model")
    of_a_model_that_stays = score(looking, scoring_rule(model, "bfloat16"))
    aside = looking.services.store.set_aside("training_spec", publish(looking, "broken bytes").fingerprint)
    dry = collect(looking.services, looking.instance)
    kinds = {item.kind for item in dry.garbage}
    assert kinds == {"training_spec", "job", "corrupt", f"memo/{'f' * 64}"} and not dry.deleted
    assert orphan.folder.is_dir() and dry.bytes == sum(item.bytes for item in dry.garbage) > 0
    done = collect(looking.services, looking.instance, delete=True)
    assert done.deleted and done.garbage == dry.garbage and done.kept == len(GRAPH) - 1
    assert not orphan.folder.exists() and not shard.folder.exists() and not aside.exists()
    assert of_a_model_that_stays.folder.is_dir(), "though no table has been made in this dtype"
    assert looking.services.store.find("training_spec", orphan.derivation.key) is None
    assert collect(looking.services, looking.instance).garbage == []
    found = status(looking.pipeline, looking.services, looking.instance)
    assert {asset.state for asset in found} == {"fresh"}


def test_another_dagster_lets_nothing_go(looking):
    """Whatever it knows: what is current here is in the records of the one that saw it made."""
    [note] = (looking.home / "records").iterdir()
    with dg.DagsterInstance.local_temp() as other:
        other.report_runless_asset_event(dg.AssetMaterialization(looking.pipeline.key("policy")))
        with pytest.raises(StoreError, match=rf"runs were recorded in .*/dagster too; .* or remove {note} if"):
            collect(looking.services, other, delete=True)
    assert list(looking.home.glob("jobs/*"))
    with dg.DagsterInstance.from_config(str(looking.home / "dagster")) as first:
        assert {item.kind for item in collect(looking.services, first).garbage} == {"job"}


def test_what_lies_behind_a_link_stays(looking, tmp_path):
    """In place of a kind of artifact, a scoring rule, a model that was downloaded, or what was set aside."""
    places = ["store/proof", f"store/memo/{'a' * 64}", "mlflow/downloads/other", "store/corrupt/policy"]
    for number, place in enumerate(places):
        (tmp_path / f"elsewhere{number}" / "folder").mkdir(parents=True)
        (tmp_path / f"elsewhere{number}" / "folder" / "file").write_text("somebody else's")
        (looking.home / place).parent.mkdir(parents=True, exist_ok=True)
        (looking.home / place).symlink_to(tmp_path / f"elsewhere{number}")
    found = collect(looking.services, looking.instance, delete=True)
    assert {item.kind for item in found.garbage} == {"job"}
    assert len(list(tmp_path.glob("elsewhere*/folder/file"))) == len(places)


def test_records_that_are_corrupt_let_nothing_go(looking):
    """Their manifests say the same; where one does not, what the artifact was made from is unknown, and so what may go."""
    for path in looking.home.glob("store/keys/*/*.json"):
        flip(path)
    assert {item.kind for item in collect(looking.services, looking.instance).garbage} == {"job"}
    [manifest] = looking.home.glob("store/policy/*/manifest.json")
    flip(manifest)
    with pytest.raises(CorruptRecord, match=f"{looking.home}/store/keys/policy/.*; a run of its recipe mends it"):
        collect(looking.services, looking.instance, delete=True)
    assert manifest.is_file()


def test_a_corrupt_record_of_another_way_to_the_same_contents_lets_nothing_go(looking):
    """Their manifest says how they were made first, which may have been from other inputs."""
    key, ways = looking.pipeline.key("training_spec"), [publish(looking, text) for text in ("old", "new")]
    assert ways[0].folder == ways[1].folder
    recorded = latest(looking.instance, key).tags
    for way in ways:
        tags, metadata = {**recorded, "dagster/data_version": way.fingerprint}, {"key": way.derivation.key}
        looking.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=tags, metadata=metadata))
        flip(looking.services.store.record_file("training_spec", way.derivation.key))
        with contextlib.nullcontext() if way is ways[0] else pytest.raises(CorruptRecord):
            collect(looking.services, looking.instance)


def test_a_registered_version_keeps_its_lineage_and_its_memo(looking):
    """A Dagster instance that knows of no materialization at all, as after all was wiped for good."""
    shutil.rmtree(looking.home / "records")
    with dg.DagsterInstance.ephemeral() as instance:
        found = collect(looking.services, instance)
    assert {item.kind for item in found.garbage} == {"job"}


def test_nothing_goes_where_the_registry_is_another_one(looking):
    """As in a shell without MLFLOW_TRACKING_URI: what the versions keep is unknown there. Or somebody has deleted them all."""
    mlflow.MlflowClient(looking.services.registry.tracking_uri).delete_registered_model("small")
    with pytest.raises(
        RegistryError, match=r"mlflow\.db has no version that small released, .* set MLFLOW_TRACKING_URI"
    ):
        collect(looking.services, looking.instance, delete=True)
    assert list(looking.home.glob("jobs/*"))
    released = looking.pipeline.key("released_model")
    looking.instance.wipe_assets([released])
    assert {item.kind for item in collect(looking.services, looking.instance).garbage} == {"job"}
    # Dagster knows it, as after a first run that ended before its release.
    looking.instance.report_runless_asset_event(dg.AssetObservation(released))
    assert {item.kind for item in collect(looking.services, looking.instance).garbage} == {"job"}


def test_what_was_set_aside_stays_as_well_where_the_registry_is_another_one(looking):
    """Though nothing else is left: what a person has to restore is refused before anything goes, not after."""
    mlflow.MlflowClient(looking.services.registry.tracking_uri).delete_registered_model("small")
    for kind in (*GRAPH, "memo", "proof"):
        shutil.rmtree(looking.home / "store" / kind, ignore_errors=True)
    (aside := looking.home / "store" / "corrupt" / "policy").mkdir(parents=True)
    with pytest.raises(RegistryError, match="has no version that small released"):
        collect(looking.services, looking.instance, delete=True)
    assert aside.is_dir()


def test_a_job_in_progress_and_one_to_be_taken_up_keep_their_folders(looking):
    running, interrupted = (job_of(looking, asset) for asset in ("reference_logprobs", "policy"))
    staging = [running.staging, looking.home / "store" / "staging" / "policy-abandoned"]
    for folder in staging:
        folder.mkdir(parents=True)
    lock = looking.home / "store" / "locks" / f"{running.artifact}-{running.derivation.key}.lock"
    interrupted = interrupted.model_copy(update={"settings": {**interrupted.settings, "seed": 1}})
    interrupted.write()
    (interrupted.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    with open(lock, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = named(looking, "job")
        assert running.folder.name not in found and interrupted.folder.name not in found and len(found) == 5
        assert named(looking, "staging") == []
    assert running.folder.name in named(looking, "job")
    assert named(looking, "staging") == sorted(folder.name for folder in staging)


def test_what_a_job_in_progress_reads_stays_with_what_that_was_made_from(looking):
    below, base = publish(looking, "below"), publish(looking, "a base", "base_model")
    read = publish(looking, "read", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    shard = score(looking, rule := scoring_rule(base.fingerprint, "float32"))
    job = job_of(looking, "policy")
    inputs = {
        artifact.manifest.kind: Input(
            kind=artifact.manifest.kind, fingerprint=artifact.fingerprint, folder=artifact.folder
        )
        for artifact in (read, base)
    }
    job = job.model_copy(update={"inputs": {**job.inputs, **inputs}})
    job.write()
    with holding([looking.services.store.lock_file(job.artifact, job.derivation.key)]):
        assert named(looking, "training_spec", delete=True) == named(looking, f"memo/{rule}") == []
    assert named(looking, "training_spec") == sorted([below.fingerprint, read.fingerprint])
    assert named(looking, f"memo/{rule}") == [shard.fingerprint]


def test_the_memo_of_a_table_of_another_scoring_stays(looking):
    """As of one that another version of the program made: the rules of now, of any model, do not name it."""
    store, key, rule = looking.services.store, looking.pipeline.key("reference_logprobs"), "e" * 64
    shard, recorded = score(looking, rule), latest(looking.instance, key).tags
    how = Derivation(kind="reference_logprobs", code_version="0", inputs={}, settings={})
    with store.staging() as staging:
        table = store.publish(staging, how, JobResult("a" * 64, {"rule": rule}))
    for fingerprint_of_latest, garbage in (
        (table.fingerprint, []),
        (recorded["dagster/data_version"], [shard.fingerprint]),
    ):
        tags = {**recorded, "dagster/data_version": fingerprint_of_latest}
        looking.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=tags))
        assert named(looking, f"memo/{rule}") == garbage


@pytest.mark.parametrize("kind", [MERGED, "proof"])
def test_what_is_made_beside_the_graph_goes_too(looking, kind):
    orphan = publish(looking, f"a {kind}", kind)
    assert named(looking, kind, delete=True) == [orphan.fingerprint] and not orphan.folder.exists()


def test_checkpoints_of_a_job_that_has_published_go(looking):
    """Not while what it published is away: a policy that was refused as corrupt and moved away is trained again."""
    job = job_of(looking, "policy")
    (job.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    [policy] = looking.home.glob("store/policy/*")
    policy.rename(away := looking.home / "away")
    assert job.folder.name not in named(looking, "job", delete=True)
    away.rename(policy)
    assert job.folder.name in named(looking, "job", delete=True) and not job.folder.exists()


def test_what_came_into_use_since_it_was_named_stays(looking):
    job = job_of(looking, "policy")
    job.staging.mkdir(parents=True)
    aside = looking.home / "store" / "staging" / "claimed"
    aside.mkdir()
    store, spec = looking.services.store, publish(looking, "spec")
    sweep = GarbageCollector(looking.services, looking.instance)
    names = (job.folder.name, job.staging.name, aside.name, spec.fingerprint)
    items = [item for item in sweep.garbage() if item.fingerprint in names]
    assert len(items) == 4
    keys = [(job.artifact, job.derivation.key), ("training_spec", spec.derivation.key)]
    with holding([*(store.lock_file(*key) for key in keys), aside.with_name("claimed.lock")]) as free:
        assert free
        assert [sweep.remove(item) for item in items] == [False] * 4
    interrupted = job.model_copy(update={"settings": {**job.settings, "seed": 1}})
    interrupted.write()
    (interrupted.checkpoints / "key" / "step-00000004").mkdir(parents=True)
    assert [item.kind for item in items if sweep.remove(item)] == ["training_spec", "staging", "staging"]
    assert store.record("training_spec", spec.derivation.key) is None
    assert job.folder.is_dir() and not job.staging.exists() and not aside.exists()


@pytest.mark.parametrize("text", ["old", "new"], ids=["found in the store", "made again in another way"])
def test_what_was_used_since_it_was_named_stays(looking, text):
    """Though nobody holds its lock any more: a run that took it may begin and end while others are removed."""
    orphan, left = publish(looking, "old"), publish(looking, "left")
    sweep = GarbageCollector(looking.services, looking.instance)
    items = {item.fingerprint: item for item in sweep.garbage() if item.kind == "training_spec"}
    assert set(items) == {orphan.fingerprint, left.fingerprint}
    used = publish(looking, text)
    assert used.folder == orphan.folder
    assert not sweep.remove(items[orphan.fingerprint]) and sweep.remove(items[left.fingerprint])
    for derivation in (orphan.derivation, used.derivation):
        assert looking.services.store.find("training_spec", derivation.key) is not None
    assert named(looking, "training_spec", delete=True) == [orphan.fingerprint]


def test_what_somebody_publishes_just_now_stays(looking):
    """In a way that nobody knows of yet: the record of its key is written last."""
    orphan = publish(looking, "old")
    with holding([looking.services.store.lock_file("training_spec", orphan.fingerprint)]):
        assert named(looking, "training_spec", delete=True) == []
    assert named(looking, "training_spec", delete=True) == [orphan.fingerprint]


def test_what_a_run_in_progress_has_found_in_the_store_stays(looking):
    """With what it was made from. Dagster learns of it at the end of the step."""
    below = publish(looking, "below")
    orphan = publish(looking, "old", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    for artifact in (below, orphan):
        os.utime(artifact.folder, (YEARS_AGO, YEARS_AGO))
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    looking.instance.add_run(run)
    assert named(looking, "training_spec") == sorted([below.fingerprint, orphan.fingerprint])
    publish(looking, "old", training_spec=Source(kind="training_spec", fingerprint=below.fingerprint))
    assert named(looking, "training_spec", delete=True) == []
    looking.instance.report_run_failed(run)
    assert named(looking, "training_spec") == sorted([below.fingerprint, orphan.fingerprint])


def test_a_job_that_cannot_be_read_keeps_its_folder_for_a_day_and_while_it_runs(looking):
    job = job_of(looking, "policy")
    job.path.write_text(job.path.read_text()[:100])
    assert job.folder.name not in named(looking, "job", delete=True)
    yesterday = time.time() - 25 * 3600
    os.utime(job.folder, (yesterday, yesterday))
    with holding([looking.services.store.lock_file(job.artifact, job.derivation.key)]):
        assert job.folder.name not in named(looking, "job", delete=True)
    assert job.folder.name in named(looking, "job", delete=True) and not job.folder.exists()


def test_what_a_run_in_progress_has_made_stays(looking):
    """Nothing stays for a run whose process is gone, though it counts as started until somebody looks."""
    tags = {PROCESS_TAG: f"killed elsewhere 1 {looking.home / 'processes' / 'gone.lock'}"}
    looking.instance.add_run(dg.DagsterRun("small", "killed", status=dg.DagsterRunStatus.STARTED, tags=tags))
    orphan = publish(looking, "before")
    os.utime(orphan.folder, (YEARS_AGO, YEARS_AGO))
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    looking.instance.add_run(run)
    recent = publish(looking, "while it runs")
    assert named(looking, "training_spec") == [orphan.fingerprint]
    looking.instance.report_run_failed(run)
    assert named(looking, "training_spec") == sorted([orphan.fingerprint, recent.fingerprint])


def test_what_a_run_in_progress_goes_on_from_stays(looking):
    """It took an artifact of before, and another run has recorded another one since."""
    orphan, key, seen = publish(looking, "before"), looking.pipeline.key("training_spec"), []
    os.utime(orphan.folder, (YEARS_AGO, YEARS_AGO))
    current = latest(looking.instance, key).tags

    @dg.asset(key=key)
    def reused():
        return dg.MaterializeResult(data_version=dg.DataVersion(orphan.fingerprint))

    @dg.asset(deps=[reused])
    def next_one():
        looking.instance.report_runless_asset_event(dg.AssetMaterialization(key, tags=current))
        seen.append(named(looking, "training_spec"))

    dg.materialize([reused, next_one], instance=looking.instance)
    assert seen == [[]] and named(looking, "training_spec") == [orphan.fingerprint]


def test_of_downloaded_versions_those_go_that_no_alias_points_at(looking):
    """As they lie in a home whose server keeps the files; here champion and candidate are version 1, of one origin."""
    downloads = looking.home / "mlflow" / "downloads" / "small"
    current = f"1-{short(fingerprint('downloaded_version', looking.services.registry.champion('small').source))}"
    for name in (current, "1-0123456789ab", "2-0123456789ab"):
        (downloads / name).mkdir(parents=True)
        (downloads / name / "model.safetensors").write_bytes(b"weights")
    run = dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED)
    looking.instance.add_run(run)
    assert named(looking, "download") == [], "the run may be reading one"
    looking.instance.report_run_failed(run)
    sweep = GarbageCollector(looking.services, looking.instance)
    outdated = [item for item in sweep.garbage() if item.kind == "download"]
    looking.instance.add_run(later := dg.DagsterRun("small", status=dg.DagsterRunStatus.STARTED))
    assert [sweep.remove(item) for item in outdated] == [False, False], "so may one that has begun since"
    looking.instance.report_run_failed(later)
    assert named(looking, "download", delete=True) == ["small/1-0123456789ab", "small/2-0123456789ab"]
    assert [path.name for path in downloads.iterdir()] == [current]
    assert named(looking, "download") == []


def test_what_conditions_evaluated_to_is_kept_for_a_month(looking):
    """Oracle: the table of Dagster's database."""
    evaluations = "asset_daemon_asset_evaluations"
    with contextlib.closing(sqlite3.connect(looking.home / "dagster/schedules/schedules.db")) as database:
        for number, days in enumerate((60, 31, 29, 0)):
            database.execute(
                f"INSERT INTO {evaluations} (evaluation_id, asset_key, asset_evaluation_body, create_timestamp) "
                f"VALUES ({number}, 'small', '', datetime('now', '-{days} days'))"
            )
        database.commit()
        found = f"SELECT evaluation_id FROM {evaluations} ORDER BY evaluation_id"
        collect(looking.services, looking.instance)
        assert database.execute(found).fetchall() == [(0,), (1,), (2,), (3,)]
        collect(looking.services, looking.instance, delete=True)
        assert database.execute(found).fetchall() == [(2,), (3,)]


def test_a_version_that_was_rolled_back_is_not_promoted_again(looking, monkeypatch):
    """The worst moment: it was promoted, rolled back by a person, and its decision was never written down."""
    registry = looking.services.registry
    client = mlflow.MlflowClient(registry.tracking_uri)
    source = client.get_model_version("small", "1")
    client.create_model_version("small", source.source, source.run_id)
    client.set_model_version_tag("small", "1", "pedigree.previous_champion", "2")
    told = Home(looking.home).look("rollback", "small")
    assert told == {"model": "small", "champion": 2, "rolled_back": 1}
    client.delete_model_version_tag("small", "1", "pedigree.champion")
    monkeypatch.setenv("PEDIGREE_HOME", str(looking.home))
    loaded = load_recipe(looking.folder)
    report = materialize(loaded, looking.services, looking.instance, "released_model")
    assert report.succeeded, [asset.error for asset in report.assets]
    champion = registry.champion("small")
    assert champion is not None and champion.number == 2
    assert client.get_model_version("small", "1").tags[ROLLED_BACK_TAG] == "true"
    [released] = [asset for asset in report.assets if asset.asset == "released_model"]
    assert released.outcome == "reused"

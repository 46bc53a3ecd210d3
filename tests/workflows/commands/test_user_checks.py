"""A user's own checks, in Python files beside the recipes: runs of the command line include them, as Dagster's do."""

import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import dedent

import dagster as dg
import pytest

from assets.execution.interruption import INTERRUPTED
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Services
from tests.factories import write_inputs
from tests.workflows.homes import ATTRIBUTES, ROOT, check_values, write_recipe
from tests.workflows.in_process import services_in
from training.contract.errors import UsageError
from workflows.commands.run import materialize
from workflows.commands.run_report import CheckRun, RunReport
from workflows.commands.user_checks import assets_built_for, find_user_checks
from workflows.recipes.discovery import LoadedRecipe, load_recipe

pytestmark = pytest.mark.slow

HEAD = "import dagster as dg\n"
DESCRIPTION = "3.5 tokens on average"
SHORT = f"""
@dg.asset_check(asset=["small", "{{asset}}"], blocking={{blocking}})
def short(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed={{passed}}, description="{DESCRIPTION}")
"""
# An asset that is made in no time.
SOURCE = HEAD + SHORT.format(asset="preference_source", blocking=True, passed=False)


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Iterator[Path]:
    """Put an empty folder of recipes, `team.defs`, in place of the project's."""
    folder = tmp_path / "team" / "defs"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    find = partial(find_user_checks, module="team.defs", folder=folder)
    monkeypatch.setattr("workflows.commands.run.find_user_checks", find)
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "team"]:
        del sys.modules[name]


@pytest.fixture
def small(tmp_path) -> LoadedRecipe:
    folder = tmp_path / "small"
    folder.mkdir()
    write_inputs(folder)
    return load_recipe(write_recipe(folder, ATTRIBUTES))


@pytest.fixture
def services(tmp_path, packaged_here) -> Services:
    return services_in(tmp_path / "home")


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def run(small, services, instance) -> Callable[..., RunReport]:
    return partial(materialize, small, services, instance)


def outcomes(report: RunReport) -> dict[str, str]:
    return {asset.asset: asset.outcome for asset in report.assets}


def own(report: RunReport) -> list[CheckRun]:
    return [check for check in report.checks if check.check == "short"]


def test_a_blocking_check_that_fails_keeps_a_policy_from_being_released(beside, run, services):
    (beside / "quality.py").write_text(HEAD + SHORT.format(asset="policy", blocking=True, passed=False))
    report = run()
    assert not report.succeeded and report.error is None
    made = outcomes(report)
    assert (made["policy"], made["reference_logprobs"]) == ("failed", "computed")
    assert not {"evaluation", "released_model"} & made.keys()
    [policy] = [asset for asset in report.assets if asset.asset == "policy"]
    assert policy.error == f"the check short failed: {DESCRIPTION}" and policy.fingerprint is not None
    assert own(report) == [CheckRun("policy", "short", False, True, DESCRIPTION)]
    assert services.registry.champion("small") is None


def test_passing_or_nonblocking_check_does_not_stop_the_release(beside, run):
    text = SHORT.format(asset="policy", blocking=True, passed=True)
    other = SHORT.format(asset="evaluation", blocking=False, passed=False)
    (beside / "quality.py").write_text(HEAD + text + other.replace("def short", "def polite"))
    report = run()
    assert report.succeeded and report.is_champion
    assert own(report) == [CheckRun("policy", "short", True, False, DESCRIPTION)]
    assert CheckRun("evaluation", "polite", False, False, DESCRIPTION) in report.checks
    assert "failed" not in outcomes(report).values()


def test_automation_counts_a_passed_blocking_check(beside, run, small, services, instance):
    """A blocking check without a result for the latest materialization would stop all requests below it."""
    (beside / "quality.py").write_text(HEAD + SHORT.format(asset="policy", blocking=True, passed=True))
    cursor = None

    def tick() -> set[str]:
        nonlocal cursor
        pipeline = load_recipe(small.pipeline.file.parent)
        own = find_user_checks(pipeline.pipeline, "team.defs", beside)
        definitions = dg.Definitions.merge(
            pipeline.definitions, own.definitions, dg.Definitions(resources={"services": services})
        )
        result = dg.evaluate_automation_conditions(definitions, instance, cursor=cursor)
        cursor = result.cursor
        return {asset for asset in GRAPH if result.get_num_requested(small.pipeline.key(asset))}

    assert run().succeeded
    assert [tick(), tick()] == [set(), set()]
    write_recipe(small.pipeline.file.parent, {**ATTRIBUTES, "evaluation": {"samples": 1, "max_new_tokens": 4}})
    assert tick() == {"evaluation_spec", "evaluation", "released_model"}


def test_run_of_assets_above_skips_the_check(beside, run):
    (beside / "quality.py").write_text(HEAD + SHORT.format(asset="policy", blocking=True, passed=False))
    assert run(asset="tokenized_pairs").succeeded


def failures(report: RunReport) -> dict[str, str | None]:
    return {asset.asset: asset.error for asset in report.assets if asset.outcome == "failed"}


def test_crashing_check_is_reported_instead_of_a_warning(beside, run):
    polite = SHORT.format(asset="preference_source", blocking=False, passed=False).replace("def short", "def polite")
    (beside / "quality.py").write_text(
        SOURCE.replace("return", "raise ValueError('no such file')\n    return") + polite
    )
    report = run(asset="preference_source")
    assert not report.succeeded and report.error is None
    assert failures(report) == {"preference_source": "ValueError: no such file"}
    assert report.warnings == [CheckRun("preference_source", "polite", False, False, DESCRIPTION)]


def test_interrupted_check_ends_a_sweep(beside, run):
    interrupted = "raise dg.DagsterExecutionInterruptedError()\n    return"
    polite = SHORT.format(asset="preference_source", blocking=False, passed=False).replace("def short", "def polite")
    (beside / "quality.py").write_text(SOURCE.replace("return", interrupted) + polite)
    report = run(asset="preference_source")
    assert report.interrupted and failures(report) == {"preference_source": INTERRUPTED}


@pytest.mark.parametrize(("severity", "succeeded"), [("WARN", True), ("ERROR", False)])
def test_warning_is_reported_beside_an_error(beside, run, severity, succeeded):
    """In Dagster a blocking check stops nothing if its result has the severity of a warning. One lacks a description."""
    short = SOURCE.replace("passed=False", f"passed=False, severity=dg.AssetCheckSeverity.{severity}")
    silent = SHORT.format(asset="preference_source", blocking=False, passed=False).replace("def short", "def silent")
    (beside / "quality.py").write_text(short + silent.replace(f', description="{DESCRIPTION}"', ""))
    report = run(asset="preference_source")
    assert report.succeeded == succeeded
    assert failures(report) == ({} if succeeded else {"preference_source": f"the check short failed: {DESCRIPTION}"})
    warnings = {check.failure for check in report.warnings}
    assert warnings == {"the check silent failed"} | (
        {f"the check short failed: {DESCRIPTION}"} if succeeded else set()
    )


def test_check_of_several_assets_fails_only_refused_ones(beside, run):
    """It can run for some of them. Here it returns results for other assets too, one of another recipe."""
    (beside / "quality.py").write_text(
        HEAD
        + dedent("""\
            NAMES = [("small", "preference_source"), ("small", "base_model"), ("small", "policy"), ("large", "base_model")]

            SPECS = [dg.AssetCheckSpec("short", asset=name, blocking=True) for name in NAMES]

            @dg.multi_asset_check(specs=SPECS, can_subset=True)
            def judge(context):
                for recipe, asset in NAMES[:3]:
                    yield dg.AssetCheckResult(passed=asset == "base_model", check_name="short", asset_key=[recipe, asset])
            """)
    )
    report = run(asset="reference_model")
    assert failures(report) == {}
    report = run(asset="raw_preferences")
    assert failures(report) == {"preference_source": "the check short failed"}


@pytest.mark.parametrize(
    "written",
    [
        {"quality.py": SOURCE + "\ndefinitions = dg.Definitions(assets=[short])\n"},
        {"group/defs.yaml": "type: dagster.DefsFolderComponent\n", "group/quality.py": SOURCE},
        {"group/deep/quality.py": SOURCE, ".ipynb_checkpoints/old.py": "nothing", "._quality.py": "\0\5\26"},
    ],
)
def test_checks_are_found_where_dagster_finds_them(beside, run, written):
    """As assets, in folders of components, or deep; hidden files are not read."""
    for name, text in written.items():
        (beside / name).parent.mkdir(parents=True, exist_ok=True)
        (beside / name).write_text(text)
    assert failures(run(asset="preference_source")) == {"preference_source": f"the check short failed: {DESCRIPTION}"}


def test_checks_of_other_recipes_are_ignored(beside, small, tmp_path):
    """Also if a recipe beside them is invalid, or another file has no checks."""
    find = partial(find_user_checks, small.pipeline, "team.defs", beside)
    assert find().checks == []
    text = HEAD + SHORT.format(asset="policy", blocking=True, passed=False)
    (beside / "other.py").write_text(text.replace('"small"', '"large"'))
    (write_recipe(beside / "wrong", {"training": {"epoch": 3}}) / "make.py").write_text("raise SystemExit('a script')")
    assert find().checks == []
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "deep.py").write_text(text)
    (beside / "link").symlink_to(tmp_path / "shared")
    [check] = find().checks
    assert list(check.check_keys) == [dg.AssetCheckKey(small.pipeline.key("policy"), "short")]


def test_run_waits_for_pools_of_checks(beside, small):
    (beside / "quality.py").write_text(SOURCE.replace("blocking=True", 'blocking=True, pool="gpu"'))
    own = find_user_checks(small.pipeline, "team.defs", beside)
    source, policy = small.pipeline.key("preference_source"), small.pipeline.key("policy")
    assert (own.pools([source, policy]), own.pools([policy])) == ({"gpu"}, set())


def test_resources_of_checks_are_loaded(beside, run):
    (beside / "quality.py").write_text(
        HEAD
        + dedent("""\
            @dg.asset_check(asset=["small", "preference_source"], required_resource_keys={"limit"})
            def short(context) -> dg.AssetCheckResult:
                return dg.AssetCheckResult(passed=True, description=f"at most {context.resources.limit}")

            definitions = dg.Definitions(
                asset_checks=[short], resources={"limit": dg.ResourceDefinition.hardcoded_resource(7)}
            )
            """)
    )
    assert own(run(asset="preference_source")) == [CheckRun("preference_source", "short", True, False, "at most 7")]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import no_such_package", r":2: ModuleNotFoundError: No module named 'no_such_package'"),
        ("\n{}['MISSING']", r":3: KeyError: 'MISSING'"),
        ("raise SystemExit('a script')", ":2: SystemExit: a script"),
        ("def", r": SyntaxError: "),
    ],
)
def test_unloadable_file_of_checks_ends_the_run_early(beside, run, text, cause):
    """An unknown check must not let a policy through."""
    (beside / "quality.py").write_text(HEAD + text + "\n")
    with pytest.raises(UsageError, match=rf"^/\S+/defs/quality\.py{cause}.*\[user-file-failed\]"):
        run()


CONFIGURED = SOURCE.replace("blocking=True", "blocking=True, config_schema={'least': int}")


@pytest.mark.parametrize(
    "first", [SOURCE, CONFIGURED, SOURCE.replace("short", "rewards_finite").replace("preference_source", "policy")]
)
def test_unrunnable_checks_are_refused_with_their_file(beside, run, first):
    """Two of one name, one that needs configuration, one with the name of ours."""
    (beside / "quality.py").write_text(first)
    if first == SOURCE:
        (beside / "copy.py").write_text(SOURCE)
    with pytest.raises(UsageError, match=rf"(?s)^small .*{beside}: .*\[wrong-user-checks\]"):
        run(asset="preference_source")


MEASURE = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, figures = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
turn = {"role": "user", "content": "How much is 2 plus 3?"}
asked = tokenizer.apply_chat_template([turn], add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = tokenizer.decode(model.generate(**asked, max_new_tokens=4, do_sample=False)[0])
json.dump({"exact_match": float("It is 5." in answer)}, open(figures, "w"))
"""


def test_the_example_measures_a_policy_once(beside, run, tmp_path):
    """A random model cannot add. Existing figures, better ones here, are used as they are."""
    (tmp_path / "measure.py").write_text(MEASURE)
    example = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/custom-checks.md").read_text(), re.DOTALL)[0]
    example = example.replace('"demo"', '"small"').replace("/srv/figures", "/srv").replace("/srv", str(tmp_path))
    (beside / "arithmetic.py").write_text(example)
    [policy] = [asset for asset in run().assets if asset.asset == "policy"]
    assert policy.outcome == "failed"
    check_values(policy.error, "check arithmetic ", " 0.0% ", "80%")
    figures = tmp_path / f"{policy.fingerprint}.json"
    assert figures.read_text() == '{"exact_match": 0.0}'
    figures.write_text('{"exact_match": 0.9}')
    (tmp_path / "measure.py").unlink()
    report = run()
    assert report.succeeded and report.is_champion
    [passed] = [check for check in report.checks if check.check == "arithmetic"]
    assert (passed.asset, passed.passed) == ("policy", True)
    check_values(passed.description, "90.0% ", "80%")


def test_recipe_shown_alone_has_its_checks(beside, small):
    """A benchmark that blocks releases counts there too. Notices of runs stay, because they start nothing."""
    other = (
        SHORT.format(asset="policy", blocking=True, passed=True).replace("small", "demo").replace("short", "of_demo")
    )
    notices = "@dg.run_failure_sensor(monitor_all_code_locations=True)\ndef failures(context): ...\n"
    starts = '@dg.sensor(target=dg.AssetSelection.keys(["demo", "policy"]))\ndef restart(context): ...\n'
    mine = SHORT.format(asset="policy", blocking=True, passed=True)
    (beside / "quality.py").write_text(HEAD + mine + other + notices + starts)
    keys = [small.pipeline.key(asset) for asset in GRAPH]
    found = assets_built_for(keys, "team.defs", beside)
    everything = dg.Definitions.merge(small.definitions, found, dg.Definitions(resources={"services": None}))
    graph = everything.resolve_asset_graph()
    assert graph.get_all_asset_keys() == set(keys)
    assert {key.name for key in graph.asset_check_keys if key.asset_key == keys[list(GRAPH).index("policy")]} >= {
        "short"
    }
    assert "of_demo" not in {key.name for key in graph.asset_check_keys}
    assert [sensor.name for sensor in found.sensors or ()] == ["failures"]

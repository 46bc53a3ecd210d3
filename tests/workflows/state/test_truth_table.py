"""The truth table of reuse: the recomputed and the reused assets after each of a hundred and ten edits.

The table at the end of this file was written by hand, from the meaning of each edit. If the code differed, we judged
which is right; the lines with `n`, another scoring and a reworded held-out answer follow the code. Each line has an edit and
a letter for every asset, in the order of the graph. The letter gives the status before the run and the outcome of the run:

    .  fresh, and reused
    C  stale, computed, and another artifact than before
    c  stale, computed, and the same artifact as before
    r  stale, because an asset above had to be computed; reused, because that one came out the same
    m  missing, because no recipe of this name was ever run; reused
    M  missing as well; computed, because it belongs to the recipe, and the same
    n  fresh, and only recorded again: a source or a spec is read to know it, and it was the same
    u  stale, and reused though another artifact than before: another recipe has made it

Anything else is an error: a fresh asset that the run computes, or another artifact that was not computed. The number at the
end is the sequences that the reference model had to score.

Every edit starts from the same state, in which the recipe was run once. Afterwards the edit is undone and a run is planned: the
plan must reuse everything.
"""

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from assets.inputs.current import ROOTS
from assets.pipeline.graph import GRAPH
from assets.pipeline.pipeline import Services
from tests.factories import PAIRS
from tests.workflows import edits
from tests.workflows.edits import (
    Edit,
    Sandbox,
    SetFields,
    code_version,
    config,
    data_lines,
    field,
    fields,
    retokenizer,
    template,
)
from tests.workflows.homes import latest
from tests.workflows.in_process import Baseline, services_in
from tests.workflows.prepared_homes import PreparedHomes
from training.contract.config.loss import Divergence, LossTerm
from training.contract.config.optimizer import AdamW
from training.contract.config.recipe import Recipe
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.recipes.discovery import load_recipe
from workflows.state.expected_state import expect_state
from workflows.state.status import status

pytestmark = pytest.mark.slow

PLAIN: dict[str, Any] = {
    "data": {"sources": [{"path": "preferences.jsonl"}], "validation_fraction": 0.25},
    "tokenization": {"max_length": 128},
    "reference": {"model": "./base"},
    "training": {"max_steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}},
    "evaluation": {"samples": 1, "max_new_tokens": 2},
    "release": {"model_name": "plain"},
    "compute": {"device": "cpu"},
}
TUNED: dict[str, Any] = {
    **PLAIN,
    "reference": {"model": "./base", "sft": {"epochs": 2, "batch_size": 8}},
    "release": {"model_name": "tuned"},
}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path_factory.mktemp("truth"), {"plain": PLAIN, "tuned": TUNED}) as made:
        yield made


@dataclass(frozen=True)
class Row:
    """An edit, the letters of the fourteen assets, and the sequences scored; `recipe` is the edited recipe."""

    edit: Edit
    letters: str
    scored: int | None = None
    recipe: str = "plain"


def observe(baseline: Baseline, row: Row, sandbox: Sandbox, services: Services) -> tuple[str, int]:
    """Return the letters of status and run in the current state, and the number of sequences scored."""
    loaded = load_recipe(sandbox.folder)
    states = {asset.asset: asset.state for asset in status(loaded.pipeline, services, baseline.instance)}
    report = materialize(loaded, services, baseline.instance)
    failures = {asset.asset: asset.error for asset in report.assets if asset.outcome == "failed"}
    assert not failures and len(report.assets) == len(GRAPH), failures
    before = baseline.fingerprints[row.recipe]
    letters = "".join(
        _letter(a.asset, states[a.asset], a.outcome, a.fingerprint == before[a.asset]) for a in report.assets
    )
    shown = latest(baseline.instance, loaded.pipeline.key("reference_logprobs")).metadata
    return letters, int(shown["cache_misses"])


def _letter(asset: str, state: str, outcome: str, same: bool) -> str:
    letters = {
        ("fresh", "reused", True): ".",
        ("stale", "computed", False): "C",
        ("stale", "computed", True): "c",
        ("stale", "reused", True): "r",
        ("missing", "reused", True): "m",
        ("missing", "computed", True): "M",
        ("fresh", "computed", True): "n" if asset in LOOKED_AT else "",
        ("stale", "reused", False): "u",
    }
    return letters.get((state, outcome, same)) or f"<{state}, {outcome}, {'same' if same else 'another'}>"


HELD_OUT, TRAINED = 0, 2  # rows of the two splits, by the hash of their prompts
LOOKED_AT = set(ROOTS) - {"tokenization_spec", "release_spec"}
ALL = PAIRS * 2
CAPITAL = edits.conversation("What is the capital of Utopia?", "Amaurot.", "It is Paris, I am sure.")
RIVER = edits.conversation("Which river is the longest?", "The Nile.", "It is the Rhine, I am sure.")
LOSS_OPTIONS = {"ld_alpha": 0.5, "weighting": "wpo"}
COMPUTE = {
    **{"parallel": "hsdp", "device": "auto", "evaluate_every": 1},
    **{"checkpoint_every": 1, "keep_checkpoints": 1, "grace_seconds": 1, "nodes": 2, "queue": "big"},
}
FASTER = {"activation_checkpointing": True, "compile": True}
MUON = {"type": "muon", "momentum": 0.9, "nesterov": False, "ns_steps": 4, "adjust_lr": "original"}
MUON |= {f"adamw.{name}": value for name, value in AdamW(learning_rate=1e-3).model_dump(mode="json").items()}
ADAPTER = {"rank": 2, "alpha": 4, "dropout": 0.1, "target_modules": ["q_proj"], "export": "adapter"}
BY_LOT = {"temperature": 3.0, "top_p": 0.99, "top_k": 100, "repetition_penalty": 1.5}
AUTOMATION = {"cron": "0 6 * * 1", "timezone": "Asia/Tokyo", "on_change": False}
NOTHING = ".. .... .. .. . ..."
NEW_DATA, SAME_PAIRS = "C. .... CC .C c CCC", "C. .... cr .r r rrr"
NEW_TRAINING, NEW_LOSS = ".. .C.. .. .. . CCC", ".. .CC. .. .. . CCC"
FLOOR_OF_A_SOURCE = {"data.sources.0.name": "every", "release.gate.min_accuracy_of": {"every": 0.1}}
NEW_EVALUATION, NEW_RELEASE = ".. ..C. .. .. . .CC", ".. .... .. .. . ..C"
NEW_REFERENCE, OTHER_BASE = ".. .... .. CC . CCC", ".C .... .. CC . CCC"
SAME_SPEC, SAME_TOKENS, NEW_TOKENS = ".. c..c .r .r . rrr", ".. C..C .c .r . rrC", ".. C..C .C .C . CCC"
OTHER_RULES, SHIPPED = ".. C... .c .r . rrC", ".. ...C .. .. . ..C"

#                    sources: preference_source, base_model
#                       specs: tokenization_spec, training_spec, evaluation_spec, release_spec
#                           data: raw_preferences, tokenized_pairs
#                              reference: reference_model, reference_logprobs
#                                 prequential_scores
#                                   policy, evaluation, released_model
TABLE: dict[str, Row] = {
    # Preference data
    "a row is appended": Row(data_lines(lambda rows: [*rows, CAPITAL]), "C. .... CC .C C CCC", 2),
    "a row is removed": Row(data_lines(lambda rows: rows[:-1]), NEW_DATA, 0),
    "rows in another order": Row(data_lines(lambda rows: rows[::-1]), NEW_DATA, 0),
    "a row twice": Row(data_lines(lambda rows: [*rows, rows[TRAINED]]), NEW_DATA, 0),
    "one answer reworded": Row(data_lines(edits.reword(TRAINED)), NEW_DATA, 1),
    "a held-out answer reworded": Row(data_lines(edits.reword(HELD_OUT)), "C. .... CC .C c cCC", 1),
    "a chosen answer is rejected": Row(data_lines(edits.swap_sides(TRAINED)), NEW_DATA, 0),
    "a row that is none": Row(data_lines(lambda rows: [*rows, "{}\n"]), "C. .... Cc .r c rrr", 0),
    "file renamed": Row(edits.rename_data, "n. .... .. .. . ..."),
    "file read in another way": Row(edits.rename_extension, SAME_PAIRS, 0),
    "file moved, found by a glob": Row(edits.move_data, NOTHING),
    "file touched": Row(edits.touch_data, NOTHING),
    "rewritten file": Row(edits.rewrite_data, SAME_PAIRS, 0),
    "the same rows as Parquet": Row(edits.data_as_parquet, SAME_PAIRS, 0),
    "file split in two": Row(edits.split_data, "C. .... Cc .r c rrr", 0),
    "a file held out": Row(edits.hold_out_a_file, NEW_DATA, 0),
    "a fraction of the prompts": Row(field("data.sources.0.fraction", 0.5), ".. .... CC .C c CCC", 0),
    "a fraction that leaves none out": Row(field("data.sources.0.fraction", 0.999), ".. .... cr .r r rrr", 0),
    "a source is named": Row(field("data.sources.0.name", "all"), ".. .... Cc .r c rCC", 0),
    "a field that is in no column": Row(field("data.sources.0.columns", {"tools": None}), ".. .... cr .r r rrr", 0),
    "roles": Row(field("data.sources.0.roles", {"bot": "assistant"}), ".. .... cr .r r rrr", 0),
    "format named": Row(field("data.sources.0.format", "conversational"), ".. .... cr .r r rrr", 0),
    "validation_fraction": Row(field("data.validation_fraction", 0.5), ".. .... CC .c c CCC", 0),
    "duplicates, of which there are none": Row(field("data.duplicates", "drop"), ".. .... cr .r r rrr", 0),
    "rows that were there, where duplicates are dropped": Row(
        edits.both(field("data.duplicates", "drop"), data_lines(lambda rows: [*rows, *rows[:3]])), SAME_PAIRS, 0
    ),
    "max_quarantined": Row(field("data.max_quarantined", 0.5), NOTHING),
    # Tokenizer
    "tokenizer moved, away from config.json": Row(edits.move_tokenizer, SAME_SPEC, 0),
    "rewritten tokenizer.json": Row(edits.respell_tokenizer, SAME_SPEC, 0),
    "tokenizer saved again": Row(retokenizer(lambda tokenizer: None), SAME_SPEC, 0),
    "padding token": Row(retokenizer(edits.pad_with_the_end), ".. c..C .r .r . rrC", 0),
    "model_max_length": Row(edits.shorten_model_max_length, ".. c..C .r .r . rrC", 0),
    "a token is added": Row(retokenizer(edits.add_token), SAME_TOKENS, 0),
    "end-of-sequence id": Row(retokenizer(edits.end_with_the_user), ".. C..C .C .c . ccC", 0),
    # Chat template and rules
    "template: a comment": Row(template(lambda text: "{#- a comment #}" + text), SAME_TOKENS, 0),
    "template: the same, in a file": Row(edits.template_in_a_file, SAME_SPEC, 0),
    "template: a character for all": Row(template(edits.space_after_roles), NEW_TOKENS, ALL),
    "template: a character for some": Row(template(edits.space_after("capital")), NEW_TOKENS, 16),
    "date": Row(field("tokenization.date", "2026-11-22"), SAME_TOKENS, 0),
    "template_kwargs": Row(field("tokenization.template_kwargs", {"unused": 1}), SAME_TOKENS, 0),
    "train_on": Row(field("tokenization.train_on", "assistant_turns"), OTHER_RULES, 0),
    "max_length that cuts nothing": Row(field("tokenization.max_length", 127), OTHER_RULES, 0),
    "max_length that drops pairs": Row(field("tokenization.max_length", 40), ".. C... .C .C . CCC", 0),
    "over_length": Row(field("tokenization.over_length", "truncate_prompt"), OTHER_RULES, 0),
    # Base and reference model
    "model moved": Row(edits.move_model, NOTHING),
    "model resharded": Row(edits.reshard, NOTHING),
    "tensors in another order": Row(edits.rewrite_weights, NOTHING),
    "names in the model's folder": Row(edits.rename_model, NOTHING),
    "the version of transformers in config.json": Row(config("transformers_version", "4.0.0"), SAME_SPEC, 0),
    "one bit of one weight": Row(edits.flip_a_bit, OTHER_BASE, ALL),
    "weights in bfloat16": Row(edits.halve_precision, OTHER_BASE, ALL),
    "rms_norm_eps": Row(config("rms_norm_eps", 1e-3), OTHER_BASE, ALL),
    "rope theta": Row(config("rope_parameters", {"rope_theta": 500.0, "rope_type": "default"}), OTHER_BASE, ALL),
    "where it stops, in generation_config.json": Row(edits.edit_generation, ".. ..CC .. .. . .CC", 0),
    "how it samples, in generation_config.json": Row(edits.edit_sampling, NOTHING),
    "how it pads, in generation_config.json": Row(edits.edit_padding, SHIPPED, 0),
    "a processor file": Row(edits.add_processor, SHIPPED, 0),
    "revision of a folder": Row(field("reference.revision", "main"), NOTHING),
    "dtype": Row(field("reference.dtype", "bfloat16"), ".. .... .. .C . CCC", ALL),
    "supervised tuning": Row(field("reference.sft", {"epochs": 1, "batch_size": 4}), NEW_REFERENCE, ALL),
    # Supervised tuning
    "tuned: no tuning any more": Row(field("reference.sft", None), ".. .... .. uu . uuC", 0, "tuned"),
    "tuned: precision": Row(field("reference.sft.precision", "bfloat16"), NEW_REFERENCE, ALL, "tuned"),
    "tuned: epochs": Row(field("reference.sft.epochs", 3), NEW_REFERENCE, ALL, "tuned"),
    "tuned: batch_size": Row(field("reference.sft.batch_size", 6), NEW_REFERENCE, ALL, "tuned"),
    "tuned: micro_tokens": Row(field("reference.sft.micro_tokens", 200), NEW_REFERENCE, ALL, "tuned"),
    "tuned: learning_rate": Row(field("reference.sft.optimizer.learning_rate", 1e-3), NEW_REFERENCE, ALL, "tuned"),
    "tuned: betas": Row(field("reference.sft.optimizer.betas", [0.8, 0.99]), NEW_REFERENCE, ALL, "tuned"),
    "tuned: eps": Row(field("reference.sft.optimizer.eps", 1e-4), NEW_REFERENCE, ALL, "tuned"),
    "tuned: weight_decay": Row(field("reference.sft.optimizer.weight_decay", 0.1), NEW_REFERENCE, ALL, "tuned"),
    "tuned: muon": Row(fields("reference.sft.optimizer", MUON), NEW_REFERENCE, ALL, "tuned"),
    "tuned: schedule": Row(field("reference.sft.schedule.type", "constant"), NEW_REFERENCE, ALL, "tuned"),
    "tuned: warmup_ratio": Row(field("reference.sft.schedule.warmup_ratio", 0.9), NEW_REFERENCE, ALL, "tuned"),
    "tuned: max_grad_norm": Row(field("reference.sft.max_grad_norm", 1e-6), NEW_REFERENCE, ALL, "tuned"),
    "tuned: seed": Row(field("reference.sft.seed", 1), NEW_REFERENCE, ALL, "tuned"),
    "tuned: a row is appended": Row(data_lines(lambda rows: [*rows, RIVER]), "C. .... CC CC C CCC", ALL + 2, "tuned"),
    "tuned: a row that is none": Row(data_lines(lambda rows: [*rows, "[]\n"]), "C. .... Cc rr c rrr", 0, "tuned"),
    "tuned: template comment": Row(template(lambda text: "{#- x #}" + text), ".. C..C .c rr . rrC", 0, "tuned"),
    "tuned: beta": Row(field("training.loss.beta", 0.3), NEW_LOSS, 0, "tuned"),
    # Preference tuning
    "beta": Row(field("training.loss.beta", 0.2), NEW_LOSS, 0),
    "label_smoothing": Row(field("training.loss.label_smoothing", 0.1), NEW_LOSS, 0),
    "loss type": Row(field("training.loss.type", "apo_zero"), NEW_LOSS, 0),
    "loss options": Row(fields("training.loss", LOSS_OPTIONS), NEW_LOSS, 0),
    "epochs, where max_steps decides": Row(field("training.epochs", 2), NOTHING),
    "max_steps": Row(field("training.max_steps", 4), NEW_TRAINING, 0),
    "batch_size": Row(field("training.batch_size", 6), NEW_TRAINING, 0),
    "micro_tokens": Row(field("training.micro_tokens", 200), NEW_TRAINING, 0),
    "learning_rate": Row(field("training.optimizer.learning_rate", 2e-3), NEW_TRAINING, 0),
    "betas": Row(field("training.optimizer.betas", [0.8, 0.99]), NEW_TRAINING, 0),
    "eps": Row(field("training.optimizer.eps", 1e-4), NEW_TRAINING, 0),
    "weight_decay": Row(field("training.optimizer.weight_decay", 0.1), NEW_TRAINING, 0),
    "muon": Row(fields("training.optimizer", MUON), NEW_TRAINING, 0),
    "schedule": Row(field("training.schedule.type", "constant"), NEW_TRAINING, 0),
    "warmup_ratio": Row(field("training.schedule.warmup_ratio", 0.9), NEW_TRAINING, 0),
    "max_grad_norm": Row(field("training.max_grad_norm", 1e-6), NEW_TRAINING, 0),
    "precision": Row(field("training.precision", "bfloat16"), NEW_TRAINING, 0),
    "dropout, of which the model has none": Row(field("training.disable_dropout", False), ".. .C.. .. .. . crr", 0),
    "seed": Row(field("training.seed", 1), NEW_TRAINING, 0),
    "adapter": Row(fields("training.adapter", ADAPTER), NEW_TRAINING, 0),
    # Evaluation and release
    "samples": Row(field("evaluation.samples", 2), NEW_EVALUATION, 0),
    "max_new_tokens": Row(field("evaluation.max_new_tokens", 12), NEW_EVALUATION, 0),
    "disclosure": Row(field("evaluation.disclosure", "votes"), NEW_EVALUATION, 0),
    "disclosure_budget": Row(field("evaluation.disclosure_budget", 0.2), NOTHING),
    "model_name": Row(field("release.model_name", "another"), ".. .... .. .. c ..C", 0),
    "eos_tokens, none of which an answer of two tokens has": Row(
        field("release.eos_tokens", ["<|user|>"]), ".. ..CC .. .. . .cC", 0
    ),
    "answers drawn by lot": Row(fields("release.generation", BY_LOT), ".. ..CC .. .. . .CC", 0),
    "min_accuracy": Row(field("release.gate.min_accuracy", 0.1), NEW_RELEASE, 0),
    "min_accuracy_of a source": Row(SetFields(FLOOR_OF_A_SOURCE), ".. .... Cc .r c rCC", 0),
    # How and when it is run
    "two ranks": Row(field("compute.processes_per_node", 2), NOTHING),
    "less memory, compiled": Row(fields("compute", FASTER), NOTHING),
    "all else of compute": Row(fields("compute", COMPUTE), NOTHING),
    "automation": Row(fields("automation", AUTOMATION), NOTHING),
    "rewritten recipe": Row(edits.rewrite_recipe, NOTHING),
    # Another version of an asset's algorithm
    "code: preference_source": Row(code_version("preference_source"), "n. .... .. .. . ...", 0),
    "code: base_model": Row(code_version("base_model"), ".n .... .. .. . ...", 0),
    "code: tokenization_spec": Row(code_version("tokenization_spec"), ".. c... .r .r . rrr", 0),
    "code: training_spec": Row(code_version("training_spec"), ".. .n.. .. .. . ...", 0),
    "code: evaluation_spec": Row(code_version("evaluation_spec"), ".. ..n. .. .. . ...", 0),
    "code: release_spec": Row(code_version("release_spec"), ".. ...c .. .. . ..r", 0),
    "code: raw_preferences": Row(code_version("raw_preferences"), ".. .... cr .r r rrr", 0),
    "code: tokenized_pairs": Row(code_version("tokenized_pairs"), ".. .... .c .r . rrr", 0),
    "code: reference_model": Row(code_version("reference_model"), ".. .... .. cr . rrr", 0, "tuned"),
    "code: reference_logprobs": Row(code_version("reference_logprobs"), ".. .... .. .c . rrr", 0),
    "code: scoring": Row(edits.another_scoring, ".. .... .. .C . ccr", ALL),
    "code: policy": Row(code_version("policy"), ".. .... .. .. . crr", 0),
    "code: evaluation": Row(code_version("evaluation"), ".. .... .. .. . .cr", 0),
    "code: released_model": Row(code_version("released_model"), ".. .... .. .. . ..C", 0),
    # Other versions of libraries, which change no token and no log-prob
    "another transformers": Row(edits.software("transformers"), ".. c... .c .c . rrr", 0),
    "another tokenizers": Row(edits.software("tokenizers"), ".. c... .c .r . rrr", 0),
    "another torch": Row(edits.software("torch"), ".. .... .. .c . rrr", 0),
    "another device": Row(edits.another_device, ".. .... .. .c . rrr", 0),
    # The place and process of the run
    "another folder": Row(edits.another_folder, NOTHING),
    "another home": Row(edits.another_home, NOTHING),
    "another user, clock and locale": Row(edits.another_process, NOTHING),
    "another name of the recipe": Row(edits.another_name, "mm mmmm mm mm M mmm"),
}


# Fields that no line of the table sets by name.
ELSEWHERE = {
    **dict.fromkeys(("data.sources.path", "tokenization.tokenizer", "tokenization.chat_template"), "moved files"),
    "data.sources.held_out": "a file held out",
    "reference.model": "a moved model",
    **dict.fromkeys((f"data.sources.{name}" for name in ("hub", "config", "split", "revision")), "needs the hub"),
    "tokenization.revision": "needs the hub",
    "training.adapter.type": "has one value",
    "training.start_from": "needs a champion",
    **dict.fromkeys((f"training.loss.{name}" for name in ("gamma", "tau")), "belongs to another type of loss"),
    **dict.fromkeys((f"training.loss.of.{name}" for name in LossTerm.model_fields), "belongs to a mixture"),
    **dict.fromkeys((f"training.loss.divergence.{name}" for name in Divergence.model_fields), "as the other options"),
    "training.head_precision": "needs a GPU",
    **dict.fromkeys(("training.router_aux_loss_coef", "reference.sft.router_aux_loss_coef"), "needs experts"),
    **dict.fromkeys(
        (f"release.gate.{name}" for name in ("type", "alpha", "held_out_evidence", "clip")), "in test_promotion.py"
    ),
}


def test_every_field_of_the_recipe_is_in_the_table() -> None:
    edited = {
        name.replace("sources.0.", "sources.")
        for row in TABLE.values()
        if isinstance(row.edit, SetFields)
        for name in row.edit.values
    }
    assert set(field_names(Recipe)) - edited == ELSEWHERE.keys()


def field_names(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Return the dotted names of all leaf fields, also of sections in lists and of optional sections."""
    for name, about in section.model_fields.items():
        inner = sections(about.annotation)
        for section_type in inner:
            yield from field_names(section_type, f"{prefix}{name}.")
        if not inner:
            yield f"{prefix}{name}"


def sections(kind: Any) -> list[type[BaseModel]]:
    """Return the sections that a field may hold: one, one of several types, or none; alone or in a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [section for part in get_args(kind) for section in sections(part)]


def rows() -> Iterator[Any]:
    """Return all rows. A row that repeats the letters and the recipe of an earlier row has the marker `system`."""
    seen: set[tuple[str, str]] = set()
    for name, row in TABLE.items():
        repeated = (row.letters, row.recipe) in seen
        seen.add((row.letters, row.recipe))
        yield pytest.param(name, marks=pytest.mark.system if repeated else ())


@pytest.mark.parametrize("name", rows())
def test_what_an_edit_recomputes(name: str, baseline: Baseline, tmp_path: Path) -> None:
    row = TABLE[name]
    folder = Path(shutil.copytree(baseline.folders[row.recipe], tmp_path / row.recipe))
    shutil.rmtree(baseline.home / "names", ignore_errors=True)  # use the copy as the recipe's own folder
    try:
        with pytest.MonkeyPatch.context() as patch:
            sandbox = Sandbox(folder, baseline.home, patch)
            row.edit(sandbox)
            services = baseline.services if sandbox.home == baseline.home else services_in(sandbox.home)
            letters, scored = observe(baseline, row, sandbox, services)
        time.tzset()
        assert _in_groups(letters) == row.letters
        assert scored == (row.scored or 0)
        if letters != "." * len(GRAPH):
            assert_the_way_back_is_free(baseline, row.recipe)
    finally:
        baseline.restore(row.recipe)


def assert_the_way_back_is_free(baseline: Baseline, recipe: str) -> None:
    pipeline = load_recipe(baseline.folders[recipe]).pipeline
    found = expect_state(pipeline, baseline.services)
    assert {asset: outcome.fingerprint for asset, outcome in found.items()} == baseline.fingerprints[recipe]
    assert {asset.action for asset in plan(pipeline, baseline.services, baseline.instance)} == {"reuse"}


def _in_groups(letters: str) -> str:
    """Return the letters of the fourteen assets with a space between groups; unchanged if one of them is an error."""
    return (
        " ".join(letters[a:b] for a, b in itertools.pairwise((0, 2, 6, 8, 10, 11, 14)))
        if len(letters) == 14
        else letters
    )

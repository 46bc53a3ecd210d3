"""Each recipe releases its own files: a changed shipped file makes a new version, and other recipes keep theirs.

The oracles are the files as the edits wrote them, and the objects that transformers loads from a released folder.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, Olmo2Config, pipeline

from tests.workflows.edits import change_json
from tests.workflows.homes import check_error, check_values
from tests.workflows.in_process import Baseline, run_in
from tests.workflows.prepared_homes import PreparedHomes
from tests.workflows.question_pairs import conversation, write_data
from tests.workflows.state.test_truth_table import PLAIN
from training.contract.errors import ModelError
from workflows.commands.inspect_pair import inspect_row
from workflows.commands.plan import plan
from workflows.commands.run import materialize
from workflows.commands.run_report import RunReport
from workflows.recipes.discovery import load_recipe
from workflows.state.status import status

pytestmark = pytest.mark.slow

# OLMo 2's tokenizer splits digits into groups of three. That of GPT-2 keeps all digits together.
IN_THREES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
FEW = {**PLAIN, "training": {**PLAIN["training"], "max_steps": 1}}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory, prepared_homes: PreparedHomes) -> Iterator[Baseline]:
    with prepared_homes.copied_to(tmp_path_factory.mktemp("released"), {"plain": FEW}) as made:
        yield made


@pytest.fixture
def folder(baseline: Baseline, tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the recipe that was run, under the same name, to be edited."""
    yield Path(shutil.copytree(baseline.folders["plain"], tmp_path / "plain"))
    baseline.restore("plain")
    shutil.rmtree(baseline.home / "names", ignore_errors=True)


@pytest.fixture(autouse=True)
def _free_names(baseline: Baseline) -> None:
    shutil.rmtree(baseline.home / "names", ignore_errors=True)


def run(baseline: Baseline, folder: Path, asset: str | None = None) -> RunReport:
    report = materialize(load_recipe(folder), baseline.services, baseline.instance, asset)
    assert report.succeeded, report
    return report


def states(baseline: Baseline, folder: Path) -> dict[str, tuple[str, ...]]:
    found = status(load_recipe(folder).pipeline, baseline.services, baseline.instance)
    return {asset.asset: asset.causes for asset in found if asset.state != "fresh"}


def released(baseline: Baseline, report: RunReport, name: str = "plain") -> Path:
    return baseline.services.registry.resolve(f"models:/{name}/{report.model_version}")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def set_attributes(folder: Path, attributes: dict[str, Any]) -> None:
    (folder / "defs.yaml").write_text(json.dumps({"type": "workflows.PreferenceTuning", "attributes": attributes}))


@pytest.mark.parametrize(
    ("file", "fields", "cause", "place"),
    [
        ("generation_config.json", {"pad_token_id": 2}, "generation_config.json pad_token_id 0 -> 2", ""),
        (
            "tokenizer_config.json",
            {"pad_token": "<|user|>"},
            "tokenizer_config.json pad_token <|pad|> -> <|user|>",
            "components/tokenizer",
        ),
        ("tokenizer_config.json", {"model_max_length": 77}, "tokenizer_config.json model_max_length 256 -> 77", ""),
        ("processor_config.json", {"image_seq_len": 5}, "processor_config.json differs", ""),
    ],
)
def test_release_after_an_edit_of_a_shipped_file_is_a_new_version_and_trains_nothing(
    baseline: Baseline, folder: Path, file: str, fields: dict[str, Any], cause: str, place: str
) -> None:
    path = folder / "base" / file
    path.write_text(path.read_text() if path.exists() else "{}")
    change_json(path, **fields)
    assert states(baseline, folder)["released_model"][-1] == f"release_spec: {cause}"
    report = run(baseline, folder)
    outcomes = {asset.asset: asset.outcome for asset in report.assets}
    assert {asset for asset, outcome in outcomes.items() if outcome == "computed"} <= {
        "tokenization_spec",
        "release_spec",
        "released_model",
    }
    assert outcomes["released_model"] == "computed" and report.model_version != "1"
    model = released(baseline, report)
    for shipped in (model / file, model.parent / place / file if place else model / file):
        assert fields.items() <= read(shipped).items()
    assert states(baseline, folder) == {}


def test_release_of_a_recipe_has_its_own_padding_whatever_ran_in_the_home_before(
    baseline: Baseline, tmp_path: Path
) -> None:
    """The two bases give the same tokens and weights, so they share everything that is trained."""
    other = Path(shutil.copytree(baseline.folders["plain"], tmp_path / "other"))
    set_attributes(other, {**FEW, "release": {"model_name": "other"}})
    change_json(other / "base" / "tokenizer_config.json", pad_token="<|end|>", model_max_length=512)
    change_json(other / "base" / "config.json", use_cache=False)
    change_json(other / "base" / "generation_config.json", suppress_tokens=[7])
    report = run(baseline, other)
    reused = {asset.asset for asset in report.assets if asset.outcome == "reused"}
    assert {"tokenized_pairs", "reference_logprobs", "policy", "evaluation"} <= reused
    tokenizer = AutoTokenizer.from_pretrained(released(baseline, report, "other"))
    assert (tokenizer.pad_token, tokenizer.model_max_length) == ("<|end|>", 512)
    assert read(released(baseline, report, "other") / "generation_config.json")["suppress_tokens"] == [7]
    first = baseline.services.registry.resolve("models:/plain/1")
    assert AutoTokenizer.from_pretrained(first).pad_token == "<|pad|>"
    assert "suppress_tokens" not in read(first / "generation_config.json")


def test_release_of_files_from_the_store_is_the_same_after_they_were_lost(baseline: Baseline, folder: Path) -> None:
    change_json(folder / "base" / "generation_config.json", suppress_tokens=[9])
    model = released(baseline, run(baseline, folder))
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    shutil.rmtree(model)
    run(baseline, folder)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert read(model / "generation_config.json")["suppress_tokens"] == [9]


def test_pipeline_of_a_release_answers_greedily_though_its_base_draws_by_lot(baseline: Baseline, folder: Path) -> None:
    """A pipeline of transformers samples at a temperature of 0.7 unless the model's own file differs."""
    change_json(folder / "base" / "generation_config.json", do_sample=True, temperature=5.0, pad_token_id=1)
    model = released(baseline, run(baseline, folder))
    answer = pipeline("text-generation", model=str(model))
    asked = [{"role": "user", "content": "What is the opposite of hot?"}]
    answers = {answer(asked, max_new_tokens=12)[0]["generated_text"][-1]["content"] for _ in range(4)}
    tokenizer, weights = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    greedy = weights.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answers == {tokenizer.decode(greedy, skip_special_tokens=True)}


def ends_with_another_token(folder: Path) -> None:
    """Make the base stop at <|pad|>, while its template ends an answer with <|end|>."""
    for name in ("config.json", "generation_config.json"):
        change_json(folder / "base" / name, eos_token_id=0)
    change_json(folder / "base" / "tokenizer_config.json", eos_token="<|pad|>")


def test_note_of_an_end_of_turn_at_which_the_model_does_not_stop(
    baseline: Baseline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(baseline.folders["plain"], tmp_path / "endless"))
    set_attributes(folder, {**FEW, "release": {"model_name": "endless"}})
    ends_with_another_token(folder)
    [note] = {asset.asset: asset.notes for asset in planned(baseline, folder)}["release_spec"]
    check_values(note, " <|end|>", "(<|pad|>)", '`release.eos_tokens: ["<|end|>"]`')
    model = released(baseline, run(baseline, folder), "endless")
    assert read(model / "generation_config.json")["eos_token_id"] == 0
    set_attributes(folder, {**FEW, "release": {"model_name": "endless", "eos_tokens": ["<|end|>"]}})
    assert {asset.asset: asset.notes for asset in planned(baseline, folder)}["release_spec"] == ()
    report = run(baseline, folder)
    computed = {asset.asset for asset in report.assets if asset.outcome == "computed"}
    assert computed == {"evaluation", "released_model"}  # the plan made the specs
    assert read(released(baseline, report, "endless") / "generation_config.json")["eos_token_id"] == [0, 1]


def planned(baseline: Baseline, folder: Path) -> Any:
    return plan(load_recipe(folder).pipeline, baseline.services, baseline.instance)


def of_olmo(folder: Path) -> None:
    """Write `base`, an OLMo 2, and `tok`, the same tokenizer files without a model's config.json beside them."""
    rows = [
        conversation(f"What is in town {n}? I have 2023 crowns.", f"It costs $1,650 ({650841823 + n}).", f"No {n}.")
        for n in range(16)
    ]
    tokenizer = write_data(folder, rows)
    content = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(IN_THREES), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    content.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    content.decoder = decoders.ByteLevel()
    content.save(str(folder / "base" / "tokenizer.json"))
    change_json(folder / "base" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    shutil.copytree(folder / "base", folder / "tok")
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Olmo2Config(vocab_size=len(tokenizer), **shape, eos_token_id=1, pad_token_id=0, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")


def test_tokens_of_a_tokenizer_whose_class_config_json_decides(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The same tokenizer files give other ids beside a config.json of OLMo 2, so a move there tokenizes again."""
    attributes = {**FEW, "tokenization": {"tokenizer": "./tok"}, "release": {"model_name": "olmo"}}
    with run_in(tmp_path_factory.mktemp("olmo"), {"olmo": attributes}, of_olmo) as baseline:
        folder = baseline.folders["olmo"]
        of_gpt2 = ids_of_row(baseline, folder)
        assert of_gpt2 == own_ids(folder, "tok")
        [note] = {asset.asset: asset.notes for asset in planned(baseline, folder)}["tokenization_spec"]
        check_values(note, " GPT2Tokenizer", "tokens", "'x = [1, 20, 300]")
        # Beside OLMo's config.json the released tokenizer still gives the ids of training.
        text = AutoTokenizer.from_pretrained(folder / "tok").decode(of_gpt2)
        model = baseline.services.registry.resolve("models:/olmo/1")
        assert AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"] == of_gpt2

        set_attributes(folder, {**attributes, "tokenization": {}})
        causes = states(baseline, folder)
        assert "config.json beside the tokenizer: model_type absent -> olmo2" in causes["tokenization_spec"]
        assert {"tokenized_pairs", "policy", "released_model"} <= causes.keys()
        run(baseline, folder)
        assert ids_of_row(baseline, folder) == own_ids(folder, "base") != of_gpt2
        assert {asset.asset: asset.notes for asset in planned(baseline, folder)}["tokenization_spec"] == ()


def ids_of_row(baseline: Baseline, folder: Path) -> list[int]:
    return inspect_row(load_recipe(folder).pipeline, baseline.services, baseline.instance, 0).chosen.token_ids


def own_ids(folder: Path, part: str) -> list[int]:
    """Return transformers' tokens of the first pair's chosen conversation."""
    row = json.loads((folder / "preferences.jsonl").read_text().splitlines()[0])
    tokenizer = AutoTokenizer.from_pretrained(folder / part)
    text = tokenizer.apply_chat_template([*row["prompt"], *row["chosen"]], tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_tokens_without_embeddings_are_named_before_rows_are_tokenized(baseline: Baseline, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_tokens([f"unused {n}" for n in range(640 - len(tokenizer))])  # for which the model has embeddings
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>", "<|done|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|done|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder / "base")
    before = set(baseline.services.store.fingerprints("tokenized_pairs"))
    message = r"defs\.yaml:\d+: reference\.model: \./base: .* <\|turn\|>, <\|done\|>.*vocab_size: 640`.*\[missing-embeddings\]$"
    with pytest.raises(ModelError, match=message):
        planned(baseline, folder)
    report = materialize(load_recipe(folder), baseline.services, baseline.instance, "tokenized_pairs")
    failed = {asset.asset: asset.error for asset in report.assets if asset.outcome == "failed"}
    assert failed.keys() == {"tokenized_pairs"}
    check_error(failed["tokenized_pairs"], "missing-embeddings", "<|turn|>, <|done|>")
    assert set(baseline.services.store.fingerprints("tokenized_pairs")) == before


def test_inspect_shows_tokens_that_a_plan_has_made(baseline: Baseline, folder: Path) -> None:
    path = folder / "base" / "chat_template.jinja"
    then = ids_of_row(baseline, folder)
    path.write_text(path.read_text().replace("+ '|>' }}", "+ '|> ' }}"))
    assert ids_of_row(baseline, folder) == then
    planned(baseline, folder)
    assert ids_of_row(baseline, folder) == own_ids(folder, "base") != then


def test_files_of_a_release_are_those_of_the_table(baseline: Baseline) -> None:
    model = baseline.services.registry.resolve("models:/plain/1")
    of_weights, of_tokenizer = {"model.safetensors", "config.json"}, {"tokenizer.json", "tokenizer_config.json"}
    shipped = {*of_weights, *of_tokenizer, "chat_template.jinja", "generation_config.json", "README.md"}
    assert {path.name for path in model.iterdir()} == shipped

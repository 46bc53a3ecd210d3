"""The `preferences` job: real files counted, every row accounted for, splits that never move."""

import hashlib
import itertools
import json

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from training.contract.errors import DataError
from training.contract.files.local_files import data_files
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.fingerprint import value_digest
from training.contract.protocol.events import read_events
from training.data.reading.pair_writer import is_sampled, split_of

GOOD = {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}

# Rows and usable pairs of each published file. What is missing was counted over the raw rows by a few other lines:
# hh: prompts before the last "\n\nAssistant:" equal (9 differ), both answers and all turns non-blank (4), different (2);
# pandalm: text responses (6 are JSON booleans) where 1 or 2 has two of three votes (105 not) and neither is blank (52);
# rasbt: chosen != rejected (6 equal).
PUBLISHED = {
    "preferences/hh-rlhf.helpful-base.test.jsonl": ("hh", 2354, 2339),
    "preferences/llama-factory.dpo_en_demo.json": ("sharegpt", 300, 300),
    "preferences/rasbt.instruction-data-with-preference.json": ("alpaca", 1100, 1094),
    "preferences/azure.orca_dpo_pairs.validation.jsonl": ("openai", 284, 284),
    "preferences/pandalm.testset-v1.json": ("comparison", 999, 836),
    "schemas/conversational-explicit-prompt.jsonl": ("conversational", 300, 300),
    "schemas/conversational-implicit-prompt.jsonl": ("implicit_prompt", 300, 300),
    "schemas/strings-prompt-chosen-rejected.jsonl": ("strings", 300, 300),
}
CLEANED = {
    "hh-helpful-base": "hh-rlhf.helpful-base.test.jsonl",
    "rasbt-politeness": "rasbt.instruction-data-with-preference.json",
    "llama-factory-dpo-en": "llama-factory.dpo_en_demo.json",
    "azure-orca-dpo": "azure.orca_dpo_pairs.validation.jsonl",
    "pandalm-human": "pandalm.testset-v1.json",
}


@pytest.mark.shared
@pytest.mark.parametrize("file", PUBLISHED)
def test_published_files(workshop, shared_data, file):
    format, rows, pairs = PUBLISHED[file]
    done = workshop.preferences({"path": str(shared_data / file)})
    counts = done.details["counts"]
    assert (counts["rows_read"], counts["pairs"], counts["quarantined"]) == (rows, pairs, rows - pairs)
    assert list(done.details["formats"].values()) == [format]
    assert len(done.table("preferences.parquet")) == pairs
    assert len(done.table("quarantine.parquet")) == rows - pairs == sum(done.details["reasons"].values())


@pytest.mark.shared
def test_rows_agree_with_an_independent_cleaning_of_the_same_files(workshop, shared_data):
    """`preferences-real.jsonl` was made from these files by other code, which dropped more and stripped blanks."""
    done = workshop.preferences({"path": str(shared_data / "preferences")})
    made = {(row["source"], row["line"] - 1): row for row in done.table("preferences.parquet")}
    rows = map(json.loads, (shared_data / "preferences-real.jsonl").open("rb"))
    origins = map(json.loads, (shared_data / "preferences-real.meta.jsonl").open("rb"))
    compared = stripped = 0
    for row, origin in zip(rows, origins, strict=True):
        if origin["source"] in CLEANED:
            ours = made[CLEANED[origin["source"]], origin["row"]]
            compared += 1
            for part in ("prompt", "chosen", "rejected"):
                stripped += ours[part] != row[part]
                texts = [[turn["content"].strip() for turn in turns] for turns in (ours[part], row[part])]
                assert texts[0] == texts[1], (origin, part)
    assert (compared, stripped) == (2281 + 1092 + 751 + 280 + 264, 3)


def test_nothing_is_dropped_silently(workshop):
    bad = ['{"prompt": "x"', {"prompt": "x", "chosen": "a", "rejected": "a"}, "[]", {**GOOD, "prompt": "a\ud800"}]
    done = workshop.rows([GOOD, *bad])
    counts = {"rows_read": 5, "pairs": 1, "quarantined": 4, "left_out": 0, "train": 1, "validation": 0}
    assert done.details["counts"] == counts | {"duplicates": 0, "conflicting": 0}
    assert [(row["line"], row["reason"]) for row in done.table("quarantine.parquet")] == [
        (2, "bad JSON"), (3, "chosen equals rejected"), (4, "not an object"), (5, "invalid unicode"),
    ]  # fmt: skip
    assert "1 rows in quarantine: chosen equals rejected, the first: rows0.jsonl, line 3" in _told(done)
    assert done.table("quarantine.parquet")[0]["text"] == bad[0]
    [row] = done.table("preferences.parquet")
    assert len(bytes.fromhex(row.pop("identity"))) == 16
    assert row == {
        "row": 0, "split": "train", "source": "rows0.jsonl", "line": 1,
        "prompt": [{"role": "user", "content": "Why?"}], "chosen": [{"role": "assistant", "content": "Because."}],
        "rejected": [{"role": "assistant", "content": "No idea."}],
    }  # fmt: skip


def _told(done) -> str:
    """What the job told, in the words of its events."""
    return "\n".join(json.loads(line).get("text", "") for line in done.events.read_text().splitlines())


def test_pairs_that_repeat_or_contradict_an_earlier_one_are_counted_and_dropped_on_request(workshop, tmp_path):
    """In any format and file. Of pairs with other tools, another answer or other arguments of the template none repeats."""
    turns = {"prompt": [{"role": "user", "content": "Why?"}]}
    turns |= {side: [{"role": "assistant", "content": GOOD[side]}] for side in ("chosen", "rejected")}
    opposite = {**GOOD, "chosen": GOOD["rejected"], "rejected": GOOD["chosen"]}
    others = [{**GOOD, "rejected": "So."}, {**GOOD, "prompt": "Who?"}, {**GOOD, "chat_template_kwargs": {"a": 1}}]
    for name, rows in {"a": [GOOD, *others, "{", GOOD], "b": [opposite, GOOD, opposite, others[0]]}.items():
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "c.jsonl").write_text(json.dumps(turns) + "\n")
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "abc"]
    kept, dropped = (workshop.preferences(*sources, duplicates=rule) for rule in ("keep", "drop"))
    found = {"rows_read": 11, "quarantined": 1, "left_out": 0, "duplicates": 5, "conflicting": 1}
    for done, pairs in ((kept, 10), (dropped, 5)):
        assert done.details["counts"].items() >= (found | {"pairs": pairs}).items()
        assert len(done.table("preferences.parquet")) == pairs
        assert "pairs that say the opposite of an earlier one: 1, the first: b.jsonl, line 1" in _told(done)
    every = [(row["source"], row["line"]) for row in kept.table("preferences.parquet")]
    assert every == [("a.jsonl", n) for n in (1, 2, 3, 4, 6)] + [("b.jsonl", n) for n in (1, 2, 3, 4)] + [
        ("c.jsonl", 1)
    ]
    assert len({row["identity"] for row in kept.table("preferences.parquet")}) == 5
    rows = dropped.table("preferences.parquet")
    assert [(row["row"], row["source"], row["line"]) for row in rows] == [
        (0, "a.jsonl", 1), (1, "a.jsonl", 2), (2, "a.jsonl", 3), (3, "a.jsonl", 4), (4, "b.jsonl", 1),
    ]  # fmt: skip
    assert "pairs that repeat an earlier one: 5, the first: a.jsonl, line 6; they were kept, `data." in _told(kept)
    assert "pairs that repeat an earlier one: 5, the first: a.jsonl, line 6; they were dropped" in _told(dropped)


def test_without_duplicates_dropping_them_changes_nothing_and_with_it_repetition_changes_nothing(workshop):
    """So an export with rows that were there before is no new data."""
    other = {**GOOD, "prompt": "Who?"}
    given = [[GOOD, other], [GOOD, other, other, GOOD]]
    plain, repeated = (workshop.preferences(workshop.source(rows)) for rows in given)
    once, again = (workshop.preferences(workshop.source(rows), duplicates="drop") for rows in given)
    assert plain.made.fingerprint == once.made.fingerprint == again.made.fingerprint != repeated.made.fingerprint


def test_of_a_duplicate_in_a_held_out_source_that_one_stays(workshop):
    """Held-out sources are read first, and one of which every pair is in another of them has pairs all the same."""
    train = workshop.source([GOOD, {**GOOD, "prompt": "Who?"}])
    workshop.count += 1
    held_out = {**workshop.source([GOOD]), "held_out": True}
    done = workshop.preferences(train, held_out, held_out, fraction=0.0, duplicates="drop")
    assert [(row["line"], row["split"]) for row in done.table("preferences.parquet")] == [
        (1, "validation"),
        (2, "train"),
    ]
    assert done.details["counts"]["duplicates"] == 2


def test_a_given_format_overrides_detection(workshop):
    done = workshop.rows(
        [GOOD, {"chosen": "\n\nHuman: A\n\nAssistant: a", "rejected": "\n\nHuman: A\n\nAssistant: b"}], "hh"
    )
    assert done.details["formats"] == {"rows0.jsonl": "hh"}
    assert done.details["reasons"] == {"not a transcript": 1}


def test_the_format_is_that_of_most_rows_and_not_of_the_first(workshop):
    done = workshop.rows([{"instruction": "A", "chosen": "a", "rejected": "b"}, GOOD, GOOD])
    assert done.details["formats"] == {"rows0.jsonl": "strings"}
    assert done.details["reasons"] == {"missing field": 1}


def test_the_fingerprint_is_of_the_pairs_and_not_of_the_files(workshop):
    conversation = {
        "prompt": [{"role": "user", "content": "Why?"}], "rejected": [{"role": "assistant", "content": "No idea."}],
        "chosen": [{"role": "assistant", "content": "Because."}],
    }  # fmt: skip
    same = [workshop.rows([GOOD]), workshop.rows([conversation])]
    assert len({done.made.fingerprint for done in same}) == 1
    assert workshop.rows([GOOD, "{"]).made.fingerprint not in {done.made.fingerprint for done in same}
    others = [
        workshop.rows([GOOD, {**GOOD, "prompt": "Who?"}]), workshop.rows([{**GOOD, "prompt": "Who?"}, GOOD]),
        workshop.rows([{**GOOD, "chosen": "So."}]), workshop.rows([GOOD], fraction=0.9999),
    ]  # fmt: skip
    assert len({done.made.fingerprint for done in [same[0], *others]}) == 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], r"no usable preference pair in rows0.jsonl \(no row at all\)$"),
        (["{", GOOD | {"chosen": ""}], r"1 x bad JSON.*; the first: rows0.jsonl, line 1: "),
        (["{", "]"], r"rows0.jsonl: no row of it can be read; line 1: bad JSON: "),
    ],
)
def test_data_without_a_pair_is_refused(workshop, rows, words):
    with pytest.raises(DataError, match=words):
        workshop.rows(rows)


def test_split_by_hand():
    """sha256 of the canonical JSON of the prompt, as a number in [0, 1), against the fraction."""
    prompt = [{"role": "system", "content": "Knapp!"}, {"role": "user", "content": "Wie heißt du?"}]
    text = '[{"content":"Knapp!","role":"system"},{"content":"Wie heißt du?","role":"user"}]'
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256
    assert split_of(value_digest(prompt), place + 1e-9) == "validation"
    assert split_of(value_digest(prompt), place - 1e-9) == "train"


PROMPTS = st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_fraction_keeps_what_was_validation(prompts, one, other):
    small, large = sorted((one, other))
    for prompt in prompts:
        digest = value_digest([{"role": "user", "content": prompt}])
        assert split_of(digest, small) == "train" or split_of(digest, large) == "validation"


def test_splits_stay_as_data_grows_and_follow_the_prompt(workshop):
    rows = [{**GOOD, "prompt": f"Q{n // 2}", "chosen": f"A{n}"} for n in range(400)]
    first = {
        row["chosen"][0]["content"]: row["split"]
        for row in workshop.rows(rows[:100], fraction=0.3).table("preferences.parquet")
    }
    grown = workshop.rows(rows[::-1], fraction=0.3)
    later = {row["chosen"][0]["content"]: row["split"] for row in grown.table("preferences.parquet")}
    assert first.items() <= later.items()
    assert all(later[f"A{n}"] == later[f"A{n + 1}"] for n in range(0, 400, 2))
    assert 0.2 < grown.details["counts"]["validation"] / 400 < 0.4


def test_what_a_held_out_source_asks_is_held_out_wherever_it_stands(workshop, tmp_path):
    """Of eight questions to train on, Q0 to Q7, three are in the test set too, which comes last in the recipe."""

    def source(name: str, questions: range, **given: bool) -> dict[str, object]:
        rows = [{**GOOD, "prompt": f"Q{n}", "chosen": f"{name} {n}"} for n in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(tmp_path / f"{name}.jsonl"), **given}

    train, test = source("train", range(8)), source("test", range(5, 10), held_out=True)
    done = workshop.preferences(train, test, fraction=0.0)
    splits = {row["chosen"][0]["content"]: row["split"] for row in done.table("preferences.parquet")}
    assert {name for name, split in splits.items() if split == "train"} == {f"train {n}" for n in range(5)}
    assert len(splits) == 13 and done.details["counts"]["validation"] == 8
    both = workshop.preferences(train, test, fraction=0.5).table("preferences.parquet")
    alone = workshop.preferences(train, fraction=0.5).table("preferences.parquet")
    by_hash = {row["chosen"][0]["content"] for row in alone if row["split"] == "validation"}
    held_out = {row["chosen"][0]["content"] for row in both if row["split"] == "validation"}
    assert held_out == by_hash | {name for name, split in splits.items() if split == "validation"}
    assert by_hash - {f"train {n}" for n in (5, 6, 7)}


def test_a_held_out_source_without_a_pair_is_refused(workshop, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "test.jsonl").write_text("{}\n")
    train, test = ({"path": str(tmp_path / name), "format": "strings"} for name in ("train.jsonl", "test.jsonl"))
    with pytest.raises(
        DataError, match=r"`data.sources\.1` \(test.jsonl ...\) is held out, and none of its rows is a usable pair;"
    ):
        workshop.preferences(train, {**test, "held_out": True})


def test_a_fraction_by_hand():
    """The second half of sha256 of the canonical JSON of the prompt, as a number in [0, 1), against the fraction."""
    prompt = [{"role": "user", "content": "Why?"}]
    half = hashlib.sha256(b'[{"content":"Why?","role":"user"}]').hexdigest()[32:]
    place = int(half, 16) / 2**128
    assert is_sampled(value_digest(prompt), place + 1e-9) and is_sampled(value_digest(prompt), 1.0)
    assert not is_sampled(value_digest(prompt), place - 1e-9)


def test_a_fraction_of_a_source_is_of_its_prompts_and_stays_as_data_grows(workshop, tmp_path):
    """Of 400 rows about 200 prompts, of which those left out are counted, and another source is used whole."""
    rows = [{**GOOD, "prompt": f"Q{n // 2}", "chosen": f"A{n}"} for n in range(400)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({**GOOD, "prompt": f"Q{n}"}) + "\n" for n in range(20)))

    def drawn(lines: list[dict[str, str]], fraction: float) -> dict[str, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines, {}]))
        sampled = {"path": str(tmp_path / "rows.jsonl"), "format": "strings", "fraction": fraction}
        done = workshop.preferences(sampled, {"path": str(tmp_path / "own.jsonl")}, fraction=0.3)
        table, counts = done.table("preferences.parquet"), done.details["counts"]
        kept = {row["chosen"][0]["content"]: row["split"] for row in table if row["source"] == "rows.jsonl"}
        assert counts["pairs"] == len(table) == len(kept) + 20
        assert (counts["rows_read"], counts["quarantined"]) == (len(lines) + 1 + 20, 1)
        left_out = len(lines) - len(kept)
        assert counts["left_out"] == left_out
        told = f"{left_out} rows left out by the `fraction` of their source" in done.events.read_text()
        assert told == (left_out > 0)
        return kept

    whole, third, tenth = drawn(rows, 1.0), drawn(rows, 0.33), drawn(rows[:100], 0.1)
    assert whole.keys() == {row["chosen"] for row in rows}
    assert tenth.items() <= third.items() <= whole.items(), "and in the same split"
    assert all((f"A{n}" in third) == (f"A{n + 1}" in third) for n in range(0, 400, 2))
    assert 0.25 < len(third) / 400 < 0.41
    assert 0.2 < sum(split == "validation" for split in third.values()) / len(third) < 0.4, "as of all prompts"


def test_only_what_is_used_of_a_held_out_source_is_held_out(workshop, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**GOOD, "prompt": f"Q{n}"}) + "\n" for n in range(100)))
    same = {"path": str(tmp_path / "rows.jsonl")}
    done = workshop.preferences(same, {**same, "held_out": True, "fraction": 0.2}, fraction=0.0)
    rows = done.table("preferences.parquet")
    tested = {row["prompt"][0]["content"] for row in rows if row["source"].startswith("2:")}
    assert 10 < len(tested) < 30
    assert {row["prompt"][0]["content"] for row in rows if row["split"] == "validation"} == tested
    with pytest.raises(DataError, match=r"is a usable pair in its `fraction` of 1e-06; name one"):
        workshop.preferences(same, {**same, "held_out": True, "fraction": 1e-6})
    with pytest.raises(DataError, match=r"no usable preference pair in rows.jsonl \(100 x left out by `fraction`\)$"):
        workshop.preferences({**same, "fraction": 1e-6})


@pytest.mark.parametrize(("suffix", "empty"), [("jsonl", ""), ("json", "[]"), ("csv", "prompt,chosen,rejected\n")])
def test_a_source_without_a_row_is_refused_and_a_file_of_it_is_told(workshop, tmp_path, suffix, empty):
    """A failed export would else train on what is left, and say so nowhere."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / f"export.{suffix}").write_text(empty)
    sources = [{"path": str(tmp_path / name)} for name in ("rows.jsonl", f"export.{suffix}")]
    with pytest.raises(
        DataError, match=rf"`data.sources.1` \(export.{suffix} ...\) has no row at all, .*; write its rows"
    ):
        workshop.preferences(*sources)
    done = workshop.preferences({"path": str(tmp_path / "*.*")})
    told = [event["text"] for event in read_events(done.events) if event["event"] == "note"]
    assert done.details["counts"]["pairs"] == 1 and told == [f"export.{suffix} has no row"]


RENAMED = [
    ({"input": "Why?", "chosen": "Because.", "rejected": "No idea."}, {"prompt": "input"}),
    ({"input": "Why?", "prompt": "[INST] Why?", "yes": "Because.", "rejected": "No idea."},
     {"prompt": "input", "chosen": "yes"}),
    ({"prompt": "Why?", "chosen": "No idea.", "rejected": "Because."}, {"chosen": "rejected", "rejected": "chosen"}),
    ({**GOOD, "images": ["a.png"], "tools": "a hammer"}, {"images": None, "tools": None}),
    ({"post": "Why?", "A": "No idea.", "B": "Because.", "better": "b"},
     {"prompt": "post", "response_a": "A", "response_b": "B", "label": "better"}),
    ({"context": [{"role": "user", "content": "Why?"}], "response1": "Because.", "response2": "No idea.",
      "overall_preference": -3}, {"prompt": "context"}),
    ({"prompt": "Why?", "response_0": "No idea.", "response_1": "Because.", "better_response_id": 0,
      "safer_response_id": 1}, {"better_response_id": "safer_response_id"}),
]  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "columns"), RENAMED)
def test_a_field_is_read_from_the_column_that_holds_it(workshop, tmp_path, row, columns, suffix):
    """In one of two sources; a row that is no pair is kept as it was read."""
    rows = Dataset.from_list([row, {name: "" if isinstance(value, str) else value for name, value in row.items()}])
    getattr(rows, {"jsonl": "to_json", "parquet": "to_parquet"}[suffix])(tmp_path / f"rows.{suffix}")
    (tmp_path / "own.jsonl").write_text(json.dumps({**GOOD, "prompt": "Who?"}) + "\n")
    renamed = {"path": str(tmp_path / f"rows.{suffix}"), "columns": columns}
    done = workshop.preferences({"path": str(tmp_path / "own.jsonl")}, renamed)
    pairs = done.table("preferences.parquet")
    assert [pair["prompt"][0]["content"] for pair in pairs] == ["Who?", "Why?"]
    sides = [[turn["content"] for turn in pairs[1][side]] for side in ("prompt", "chosen", "rejected")]
    assert sides == [["Why?"], ["Because."], ["No idea."]]
    [left] = done.table("quarantine.parquet")
    assert json.loads(left["text"]).keys() == row.keys()


def test_a_column_that_comes_late_is_found_and_one_that_never_comes_is_refused(workshop, tmp_path):
    rows = [*({**GOOD, "prompt": f"Q{n}"} for n in range(40)), {**GOOD, "persona": "You are a teacher."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "rows.jsonl")}
    last = workshop.preferences({**source, "columns": {"system": "persona"}}).table("preferences.parquet")[-1]
    assert [turn["role"] for turn in last["prompt"]] == ["system", "user"]
    absent = r"sources.1.columns` says that `{}` is in the column '{}', and none of {} has .* 'prompt', 'chosen', 'rejected'$"
    first, every = "the first rows of .*rows.jsonl", "the source's rows"
    for field, column, format, where in (
        ("system", "personna", "auto", every), ("prompt", "q", "auto", first), ("prompt", "q", "strings", every),
    ):  # fmt: skip
        with pytest.raises(DataError, match=absent.format(field, column, where)):
            workshop.preferences(source, {**source, "columns": {field: column}, "format": format})
    (tmp_path / "none.jsonl").write_text("{\n")
    unread = {"path": str(tmp_path / "none.jsonl"), "columns": {"prompt": "q"}, "format": "strings"}
    assert workshop.preferences(source, unread).details["reasons"] == {"bad JSON": 1}


@pytest.mark.parametrize(
    ("row", "columns", "read"),
    [
        ({"instruction": "Judge it.", "q": "Why?", "chosen": "a", "rejected": "b"}, {"prompt": "q"}, "instruction, rejected"),
        ({**GOOD, "q": "Who?"}, {"question": "q"}, "chosen, prompt, rejected"),
        ({**GOOD, "better": 1}, {"label": "better"}, "chosen, prompt, rejected"),
        ({"prompt": "Why?", "response_0": "a", "response_1": "b", "best": 1, "x": "c", "y": "d"},
         {"response_1": "x", "response_2": "y", "label": "best"}, "label, prompt, response_0, response_1"),
    ],
)  # fmt: skip
def test_a_column_that_no_row_is_asked_for_is_refused(workshop, row, columns, read):
    """Another field comes first: what the recipe says would not be what is trained."""
    with pytest.raises(
        DataError, match=rf"in the column '\w+', but the rows were read without it, from .*{read}: set what"
    ):
        workshop.preferences({**workshop.source([row]), "columns": columns})


def _labelled(labels):
    return [{"prompt": f"Q{n}", "response_a": "a", "response_b": "b", "label": label} for n, label in enumerate(labels)]


def test_labels_that_count_from_0_are_not_taken_for_ties(workshop):
    with pytest.raises(
        DataError, match=r"labels of the first rows are 0 and 1 and never 2, .* `columns: \{response_0:"
    ):
        workshop.rows(_labelled([0, 1, 1, "0"] * 4))
    with pytest.raises(DataError, match="labels of the first rows"):
        workshop.rows(_labelled([0.0, 1.0] * 8), "comparison")
    named = {"response_0": "response_a", "response_1": "response_b"}
    done = workshop.preferences({**workshop.source(_labelled([0, 1, 1, 0] * 4)), "columns": named})
    assert [row["chosen"][0]["content"] for row in done.table("preferences.parquet")] == ["a", "b", "b", "a"] * 4
    signed = [{"preference_strength": row.pop("label"), **row} for row in _labelled([-1, 0, 1] * 6)]
    assert workshop.rows(signed).details["counts"]["pairs"] == 12
    for labels in ([0, 1, 1, 2] * 4, [0, 1, 1, 0], [1] * 16, ["tie", 1] * 8, ["a"] * 16 + [0, 1]):
        assert workshop.rows(_labelled(labels)).details["counts"]["pairs"] == sum(
            label in (1, 2, "a") for label in labels
        )


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("chosen", '[{"role": "assistant", "content": "Because."}]'),
        ("chosen", " [{'content': 'Because.', 'role': 'assistant'}]"),
        ("prompt", '["Why?"]'),
    ],
)
def test_lists_written_as_text_are_not_taken_for_text(workshop, side, text):
    with pytest.raises(DataError, match=rf"rows\d.jsonl: `{side}` holds lists written as text, such as .*; save "):
        workshop.rows([{**GOOD, side: text}] * 3)
    assert workshop.rows([{**GOOD, side: text}, GOOD]).details["counts"]["pairs"] == 2, "an answer may be JSON"
    assert workshop.rows([{**GOOD, side: text}] * 3, "strings").details["counts"]["pairs"] == 3, "and so may all"
    others = [{**GOOD, "models": text}, {**GOOD, side: '["a"] is a list.'}]
    assert all(workshop.rows([row] * 3).details["counts"]["pairs"] == 3 for row in others)


def test_a_pair_has_the_name_of_its_source_and_the_fingerprint_knows_it(workshop, tmp_path):
    for file in ("a", "b"):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({**GOOD, "prompt": file}) + "\n")
    a, b = ({"path": str(tmp_path / f"{file}.jsonl")} for file in ("a", "b"))
    made = [
        workshop.preferences({**a, "name": one}, {**b, "name": other})
        for one, other in (("x", "y"), ("y", "x"), ("x", "x"), (None, "x"), (None, None))
    ]
    names = [[row.get("source_name") for row in done.table("preferences.parquet")] for done in made]
    assert names == [["x", "y"], ["y", "x"], ["x", "x"], [None, "x"], [None, None]]
    assert len({done.made.fingerprint for done in made}) == 5
    (tmp_path / "both").mkdir()
    for file in ("a", "b"):
        (tmp_path / f"{file}.jsonl").rename(tmp_path / "both" / f"{file}.jsonl")
    folder = workshop.preferences({"path": str(tmp_path / "both"), "name": "x"})
    assert folder.made.fingerprint == made[2].made.fingerprint, "of what is in them"


def test_files_of_one_name_are_told_apart(workshop, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(json.dumps({**GOOD, "prompt": folder}) + "\n{}\n")
    done = workshop.preferences(*({"path": str(tmp_path / folder / "rows.jsonl")} for folder in ("a", "b")))
    assert [row["source"] for row in done.table("preferences.parquet")] == ["1:rows.jsonl", "2:rows.jsonl"]
    assert done.details["formats"] == {"1:rows.jsonl": "strings", "2:rows.jsonl": "strings"}
    assert done.details["reasons"] == {"missing field": 2}


def test_what_changed_since_it_was_hashed_is_refused_and_what_came_does_not_enter(workshop, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(GOOD) + "\n")
    listed = [file.model_copy(update={"sha256": hash_file(file.path)}) for file in data_files(str(folder))]
    (folder / "b.ndjson").write_text(json.dumps({**GOOD, "prompt": "Who?"}) + "\n")
    source = {"path": str(folder)}
    assert workshop.preferences(source).details["counts"]["pairs"] == 2
    assert workshop.preferences(source, listed=[listed]).details["formats"] == {"a.jsonl": "strings"}
    (folder / "a.jsonl").write_text(json.dumps({**GOOD, "chosen": "So."}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read: it was [0-9a-f]{12} and is [0-9a-f]{12}"):
        workshop.preferences(source, listed=[listed])


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        ({"old.jsonl": 3, "new.jsonl": 2}, [(done, 5, "rows") for done in (1, 2, 3, 4, 5)]),
        ({"old.jsonl": 3, "org/data (train) 1": None}, [(done, 2, "files") for done in (1, 2)]),
    ],
)
def test_reading_tells_how_far_it_is_in_rows_where_all_were_counted(workshop, tmp_path, monkeypatch, counted, told):
    """Within a file too: a million rows take minutes. Each look at the clock here finds it a second on."""
    seconds = itertools.count()
    monkeypatch.setattr("training.contract.protocol.events.time.monotonic", lambda: next(seconds))
    rows = [{**GOOD, "prompt": f"Why {n}?"} for n in range(4)]
    for name, lines in (("old", [*rows[:2], []]), ("new", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = workshop.preferences({"path": str(tmp_path)}, counted=counted)
    events = [json.loads(line) for line in done.events.read_text().splitlines()]
    found = [event for event in events if event["event"] == "progress" and event["unit"] != "MB"]  # not of hashing
    assert [(event["done"], event["total"], event["unit"]) for event in found] == told
    assert found[0]["seconds_left"] > found[-1]["seconds_left"] == 0

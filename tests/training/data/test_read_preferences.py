"""The `preferences` job: counts of real files, quarantine of all other rows, stable splits."""

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

# Rows and usable pairs of each published file. Other code counted the unusable rows:
# hh: prompts before the last "\n\nAssistant:" differ (9), a response or turn is blank (4), equal responses (2);
# pandalm: responses are JSON booleans (6), neither 1 nor 2 has two of three votes (105), a response is blank (52);
# rasbt: chosen equals rejected (6).
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
def test_preferences_of_published_files_have_the_known_counts(job_runner, shared_data, file):
    format, rows, pairs = PUBLISHED[file]
    done = job_runner.preferences({"path": str(shared_data / file)})
    counts = done.details.counts
    assert (counts.rows_read, counts.pairs, counts.quarantined) == (rows, pairs, rows - pairs)
    assert list(done.details.formats.values()) == [format]
    assert len(done.table("preferences.parquet")) == pairs
    assert len(done.table("quarantine.parquet")) == rows - pairs == sum(done.details.reasons.values())


@pytest.mark.shared
def test_preferences_of_published_files_equal_an_independent_cleaning(job_runner, shared_data):
    """Other code made `preferences-real.jsonl` from these files. It dropped more rows and stripped blanks."""
    done = job_runner.preferences({"path": str(shared_data / "preferences")})
    read = {(row["source"], row["line"] - 1): row for row in done.table("preferences.parquet")}
    rows = map(json.loads, (shared_data / "preferences-real.jsonl").open("rb"))
    origins = map(json.loads, (shared_data / "preferences-real.meta.jsonl").open("rb"))
    compared = stripped = 0
    for row, origin in zip(rows, origins, strict=True):
        if origin["source"] in CLEANED:
            pair = read[CLEANED[origin["source"]], origin["row"]]
            compared += 1
            for part in ("prompt", "chosen", "rejected"):
                stripped += pair[part] != row[part]
                texts = [[turn["content"].strip() for turn in turns] for turns in (pair[part], row[part])]
                assert texts[0] == texts[1], (origin, part)
    assert (compared, stripped) == (2281 + 1092 + 751 + 280 + 264, 3)


def test_preferences_with_bad_rows_quarantine_each_with_its_reason(job_runner):
    bad = ['{"prompt": "x"', {"prompt": "x", "chosen": "a", "rejected": "a"}, "[]", {**GOOD, "prompt": "a\ud800"}]
    done = job_runner.rows([GOOD, *bad])
    counts = {"rows_read": 5, "pairs": 1, "quarantined": 4, "left_out": 0, "train": 1, "validation": 0}
    assert done.details.counts.model_dump() == counts | {"duplicates": 0, "conflicting": 0}
    assert [(row["line"], row["reason"]) for row in done.table("quarantine.parquet")] == [
        (2, "bad JSON"), (3, "chosen equals rejected"), (4, "not an object"), (5, "invalid unicode"),
    ]  # fmt: skip
    assert "chosen equals rejected, the first: rows0.jsonl, line 3" in _notes(done)
    assert done.table("quarantine.parquet")[0]["text"] == bad[0]
    [row] = done.table("preferences.parquet")
    assert len(bytes.fromhex(row.pop("identity"))) == 16
    assert row == {
        "row": 0, "split": "train", "source": "rows0.jsonl", "line": 1,
        "prompt": [{"role": "user", "content": "Why?"}], "chosen": [{"role": "assistant", "content": "Because."}],
        "rejected": [{"role": "assistant", "content": "No idea."}],
    }  # fmt: skip


def _notes(done) -> str:
    """Return the texts of the job's events."""
    return "\n".join(json.loads(line).get("text", "") for line in done.events.read_text().splitlines())


def test_preferences_count_duplicates_and_conflicts_and_drop_duplicates_on_request(job_runner, tmp_path):
    """In any format and file. Pairs that differ in prompt, response or template arguments are not duplicates."""
    turns = {"prompt": [{"role": "user", "content": "Why?"}]}
    turns |= {side: [{"role": "assistant", "content": GOOD[side]}] for side in ("chosen", "rejected")}
    opposite = {**GOOD, "chosen": GOOD["rejected"], "rejected": GOOD["chosen"]}
    others = [{**GOOD, "rejected": "So."}, {**GOOD, "prompt": "Who?"}, {**GOOD, "chat_template_kwargs": {"a": 1}}]
    for name, rows in {"a": [GOOD, *others, "{", GOOD], "b": [opposite, GOOD, opposite, others[0]]}.items():
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "c.jsonl").write_text(json.dumps(turns) + "\n")
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "abc"]
    kept, dropped = (job_runner.preferences(*sources, duplicates=rule) for rule in ("keep", "drop"))
    counts = {"rows_read": 11, "quarantined": 1, "left_out": 0, "duplicates": 5, "conflicting": 1}
    for done, pairs in ((kept, 10), (dropped, 5)):
        assert done.details.counts.model_dump().items() >= (counts | {"pairs": pairs}).items()
        assert len(done.table("preferences.parquet")) == pairs
        assert ": 1, the first: b.jsonl, line 1" in _notes(done)
        assert ": 5, the first: a.jsonl, line 6" in _notes(done)
    origins = [(row["source"], row["line"]) for row in kept.table("preferences.parquet")]
    assert origins == [("a.jsonl", n) for n in (1, 2, 3, 4, 6)] + [("b.jsonl", n) for n in (1, 2, 3, 4)] + [
        ("c.jsonl", 1)
    ]
    assert len({row["identity"] for row in kept.table("preferences.parquet")}) == 5
    rows = dropped.table("preferences.parquet")
    assert [(row["row"], row["source"], row["line"]) for row in rows] == [
        (0, "a.jsonl", 1), (1, "a.jsonl", 2), (2, "a.jsonl", 3), (3, "a.jsonl", 4), (4, "b.jsonl", 1),
    ]  # fmt: skip
    assert "they were kept, `data.duplicates: drop`" in _notes(kept) and "they were dropped" in _notes(dropped)


def test_fingerprint_with_dropped_duplicates_ignores_repeated_rows(job_runner):
    """So an export that repeats earlier rows is not new data."""
    other = {**GOOD, "prompt": "Who?"}
    exports = [[GOOD, other], [GOOD, other, other, GOOD]]
    plain, repeated = (job_runner.preferences(job_runner.source(rows)) for rows in exports)
    once, again = (job_runner.preferences(job_runner.source(rows), duplicates="drop") for rows in exports)
    assert plain.made.fingerprint == once.made.fingerprint == again.made.fingerprint != repeated.made.fingerprint


def test_preferences_drop_duplicates_outside_the_held_out_source(job_runner):
    """Held-out sources are read first. A held-out source of duplicates only does not count as empty."""
    train = job_runner.source([GOOD, {**GOOD, "prompt": "Who?"}])
    job_runner.count += 1
    held_out = {**job_runner.source([GOOD]), "held_out": True}
    done = job_runner.preferences(train, held_out, held_out, fraction=0.0, duplicates="drop")
    assert [(row["line"], row["split"]) for row in done.table("preferences.parquet")] == [
        (1, "validation"),
        (2, "train"),
    ]
    assert done.details.counts.duplicates == 2


def test_preferences_with_a_format_do_not_detect_it(job_runner):
    done = job_runner.rows(
        [GOOD, {"chosen": "\n\nHuman: A\n\nAssistant: a", "rejected": "\n\nHuman: A\n\nAssistant: b"}], "hh"
    )
    assert done.details.formats == {"rows0.jsonl": "hh"}
    assert done.details.reasons == {"not a transcript": 1}


def test_preferences_detect_the_format_of_most_rows(job_runner):
    done = job_runner.rows([{"instruction": "A", "chosen": "a", "rejected": "b"}, GOOD, GOOD])
    assert done.details.formats == {"rows0.jsonl": "strings"}
    assert done.details.reasons == {"missing field": 1}


def test_fingerprint_covers_pairs_and_quarantine_but_not_formats(job_runner):
    conversation = {
        "prompt": [{"role": "user", "content": "Why?"}], "rejected": [{"role": "assistant", "content": "No idea."}],
        "chosen": [{"role": "assistant", "content": "Because."}],
    }  # fmt: skip
    same = [job_runner.rows([GOOD]), job_runner.rows([conversation])]
    assert len({done.made.fingerprint for done in same}) == 1
    assert job_runner.rows([GOOD, "{"]).made.fingerprint not in {done.made.fingerprint for done in same}
    others = [
        job_runner.rows([GOOD, {**GOOD, "prompt": "Who?"}]), job_runner.rows([{**GOOD, "prompt": "Who?"}, GOOD]),
        job_runner.rows([{**GOOD, "chosen": "So."}]), job_runner.rows([GOOD], fraction=0.9999),
    ]  # fmt: skip
    assert len({done.made.fingerprint for done in [same[0], *others]}) == 5


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], r"rows0\.jsonl \(0 rows\) \[no-pairs\]"),
        (["{", GOOD | {"chosen": ""}], r"1 x bad JSON.*; the first: rows0\.jsonl, line 1: .*\[no-pairs\]"),
        (["{", "]"], r"rows0\.jsonl: .*line 1: bad JSON: .*\[no-readable-row\]"),
    ],
)
def test_preferences_without_a_pair_raise(job_runner, rows, error):
    with pytest.raises(DataError, match=error):
        job_runner.rows(rows)


def test_split_of_compares_the_sha256_with_the_fraction():
    """By hand: the sha256 of the canonical JSON of the prompt, as a number in [0, 1)."""
    prompt = [{"role": "system", "content": "Knapp!"}, {"role": "user", "content": "Wie heißt du?"}]
    text = '[{"content":"Knapp!","role":"system"},{"content":"Wie heißt du?","role":"user"}]'
    number = int(hashlib.sha256(text.encode()).hexdigest(), 16) / 2**256
    assert split_of(value_digest(prompt), number + 1e-9) == "validation"
    assert split_of(value_digest(prompt), number - 1e-9) == "train"


PROMPTS = st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.floats(0, 0.99), st.floats(0, 0.99))
def test_split_of_a_larger_fraction_keeps_validation_prompts(prompts, one, other):
    small, large = sorted((one, other))
    for prompt in prompts:
        digest = value_digest([{"role": "user", "content": prompt}])
        assert split_of(digest, small) == "train" or split_of(digest, large) == "validation"


def test_splits_follow_the_prompt_and_stay_when_data_grows(job_runner):
    rows = [{**GOOD, "prompt": f"Q{n // 2}", "chosen": f"A{n}"} for n in range(400)]
    first = {
        row["chosen"][0]["content"]: row["split"]
        for row in job_runner.rows(rows[:100], fraction=0.3).table("preferences.parquet")
    }
    grown = job_runner.rows(rows[::-1], fraction=0.3)
    later = {row["chosen"][0]["content"]: row["split"] for row in grown.table("preferences.parquet")}
    assert first.items() <= later.items()
    assert all(later[f"A{n}"] == later[f"A{n + 1}"] for n in range(0, 400, 2))
    assert 0.2 < grown.details.counts.validation / 400 < 0.4


def test_prompts_of_a_held_out_source_are_validation_in_all_sources(job_runner, tmp_path):
    """Three of the eight train questions Q0 to Q7 are also in the test set, which is last in the recipe."""

    def source(name: str, questions: range, **settings: bool) -> dict[str, object]:
        rows = [{**GOOD, "prompt": f"Q{n}", "chosen": f"{name} {n}"} for n in questions]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"path": str(tmp_path / f"{name}.jsonl"), **settings}

    train, test = source("train", range(8)), source("test", range(5, 10), held_out=True)
    done = job_runner.preferences(train, test, fraction=0.0)
    splits = {row["chosen"][0]["content"]: row["split"] for row in done.table("preferences.parquet")}
    assert {name for name, split in splits.items() if split == "train"} == {f"train {n}" for n in range(5)}
    assert len(splits) == 13 and done.details.counts.validation == 8
    both = job_runner.preferences(train, test, fraction=0.5).table("preferences.parquet")
    alone = job_runner.preferences(train, fraction=0.5).table("preferences.parquet")
    by_hash = {row["chosen"][0]["content"] for row in alone if row["split"] == "validation"}
    held_out = {row["chosen"][0]["content"] for row in both if row["split"] == "validation"}
    assert held_out == by_hash | {name for name, split in splits.items() if split == "validation"}
    assert by_hash - {f"train {n}" for n in (5, 6, 7)}


def test_preferences_with_a_held_out_source_without_pairs_raise(job_runner, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "test.jsonl").write_text("{}\n")
    train, test = ({"path": str(tmp_path / name), "format": "strings"} for name in ("train.jsonl", "test.jsonl"))
    with pytest.raises(DataError, match=r"`data\.sources\.1` \(test\.jsonl .*\[held-out-without-pairs\]"):
        job_runner.preferences(train, {**test, "held_out": True})


def test_is_sampled_compares_the_second_half_of_the_sha256_with_the_fraction():
    """By hand: the second half of the sha256 of the canonical JSON of the prompt, as a number in [0, 1)."""
    prompt = [{"role": "user", "content": "Why?"}]
    half = hashlib.sha256(b'[{"content":"Why?","role":"user"}]').hexdigest()[32:]
    number = int(half, 16) / 2**128
    assert is_sampled(value_digest(prompt), number + 1e-9) and is_sampled(value_digest(prompt), 1.0)
    assert not is_sampled(value_digest(prompt), number - 1e-9)


def test_fraction_of_a_source_samples_prompts_and_stays_when_data_grows(job_runner, tmp_path):
    """The 400 rows have 200 prompts. Rows outside the fraction are counted, and the other source is used completely."""
    rows = [{**GOOD, "prompt": f"Q{n // 2}", "chosen": f"A{n}"} for n in range(400)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({**GOOD, "prompt": f"Q{n}"}) + "\n" for n in range(20)))

    def drawn(lines: list[dict[str, str]], fraction: float) -> dict[str, str]:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*lines, {}]))
        sampled = {"path": str(tmp_path / "rows.jsonl"), "format": "strings", "fraction": fraction}
        done = job_runner.preferences(sampled, {"path": str(tmp_path / "own.jsonl")}, fraction=0.3)
        table, counts = done.table("preferences.parquet"), done.details.counts
        kept = {row["chosen"][0]["content"]: row["split"] for row in table if row["source"] == "rows.jsonl"}
        assert counts.pairs == len(table) == len(kept) + 20
        assert (counts.rows_read, counts.quarantined) == (len(lines) + 1 + 20, 1)
        left_out = len(lines) - len(kept)
        assert counts.left_out == left_out
        assert (f"{left_out} rows " in _notes(done)) == (left_out > 0)
        return kept

    complete, third, tenth = drawn(rows, 1.0), drawn(rows, 0.33), drawn(rows[:100], 0.1)
    assert complete.keys() == {row["chosen"] for row in rows}
    assert tenth.items() <= third.items() <= complete.items(), "in the same split"
    assert all((f"A{n}" in third) == (f"A{n + 1}" in third) for n in range(0, 400, 2))
    assert 0.25 < len(third) / 400 < 0.41
    assert 0.2 < sum(split == "validation" for split in third.values()) / len(third) < 0.4, "independent of the split"


def test_fraction_of_a_held_out_source_holds_out_only_its_sample(job_runner, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**GOOD, "prompt": f"Q{n}"}) + "\n" for n in range(100)))
    same = {"path": str(tmp_path / "rows.jsonl")}
    done = job_runner.preferences(same, {**same, "held_out": True, "fraction": 0.2}, fraction=0.0)
    rows = done.table("preferences.parquet")
    tested = {row["prompt"][0]["content"] for row in rows if row["source"].startswith("2:")}
    assert 10 < len(tested) < 30
    assert {row["prompt"][0]["content"] for row in rows if row["split"] == "validation"} == tested
    with pytest.raises(DataError, match=r"`fraction` of 1e-06.*\[held-out-without-pairs\]"):
        job_runner.preferences(same, {**same, "held_out": True, "fraction": 1e-6})
    with pytest.raises(DataError, match=r"rows\.jsonl \(100 x left out by `fraction`\) \[no-pairs\]"):
        job_runner.preferences({**same, "fraction": 1e-6})


@pytest.mark.parametrize(("suffix", "empty"), [("jsonl", ""), ("json", "[]"), ("csv", "prompt,chosen,rejected\n")])
def test_preferences_with_an_empty_source_raise_but_note_an_empty_file(job_runner, tmp_path, suffix, empty):
    """After a failed export, training would silently use the other sources only."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(GOOD) + "\n")
    (tmp_path / f"export.{suffix}").write_text(empty)
    sources = [{"path": str(tmp_path / name)} for name in ("rows.jsonl", f"export.{suffix}")]
    with pytest.raises(DataError, match=rf"`data\.sources\.1` \(export\.{suffix} .*\[empty-source\]"):
        job_runner.preferences(*sources)
    done = job_runner.preferences({"path": str(tmp_path / "*.*")})
    [note] = [event["text"] for event in read_events(done.events) if event["event"] == "note"]
    assert done.details.counts.pairs == 1 and f"export.{suffix}" in note


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
def test_preferences_with_columns_read_fields_from_them(job_runner, tmp_path, row, columns, suffix):
    """Only one of two sources has `columns`. A quarantined row keeps its original columns."""
    rows = Dataset.from_list([row, {name: "" if isinstance(value, str) else value for name, value in row.items()}])
    getattr(rows, {"jsonl": "to_json", "parquet": "to_parquet"}[suffix])(tmp_path / f"rows.{suffix}")
    (tmp_path / "own.jsonl").write_text(json.dumps({**GOOD, "prompt": "Who?"}) + "\n")
    renamed = {"path": str(tmp_path / f"rows.{suffix}"), "columns": columns}
    done = job_runner.preferences({"path": str(tmp_path / "own.jsonl")}, renamed)
    pairs = done.table("preferences.parquet")
    assert [pair["prompt"][0]["content"] for pair in pairs] == ["Who?", "Why?"]
    sides = [[turn["content"] for turn in pairs[1][side]] for side in ("prompt", "chosen", "rejected")]
    assert sides == [["Why?"], ["Because."], ["No idea."]]
    [quarantined] = done.table("quarantine.parquet")
    assert json.loads(quarantined["text"]).keys() == row.keys()


def test_preferences_with_columns_accept_a_late_column_but_not_a_missing_one(job_runner, tmp_path):
    rows = [*({**GOOD, "prompt": f"Q{n}"} for n in range(40)), {**GOOD, "persona": "You are a teacher."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "rows.jsonl")}
    last = job_runner.preferences({**source, "columns": {"system": "persona"}}).table("preferences.parquet")[-1]
    assert [turn["role"] for turn in last["prompt"]] == ["system", "user"]
    missing = r"`data\.sources\.1\.columns` .*`{}` .*'{}'.*{}.* 'prompt', 'chosen', 'rejected' \[unknown-column\]"
    first, every = r"first rows of .*rows\.jsonl", "source's rows"
    for field, column, format, rows_read in (
        ("system", "personna", "auto", every), ("prompt", "q", "auto", first), ("prompt", "q", "strings", every),
    ):  # fmt: skip
        with pytest.raises(DataError, match=missing.format(field, column, rows_read)):
            job_runner.preferences(source, {**source, "columns": {field: column}, "format": format})
    (tmp_path / "none.jsonl").write_text("{\n")
    unread = {"path": str(tmp_path / "none.jsonl"), "columns": {"prompt": "q"}, "format": "strings"}
    assert job_runner.preferences(source, unread).details.reasons == {"bad JSON": 1}


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
def test_preferences_with_columns_that_the_format_does_not_read_raise(job_runner, row, columns, read):
    """The format reads another field first, so training would not use the recipe's column."""
    with pytest.raises(DataError, match=rf"'\w+'.*{read}: .*\[unread-column\]"):
        job_runner.preferences({**job_runner.source([row]), "columns": columns})


def _labelled(labels):
    return [{"prompt": f"Q{n}", "response_a": "a", "response_b": "b", "label": label} for n, label in enumerate(labels)]


def test_preferences_with_labels_from_0_raise_if_responses_count_from_1(job_runner):
    with pytest.raises(DataError, match=r"`columns: \{response_0: .*\[labels-from-0\]"):
        job_runner.rows(_labelled([0, 1, 1, "0"] * 4))
    with pytest.raises(DataError, match=r"\[labels-from-0\]"):
        job_runner.rows(_labelled([0.0, 1.0] * 8), "comparison")
    named = {"response_0": "response_a", "response_1": "response_b"}
    done = job_runner.preferences({**job_runner.source(_labelled([0, 1, 1, 0] * 4)), "columns": named})
    assert [row["chosen"][0]["content"] for row in done.table("preferences.parquet")] == ["a", "b", "b", "a"] * 4
    signed = [{"preference_strength": row.pop("label"), **row} for row in _labelled([-1, 0, 1] * 6)]
    assert job_runner.rows(signed).details.counts.pairs == 12
    for labels in ([0, 1, 1, 2] * 4, [0, 1, 1, 0], [1] * 16, ["tie", 1] * 8, ["a"] * 16 + [0, 1]):
        assert job_runner.rows(_labelled(labels)).details.counts.pairs == sum(label in (1, 2, "a") for label in labels)


@pytest.mark.parametrize(
    ("side", "text"),
    [
        ("chosen", '[{"role": "assistant", "content": "Because."}]'),
        ("chosen", " [{'content': 'Because.', 'role': 'assistant'}]"),
        ("prompt", '["Why?"]'),
    ],
)
def test_preferences_with_lists_as_text_raise_unless_the_format_is_set(job_runner, side, text):
    with pytest.raises(DataError, match=rf"rows\d\.jsonl: `{side}` .*\[list-as-text\]"):
        job_runner.rows([{**GOOD, side: text}] * 3)
    assert job_runner.rows([{**GOOD, side: text}, GOOD]).details.counts.pairs == 2, "a response may be JSON"
    assert job_runner.rows([{**GOOD, side: text}] * 3, "strings").details.counts.pairs == 3, "all may be JSON"
    others = [{**GOOD, "models": text}, {**GOOD, side: '["a"] is a list.'}]
    assert all(job_runner.rows([row] * 3).details.counts.pairs == 3 for row in others)


def test_pairs_have_the_source_name_and_the_fingerprint_covers_it(job_runner, tmp_path):
    for file in ("a", "b"):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({**GOOD, "prompt": file}) + "\n")
    a, b = ({"path": str(tmp_path / f"{file}.jsonl")} for file in ("a", "b"))
    runs = [
        job_runner.preferences({**a, "name": one}, {**b, "name": other})
        for one, other in (("x", "y"), ("y", "x"), ("x", "x"), (None, "x"), (None, None))
    ]
    names = [[row.get("source_name") for row in done.table("preferences.parquet")] for done in runs]
    assert names == [["x", "y"], ["y", "x"], ["x", "x"], [None, "x"], [None, None]]
    assert len({done.made.fingerprint for done in runs}) == 5
    (tmp_path / "both").mkdir()
    for file in ("a", "b"):
        (tmp_path / f"{file}.jsonl").rename(tmp_path / "both" / f"{file}.jsonl")
    folder = job_runner.preferences({"path": str(tmp_path / "both"), "name": "x"})
    assert folder.made.fingerprint == runs[2].made.fingerprint, "the number of sources does not matter"


def test_preferences_of_files_with_one_name_number_them(job_runner, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text(json.dumps({**GOOD, "prompt": folder}) + "\n{}\n")
    done = job_runner.preferences(*({"path": str(tmp_path / folder / "rows.jsonl")} for folder in ("a", "b")))
    assert [row["source"] for row in done.table("preferences.parquet")] == ["1:rows.jsonl", "2:rows.jsonl"]
    assert done.details.formats == {"1:rows.jsonl": "strings", "2:rows.jsonl": "strings"}
    assert done.details.reasons == {"missing field": 2}


def test_preferences_of_listed_files_raise_for_changes_and_ignore_new_files(job_runner, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(GOOD) + "\n")
    listed = [file.model_copy(update={"sha256": hash_file(file.path)}) for file in data_files(str(folder))]
    (folder / "b.ndjson").write_text(json.dumps({**GOOD, "prompt": "Who?"}) + "\n")
    source = {"path": str(folder)}
    assert job_runner.preferences(source).details.counts.pairs == 2
    assert job_runner.preferences(source, listed=[listed]).details.formats == {"a.jsonl": "strings"}
    (folder / "a.jsonl").write_text(json.dumps({**GOOD, "chosen": "So."}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl .*[0-9a-f]{12} .* [0-9a-f]{12}.*\[file-changed\]"):
        job_runner.preferences(source, listed=[listed])


@pytest.mark.parametrize(
    ("counted", "progress"),
    [
        ({"old.jsonl": 3, "new.jsonl": 2}, [(done, 5, "rows") for done in (1, 2, 3, 4, 5)]),
        ({"old.jsonl": 3, "org/data (train) 1": None}, [(done, 2, "files") for done in (1, 2)]),
    ],
)
def test_preferences_report_progress_in_rows_if_all_were_counted(job_runner, tmp_path, monkeypatch, counted, progress):
    """Also within a file: a million rows take minutes. Each reading of this clock adds a second."""
    seconds = itertools.count()
    monkeypatch.setattr("training.contract.protocol.events.time.monotonic", lambda: next(seconds))
    monkeypatch.setattr("training.jobs.read_preferences._BLOCK_ROWS", 1)
    rows = [{**GOOD, "prompt": f"Why {n}?"} for n in range(4)]
    for name, lines in (("old", [*rows[:2], []]), ("new", rows[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = job_runner.preferences({"path": str(tmp_path)}, counted=counted)
    events = [json.loads(line) for line in done.events.read_text().splitlines()]
    reports = [event for event in events if event["event"] == "progress" and event["unit"] != "MB"]  # without hashing
    assert [(event["done"], event["total"], event["unit"]) for event in reports] == progress
    assert reports[0]["seconds_left"] > reports[-1]["seconds_left"] == 0

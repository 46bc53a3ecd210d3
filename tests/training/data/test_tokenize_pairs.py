"""The `pairs` job. Oracles: transformers' masks, counts by other code, and rows made by hand."""

import json
import sys

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from training.contract.errors import DataError
from training.contract.identity.fingerprint import sequence_key
from training.data.tokenization.encoded_pair import Dropped, EncodedPair, OverLength, ResponseTokens, fit
from training.data.tokenization.tokenize_pair import inside

pytestmark = [pytest.mark.shared, pytest.mark.slow]
SIDES = ("chosen", "rejected")


@pytest.fixture
def real_rows(shared_data):
    """Read the real rows with these numbers."""

    def real_rows(numbers):
        selected = set(numbers)
        with (shared_data / "preferences-real.jsonl").open("rb") as file:
            return [json.loads(line) for number, line in enumerate(file) if number in selected]

    return real_rows


def _conversation(row, side):
    return row["prompt"] + row[side]


@pytest.mark.parametrize(("train_on", "trained"), [("last_response", "n_suffix"), ("assistant_turns", "n_mask")])
def test_pairs_of_tiny_chat_have_the_lengths_and_masks_of_transformers(
    job_runner, shared_data, tiny_chat, real_rows, train_on, trained
):
    """The counts of 353 held-out rows come from transformers, like the log-probs in the same file."""
    oracle = json.loads((shared_data / "tiny-chat-logps.json").read_text())["rows"]
    rows = real_rows(entry["row"] for entry in oracle)
    done = job_runner.pairs(job_runner.rows(rows), job_runner.tokenizer(tiny_chat, train_on=train_on))
    pairs, tokenizer = done.pairs, AutoTokenizer.from_pretrained(tiny_chat)
    assert pairs.rows.tolist() == list(range(353)) == list(range(len(oracle)))
    for index, (row, entry) in enumerate(zip(rows, oracle, strict=True)):
        assert pairs.prompt_lengths[index] == entry["chosen"]["n_prompt"]
        for side in SIDES:
            counts = {**entry[side], "n_suffix": entry[side]["n_total"] - entry[side]["n_prompt"]}
            sequence = pairs.sequence(index, side)
            assert (len(sequence.ids_T), int(sequence.mask_T.sum())) == (counts["n_total"], counts[trained])
            expected = tokenizer.apply_chat_template(
                _conversation(row, side), return_dict=True, return_assistant_tokens_mask=True
            )
            assert sequence.ids_T.tolist() == expected["input_ids"]
            if train_on == "assistant_turns":
                start = entry[side]["n_prompt"]
                assert sequence.mask_T[start:].int().tolist() == expected["assistant_masks"][start:]
                assert not sequence.mask_T[:start].any()


@pytest.mark.parametrize("name", ["qwen2.5", "phi-3-mini"])
def test_pairs_of_published_templates_have_the_tokens_of_transformers(job_runner, shared_data, real_rows, name):
    """Every 20th real row. The responses end with the template's end of turn."""
    rows = real_rows(range(0, 7285, 20))
    spec = job_runner.tokenizer(shared_data / "tokenizers" / name, max_length=4096)
    done = job_runner.pairs(job_runner.rows(rows), spec)
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
    pairs = done.pairs
    assert (len(pairs), done.details.reasons) == (len(rows), {})
    ending = {"qwen2.5": ["<|im_end|>", "Ċ"], "phi-3-mini": ["<|end|>", "<|endoftext|>"]}[name]
    for index, row in enumerate(rows):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        assert pairs.prompt_ids(index) == prompt
        for side in SIDES:
            ids = pairs.sequence(index, side).ids_T.tolist()
            assert ids == tokenizer.apply_chat_template(_conversation(row, side), return_dict=False)
            assert tokenizer.convert_ids_to_tokens(ids[-2:]) == ending


def _row(prompt="Why?", chosen="Because.", rejected="No idea.", system=None):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | ({"system": system} if system else {})


def _template(tmp_path, text):
    path = tmp_path / "template.jinja"
    path.write_text(text, encoding="utf-8")
    return path


def test_pairs_have_one_bos_only_if_the_template_writes_it(job_runner, shared_data, tmp_path):
    """mistral-v3's BOS is id 1. By default, its tokenizer adds it to every text."""
    folder, turns = (
        shared_data / "tokenizers" / "mistral-v3",
        "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
    )
    assert AutoTokenizer.from_pretrained(folder)("x")["input_ids"][0] == 1
    for text, expected in (("{{ bos_token }}" + turns, 1), (turns, 0)):
        spec = job_runner.tokenizer(folder, _template(tmp_path, text))
        pairs = job_runner.pairs(job_runner.rows([_row()]), spec).pairs
        assert [pairs.sequence(0, side).ids_T.tolist().count(1) for side in SIDES] == [expected, expected]


def test_pairs_whose_prompt_is_not_a_prefix_are_dropped_with_the_tokens(job_runner, tiny_chat, tmp_path):
    """Like "thinking" templates, this one opens a block in the generation prompt that the conversation lacks."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    rows = [_row(), _row("Who?", "<think>me", "<think>you")]
    done = job_runner.pairs(job_runner.rows(rows), job_runner.tokenizer(tiny_chat, _template(tmp_path, text)))
    assert done.details.prefix_violations == 1
    [drop] = done.details.dropped_examples
    assert (drop.row, drop.reason) == (0, "prompt is not a prefix")
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    start = len(tokenizer(prompt)["input_ids"])
    ids = tokenizer(prompt + "<think>")["input_ids"][start:], tokenizer(prompt + "Because.")["input_ids"][start:]
    assert f"at token {start} of {start + len(ids[0])}" in drop.detail
    assert all(f"{part[0]} {tokenizer.convert_ids_to_tokens(part[0])!r}" in drop.detail for part in ids)


def test_pairs_whose_prompt_is_not_a_prefix_name_the_switch_once(job_runner, tiny_chat, tmp_path):
    text = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>{% endif %}{% endif %}"
    )
    spec = job_runner.tokenizer(tiny_chat, _template(tmp_path, text), template_kwargs={"enable_thinking": True})
    thought = _row("Who?", "<think>Hm.</think>me", "<think>Hm.</think>you")
    done = job_runner.pairs(job_runner.rows([_row(), _row("When?"), thought]), spec)
    first, second = done.details.dropped_examples
    advice = "`enable_thinking: false` in `tokenization.template_kwargs`"
    assert advice in first.detail and advice not in second.detail
    assert done.details.first_prefix_violation == f"row 0, {first.detail}"


def test_pairs_that_the_template_rejects_have_its_message(job_runner, tiny_chat, tmp_path):
    text = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    spec = job_runner.tokenizer(tiny_chat, _template(tmp_path, text))
    done = job_runner.pairs(job_runner.rows([_row(), _row(system="Be kind.")]), spec)
    assert [dict(drop) for drop in done.details.dropped_examples] == [
        {"row": 1, "reason": "rejected by the template", "detail": "System role not supported"}
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (_row(chosen="Because.<|im_end|>"), "doubled end of turn"),
        (_row(rejected="No.<|im_end|>\n<|im_start|>user\nhi"), "doubled end of turn"),
    ],
)
def test_pairs_with_an_end_of_turn_in_a_response_are_dropped(job_runner, tiny_chat, row, reason):
    done = job_runner.pairs(job_runner.rows([_row(), row]), job_runner.tokenizer(tiny_chat))
    assert done.details.reasons == {reason: 1}
    assert "'<|im_end|>' 2 times" in done.details.dropped_examples[0].detail


def test_pairs_of_responses_with_the_same_tokens_are_dropped(job_runner, tiny_chat, tmp_path):
    text = "{% for m in messages %}{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    spec = job_runner.tokenizer(tiny_chat, _template(tmp_path, text))
    done = job_runner.pairs(job_runner.rows([_row(), _row(chosen="a", rejected="a ")]), spec)
    assert done.details.reasons == {"responses have the same tokens": 1}


@pytest.mark.parametrize("over_length", ["drop", "truncate_prompt", "truncate_response"])
def test_pairs_whose_prompt_has_no_tokens_are_dropped(job_runner, tiny_chat, tmp_path, over_length):
    """The first token of a sequence lacks a log-prob, so a response cannot begin with it."""
    text = "{% for m in messages if m['content'] != 'Why?' %}{{ m['content'] }}<|im_end|>{% endfor %}"
    spec = job_runner.tokenizer(tiny_chat, _template(tmp_path, text), max_length=40, over_length=over_length)
    done = job_runner.pairs(job_runner.rows([_row(), _row(system="Be kind."), _row(chosen="word " * 50)]), spec)
    assert done.details.reasons == {"prompt has no tokens": 2}
    assert done.pairs.rows.tolist() == [1] and done.pairs.prompt_lengths[0] > 0


@pytest.fixture
def cut(job_runner, tiny_chat):
    """Return the number of kept rows under a setting of `over_length`, and prompt and responses of the last kept row."""

    def cut(over_length, max_length):
        rows = [_row(), _row("one two three four five six", "a b c d e f", "x y z")]
        spec = job_runner.tokenizer(tiny_chat, max_length=max_length, over_length=over_length)
        done = job_runner.pairs(job_runner.rows(rows), spec)
        pairs = done.pairs
        last = len(pairs) - 1
        start = pairs.prompt_lengths[last]
        parts = [pairs.sequence(last, side).ids_T.tolist()[start:] for side in SIDES]
        return len(pairs), pairs.prompt_ids(last), *parts

    return cut


def test_over_length_drops_truncates_or_raises(cut):
    """The second row is three tokens too long."""
    _, prompt, chosen, rejected = cut("drop", 1024)
    total = len(prompt) + len(chosen)
    assert len(rejected) < len(chosen)
    assert cut("drop", total - 3)[0] == 1
    assert cut("truncate_prompt", total - 3) == (2, prompt[3:], chosen, rejected)
    assert cut("truncate_response", total - 3) == (2, prompt, chosen[:-3], rejected[: len(chosen) - 3])
    for setting in ("drop", "truncate_prompt", "truncate_response", "error"):
        assert cut(setting, total) == (2, prompt, chosen, rejected)
    with pytest.raises(DataError, match=rf"row 1 \(rows\d+\.jsonl, line 2\) .*{total} tokens.*\[pair-too-long\]"):
        cut("error", total - 1)


@pytest.mark.parametrize(
    ("bos", "max_length", "prompt"),
    [
        (None, 7, [3, 4, 5]),  # 4 tokens of the longer response leave room for 3
        (1, 7, [1, 4, 5]),  # the BOS is one of the 3
        (1, 6, [1, 5]),
        (None, 5, [5]),
        (1, 5, None),  # a BOS alone is not a prompt
        (None, 4, None),
        (9, 7, [3, 4, 5]),  # this template does not write a BOS
    ],
)
def test_fit_truncated_prompt_keeps_its_bos(bos, max_length, prompt):
    """Either response may be the longer one."""
    longer, shorter = ResponseTokens([6] * 4, [True] * 4), ResponseTokens([7], [True])
    for responses in ((longer, shorter), (shorter, longer)):
        pair = EncodedPair([1, 2, 3, 4, 5], *responses)
        if prompt is None:
            with pytest.raises(Dropped, match=rf"9 tokens \(5 of the prompt\).* {max_length}$"):
                fit(pair, max_length, OverLength.TRUNCATE_PROMPT, bos)
        else:
            assert fit(pair, max_length, OverLength.TRUNCATE_PROMPT, bos) == EncodedPair(prompt, *responses)


_SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)).map(lambda span: (span[0], span[0] + span[1])))


@given(_SPANS.map(sorted), _SPANS)
def test_inside_returns_overlap_with_any_span(offsets, spans):
    overlaps = [any(start < end_ and end > start_ for start_, end_ in spans) for start, end in offsets]
    assert inside(offsets, spans) == overlaps


def test_inside_of_many_spans_takes_linear_time():
    """With quadratic time, a response of 4,000 messages (287 kB) took three seconds. 4 MB would take ten minutes."""
    spans, calls = [(n, n + 1) for n in range(1000)], []
    sys.setprofile(lambda *_: calls.append(_))
    try:
        inside(spans, spans)
    finally:
        sys.setprofile(None)
    assert len(calls) < 10 * len(spans)


def test_inside_of_a_partly_covered_token_is_true():
    """By hand: the span 2 to 5 begins before the first token and ends in it. The last token has 0 characters."""
    assert inside([(3, 6), (6, 9), (9, 9)], [(0, 3), (2, 5), (9, 12)]) == [True, False, False]


def test_pairs_that_truncation_cannot_fit_are_dropped(job_runner, tiny_chat):
    """Within 30 tokens, a long response leaves no room for a prompt, and a long prompt no room for a response."""
    long = "word " * 60
    rows = [_row(), _row(chosen=long, rejected="no"), _row(prompt=long)]
    for setting, kept in (("truncate_prompt", [0, 2]), ("truncate_response", [0, 1])):
        done = job_runner.pairs(
            job_runner.rows(rows), job_runner.tokenizer(tiny_chat, max_length=30, over_length=setting)
        )
        assert done.pairs.rows.tolist() == kept
        assert done.details.reasons == {"over max_length": 1}
        assert max(done.pairs.lengths(side).max() for side in SIDES) <= 30
    with pytest.raises(Dropped, match=r"7 tokens \(3 of the prompt\).* 3$"):  # room for the prompt only
        fit(EncodedPair([1, 2, 3], *[ResponseTokens([6] * 4, [True] * 4)] * 2), 3, OverLength.TRUNCATE_RESPONSE, None)


@pytest.mark.parametrize(
    ("train_on", "room", "reason"),
    [
        ("assistant_turns", 1, "no trained token, .* 1 tokens of `chosen`"),
        ("last_response", 2, "responses have the same tokens, .* 2 tokens"),
    ],
)
def test_pairs_truncated_to_untrained_or_same_tokens_are_dropped(
    job_runner, tiny_chat, tmp_path, train_on, room, reason
):
    """Both responses begin with text of the template, which `assistant_turns` does not train, and with the same word."""
    turn = "<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}Well, {% generation %}{{ m['content'] }}"
    text = (
        f"{{% for m in messages %}}{turn}<|im_end|>{{% endgeneration %}}{{% else %}}{{{{ m['content'] }}}}<|im_end|>\n"
    )
    text += "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    rules = {"train_on": train_on, "over_length": "truncate_response"}
    rows = job_runner.rows([_row(chosen="one two three", rejected="one two four")])
    complete = job_runner.pairs(rows, job_runner.tokenizer(tiny_chat, _template(tmp_path, text), **rules)).pairs
    most = int(complete.prompt_lengths[0]) + room
    with pytest.raises(DataError, match=rf"{reason}.*\[all-pairs-dropped\]"):
        job_runner.pairs(rows, job_runner.tokenizer(tiny_chat, _template(tmp_path, text), **rules, max_length=most))


def test_pairs_that_are_all_dropped_raise(job_runner, tiny_chat, tmp_path):
    with pytest.raises(DataError, match=r"of 1 pairs .*over max_length.*\[all-pairs-dropped\]"):
        job_runner.pairs(job_runner.rows([_row()]), job_runner.tokenizer(tiny_chat, max_length=2))
    (template := tmp_path / "reversed.jinja").write_text(
        "{% for m in messages | reverse %}{{ m['content'] }} {% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"not a prefix, .*\(recipe\.yaml:7: tokenization\.chat_template\) \[all-pairs-dropped\]"
    ):
        job_runner.pairs(job_runner.rows([_row()]), job_runner.tokenizer(tiny_chat, template))


def test_fingerprint_covers_tokens_masks_and_splits(job_runner, tiny_chat, tmp_path):
    """A comment in the template changes the spec, but not the pairs."""
    rows = [_row(f"Q{n}", f"A{n}") for n in range(6)]
    text = (tiny_chat / "chat_template.jinja").read_text()
    plain, commented = (
        job_runner.tokenizer(tiny_chat),
        job_runner.tokenizer(tiny_chat, _template(tmp_path, text + "{# x #}")),
    )
    assert plain.made.fingerprint != commented.made.fingerprint
    data = job_runner.rows(rows)
    same = [job_runner.pairs(data, spec).made.fingerprint for spec in (plain, plain, commented)]
    assert len(set(same)) == 1
    turns = job_runner.tokenizer(tiny_chat, train_on="assistant_turns")
    colon = job_runner.tokenizer(tiny_chat, _template(tmp_path, text.replace("\\n' }}", ":\\n' }}")))
    others = [
        job_runner.pairs(data, turns), job_runner.pairs(data, colon), job_runner.pairs(job_runner.rows(rows[:5]), plain),
        job_runner.pairs(job_runner.rows(rows, fraction=0.99), plain),
    ]  # fmt: skip
    assert len({same[0], *(done.made.fingerprint for done in others)}) == 5


def test_fingerprint_covers_the_end_of_the_prompt(job_runner, tiny_chat, tmp_path):
    """Samples start there, so the same ids and masks with another prompt length are other pairs."""
    text = (tiny_chat / "chat_template.jinja").read_text()
    shorter = text.replace("'<|im_start|>assistant\\n'", "'<|im_start|>'")
    specs = (
        job_runner.tokenizer(tiny_chat, _template(tmp_path, t), train_on="assistant_turns") for t in (text, shorter)
    )
    data = job_runner.rows([_row()])
    one, other = (job_runner.pairs(data, spec) for spec in specs)
    assert (one.pairs.keys("chosen") == other.pairs.keys("chosen")).all()
    assert one.pairs.prompt_lengths > other.pairs.prompt_lengths
    assert one.made.fingerprint != other.made.fingerprint


def test_fingerprint_covers_the_eos_token(job_runner, tiny_chat, tmp_path):
    """Samples end there, although the pairs do not contain it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(tmp_path / "ends")
    data = job_runner.rows([_row()])
    one, other = (job_runner.pairs(data, job_runner.tokenizer(folder)) for folder in (tiny_chat, tmp_path / "ends"))
    assert (one.pairs.keys("chosen") == other.pairs.keys("chosen")).all()
    assert one.made.fingerprint != other.made.fingerprint


def test_keys_are_equal_for_equal_ids_and_masks(job_runner, tiny_chat):
    """The first two rows share a sequence. The third has the first row's responses exchanged."""
    rows = [_row(), _row(rejected="Ask."), _row(chosen="No idea.", rejected="Because.")]
    pairs = job_runner.pairs(job_runner.rows(rows), job_runner.tokenizer(tiny_chat)).pairs
    chosen, rejected = (pairs.keys(side) for side in SIDES)
    assert chosen.shape == (3, 32)
    assert (chosen[0] == chosen[1]).all() and (chosen[0] == rejected[2]).all() and (rejected[0] == chosen[2]).all()
    assert not (rejected[0] == rejected[1]).all()
    sequence = pairs.sequence(0, "chosen")
    ids, mask = sequence.ids_T.tolist(), sequence.mask_T.tolist()
    assert chosen[0].tobytes() == sequence_key(ids, mask)
    others = [(ids, [*mask[:-1], False]), ([*ids[:-1], 5], mask), (ids[:-1], mask[:-1])]
    assert len({sequence_key(ids, mask), *(sequence_key(*other) for other in others)}) == 4


def test_pairs_artifact_has_consistent_files_counts_and_details(job_runner, tiny_chat, real_rows):
    done = job_runner.pairs(
        job_runner.rows(real_rows(range(300)), fraction=0.5), job_runner.tokenizer(tiny_chat, max_length=256)
    )
    pairs, counts = done.pairs, done.details.counts
    assert {path.name for path in done.folder.iterdir()} == {"manifest.json", "pairs.arrow", "tokenizer"}
    assert counts.pairs + counts.dropped == 300 and sum(done.details.reasons.values()) == counts.dropped
    train, validation = pairs.indices("train"), pairs.indices("validation")
    assert (len(train), len(validation)) == (counts.train, counts.validation)
    assert sorted([*train, *validation]) == list(range(len(pairs)))
    assert counts.prompt_tokens == pairs.prompt_lengths.sum()
    for side in SIDES:
        assert getattr(counts, f"{side}_tokens") == (pairs.lengths(side) - pairs.prompt_lengths).sum()
        assert sum(getattr(done.details.histogram, side)) == len(pairs)
        assert done.details.percentiles[side]["p50"] == np.median(pairs.lengths(side))
        assert done.details.percentiles[side]["p100"] == pairs.lengths(side).max()
    assert (done.details.empty_masks, done.details.shared_prompts) == (0, 0)
    assert done.details.first_shared_prompt == ""
    assert done.details.examples[0].chosen.endswith("<|im_end|>\n")
    events = [json.loads(line) for line in done.events.read_text().splitlines()]
    [*_, last] = [event for event in events if event["event"] == "progress"]
    assert last["done"] == last["total"] == 300
    [first, *_] = done.details.dropped_examples
    values = (f"{counts.dropped} pairs", "over max_length", f"row {first.row}, {first.detail}")
    assert all(value in events[-1]["text"] for value in values)


def test_shared_prompts_are_found_by_tokens(job_runner, tiny_chat, tmp_path):
    """The template drops the difference between these prompts, so a split by the prompt's text cannot prevent the leak."""
    text = "{% for m in messages if 'number' not in m['content'] %}{{ m['content'] }}<|im_end|>{% endfor %}"
    spec = job_runner.tokenizer(tiny_chat, _template(tmp_path, text))
    rows = [_row(system=f"You are number {n}.") for n in range(20)]
    done = job_runner.pairs(job_runner.rows(rows, fraction=0.5), spec)
    assert min(done.details.counts.train, done.details.counts.validation) > 0
    assert done.details.shared_prompts == 1
    pairs = done.pairs
    first = [pairs.rows[pairs.indices(split)[0]] for split in ("train", "validation")]
    assert done.details.first_shared_prompt == "row {} (train) and row {} (validation)".format(*first)


def test_pairs_file_opens_in_datasets(job_runner, tiny_chat):
    done = job_runner.pairs(job_runner.rows([_row(), _row("Who?")]), job_runner.tokenizer(tiny_chat))
    dataset = datasets.Dataset.from_file(str(done.folder / "pairs.arrow"))
    assert dataset["row"][:] == [0, 1]
    assert dataset[1]["rejected_ids"] == done.pairs.sequence(1, "rejected").ids_T.tolist()
    assert dataset[1]["rejected_mask"] == done.pairs.sequence(1, "rejected").mask_T.tolist()

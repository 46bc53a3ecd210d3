"""Published chat templates, from TRL's copies. Oracle: transformers' `apply_chat_template`, and words.

A pair is kept if the prompt begins both conversations, and both contain all words of their messages, tools and calls. Its
tokens must equal those from transformers.
"""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tests import factories
from training.data.formats.formats import FORMATS
from training.data.templates.chat_template import ChatTemplate
from training.data.tokenization.encoded_pair import Dropped, DropReason
from training.data.tokenization.tokenize_pair import PairEncoder
from training.jobs.freeze_tokenizer import check_template

PUBLISHED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
DAY = "2026-03-05"
FOR_IMAGES = ("idefics3", "llava_next", "smolvlm")  # they write only messages that are lists of parts
THINKS_FIRST = ("nemotron_3", "qwen3_5_think", "qwen3_6", "qwen3_8")  # unless a switch is off
SPEC = factories.tokenization_spec()


def _message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _call(content: str = "", **fields: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "wombat", "arguments": {"place": "perth"}}}
    return _message("assistant", content, tool_calls=[call], **fields)


TOOL = {
    "type": "function",
    "function": {
        "name": "wombat",
        "description": "Looks one up",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}},
    },
}
ASK, GOOD, BAD = _message("user", "quokka"), _message("assistant", "numbat"), _message("assistant", "dingo")
AGAIN, SYSTEM = _message("user", "possum"), _message("system", "kookaburra")
RESULT = _message("tool", "galah", tool_call_id="call00001", name="wombat")
ROWS: dict[str, dict[str, Any]] = {
    "a question": {"prompt": [ASK]},
    "two questions": {"prompt": [ASK, _message("assistant", "cockatoo"), AGAIN]},
    "with a system message": {"prompt": [SYSTEM, ASK]},
    "with a later system message": {"prompt": [ASK, _message("assistant", "cockatoo"), SYSTEM, AGAIN]},
    "reasoning": {
        "prompt": [ASK],
        "chosen": [{**GOOD, "reasoning_content": "bilby"}],
        "rejected": [{**BAD, "reasoning_content": "brolga"}],
    },
    "a call": {"prompt": [ASK], "chosen": [_call()], "tools": [TOOL]},
    "a call, and text": {"prompt": [ASK], "chosen": [_call("echidna")], "tools": [TOOL]},
    "a result": {"prompt": [ASK, _call(), RESULT], "tools": [TOOL]},
    "a result, and a system message": {"prompt": [SYSTEM, ASK, _call(), RESULT], "tools": [TOOL]},
}
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "a call with its result": {"prompt": [ASK], "chosen": [_call(), RESULT, GOOD], "tools": [TOOL]},
    "two calls": {
        "prompt": [SYSTEM, ASK],
        "chosen": [_call("echidna"), RESULT, _call(), RESULT, GOOD],
        "rejected": [_call(), RESULT, BAD],
        "tools": [TOOL],
    },
    "calls with reasoning": {
        "prompt": [ASK],
        "chosen": [_call(reasoning_content="bilby"), RESULT, {**GOOD, "reasoning_content": "brolga"}],
        "rejected": [{**BAD, "reasoning_content": "bilby"}],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each byte and one for two line ends: equal text may have other tokens at its end."""
    vocabulary = {letter: index for index, letter in enumerate([*sorted(ByteLevel.alphabet()), "ĊĊ"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Day":
        return cls.fromisoformat(DAY)


def test_published_templates_are_found():
    assert len(PUBLISHED) > 60


@pytest.fixture
def open_template(tokenizer, monkeypatch):
    """Read the template of a file, with the same fixed day for transformers."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Day)

    def open_template(path, **template_kwargs):
        monkeypatch.setattr(tokenizer, "chat_template", path.read_text(encoding="utf-8"))
        return ChatTemplate(tokenizer, template_kwargs, DAY)

    return open_template


def _encode(encoder: PairEncoder, row: dict[str, Any]) -> Any:
    [outcome] = encoder.encode([_pair(row)])
    if isinstance(outcome, Dropped):
        return outcome
    return [outcome.prompt, outcome.ids(outcome.chosen), outcome.ids(outcome.rejected)]


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    return vars(FORMATS["conversational"].convert({"chosen": [GOOD], "rejected": [BAD], **row}))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_encode_returns_the_tokens_of_transformers_or_drops_the_pair(tokenizer, open_template, path):
    template = open_template(path)
    check_template(template, "last_response", path.name)
    encoder, kept = PairEncoder(tokenizer, template, SPEC), set()
    for name, row in ROWS.items():
        outcome, expected = _encode(encoder, row), _expected(tokenizer, row, path.stem.startswith(FOR_IMAGES))
        assert outcome == expected if expected else isinstance(outcome, Dropped), f"{name}: {outcome}"
        kept |= {name} if expected else set()
    assert ("a question" in kept) is not path.stem.startswith((*THINKS_FIRST, "deepseek"))


# By hand: their text has the role beside `system`.
KNOW_DEVELOPER = ("diffusion_gemma", "gemma4", "gptoss")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_encode_developer_message_is_dropped_unless_the_template_knows_the_role(tokenizer, open_template, path):
    """Cohere's template has the word only in a sentence, and does not write the message."""
    row = {"prompt": [_message("developer", "kookaburra"), ASK]}
    outcome = _encode(PairEncoder(tokenizer, open_template(path), SPEC), row)
    if path.stem.startswith(KNOW_DEVELOPER):
        expected = _expected(tokenizer, row)
        assert expected and outcome == expected
    elif path.stem.startswith("cohere2"):
        assert outcome.reason is DropReason.LEFT_OUT and "a message of the developer" in outcome.detail
    else:
        assert outcome.reason is DropReason.TEMPLATE
        assert "`developer`" in outcome.detail and "`roles: {developer: system}`" in outcome.detail


MARKING = [path for path in PUBLISHED if "{%- generation" in path.read_text() or "{% generation" in path.read_text()]


@pytest.mark.parametrize("path", MARKING, ids=lambda path: path.stem)
def test_encode_assistant_turns_returns_the_mask_of_transformers(tokenizer, open_template, path):
    """In responses of several messages, the mask excludes tool results."""
    template, kept, in_parts = open_template(path), set(), path.stem.startswith(FOR_IMAGES)
    encoder = PairEncoder(tokenizer, template, factories.tokenization_spec(train_on="assistant_turns"))
    for name, row in (ROWS | TRAJECTORIES).items():
        [outcome] = encoder.encode([_pair(row)])
        expected = _expected(tokenizer, row, in_parts)
        if isinstance(outcome, Dropped):
            assert expected is None or "inside {% generation %}" in str(outcome), f"{name}: {outcome}"
            continue
        assert [outcome.prompt, outcome.ids(outcome.chosen), outcome.ids(outcome.rejected)] == expected
        for side, response in (("chosen", outcome.chosen), ("rejected", outcome.rejected)):
            turns = row["prompt"] + {"chosen": [GOOD], "rejected": [BAD], **row}[side]
            mask = tokenizer.apply_chat_template(
                _in_parts(turns) if in_parts else turns,
                row.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )["assistant_masks"]
            assert response.mask == [bool(value) for value in mask[len(outcome.prompt) :]]
            trained = [id_ for id_, is_trained in zip(response.ids, response.mask, strict=True) if is_trained]
            text = "".join(tokenizer.convert_ids_to_tokens(trained))
            assert "galah" not in text and all(turn["content"] in text for turn in turns[len(row["prompt"]) :: 2])
        kept.add(name)
    if path.stem in ("qwen3_training", "glm4moe_training", "lfm2_2_5", "diffusion_gemma_training"):
        assert kept == (ROWS | TRAJECTORIES).keys()


@pytest.mark.parametrize(
    ("start", "name", "thinking"),
    [*((start, "a question", False) for start in THINKS_FIRST), ("qwen3_5_nothink", "reasoning", True)],
)
def test_remedy_returns_the_switch_that_makes_a_pair_usable(tokenizer, open_template, start, name, thinking):
    paths = [path for path in PUBLISHED if path.stem.startswith(start)]
    assert paths
    for path in paths:
        encoder = PairEncoder(tokenizer, open_template(path), SPEC)
        assert isinstance(_encode(encoder, ROWS[name]), Dropped)
        assert encoder.remedy(_pair(ROWS[name])) == f"enable_thinking: {str(thinking).lower()}"
        switched = PairEncoder(tokenizer, open_template(path, enable_thinking=thinking), SPEC)
        expected = _expected(tokenizer, ROWS[name], enable_thinking=thinking)
        assert expected and _encode(switched, ROWS[name]) == expected


@pytest.mark.parametrize("name", ["nemotron_3_nano", "qwen3_5_nothink", "qwen3_5_think"])
@pytest.mark.parametrize("as_text", [False, True])
def test_encode_row_with_a_switch_uses_it(tokenizer, open_template, name, as_text):
    """Data that mixes responses with and without reasoning needs a switch in each row."""
    [path] = [path for path in PUBLISHED if path.stem == name]
    encoder = PairEncoder(tokenizer, open_template(path), SPEC)
    for row, thinking in (("a question", False), ("reasoning", True)):
        switch: Any = {"enable_thinking": thinking}
        row_with_switch = {**ROWS[row], "chat_template_kwargs": json.dumps(switch) if as_text else switch}
        expected = _expected(tokenizer, ROWS[row], **switch)
        assert expected and _encode(encoder, row_with_switch) == expected


def test_remedy_of_responses_that_contradict_the_switch_is_none(tokenizer, open_template):
    """With thinking off, this template would write an empty block before the reasoning in the text."""
    [path] = [path for path in PUBLISHED if path.stem == "qwen3_8"]
    thought = {"prompt": [ASK], "chosen": [_message("assistant", "<think>\nbilby\n</think>\n\nnumbat")]}
    encoder = PairEncoder(tokenizer, open_template(path), SPEC)
    for rejected in (BAD, _message("assistant", "<think>\nbrolga\n</think>\n\ndingo")):
        row = {**thought, "rejected": [rejected]}
        assert isinstance(_encode(encoder, row), Dropped) and encoder.remedy(_pair(row)) is None


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
@pytest.mark.parametrize(
    "text", ["Between <think> and </think>, then </think> again.", "zebu <think>bilby</think>numbat"]
)
def test_encode_response_that_the_template_cuts_at_a_tag_is_dropped(tokenizer, open_template, name, text):
    [path] = [path for path in PUBLISHED if path.stem == name]
    row = {"prompt": [ASK], "chosen": [_message("assistant", text)]}
    outcome = _encode(PairEncoder(tokenizer, open_template(path), SPEC), row)
    assert outcome.reason is DropReason.LEFT_OUT and repr(text) in outcome.detail


def test_remedy_without_a_useful_switch_is_none(tokenizer, open_template):
    [path] = [path for path in PUBLISHED if path.stem == "deepseek_r1_distill"]
    assert PairEncoder(tokenizer, open_template(path), SPEC).remedy(_pair(ROWS["a question"])) is None


def _expected(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], in_parts: bool = False, **template_kwargs: Any
) -> list[list[int]] | None:
    """Return the tokens of prompt and both conversations; None if the template rejects one or drops a word."""
    row, tools, texts = {"chosen": [GOOD], "rejected": [BAD], **row}, row.get("tools"), []
    for turns, prompt in (
        (row["prompt"], True),
        *((row["prompt"] + row[side], False) for side in ("chosen", "rejected")),
    ):
        try:
            text = tokenizer.apply_chat_template(
                _in_parts(turns) if in_parts else turns,
                tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **template_kwargs,
            )
        except Exception:
            return None
        words = [turn["content"] for turn in turns]
        words += [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]
        calls = sum(len(turn.get("tool_calls", [])) for turn in turns)
        if any(word not in text for word in words) or text.count("wombat") < calls + bool(tools):
            return None
        texts.append(text)
    prompt, *conversations = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [prompt, *conversations] if all(ids[: len(prompt)] == prompt for ids in conversations) else None


def _in_parts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]

"""Chat templates as they are published, of which TRL has copies. Oracle: transformers' `apply_chat_template`, and words.

A pair is kept if the prompt begins both conversations, and both hold each word of the messages, tools and calls that they are
made of. Its tokens are those of transformers.
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

from training.data.formats.formats import FORMATS
from training.data.templates.chat_template import ChatTemplate
from training.data.tokenization.tokenize_pair import Dropped, PairEncoder
from training.jobs.freeze_tokenizer import check_template

PUBLISHED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
DAY = "2026-03-05"
FOR_IMAGES = ("idefics3", "llava_next", "smolvlm")  # take messages as lists of parts alone
THINKS_FIRST = ("nemotron_3", "qwen3_5_think", "qwen3_6", "qwen3_8")  # unless it is told not to
RULES = {"train_on": "last_response", "max_length": 99999, "over_length": "drop", "end_of_turn": {}}


def _said(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def _called(content: str = "", **others: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "wombat", "arguments": {"place": "perth"}}}
    return _said("assistant", content, tool_calls=[call], **others)


TOOL = {
    "type": "function",
    "function": {
        "name": "wombat",
        "description": "Looks one up",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "where"}}},
    },
}
ASK, GOOD, BAD = _said("user", "quokka"), _said("assistant", "numbat"), _said("assistant", "dingo")
AGAIN, SYSTEM = _said("user", "possum"), _said("system", "kookaburra")
RESULT = _said("tool", "galah", tool_call_id="call00001", name="wombat")
ROWS: dict[str, dict[str, Any]] = {
    "a question": {"prompt": [ASK]},
    "two questions": {"prompt": [ASK, _said("assistant", "cockatoo"), AGAIN]},
    "with a system message": {"prompt": [SYSTEM, ASK]},
    "with a later system message": {"prompt": [ASK, _said("assistant", "cockatoo"), SYSTEM, AGAIN]},
    "reasoning": {
        "prompt": [ASK],
        "chosen": [{**GOOD, "reasoning_content": "bilby"}],
        "rejected": [{**BAD, "reasoning_content": "brolga"}],
    },
    "a call": {"prompt": [ASK], "chosen": [_called()], "tools": [TOOL]},
    "a call, and text": {"prompt": [ASK], "chosen": [_called("echidna")], "tools": [TOOL]},
    "a result": {"prompt": [ASK, _called(), RESULT], "tools": [TOOL]},
    "a result, and a system message": {"prompt": [SYSTEM, ASK, _called(), RESULT], "tools": [TOOL]},
}
TRAJECTORIES: dict[str, dict[str, Any]] = {
    "a call and what follows": {"prompt": [ASK], "chosen": [_called(), RESULT, GOOD], "tools": [TOOL]},
    "two calls": {
        "prompt": [SYSTEM, ASK],
        "chosen": [_called("echidna"), RESULT, _called(), RESULT, GOOD],
        "rejected": [_called(), RESULT, BAD],
        "tools": [TOOL],
    },
    "calls with reasoning": {
        "prompt": [ASK],
        "chosen": [_called(reasoning_content="bilby"), RESULT, {**GOOD, "reasoning_content": "brolga"}],
        "rejected": [{**BAD, "reasoning_content": "bilby"}],
        "tools": [TOOL],
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte, and one for two new lines: as usual, texts may begin alike and their tokens differ there."""
    vocabulary = {letter: index for index, letter in enumerate([*sorted(ByteLevel.alphabet()), "ĊĊ"])}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "_Day":
        return cls.fromisoformat(DAY)


def test_there_are_many():
    assert len(PUBLISHED) > 60


@pytest.fixture
def open_template(tokenizer, monkeypatch):
    """The template of a file, on a fixed day for transformers too."""
    monkeypatch.setattr(chat_template_utils, "datetime", _Day)

    def open_template(path, **template_kwargs):
        monkeypatch.setattr(tokenizer, "chat_template", path.read_text(encoding="utf-8"))
        return ChatTemplate(tokenizer, template_kwargs, DAY)

    return open_template


def _encode(encoder: PairEncoder, row: dict[str, Any]) -> Any:
    [found] = encoder.encode([_pair(row)])
    if isinstance(found, Dropped):
        return found
    return [found.prompt, found.ids(found.chosen), found.ids(found.rejected)]


def _pair(row: dict[str, Any]) -> dict[str, Any]:
    return vars(FORMATS["conversational"].convert({"chosen": [GOOD], "rejected": [BAD], **row}))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_a_pair_is_kept_whole_or_not_at_all(tokenizer, open_template, path):
    template = open_template(path)
    check_template(template, "last_response", path.name)
    encoder, kept = PairEncoder(tokenizer, template, RULES), set()
    for name, row in ROWS.items():
        found, expected = _encode(encoder, row), _expected(tokenizer, row, path.stem.startswith(FOR_IMAGES))
        assert found == expected if expected else isinstance(found, Dropped), f"{name}: {found}"
        kept |= {name} if expected else set()
    assert ("a question" in kept) is not path.stem.startswith((*THINKS_FIRST, "deepseek"))


# Read out of their text: they name the role beside `system`.
KNOW_DEVELOPER = ("diffusion_gemma", "gemma4", "gptoss")


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_encode_developer_message_is_kept_by_templates_that_know_the_role(tokenizer, open_template, path):
    """Cohere's has the word in a sentence alone, and does not write the message."""
    row = {"prompt": [_said("developer", "kookaburra"), ASK]}
    found = _encode(PairEncoder(tokenizer, open_template(path), RULES), row)
    if path.stem.startswith(KNOW_DEVELOPER):
        expected = _expected(tokenizer, row)
        assert expected and found == expected
    elif path.stem.startswith("cohere2"):
        assert str(found) == "left out by the template: the template does not write a message of the developer"
    else:
        assert str(found).startswith("rejected by the template: the template does not know the role `developer`, which")
        assert "`roles: {developer: system}`" in found.detail


MARKING = [path for path in PUBLISHED if "{%- generation" in path.read_text() or "{% generation" in path.read_text()]


@pytest.mark.parametrize("path", MARKING, ids=lambda path: path.stem)
def test_what_is_trained_of_answers_is_what_transformers_says_the_assistant_said(tokenizer, open_template, path):
    """Of answers with several messages that is not what tools say between them."""
    template, kept, in_parts = open_template(path), set(), path.stem.startswith(FOR_IMAGES)
    encoder = PairEncoder(tokenizer, template, RULES | {"train_on": "assistant_turns"})
    for name, row in (ROWS | TRAJECTORIES).items():
        [found] = encoder.encode([_pair(row)])
        expected = _expected(tokenizer, row, in_parts)
        if isinstance(found, Dropped):
            assert expected is None or "inside {% generation %}" in str(found), f"{name}: {found}"
            continue
        assert [found.prompt, found.ids(found.chosen), found.ids(found.rejected)] == expected
        for side, response in (("chosen", found.chosen), ("rejected", found.rejected)):
            turns = row["prompt"] + {"chosen": [GOOD], "rejected": [BAD], **row}[side]
            theirs = tokenizer.apply_chat_template(
                _in_parts(turns) if in_parts else turns,
                row.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )["assistant_masks"]
            assert response.mask == [bool(one) for one in theirs[len(found.prompt) :]]
            trained = [id_ for id_, is_trained in zip(response.ids, response.mask, strict=True) if is_trained]
            said = "".join(tokenizer.convert_ids_to_tokens(trained))
            assert "galah" not in said and all(turn["content"] in said for turn in turns[len(row["prompt"]) :: 2])
        kept.add(name)
    if path.stem in ("qwen3_training", "glm4moe_training", "lfm2_2_5", "diffusion_gemma_training"):
        assert kept == (ROWS | TRAJECTORIES).keys()


@pytest.mark.parametrize(
    ("start", "name", "thinking"),
    [*((start, "a question", False) for start in THINKS_FIRST), ("qwen3_5_nothink", "reasoning", True)],
)
def test_the_switch_that_makes_a_pair_usable_is_found(tokenizer, open_template, start, name, thinking):
    paths = [path for path in PUBLISHED if path.stem.startswith(start)]
    assert paths
    for path in paths:
        encoder = PairEncoder(tokenizer, open_template(path), RULES)
        assert isinstance(_encode(encoder, ROWS[name]), Dropped)
        assert encoder.remedy(_pair(ROWS[name])) == f"enable_thinking: {str(thinking).lower()}"
        switched = PairEncoder(tokenizer, open_template(path, enable_thinking=thinking), RULES)
        expected = _expected(tokenizer, ROWS[name], enable_thinking=thinking)
        assert expected and _encode(switched, ROWS[name]) == expected


@pytest.mark.parametrize("name", ["nemotron_3_nano", "qwen3_5_nothink", "qwen3_5_think"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_switches_for_itself(tokenizer, open_template, name, as_text):
    """Some answers with reasoning and some without are of use only if each says which it is."""
    [path] = [path for path in PUBLISHED if path.stem == name]
    encoder = PairEncoder(tokenizer, open_template(path), RULES)
    for row, thinking in (("a question", False), ("reasoning", True)):
        given: Any = {"enable_thinking": thinking}
        row_of_its_own = {**ROWS[row], "chat_template_kwargs": json.dumps(given) if as_text else given}
        expected = _expected(tokenizer, ROWS[row], **given)
        assert expected and _encode(encoder, row_of_its_own) == expected


def test_no_switch_is_named_that_says_the_opposite_of_the_answers(tokenizer, open_template):
    """This template leaves reasoning in an answer's text where it is, so with thinking off it would write some after none."""
    [path] = [path for path in PUBLISHED if path.stem == "qwen3_8"]
    thought = {"prompt": [ASK], "chosen": [_said("assistant", "<think>\nbilby\n</think>\n\nnumbat")]}
    encoder = PairEncoder(tokenizer, open_template(path), RULES)
    for rejected in (BAD, _said("assistant", "<think>\nbrolga\n</think>\n\ndingo")):
        row = {**thought, "rejected": [rejected]}
        assert isinstance(_encode(encoder, row), Dropped) and encoder.remedy(_pair(row)) is None


@pytest.mark.parametrize("name", ["qwen3", "glm4moe"])
@pytest.mark.parametrize(
    "text", ["Between <think> and </think>, then </think> again.", "zebu <think>bilby</think>numbat"]
)
def test_an_answer_that_talks_of_tags_is_not_cut(tokenizer, open_template, name, text):
    [path] = [path for path in PUBLISHED if path.stem == name]
    found = _encode(
        PairEncoder(tokenizer, open_template(path), RULES), {"prompt": [ASK], "chosen": [_said("assistant", text)]}
    )
    assert isinstance(found, Dropped) and "does not write all that the assistant says" in found.detail


def test_where_no_switch_helps_none_is_named(tokenizer, open_template):
    [path] = [path for path in PUBLISHED if path.stem == "deepseek_r1_distill"]
    assert PairEncoder(tokenizer, open_template(path), RULES).remedy(_pair(ROWS["a question"])) is None


def _expected(
    tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], in_parts: bool = False, **template_kwargs: Any
) -> list[list[int]] | None:
    """The tokens of the prompt and of both conversations; None where the template refuses one, or a word is missing."""
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
    prompt_ids, *whole = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return [prompt_ids, *whole] if all(ids[: len(prompt_ids)] == prompt_ids for ids in whole) else None


def _in_parts(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]

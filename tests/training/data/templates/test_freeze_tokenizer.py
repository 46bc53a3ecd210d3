"""Tokenizers and chat templates: identities that follow what they do, and refusals that name the fix."""

import datetime
import json
import shutil

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from assets.inputs.resolve import LocatedTokenizer
from assets.lineage.tokenizer_diff import template_text
from training.contract.errors import DataError, TemplateError
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.tokenizer_files import tokenizer_files
from training.data.templates.chat_template import PROBES, ChatTemplate, ConversationRejected
from training.data.templates.tokenization_spec import read_spec
from training.data.templates.tokenizer import load_tokenizer, tokenizer_fingerprint
from training.jobs.freeze_tokenizer import _write

pytestmark = pytest.mark.shared
GEMMA_LIKE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ m['role'] + ': ' + m['content'] + '<|im_end|>' }}{% endfor %}"
)
# As in Llama 3.2: the date of today unless one is given.
DATED = (
    "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "{{- date_string }}{%- for m in messages %}{{- m['content'] + '<|im_end|>' }}{%- endfor %}"
)


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "template.jinja"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_template_is_what_it_writes(tiny_chat):
    """The same text is another template with another BOS, which it writes, and the same with another EOS, which it does not."""

    def identity(**spellings: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(tiny_chat, **spellings)
        tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        return ChatTemplate(tokenizer, {}).fingerprint()

    plain = identity(bos_token="<|im_start|>")
    assert identity(bos_token="<|im_end|>") != plain == identity(bos_token="<|im_start|>", eos_token="<|im_start|>")


@pytest.fixture
def copied(tiny_chat, tmp_path):
    """tiny-chat's tokenizer in a folder of another name, with one of its files edited."""

    def copied(name="tokenizer_config.json", remove_template=False, **changes):
        folder = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(tiny_chat / file, folder / file)
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))
        if remove_template:
            (folder / "chat_template.jinja").unlink()
        return folder

    return copied


@pytest.mark.parametrize("name", ["models/tiny-chat", "tokenizers/qwen2.5", "tokenizers/phi-3-mini"])
def test_renderings_are_those_of_transformers(shared_data, name):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / name)
    template = ChatTemplate(tokenizer, {})
    for turns in PROBES:
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=prompt)
            assert template.render(turns, prompt)["text"] == expected


def test_the_spec_holds_what_tokenizing_needs(workshop, tiny_chat):
    done = workshop.tokenizer(tiny_chat, max_length=77, over_length="error")
    spec = read_spec(done.folder)
    assert (spec["max_length"], spec["over_length"], spec["train_on"]) == (77, "error", "last_response")
    assert spec["template"] == (tiny_chat / "chat_template.jinja").read_text()
    assert (spec["vocabulary"], spec["special_ids"]["eos_token_id"]) == (2048, 2)
    assert spec["end_of_turn"] == {"<|im_end|>": 1}
    written = load_tokenizer(done.folder / "tokenizer")
    assert tokenizer_fingerprint(written) == spec["tokenizer_fingerprint"]
    assert written.chat_template == spec["template"]
    assert {path.name for path in (done.folder / "tokenizer").iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert str(tiny_chat) not in "".join(path.read_text() for path in done.folder.rglob("*.*") if path.is_file())


def test_folder_padding_and_place_of_the_template_change_no_identity(workshop, tiny_chat, copied):
    text = (tiny_chat / "chat_template.jinja").read_text()
    truncating = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    same = [
        tiny_chat,
        copied(),
        copied(padding_side="left", pad_token="<|im_start|>", model_max_length=9),
        copied("tokenizer.json", truncation=truncating),
        copied(remove_template=True, chat_template=text),
        copied(
            remove_template=True,
            chat_template=[{"name": "default", "template": text}, {"name": "rag", "template": "x"}],
        ),
    ]
    assert len({workshop.tokenizer(folder).made.fingerprint for folder in same}) == 1


def test_another_ingredient_another_identity(workshop, tiny_chat, copied, write):
    content = json.loads((tiny_chat / "tokenizer.json").read_text())
    tokens = [*content["added_tokens"], {**content["added_tokens"][0], "id": 2048, "content": "<|new|>"}]
    chatml = (tiny_chat / "chat_template.jinja").read_text()
    prints = [
        done.made.fingerprint
        for done in (
            workshop.tokenizer(tiny_chat),
            workshop.tokenizer(copied("tokenizer.json", added_tokens=tokens)),
            workshop.tokenizer(copied(eos_token="<|endoftext|>")),
            workshop.tokenizer(tiny_chat, write(chatml.replace("assistant\\n", "assistant:\\n"))),
            workshop.tokenizer(tiny_chat, write(chatml + "{# a comment #}")),
            workshop.tokenizer(tiny_chat, template_kwargs={"enable_thinking": False}),
            workshop.tokenizer(tiny_chat, train_on="assistant_turns"),
            workshop.tokenizer(tiny_chat, max_length=1023),
            workshop.tokenizer(tiny_chat, over_length="error"),
        )
    ]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    ("template", "settings", "words"),
    [
        ("", {}, r"template\.jinja is empty; expected a Jinja template, or null"),
        (DATED, {}, r"strftime_now.*`tokenization\.date: \d{4}-\d\d-\d\d`"),
        ("{{ messages[0].content }}", {}, "does not write a message of the assistant"),
        ("{{ messages[0].content + 1 }}", {}, r"fails on a question and an answer: can only concatenate str"),
        (
            "{% for m in messages %}{% if loop.first %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}"
            "{{ m.content }}{% endif %}{% endfor %}",
            {},
            "does not write a message of the user",
        ),
        ("{{ [1, 2, 3, 4] | random }}{{ messages[0]['content'] }}", {}, "another text each time"),
        (
            "{% for m in messages %}\n{% endif %}",
            {},
            r"template\.jinja, line 2, fails on a question and an answer: .*'endif'",
        ),
        ("one\n\n{{ messages[0].no.no }}", {}, r"template\.jinja, line 3, fails on a question and an answer: .*'no'"),
        ("{{ raise_exception('no chat here') }}", {}, "no chat here"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"train_on": "assistant_turns"},
            r"\{% generation %\}",
        ),
    ],
)
def test_unusable_templates_are_refused_with_the_fix(workshop, tiny_chat, write, template, settings, words):
    with pytest.raises(TemplateError, match=rf"^recipe\.yaml:7: tokenization\.chat_template: .*{words}"):
        workshop.tokenizer(tiny_chat, write(template), **settings)


def test_a_template_may_take_parts_from_the_user_alone(workshop, tiny_chat, write):
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    spec = read_spec(workshop.tokenizer(tiny_chat, write(text)).folder)
    assert spec["end_of_turn"] == {"<|im_end|>": 1}


def test_the_template_of_a_processor_is_the_tokenizers(workshop, tiny_chat, copied):
    """Of models that take images transformers reads it for the processor alone."""
    folder = copied(remove_template=True)
    text = (tiny_chat / "chat_template.jinja").read_text()
    for content, said in (
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ('{"chat_template": 1}', "no chat"),
    ):
        (folder / "chat_template.json").write_text(content)
        with pytest.raises(
            TemplateError, match=rf"tokenization\.chat_template: .*{said}.*`tokenization\.chat_template`"
        ):
            workshop.tokenizer(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert workshop.tokenizer(folder).made.fingerprint == workshop.tokenizer(tiny_chat).made.fingerprint
    located = LocatedTokenizer(folder, None, {})
    assert template_text(located) == text


def test_a_dated_template_is_fine_once_the_date_is_given(workshop, tiny_chat, write):
    done = workshop.tokenizer(tiny_chat, write(DATED), template_kwargs={"date_string": "26 Jul 2024"})
    assert read_spec(done.folder)["template_kwargs"] == {"date_string": "26 Jul 2024"}


# As in SmolLM3 and Mistral Small, which take no other date.
ALWAYS_DATED = "{{ strftime_now('%d %B %Y') }}|{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(("template", "day"), [(DATED, "05 Mar 2026"), (ALWAYS_DATED, "05 March 2026")])
def test_a_date_in_the_recipe_is_the_day_of_every_conversation(workshop, tiny_chat, write, template, day):
    rows = workshop.rows([{"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}])
    spec = workshop.tokenizer(tiny_chat, write(template), date="2026-03-05")
    prompt = workshop.pairs(rows, spec).pairs.prompt_ids(0)
    assert load_tokenizer(tiny_chat).decode(prompt).replace(" ", "").startswith(day.replace(" ", ""))
    other = workshop.tokenizer(tiny_chat, write(template), date="2026-03-06")
    assert len({done.made.fingerprint for done in (spec, other)}) == 2


def test_a_date_is_part_of_a_template_that_writes_it_now_and_then(workshop, tiny_chat, write):
    """Here in front of a second question alone, which no probe can be sure to have."""
    text = "{% for m in messages %}{% if m.content == 'When?' %}{{ strftime_now('%Y') }}{% endif %}{{ m.content }}|{% endfor %}"
    rows = workshop.rows([{"prompt": prompt, "chosen": "Now.", "rejected": "No."} for prompt in ("When?", "Why?")])
    days: list[dict[str, str]] = [{}, {"date": "2025-01-01"}, {"date": "2026-01-01"}]
    specs = [workshop.tokenizer(tiny_chat, write(text), **day) for day in days]
    undated, *dated = [workshop.pairs(rows, spec) for spec in specs]
    assert undated.details["reasons"] == {"rejected by the template": 1}
    assert undated.details["first_left_out"].endswith("; if it asks for the date of today, set `tokenization.date`")
    assert len({done.made.fingerprint for done in dated}) == 2 and len({spec.made.fingerprint for spec in specs}) == 3


CLOCKS = [
    "{{ strftime_now('%d %B %Y') }}",
    '{{ strftime_now("%d" ~ " %Y") }}',
    "{{ strftime_now('%Y' if messages | length > 1 else '%d') }}",
    "{{ strftime_now('It\\'s %Y\\n%%d 📅 %-d') }}",
    "{{ strftime_now(format='%A, %j') }}",
    "{% set clock = strftime_now %}{{ clock ('%I:%M %p %c %x %X %y%m%d') }}",
    "{% if strftime_now is defined and strftime_now %}{{ strftime_now('%Y') | int - 1 }}{% endif %}",
    "{% macro day(as) %}{{ strftime_now(as) }}{% endmacro %}{{ day('%U %W %V %G %u %w') }}",
    "\n  {% if true %}x{% endif %}\n{{- strftime_now('%b') }}\n",
    "say strftime_now('%d')",
]


@pytest.mark.parametrize("text", CLOCKS)
def test_a_fixed_date_is_what_the_clock_says_on_that_day(tiny_chat, monkeypatch, text):
    """Oracle: transformers, for which it is that day."""
    tokenizer = load_tokenizer(tiny_chat)
    tokenizer.chat_template = text

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Day":
            return cls(2026, 3, 5)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert ChatTemplate(tokenizer, {}, "2026-03-05").render([{"role": "user", "content": "x"}])["text"] == expected


def test_a_template_that_takes_no_other_words_is_left_to_the_data(workshop, tiny_chat, write):
    refuse = "{% if 'mark' in m.content %}{{ raise_exception('no') }}{% endif %}"
    text = "{% for m in messages %}" + refuse + "{{ m.content }}|{% endfor %}"
    assert workshop.tokenizer(tiny_chat, write(text)).details["template"] == text


def test_lines_are_those_of_the_template_with_a_date_too(workshop, tiny_chat, write):
    for text in ("one\n\n{{ messages[0].no.no }}", "one\n\n{% endif %}"):
        with pytest.raises(TemplateError, match=r"template\.jinja, line 3, fails"):
            workshop.tokenizer(tiny_chat, write(text), date="2026-03-05")


def test_a_date_that_changes_nothing_is_told(workshop, tiny_chat):
    assert "`tokenization.date` changes nothing" in workshop.tokenizer(tiny_chat, date="2026-03-05").events.read_text()


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3"])
def test_no_chat_template_anywhere(workshop, shared_data, write, name):
    folder = shared_data / "tokenizers" / name
    with pytest.raises(TemplateError, match=r"tokenization\.chat_template"):
        workshop.tokenizer(folder)
    given = workshop.tokenizer(folder, write("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"))
    assert list(given.details["end_of_turn"].values()) == [1]


def test_files_that_changed_since_they_were_hashed_are_refused(workshop, tiny_chat, copied, write):
    folder, template = copied(), write((tiny_chat / "chat_template.jinja").read_text())
    hashes = {name: hash_file(path) for name, path in tokenizer_files(folder).items()}
    was = {"files": hashes, "chat_template": hash_file(template)}
    assert workshop.tokenizer(folder, template, **was).details["files"] == hashes
    with pytest.raises(DataError, match=r"tokenizer\.json changed while it was read: it was 0{12} and is [0-9a-f]{12}"):
        workshop.tokenizer(folder, template, **{**was, "files": {**hashes, "tokenizer.json": "0" * 64}})
    write(template.read_text() + "{# since #}")
    with pytest.raises(DataError, match=r"template\.jinja changed while it was read"):
        workshop.tokenizer(folder, template, **was)
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(DataError, match=r"changed while it was read: added_tokens\.json came or went"):
        workshop.tokenizer(folder, None, **was)


def test_places_that_hold_no_tokenizer_are_named(workshop, tmp_path, tiny_chat):
    with pytest.raises(TemplateError, match=r"^recipe\.yaml:7: tokenization\.tokenizer: .*nowhere cannot be loaded"):
        workshop.tokenizer(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    with pytest.raises(TemplateError, match="is a CanineTokenizer, not a fast tokenizer; convert it"):
        workshop.tokenizer(tmp_path)
    with pytest.raises(TemplateError, match=r"chat_template.*missing\.jinja"):
        workshop.tokenizer(tiny_chat, tmp_path / "missing.jinja")


def test_a_tokenizer_that_saving_would_change_is_refused(tmp_path, tiny_chat):
    """Of none is that known; here the other one has no identity at all."""
    with pytest.raises(TemplateError, match=r"does not survive being saved \(0{12} became [0-9a-f]{12}\)"):
        _write(tmp_path, load_tokenizer(tiny_chat), {"tokenizer_fingerprint": "0" * 64})


def test_a_refused_role_carries_the_templates_own_words(tiny_chat):
    tokenizer = load_tokenizer(tiny_chat)
    tokenizer.chat_template = GEMMA_LIKE
    with pytest.raises(ConversationRejected, match="System role not supported"):
        ChatTemplate(tokenizer, {}).render([{"role": "system", "content": "x"}])
    assert ChatTemplate(tokenizer, {}).render([{"role": "user", "content": "x"}])["text"] == "user: x<|im_end|>"


def test_missing_end_of_turn_is_said(workshop, tiny_chat, write):
    done = workshop.tokenizer(tiny_chat, write("{% for m in messages %}{{ m['content'] }} {% endfor %}"))
    assert done.details["end_of_turn"] == {}
    assert "will not learn where to stop" in done.events.read_text()


CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{- m.content }}INSIDE{%- endgeneration %}
{{- 'OUTSIDE\\n' }}
{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.mark.parametrize(
    ("train_on", "inside"), [("assistant_turns", True), ("assistant_turns", False), ("last_response", False)]
)
def test_end_of_turn_outside_generation_is_told_where_that_decides_what_is_trained(
    workshop, tiny_chat, write, train_on, inside
):
    end = "{{- '<|im_end|>' }}"
    text = CHATML.replace("INSIDE", end if inside else "").replace("OUTSIDE", "" if inside else "<|im_end|>")
    done = workshop.tokenizer(tiny_chat, write(text), train_on=train_on)
    told = [note for note in done.details["notes"] if "outside {% generation %}" in note]
    assert bool(told) == (train_on == "assistant_turns" and not inside)
    assert all("writes <|im_end|> after an answer" in note and note in done.events.read_text() for note in told)
    assert done.details["template_tokens"] == {"<|im_start|>": 1, "<|im_end|>": 2}

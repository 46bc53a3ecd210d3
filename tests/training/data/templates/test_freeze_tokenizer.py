"""The `tokenizer` job: fingerprints of tokenizers and chat templates, and errors that name the fix."""

import datetime
import json
import shutil

import pytest
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tests import factories
from training.contract.errors import DataError, TemplateError
from training.contract.identity.chat_template import chat_template
from training.contract.identity.file_hashing import hash_file
from training.contract.identity.tokenizer_files import tokenizer_files
from training.contract.protocol.spec_files import TokenizationSpec
from training.data.templates.chat_template import PROBES, ChatTemplate, ConversationRejected
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


def test_template_fingerprint_follows_the_rendered_text(tiny_chat):
    """The template writes the BOS, so another BOS changes its fingerprint. It does not write the EOS."""

    def identity(**spellings: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(tiny_chat, **spellings)
        tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        return ChatTemplate(tokenizer, {}).fingerprint()

    plain = identity(bos_token="<|im_start|>")
    assert identity(bos_token="<|im_end|>") != plain == identity(bos_token="<|im_start|>", eos_token="<|im_start|>")


@pytest.fixture
def copied(tiny_chat, tmp_path):
    """Copy tiny-chat's tokenizer to another folder, with changes in one file."""

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
def test_render_returns_the_text_of_transformers(shared_data, name):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / name)
    template = ChatTemplate(tokenizer, {})
    for turns in PROBES:
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=prompt)
            assert template.render(turns, prompt)["text"] == expected


def test_spec_has_all_that_tokenizing_needs(job_runner, tiny_chat):
    done = job_runner.tokenizer(tiny_chat, max_length=77, over_length="error")
    spec = TokenizationSpec.read(done.folder)
    assert (spec.max_length, spec.over_length, spec.train_on) == (77, "error", "last_response")
    assert spec.template == (tiny_chat / "chat_template.jinja").read_text()
    assert (spec.vocabulary, spec.special_ids["eos_token_id"]) == (2048, 2)
    assert spec.end_of_turn == {"<|im_end|>": 1}
    written = load_tokenizer(done.folder / "tokenizer")
    assert tokenizer_fingerprint(written) == spec.tokenizer_fingerprint
    assert written.chat_template == spec.template
    assert {path.name for path in (done.folder / "tokenizer").iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert str(tiny_chat) not in "".join(path.read_text() for path in done.folder.rglob("*.*") if path.is_file())


def test_fingerprint_ignores_folder_padding_and_the_file_of_the_template(job_runner, tiny_chat, copied):
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
    assert len({job_runner.tokenizer(folder).made.fingerprint for folder in same}) == 1


def test_fingerprint_covers_every_ingredient(job_runner, tiny_chat, copied, write):
    content = json.loads((tiny_chat / "tokenizer.json").read_text())
    tokens = [*content["added_tokens"], {**content["added_tokens"][0], "id": 2048, "content": "<|new|>"}]
    chatml = (tiny_chat / "chat_template.jinja").read_text()
    fingerprints = [
        done.made.fingerprint
        for done in (
            job_runner.tokenizer(tiny_chat),
            job_runner.tokenizer(copied("tokenizer.json", added_tokens=tokens)),
            job_runner.tokenizer(copied(eos_token="<|endoftext|>")),
            job_runner.tokenizer(tiny_chat, write(chatml.replace("assistant\\n", "assistant:\\n"))),
            job_runner.tokenizer(tiny_chat, write(chatml + "{# a comment #}")),
            job_runner.tokenizer(tiny_chat, template_kwargs={"enable_thinking": False}),
            job_runner.tokenizer(tiny_chat, train_on="assistant_turns"),
            job_runner.tokenizer(tiny_chat, max_length=1023),
            job_runner.tokenizer(tiny_chat, over_length="error"),
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize(
    ("template", "settings", "error"),
    [
        ("", {}, r"template\.jinja .*\[empty-chat-template\]"),
        (DATED, {}, r"strftime_now.*`tokenization\.date: \d{4}-\d\d-\d\d`.*\[template-uses-clock\]"),
        ("{{ messages[0].content }}", {}, r"a message of the assistant.*\[template-omits-text\]"),
        ("{{ messages[0].content + 1 }}", {}, r"can only concatenate str.*\[template-fails\]"),
        (
            "{% for m in messages %}{% if loop.first %}{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}"
            "{{ m.content }}{% endif %}{% endfor %}",
            {},
            r"a message of the user.*\[template-omits-text\]",
        ),
        ("{{ [1, 2, 3, 4] | random }}{{ messages[0]['content'] }}", {}, r"\[template-random\]"),
        ("{% for m in messages %}\n{% endif %}", {}, r"template\.jinja, line 2, .*'endif'.*\[template-fails\]"),
        ("one\n\n{{ messages[0].no.no }}", {}, r"template\.jinja, line 3, .*'no'.*\[template-fails\]"),
        ("{{ raise_exception('no chat here') }}", {}, r"no chat here.*\[template-fails\]"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"train_on": "assistant_turns"},
            r"\{% generation %\}.*\[template-marks-no-turns\]",
        ),
    ],
)
def test_freeze_unusable_template_names_the_fix(job_runner, tiny_chat, write, template, settings, error):
    with pytest.raises(TemplateError, match=rf"^recipe\.yaml:7: tokenization\.chat_template: .*{error}"):
        job_runner.tokenizer(tiny_chat, write(template), **settings)


def test_freeze_template_that_takes_parts_only_from_the_user_accepts_it(job_runner, tiny_chat, write):
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    spec = TokenizationSpec.read(job_runner.tokenizer(tiny_chat, write(text)).folder)
    assert spec.end_of_turn == {"<|im_end|>": 1}


def test_freeze_tokenizer_uses_the_template_of_a_processor(job_runner, tiny_chat, copied):
    """transformers reads this file only for the processor of models that take images."""
    folder = copied(remove_template=True)
    text = (tiny_chat / "chat_template.jinja").read_text()
    for content, error in (
        ("{", r"JSONDecodeError.*\[unreadable-chat-template\]"),
        ("[]", r"JSON list.*\[unreadable-chat-template\]"),
        ("{}", r"\[no-chat-template\]"),
        ('{"chat_template": 1}', r"\[no-chat-template\]"),
    ):
        (folder / "chat_template.json").write_text(content)
        with pytest.raises(TemplateError, match=rf"tokenization\.chat_template: .*{error}"):
            job_runner.tokenizer(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    assert job_runner.tokenizer(folder).made.fingerprint == job_runner.tokenizer(tiny_chat).made.fingerprint
    assert chat_template(folder, None) == text


def test_freeze_template_with_a_clock_accepts_a_date_argument(job_runner, tiny_chat, write):
    done = job_runner.tokenizer(tiny_chat, write(DATED), template_kwargs={"date_string": "26 Jul 2024"})
    assert TokenizationSpec.read(done.folder).template_kwargs == {"date_string": "26 Jul 2024"}


# As in SmolLM3 and Mistral Small, which take no other date.
ALWAYS_DATED = "{{ strftime_now('%d %B %Y') }}|{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}"


@pytest.mark.parametrize(("template", "day"), [(DATED, "05 Mar 2026"), (ALWAYS_DATED, "05 March 2026")])
def test_pairs_with_a_date_have_it_in_every_conversation(job_runner, tiny_chat, write, template, day):
    rows = job_runner.rows([{"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}])
    spec = job_runner.tokenizer(tiny_chat, write(template), date="2026-03-05")
    prompt = job_runner.pairs(rows, spec).pairs.prompt_ids(0)
    assert load_tokenizer(tiny_chat).decode(prompt).replace(" ", "").startswith(day.replace(" ", ""))
    other = job_runner.tokenizer(tiny_chat, write(template), date="2026-03-06")
    assert len({done.made.fingerprint for done in (spec, other)}) == 2


def test_fingerprint_covers_a_date_that_probes_do_not_show(job_runner, tiny_chat, write):
    """This template writes the date only for one question."""
    text = "{% for m in messages %}{% if m.content == 'When?' %}{{ strftime_now('%Y') }}{% endif %}{{ m.content }}|{% endfor %}"
    rows = job_runner.rows([{"prompt": prompt, "chosen": "Now.", "rejected": "No."} for prompt in ("When?", "Why?")])
    days: list[dict[str, str]] = [{}, {"date": "2025-01-01"}, {"date": "2026-01-01"}]
    specs = [job_runner.tokenizer(tiny_chat, write(text), **day) for day in days]
    undated, *dated = [job_runner.pairs(rows, spec) for spec in specs]
    assert undated.details.reasons == {"rejected by the template": 1}
    assert undated.details.first_left_out.endswith("set `tokenization.date`")
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
def test_render_with_a_date_returns_the_text_of_transformers_on_that_day(tiny_chat, monkeypatch, text):
    """Oracle: transformers with a patched clock."""
    tokenizer = load_tokenizer(tiny_chat)
    tokenizer.chat_template = text

    class Day(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Day":
            return cls(2026, 3, 5)

    monkeypatch.setattr(chat_template_utils, "datetime", Day)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert ChatTemplate(tokenizer, {}, "2026-03-05").render([{"role": "user", "content": "x"}])["text"] == expected


def test_freeze_template_that_rejects_the_marked_copy_accepts_it(job_runner, tiny_chat, write):
    refuse = "{% if 'mark' in m.content %}{{ raise_exception('no') }}{% endif %}"
    text = "{% for m in messages %}" + refuse + "{{ m.content }}|{% endfor %}"
    assert TokenizationSpec.read(job_runner.tokenizer(tiny_chat, write(text)).folder).template == text


def test_freeze_failing_template_with_a_date_names_the_templates_line(job_runner, tiny_chat, write):
    for text in ("one\n\n{{ messages[0].no.no }}", "one\n\n{% endif %}"):
        with pytest.raises(TemplateError, match=r"template\.jinja, line 3, .*\[template-fails\]"):
            job_runner.tokenizer(tiny_chat, write(text), date="2026-03-05")


def test_freeze_template_with_an_unused_date_notes_it(job_runner, tiny_chat):
    assert (
        "`tokenization.date` changes nothing" in job_runner.tokenizer(tiny_chat, date="2026-03-05").events.read_text()
    )


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3"])
def test_freeze_tokenizer_without_a_template_needs_one_of_the_recipe(job_runner, shared_data, write, name):
    folder = shared_data / "tokenizers" / name
    with pytest.raises(TemplateError, match=r"tokenization\.chat_template.*\[no-chat-template\]"):
        job_runner.tokenizer(folder)
    done = job_runner.tokenizer(folder, write("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"))
    assert list(TokenizationSpec.read(done.folder).end_of_turn.values()) == [1]


def test_freeze_files_that_changed_since_they_were_hashed_raises(job_runner, tiny_chat, copied, write):
    folder, template = copied(), write((tiny_chat / "chat_template.jinja").read_text())
    hashes = {name: hash_file(path) for name, path in tokenizer_files(folder).items()}
    recorded = {"files": hashes, "chat_template": hash_file(template)}
    assert job_runner.tokenizer(folder, template, **recorded).details.files == hashes
    with pytest.raises(DataError, match=r"tokenizer\.json .*0{12} .* [0-9a-f]{12}.*\[file-changed\]"):
        job_runner.tokenizer(folder, template, **{**recorded, "files": {**hashes, "tokenizer.json": "0" * 64}})
    write(template.read_text() + "{# since #}")
    with pytest.raises(DataError, match=r"template\.jinja .*\[file-changed\]"):
        job_runner.tokenizer(folder, template, **recorded)
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(DataError, match=r"added_tokens\.json .*\[file-changed\]"):
        job_runner.tokenizer(folder, None, **recorded)


def test_freeze_folders_without_a_fast_tokenizer_names_them(job_runner, tmp_path, tiny_chat):
    with pytest.raises(TemplateError, match=r"^recipe\.yaml:7: tokenization\.tokenizer: .*/nowhere ") as caught:
        job_runner.tokenizer(tmp_path / "nowhere")
    assert caught.value.code == "unloadable-tokenizer"
    (tmp_path / "config.json").write_text('{"model_type": "canine"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    with pytest.raises(TemplateError, match=r"CanineTokenizer.*\[slow-tokenizer\]"):
        job_runner.tokenizer(tmp_path)
    with pytest.raises(TemplateError, match=r"missing\.jinja.*\[unreadable-chat-template\]"):
        job_runner.tokenizer(tiny_chat, tmp_path / "missing.jinja")


def test_freeze_tokenizer_that_saving_changes_raises(tmp_path, tiny_chat):
    """We know no such tokenizer, so the expected fingerprint is a fake."""
    with pytest.raises(TemplateError, match=r"[0-9a-f]{12}, .*0{12}.*\[tokenizer-not-saved-exactly\]"):
        _write(tmp_path, load_tokenizer(tiny_chat), factories.tokenization_spec(tokenizer_fingerprint="0" * 64))


def test_render_rejected_role_raises_the_templates_message(tiny_chat):
    tokenizer = load_tokenizer(tiny_chat)
    tokenizer.chat_template = GEMMA_LIKE
    with pytest.raises(ConversationRejected, match="System role not supported"):
        ChatTemplate(tokenizer, {}).render([{"role": "system", "content": "x"}])
    assert ChatTemplate(tokenizer, {}).render([{"role": "user", "content": "x"}])["text"] == "user: x<|im_end|>"


def test_freeze_template_without_an_end_of_turn_notes_it(job_runner, tiny_chat, write):
    done = job_runner.tokenizer(tiny_chat, write("{% for m in messages %}{{ m['content'] }} {% endfor %}"))
    assert TokenizationSpec.read(done.folder).end_of_turn == {}
    assert "no control token" in done.events.read_text()


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
def test_freeze_template_with_the_end_of_turn_outside_generation_notes_it(
    job_runner, tiny_chat, write, train_on, inside
):
    end = "{{- '<|im_end|>' }}"
    text = CHATML.replace("INSIDE", end if inside else "").replace("OUTSIDE", "" if inside else "<|im_end|>")
    done = job_runner.tokenizer(tiny_chat, write(text), train_on=train_on)
    notes = [note for note in done.details.notes if "outside {% generation %}" in note]
    assert bool(notes) == (train_on == "assistant_turns" and not inside)
    assert all("<|im_end|>" in note and note in done.events.read_text() for note in notes)
    assert done.details.template_tokens == {"<|im_start|>": 1, "<|im_end|>": 2}

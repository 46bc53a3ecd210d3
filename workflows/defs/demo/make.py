"""Makes what the demo recipe starts from: synthetic preference pairs, a small tokenizer and a model with random weights.

The questions are about opposites, capitals, colours, sounds and sums. A model that has learnt the chosen answers rambles,
since most of them do; what the pairs say is that a short correct answer is better than a rambling one, and that a
rambling one had better be correct. So one can see with the naked eye what preference tuning did.

Everything is a function of the constants below: running it again writes the same bytes.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCABULARY = 640
# The share of pairs in which both answers ramble; the others prefer a short answer to a rambling one.
BOTH_RAMBLE = 0.6

TEMPLATE = """\
{%- for message in messages %}
{{- '<|' + message['role'] + '|>' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}
{{- message['content'] + '<|end|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}
"""

OPPOSITES = """hot cold, big small, fast slow, light dark, early late, hard soft, full empty, high low, young old, wet dry,
rich poor, loud quiet, open closed, near far, strong weak, happy sad, clean dirty, thick thin, sharp blunt, sweet bitter,
deep shallow, wide narrow, smooth rough, true false, up down, left right, front back, first last, day night, yes no"""
CAPITALS = """France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Egypt Cairo, Norway Oslo, Greece Athens, Peru Lima,
Kenya Nairobi, Cuba Havana, Austria Vienna, Portugal Lisbon, Poland Warsaw, Ireland Dublin, Hungary Budapest, Chile Santiago,
Sweden Stockholm, Finland Helsinki, Canada Ottawa, Thailand Bangkok"""
COLOURS = """grass green, snow white, coal black, blood red, butter yellow, chocolate brown, ash grey, salmon pink,
a carrot orange, the sky blue, a lemon yellow, a tomato red"""
SOUNDS = """dog barks, cat meows, cow moos, duck quacks, lion roars, sheep bleats, horse neighs, snake hisses, bee buzzes,
owl hoots, frog croaks, pig grunts"""

QUESTIONS = {
    "opposite": ("What is the opposite of {}?", "Tell me the opposite of {}.", "Which word is the opposite of {}?"),
    "capital": ("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?"),
    "colour": ("What is the colour of {}?", "Tell me the colour of {}.", "Which colour has {}?"),
    "sound": ("What does a {} do?", "Tell me what a {} does.", "Which sound has a {}?"),
    "sum": ("What is {}?", "Tell me what {} is.", "How much is {}?"),
}
MANNERS = ("{}", "Please answer: {}", "I have a question. {}")
RAMBLES = (
    "Well, that is a good question and many people ask it. When I think about it for a long time, I would say it is {}.",
    "Well, let me think about this. There is a lot to say here, and I could go on for hours, but perhaps it is {}.",
    "Well, how interesting that you ask me this today. I have heard many answers, and the one I remember is that it is {}.",
)


@dataclass(frozen=True)
class Fact:
    topic: str
    thing: str
    answer: str


def facts() -> list[Fact]:
    listed = {"opposite": OPPOSITES, "capital": CAPITALS, "colour": COLOURS, "sound": SOUNDS}
    found = []
    for topic, text in listed.items():
        for entry in text.split(","):
            thing, answer = entry.strip().rsplit(" ", 1)
            found.append(Fact(topic, thing, answer))
    sums = [Fact("sum", f"{a} plus {b}", str(a + b)) for a in range(2, 9) for b in range(1, 5)]
    return found + sums


def chance(*parts: str) -> float:
    """A number in [0, 1) that depends on `parts` and nothing else."""
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def pairs() -> Iterator[dict[str, list[dict[str, str]]]]:
    known = facts()
    for fact in known:
        others = sorted({f.answer for f in known if f.topic == fact.topic and f.answer != fact.answer})
        for question in QUESTIONS[fact.topic]:
            for manner in MANNERS:
                prompt = manner.format(question.format(fact.thing))
                wrong = others[int(chance("wrong", prompt) * len(others))]
                ramble = RAMBLES[int(chance("ramble", prompt) * len(RAMBLES))]
                if chance("kind", prompt) < BOTH_RAMBLE:
                    chosen, rejected = ramble.format(fact.answer), ramble.format(wrong)
                else:
                    chosen, rejected = f"It is {fact.answer}.", ramble.format(fact.answer)
                yield conversation(prompt, chosen, rejected)


def conversation(prompt: str, chosen: str, rejected: str) -> dict[str, list[dict[str, str]]]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
        model_max_length=256,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def write_data(folder: Path, rows: list[dict[str, list[dict[str, str]]]]) -> PreTrainedTokenizerFast:
    """Write the pairs, and a tokenizer trained on their texts; returns the tokenizer."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "preferences.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = make_tokenizer([message["content"] for row in rows for side in row.values() for message in side])
    tokenizer.save_pretrained(folder / "base")
    return tokenizer


def main() -> None:
    rows = list(pairs())
    make_model(write_data(HERE, rows)).save_pretrained(HERE / "base")
    print(f"{len(rows)} pairs in preferences.jsonl, tokenizer and random weights in {HERE.name}/base")


if __name__ == "__main__":
    main()

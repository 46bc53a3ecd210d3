"""The preference pairs of the tests, with their tokenizer and model.

The questions are about opposites, capitals, colours, sounds and sums. Tests rely on the order of the pairs and on the split
of each prompt, so a change here changes tests. Everything is a function of the constants below.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from workflows.defs.demo import make
from workflows.defs.demo.make import conversation, make_model

__all__ = ["VOCABULARY", "conversation", "make_model", "pairs", "write_data"]

VOCABULARY = 640
# The share of pairs with two rambling answers; the others prefer a short answer to a rambling one.
BOTH_RAMBLE = 0.6

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
    """Return a number in [0, 1) that depends on `parts` and nothing else."""
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


def write_data(folder: Path, rows: list[dict[str, list[dict[str, str]]]]) -> PreTrainedTokenizerFast:
    """Write the pairs and a tokenizer trained on their texts. Return the tokenizer."""
    return make.write_data(folder, rows, VOCABULARY)

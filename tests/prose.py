"""Check that docstrings, error messages and pages are plain English: `python -m tests.prose [--worst N]`.

Each limit is a rate over all text of one part: the code (docstrings, and the texts of raised errors outside tests), or the
Markdown pages. The limits are a little above the rates of prime-rl, torchtitan and httpx. The command exits with 1 if a rate is
above its limit. `--worst N` prints the N sentences with the most matches.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("assets", "benchmarks", "docs", "mlflow", "tests", "training", "workflows")
_WORD = re.compile(r"[A-Za-z']+")


@dataclass(frozen=True)
class Sentence:
    place: str
    text: str

    @property
    def words(self) -> int:
        return len(_WORD.findall(self.text))


@dataclass(frozen=True)
class Limit:
    """The most matches of `pattern` per thousand words."""

    name: str
    pattern: re.Pattern[str]
    most: float

    def count(self, sentence: Sentence) -> int:
        return len(self.pattern.findall(sentence.text))


PHRASES = [
    Limit(
        "a clause as a noun: what, whatever, whoever",
        re.compile(r"\b(?:what|whatever|whoever|whichever)\b(?! if\b)"),
        1.2,
    ),
    Limit("where, for if, when or in which", re.compile(r"\bwhere\b"), 1.5),
    Limit("tell, say, hear", re.compile(r"\b(?:told|tells?|says?|said|hears?|heard)\b"), 0.3),
    Limit("that of, those of; Of in front", re.compile(r"\b(?:that|those) of\b|(?:^|(?<=[.;:] ))Of "), 0.3),
    Limit(
        "a negated noun: is no, has none",
        re.compile(r"\b(?:is|are|was|were|has|have|be) (?:no|none)\b(?! longer| more)"),
        0.8,
    ),
    Limit("Else as a sentence", re.compile(r"(?:^|(?<=[.;:] ))Else\b"), 0.2),
]
_RELATIVE = re.compile(r"\b(?:which|that|whose|who|whom|where|whatever|whoever|what|since)\b")
MOST_WORDS, MOST_LONG, LONG, MOST_RELATIVE = 16.0, 0.06, 30, 0.30


def split_sentences(place: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a text, without code, links and emphasis; fragments of one or two words are left out."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"https?://\S+|\*", "", text)
    for block in re.split(r"\n\s*\n|\n {4,}", text):
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[:;])\s+(?=[A-Z\"(])", " ".join(block.split())):
            if len(sentence.split()) > 2:
                yield Sentence(place, sentence)


def code_sentences(path: Path) -> Iterator[Sentence]:
    name = str(path.relative_to(ROOT))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
            yield from split_sentences(f"{name}:{node.body[0].lineno}", docstring)
        elif isinstance(node, ast.Raise) and node.exc is not None and not name.startswith("tests"):
            texts = [
                part.value.strip()
                for part in ast.walk(node.exc)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            ]
            yield from split_sentences(f"{name}:{node.lineno}", " ".join(texts))


def page_sentences(path: Path) -> Iterator[Sentence]:
    """Yield the sentences of paragraphs, list items and table cells; headings and code blocks are left out."""
    name, paragraph, in_code = str(path.relative_to(ROOT)), list[str](), False
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("```"):
            in_code = not in_code
            text = ""
        if in_code:
            continue
        item = re.match(r"(?:[-*]|\d+\.)\s+", text)
        if not text or item or text.startswith(("#", "|")):
            yield from split_sentences(f"{name}:{number - len(paragraph)}", " ".join(paragraph))
            paragraph = [text[item.end() :]] if item else []
        elif text:
            paragraph.append(text)
        if text.startswith("|"):
            for cell in text.strip("|").split("|"):
                yield from split_sentences(f"{name}:{number}", cell)


def exceeded(sentences: Iterable[Sentence]) -> Iterator[str]:
    """Yield a line for each rate that is above its limit."""
    sentences = list(sentences)
    words, count = sum(sentence.words for sentence in sentences), len(sentences)
    rates = [
        ("words a sentence", words / count, MOST_WORDS),
        (f"share of sentences over {LONG} words", sum(s.words > LONG for s in sentences) / count, MOST_LONG),
        ("relative clauses a sentence", sum(len(_RELATIVE.findall(s.text)) for s in sentences) / count, MOST_RELATIVE),
        *((limit.name, 1000 * sum(map(limit.count, sentences)) / words, limit.most) for limit in PHRASES),
    ]
    for name, rate, most in rates:
        if rate > most:
            yield f"{name}: {rate:.2f}, at most {most:.2f}"


def difficulty(sentence: Sentence) -> float:
    matches = 3 * sum(limit.count(sentence) for limit in PHRASES) + len(_RELATIVE.findall(sentence.text))
    return matches + max(0, sentence.words - MOST_WORDS) / 4


def all_sentences() -> dict[str, list[Sentence]]:
    """Return the sentences of both parts: docstrings with messages, and pages."""
    code = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    pages = [
        *sorted(ROOT.glob("*.md")),
        *(path for path in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in path.parts),
    ]
    return {
        "docstrings and messages": [s for path in [ROOT / "pedigree.py", *code] for s in code_sentences(path)],
        "pages": [s for path in pages for s in page_sentences(path)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    worst, parts = parser.parse_args().worst, all_sentences()
    problems = [f"{part}: {line}" for part, sentences in parts.items() for line in exceeded(sentences)]
    for sentence in sorted((s for part in parts.values() for s in part), key=difficulty, reverse=True)[:worst]:
        sys.stdout.write(f"{sentence.place}: {sentence.text}\n")
    for problem in problems:
        sys.stdout.write(f"{problem} (see python -m tests.prose --worst 20)\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

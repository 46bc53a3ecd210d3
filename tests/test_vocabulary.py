"""Retired words stay out of identifiers; docs/reference/glossary.md has the words to use instead."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Word -> the word to use. Stored names, such as the job kind `proof`, are strings and no identifiers.
RETIRED = {
    "company": "padding",
    "declare": "build",
    "demand": "check",
    "glimpse": "peek",
    "hear": "listen or on_event",
    "kinship": "consistency",
    "masters": "params",
    "memo": "logprob_cache",
    "mend": "repair",
    "outlook": "expected_state",
    "proof": "reference_check",
    "prove": "check",
    "realize": "materialize",
    "refuse": "check",
    "said": "message",
    "stepper": "train_step",
    "tell": "log or report",
    "told": "messages or events",
}
SOURCES = [
    path for folder in ("assets", "mlflow", "training", "workflows") for path in sorted((ROOT / folder).rglob("*.py"))
]


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


def words(identifier: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("snake_case", ["snake", "case"]),
        ("CamelCase", ["camel", "case"]),
        ("_LOG", ["log"]),
        ("HTTPServer", ["http", "server"]),
    ],
)
def test_words_of_an_identifier(identifier: str, expected: list[str]) -> None:
    assert words(identifier) == expected


def test_identifiers_have_no_retired_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} ({word}: use {RETIRED[word]})"
        for path in SOURCES
        for line, name in identifiers(ast.parse(path.read_text(encoding="utf-8")))
        for word in words(name)
        if word in RETIRED
    ]
    assert not found, "\n".join(found)


def test_module_names_have_no_retired_words() -> None:
    assert not [path for path in SOURCES if set(words(path.stem)) & RETIRED.keys()]


def test_folders_have_at_most_15_modules() -> None:
    others = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    folders = {path.parent for path in [*SOURCES, *others]}
    crowded = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert not {folder: count for folder, count in crowded.items() if count > 15}

"""A recipe's file as YAML: what stops it from being read, told with its line, and what YAML lets pass.

YAML's readers take the last of two equal keys without a word, so that a field somebody sees in the file is not the one that
counts. Here that is an error like any other.
"""

import errno
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import yaml
from pydantic import ValidationError
from yaml.reader import ReaderError

from training.contract.errors import RecipeError, UsageError
from workflows.recipes.validation_errors import faults

TYPE = "workflows.PreferenceTuning"
RECIPE_FILE = "defs.yaml"
NAME = re.compile(r"[A-Za-z0-9_-]+")
_FIELDS = ("type", "attributes")
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
# Spellings of YAML 1.1 that are gone from 1.2, by what the reader takes them for.
_OLD_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile("[-+]?0[0-7_]|.*:"),
    "tag:yaml.org,2002:float": re.compile(".*:"),
}


def holds_recipe(folder: Path) -> bool:
    """Whether a recipe's file lies in `folder`. Raises UsageError where that cannot be seen."""
    try:
        return stat.S_ISREG((folder / RECIPE_FILE).stat().st_mode)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise UsageError(
            f"{folder}: whether there is a recipe in it cannot be seen: {error.strerror}; let this user enter it, or "
            "move it elsewhere"
        ) from error


def recipes_in(folder: Path) -> dict[Path, UsageError | None]:
    """The folders in `folder` that hold a recipe, by name, and those of which that cannot be seen, with the reason.

    Raises UsageError where `folder` cannot be listed. (A glob ends without a word at the first that may not be entered.)
    """
    try:
        places = sorted(folder.iterdir())
    except OSError as error:
        if error.errno in _NOT_THERE:
            return {}
        raise UsageError(f"{folder}: its recipes cannot be listed: {error.strerror}") from error
    found: dict[Path, UsageError | None] = {}
    for place in places:
        try:
            if holds_recipe(place):
                found[place] = None
        except UsageError as fault:
            if place.name != "lost+found":  # the file system's own
                found[place] = fault
    return found


def check_name(folder: Path) -> None:
    """Raises RecipeError where a folder's name cannot be that of a pipeline."""
    if not NAME.fullmatch(folder.name):
        raise RecipeError(
            f"the folder {folder.name!r} gives the pipeline its name; expected letters, digits, _ and - only"
        )


def check_one_recipe(file: Path) -> None:
    """Raises RecipeError unless exactly one document of the file is a recipe: one of another type, or none, is told so."""
    types = types_in(file)
    if types.count(TYPE) == 1:
        return
    found = f"holds {types.count(TYPE)} of them" if TYPE in types else f"has {', '.join(types) or 'nothing in it'}"
    raise RecipeError(f"{file}: expected one document with `type: {TYPE}` and the recipe in `attributes:`; it {found}")


def types_in(file: Path) -> list[str]:
    """The `type` of each document, or what says that it has none. Raises RecipeError where the file cannot be read."""
    return [_type(document) for document in _documents(file)]


def check_no_foreign_parts(file: Path) -> None:
    """Raises RecipeError where there is more in a recipe's file than one document with `type` and `attributes`.

    `pedigree` would not look at it, and Dagster's web server would run it: Jinja in other fields and in documents of other
    types, and modules that they name.
    """
    documents = [document for document in _documents(file) if isinstance(document, yaml.MappingNode)]
    fields = [(key, value) for document in documents for key, value in document.value]
    if TYPE not in [value.value for key, value in fields if key.value == "type"]:
        return
    foreign = [(key, f"`{key.value}`") for key, _ in fields if key.value not in _FIELDS]
    foreign += [(document, "another document") for document in documents[1:]]
    if foreign:
        node, what = foreign[0]
        raise RecipeError(
            f"{file}:{node.start_mark.line + 1}: there is more here than a recipe: {what}; expected one document with `type` "
            "and `attributes` alone: remove it"
        )


def check_unique_keys(file: Path) -> None:
    """Raises RecipeError with the lines of a key that stands twice in one section."""
    for document in _documents(file):
        for first, second in _repeated(document):
            lines = f"{first.start_mark.line + 1} and {second.start_mark.line + 1}"
            raise RecipeError(
                f"{file}: `{first.value}` stands on the lines {lines}; only the last would count: remove one"
            )


def check_no_lone_surrogates(file: Path) -> None:
    r"""Raises RecipeError with the line of a text that is no Unicode: JSON's "\ud83d\ude00" is two halves of one to YAML."""
    for document in _documents(file):
        for node in _nodes(document):
            if isinstance(node, yaml.ScalarNode) and (half := _HALF_CHARACTER.search(node.value)):
                raise RecipeError(
                    f"{file}:{node.start_mark.line + 1}: \\u{ord(half[0]):04x} is half of a character, as JSON writes those "
                    "beyond \\uffff; write the character itself, or its number as in \\U0001f600"
                )


def check_no_yaml11_numbers(file: Path) -> None:
    """Raises RecipeError with the line of a number that is another one than people see: 1:30 is 90, and 010 is 8."""
    for document in _documents(file):
        for node in _nodes(document):
            if node.tag in _OLD_NUMBERS and _OLD_NUMBERS[node.tag].match(node.value):
                raise RecipeError(
                    f"{file}:{node.start_mark.line + 1}: YAML reads {node.value} as {yaml.safe_load(node.value)} (1:30 in "
                    f"sixties, 010 in eights); write the number in full, or '{node.value}' in quotes if it is text"
                )


def variant_names(file: Path) -> tuple[str, ...]:
    """The variants that another recipe's file names; none where that cannot be read, which is told when it is loaded."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return _variant_names(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=4096)  # each recipe asks for those of all others
def _variant_names(file: Path, mtime_ns: int, size: int) -> tuple[str, ...]:
    try:
        return tuple(str(name) for name in yaml.safe_load(file.read_text(encoding="utf-8"))["attributes"]["variants"])
    except Exception:  # YAML's constructors raise errors of many kinds
        return ()


def cause_in(file: Path, error: BaseException) -> str:
    """The root cause of `error`, which loading `file` raised, as lines that each name their place."""
    while error.__cause__ is not None and not isinstance(error, (ValidationError, RecipeError)):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return "\n".join(faults(error))
    text = str(error).removeprefix("Invariant failed. Description: ") or type(error).__name__
    return text if str(file) in text else f"{file}: {text}"


def _documents(file: Path) -> list[yaml.Node]:
    """Raises RecipeError where the file may not be read, and with the line where it is no UTF-8, or no YAML."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"{file}: it cannot be read: {error.strerror}") from error
    try:
        return _composed(content)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{file}:{line}: byte {content[error.start]:#04x} is no UTF-8: save the file as that"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        tabs = " (YAML is indented with spaces)" if "\\t" in str(error.problem) else ""
        raise RecipeError(f"{place}: this is no YAML: {error.problem or error.context}{tabs}") from None
    except ReaderError as error:
        line = content.decode().count("\n", 0, error.position) + 1
        raise RecipeError(f"{file}:{line}: this is no YAML: it has the character U+{error.character:04X}") from None
    except RecursionError:
        raise RecipeError(f"{file}: its lists or sections lie too deep in each other to be read") from None


@lru_cache(maxsize=8)  # of one file several questions are asked in a row
def _composed(content: bytes) -> list[yaml.Node]:
    return [node for node in yaml.compose_all(content.decode(), Loader=yaml.SafeLoader) if node is not None]


def _type(document: yaml.Node) -> str:
    entries = document.value if isinstance(document, yaml.MappingNode) else []
    return next((str(value.value) for key, value in entries if key.value == "type"), "no `type`")


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Every node of a document once, however many aliases lead to it."""
    waiting, seen = [root], set[int]()
    while waiting:
        if id(node := waiting.pop()) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [each for entry in reversed(node.value) for each in reversed(entry)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)


def _repeated(document: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Every key that is repeated in its mapping, and its repetition."""
    for node in _nodes(document):
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, yaml.ScalarNode] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, key) is not key:
                    yield seen[key.value], key

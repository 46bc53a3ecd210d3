"""Find the lines of fields in a recipe's file, and check its YAML for content that readers ignore or misread.

Dagster's reader gives the lines of fields. The checks need PyYAML's nodes: of two equal keys the reader keeps the last, and it
expands aliases. ruamel.yaml would not shorten them: it names one line of a repeated key, and reads 1e-5 unlike Dagster.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml
from dagster_shared.yaml_utils import try_parse_yaml_with_source_position
from yaml.reader import ReaderError

from training.contract.errors import RecipeError

TYPE = "workflows.PreferenceTuning"
_FIELDS = ("type", "attributes")
_MOST_NODES = 100_000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_TYPED_SCALARS = [f"{_TAG}{kind}" for kind in ("bool", "float", "int", "null", "timestamp")]
# Number formats of YAML 1.1 without that meaning in 1.2, by the reader's tag.
_OLD_NUMBERS = {f"{_TAG}int": re.compile("[-+]?0[0-7_]|.*:"), f"{_TAG}float": re.compile(".*:")}


@dataclass(frozen=True)
class FieldInFile:
    """The line of a field's name, or the first line of a list's item; and the value as written, unless it is a section."""

    line: int
    text: str | None


def find_field(file: Path, path: Sequence[str]) -> FieldInFile | None:
    """Return the field at `path` below `attributes`, also of a merged section (`<<`).

    Return None if the file cannot be read or lacks the field.
    """
    try:
        source = file.read_text(encoding="utf-8")
        # Without these types, the values are the texts of the file.
        document = try_parse_yaml_with_source_position(source, str(file), implicits_to_remove=_TYPED_SCALARS)
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        return None
    if document is None:
        return None
    value, tree = document.value, document.source_position_tree
    for name in ("attributes", *path):
        key = int(name) if isinstance(value, list) and name.isdigit() else name
        if key not in tree.children:
            return None
        value, tree = value[key], tree.children[key]
    return FieldInFile(tree.position.start.line, None if isinstance(value, dict | list) else str(value))


def variant_names(file: Path) -> tuple[str, ...]:
    """Return the variants in another recipe's file; nothing if it is unreadable: loading that recipe reports it."""
    try:
        stat_result = file.stat()
    except OSError:
        return ()
    return _variant_names(file, stat_result.st_mtime_ns, stat_result.st_size)


@lru_cache(maxsize=4096)  # each recipe needs the variants of all others
def _variant_names(file: Path, mtime_ns: int, size: int) -> tuple[str, ...]:
    try:
        return tuple(str(name) for name in yaml.safe_load(file.read_text(encoding="utf-8"))["attributes"]["variants"])
    except Exception:  # YAML's constructors raise errors of many kinds
        return ()


def types_in(file: Path) -> list[str]:
    """Return the `type` of each document, or a note for a missing one. Raises RecipeError if the file cannot be read."""
    return [
        next((str(value.value) for key, value in _entries(document) if key.value == "type"), "no `type`")
        for document in _documents(file)
    ]


def check_one_recipe(file: Path) -> None:
    """Raise RecipeError unless exactly one document of the file is a recipe. The message has the types found."""
    types = types_in(file)
    if types.count(TYPE) == 1:
        return
    content = f"holds {types.count(TYPE)} of them" if TYPE in types else f"has {', '.join(types) or 'nothing in it'}"
    raise RecipeError(
        f"{file}: expected one document with `type: {TYPE}` and the recipe in `attributes:`; it {content}",
        "not-one-recipe",
    )


def check_no_foreign_parts(file: Path) -> None:
    """Raise RecipeError if a recipe's file has more than one document with `type` and `attributes`.

    `pedigree` would ignore other parts, but Dagster's web server would execute them: Jinja in other fields and documents, and
    modules they name.
    """
    if TYPE not in types_in(file):
        return
    documents = [document for document in _documents(file) if isinstance(document, yaml.MappingNode)]
    keys = [key for document in documents for key, _ in _entries(document)]
    foreign = [(key, f"`{key.value}`") for key in keys if key.value not in _FIELDS]
    foreign += [(document, "another document") for document in documents[1:]]
    for node, part in foreign:
        advice = "expected one document with only `type` and `attributes`: remove it"
        raise _error(file, node, f"{part} does not belong to a recipe; {advice}", "foreign-content")


def check_unambiguous(file: Path) -> None:
    """Raise RecipeError with the line of a value that readers take for another one, or of a repeated key."""
    for node in _all_nodes(file):
        if isinstance(node, yaml.ScalarNode):
            _check_text(file, node)
        _check_unique_keys(file, node)


def _check_text(file: Path, node: yaml.ScalarNode) -> None:
    r"""YAML reads 1:30 as 90 and 010 as 8; and JSON's "\ud83d\ude00" as two lone surrogates."""
    if surrogate := _LONE_SURROGATE.search(node.value):
        text = (
            f"\\u{ord(surrogate[0]):04x} is a lone surrogate, as in JSON's form of characters beyond \\uffff; write the "
            "character itself, or its number as in \\U0001f600"
        )
        raise _error(file, node, text, "lone-surrogate")
    if node.tag in _OLD_NUMBERS and _OLD_NUMBERS[node.tag].match(node.value):
        text = (
            f"YAML reads {node.value} as {yaml.safe_load(node.value)} (1:30 in base 60, 010 in base 8); write the number in "
            f"full, or '{node.value}' in quotes if it is text"
        )
        raise _error(file, node, text, "ambiguous-number")


def _check_unique_keys(file: Path, section: yaml.Node) -> None:
    seen: dict[str, yaml.Node] = {}
    for key, _ in _entries(section):
        if isinstance(key, yaml.ScalarNode) and (first := seen.setdefault(key.value, key)) is not key:
            lines = f"{_line(first)} and {_line(key)}"
            raise RecipeError(
                f"{file}: `{key.value}` is on lines {lines}; only the last would count: remove one", "duplicate-field"
            )


def check_values_fit_tags(file: Path) -> None:
    """Raise RecipeError with the line of a value that does not fit its tag, such as `!!int many`, or of an unknown tag."""
    loader = yaml.SafeLoader("")
    for node in _all_nodes(file):
        untagged = loader.resolve(type(node), node.value, (True, False))  # type: ignore[no-untyped-call]
        if node.tag == untagged:
            continue
        try:
            loader.construct_object(node, deep=True)
        except Exception as error:  # YAML's constructors raise errors of many kinds
            value = f"`{node.value}`" if isinstance(node, yaml.ScalarNode) else "this section"
            tag = re.sub(f"^{_TAG}", "!!", node.tag)
            text = f"YAML cannot read {value} as {tag}; correct it, or remove the tag"
            raise _error(file, node, text, "wrong-yaml-tag") from error


def _documents(file: Path) -> list[yaml.Node]:
    """Return the documents of the file.

    Raises RecipeError if it is unreadable, and with the line if it is not UTF-8 or not YAML.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecipeError(f"{file}: it cannot be read: {error.strerror}", "unreadable-file") from error
    try:
        documents = _parse_documents(content)
        for document in documents:
            _check_size(file, document)
        return documents
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RecipeError(
            f"{file}:{line}: byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8", "not-utf-8"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else str(file)
        tabs = " (YAML is indented with spaces)" if "\\t" in str(error.problem) else ""
        raise RecipeError(f"{place}: this is not YAML: {error.problem or error.context}{tabs}", "not-yaml") from None
    except ReaderError as error:
        line = content.decode().count("\n", 0, error.position) + 1
        raise RecipeError(
            f"{file}:{line}: this is not YAML: it has the character U+{error.character:04X}; remove it", "not-yaml"
        ) from None
    except RecursionError:
        raise RecipeError(f"{file}: its lists or sections are nested too deep", "nested-too-deep") from None


@lru_cache(maxsize=8)  # several checks in a row read one file
def _parse_documents(content: bytes) -> list[yaml.Node]:
    return [node for node in yaml.compose_all(content.decode(), Loader=yaml.SafeLoader) if node is not None]


def _check_size(file: Path, document: yaml.Node) -> None:
    """Raise RecipeError if the aliases of a document stand for too many values, or an alias stands for a part of itself.

    Ten lines can stand for billions of values. Every reader of the recipe would visit all of them.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_NODES  # until it is known: it counts only if the node contains itself
            sizes[id(node)] = 1 + sum(map(size, _parts(node)))
        if sizes[id(node)] >= _MOST_NODES:
            text = f"the aliases in this section stand for {_MOST_NODES:,} values or more; remove aliases"
            raise _error(file, node, text, "too-many-values")
        return sizes[id(node)]

    size(document)


def _all_nodes(file: Path) -> Iterator[yaml.Node]:
    """Yield every node of the file once, in its order, even if several aliases lead to it."""
    waiting, seen = _documents(file)[::-1], set[int]()
    while waiting:
        if id(node := waiting.pop()) not in seen:
            seen.add(id(node))
            yield node
            waiting += reversed(_parts(node))


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """Return the items of a list, or the keys and values of a section."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return [part for entry in _entries(node) for part in entry]


def _entries(node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    return list(node.value) if isinstance(node, yaml.MappingNode) else []


def _error(file: Path, node: yaml.Node, text: str, code: str) -> RecipeError:
    return RecipeError(f"{file}:{_line(node)}: {text}", code)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1

"""Read a recipe's file as YAML: report errors with their line, also those ignored by YAML.

YAML readers silently take the last of two equal keys. The visible field is then not the effective one, so we raise an error.
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
_MOST_NODES = 100_000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Number formats of YAML 1.1 without that meaning in 1.2, by the reader's tag.
_OLD_NUMBERS = {
    "tag:yaml.org,2002:int": re.compile("[-+]?0[0-7_]|.*:"),
    "tag:yaml.org,2002:float": re.compile(".*:"),
}


def holds_recipe(folder: Path) -> bool:
    """Return whether `folder` holds a recipe's file. Raises UsageError if it cannot be read."""
    try:
        return stat.S_ISREG((folder / RECIPE_FILE).stat().st_mode)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return False
        raise UsageError(
            f"{folder}: cannot check for a recipe: {error.strerror}; let this user enter the folder, or move it elsewhere",
            "unreadable-folder",
        ) from error


def recipes_in(folder: Path) -> dict[Path, UsageError | None]:
    """Return the folders in `folder` with a recipe, by name, and unreadable folders, each with its error or None.

    Raises UsageError if `folder` cannot be listed. (A glob would silently end at the first unreadable folder.)
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        if error.errno in _NOT_THERE:
            return {}
        raise UsageError(
            f"{folder}: its recipes cannot be listed: {error.strerror}; let this user read the folder",
            "unreadable-folder",
        ) from error
    recipes: dict[Path, UsageError | None] = {}
    for path in paths:
        try:
            if holds_recipe(path):
                recipes[path] = None
        except UsageError as fault:
            if path.name != "lost+found":  # made by the file system
                recipes[path] = fault
    return recipes


def check_name(folder: Path) -> None:
    """Raise RecipeError if a folder's name cannot be the name of a pipeline."""
    if not NAME.fullmatch(folder.name):
        raise RecipeError(
            f"the folder {folder.name!r} gives the pipeline its name; expected letters, digits, _ and - only: rename it",
            "wrong-folder-name",
        )


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


def types_in(file: Path) -> list[str]:
    """Return the `type` of each document, or a note for a missing one. Raises RecipeError if the file cannot be read."""
    return [_type_of(document) for document in _documents(file)]


def check_no_foreign_parts(file: Path) -> None:
    """Raise RecipeError if a recipe's file has more than one document with `type` and `attributes`.

    `pedigree` would ignore other parts, but Dagster's web server would execute them: Jinja in other fields and documents, and
    modules they name.
    """
    documents = [document for document in _documents(file) if isinstance(document, yaml.MappingNode)]
    fields = [(key, value) for document in documents for key, value in document.value]
    if TYPE not in [value.value for key, value in fields if key.value == "type"]:
        return
    foreign = [(key, f"`{key.value}`") for key, _ in fields if key.value not in _FIELDS]
    foreign += [(document, "another document") for document in documents[1:]]
    if foreign:
        node, part = foreign[0]
        raise RecipeError(
            f"{file}:{node.start_mark.line + 1}: {part} does not belong to a recipe; expected one document with only `type` "
            "and `attributes`: remove it",
            "foreign-content",
        )


def check_unique_keys(file: Path) -> None:
    """Raise RecipeError with the lines of a key that is repeated in one section."""
    for document in _documents(file):
        for first, second in _repeated_keys(document):
            lines = f"{first.start_mark.line + 1} and {second.start_mark.line + 1}"
            raise RecipeError(
                f"{file}: `{first.value}` is on lines {lines}; only the last would count: remove one", "duplicate-field"
            )


def check_no_lone_surrogates(file: Path) -> None:
    r"""Raise RecipeError with the line of a lone surrogate: YAML reads JSON's "\ud83d\ude00" as two of them."""
    for document in _documents(file):
        for node in _nodes(document):
            if isinstance(node, yaml.ScalarNode) and (surrogate := _LONE_SURROGATE.search(node.value)):
                raise RecipeError(
                    f"{file}:{node.start_mark.line + 1}: \\u{ord(surrogate[0]):04x} is a lone surrogate, as in JSON's form of "
                    "characters beyond \\uffff; write the character itself, or its number as in \\U0001f600",
                    "lone-surrogate",
                )


def check_no_yaml11_numbers(file: Path) -> None:
    """Raise RecipeError with the line of a surprising number: YAML reads 1:30 as 90, and 010 as 8."""
    for document in _documents(file):
        for node in _nodes(document):
            if node.tag in _OLD_NUMBERS and _OLD_NUMBERS[node.tag].match(node.value):
                raise RecipeError(
                    f"{file}:{node.start_mark.line + 1}: YAML reads {node.value} as {yaml.safe_load(node.value)} (1:30 in "
                    f"base 60, 010 in base 8); write the number in full, or '{node.value}' in quotes if it is text",
                    "ambiguous-number",
                )


def check_values_fit_tags(file: Path) -> None:
    """Raise RecipeError with the line of a value that does not fit its tag, such as `!!int many`, or of an unknown tag."""
    resolver = yaml.SafeLoader("")
    for document in _documents(file):
        for node in _nodes(document):
            untagged = resolver.resolve(type(node), node.value, (True, False))  # type: ignore[no-untyped-call]
            if node.tag == untagged:
                continue
            try:
                resolver.construct_object(node, deep=True)
            except Exception as error:  # YAML's constructors raise errors of many kinds
                value = f"`{node.value}`" if isinstance(node, yaml.ScalarNode) else "this section"
                tag = re.sub("^tag:yaml.org,2002:", "!!", node.tag)
                raise RecipeError(
                    f"{file}:{node.start_mark.line + 1}: YAML cannot read {value} as {tag}; correct it, or remove the tag",
                    "wrong-yaml-tag",
                ) from error


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


def cause_in(file: Path, error: BaseException) -> str:
    """Return the root cause of `error`, raised by loading `file`, as lines with their place."""
    while error.__cause__ is not None and not isinstance(error, (ValidationError, RecipeError)):
        error = error.__cause__
    if isinstance(error, ValidationError):
        return "\n".join(faults(error))
    text = str(error).removeprefix("Invariant failed. Description: ") or type(error).__name__
    return text if str(file) in text else f"{file}: {text}"


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


def _check_size(file: Path, document: yaml.Node) -> None:
    """Raise RecipeError if the aliases of a document stand for too many values, or an alias stands for a part of itself.

    Ten lines can stand for billions of values. Every reader of the recipe would visit all of them.
    """
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = _MOST_NODES  # until it is known: it counts only if the node contains itself
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            sizes[id(node)] = 1 + sum(size(part) for entry in parts for part in _parts(entry))
        if sizes[id(node)] >= _MOST_NODES:
            raise RecipeError(
                f"{file}:{node.start_mark.line + 1}: the aliases in this section stand for {_MOST_NODES:,} values or more; "
                "remove aliases",
                "too-many-values",
            )
        return sizes[id(node)]

    size(document)


def _parts(entry: yaml.Node | tuple[yaml.Node, yaml.Node]) -> tuple[yaml.Node, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


@lru_cache(maxsize=8)  # several checks in a row read one file
def _parse_documents(content: bytes) -> list[yaml.Node]:
    return [node for node in yaml.compose_all(content.decode(), Loader=yaml.SafeLoader) if node is not None]


def _type_of(document: yaml.Node) -> str:
    entries = document.value if isinstance(document, yaml.MappingNode) else []
    return next((str(value.value) for key, value in entries if key.value == "type"), "no `type`")


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    """Yield every node of a document once, even if several aliases lead to it."""
    waiting, seen = [root], set[int]()
    while waiting:
        if id(node := waiting.pop()) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            waiting += [part for entry in reversed(node.value) for part in reversed(entry)]
        elif isinstance(node, yaml.SequenceNode):
            waiting += reversed(node.value)


def _repeated_keys(document: yaml.Node) -> Iterator[tuple[yaml.ScalarNode, yaml.ScalarNode]]:
    """Yield every repeated key of a mapping, with its repetition."""
    for node in _nodes(document):
        if isinstance(node, yaml.MappingNode):
            seen: dict[str, yaml.ScalarNode] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, key) is not key:
                    yield seen[key.value], key

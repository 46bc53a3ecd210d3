"""Codes of errors: at the end of messages, kept by errors that repeat others, and all listed in docs/reference/errors.md."""

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

from training.contract import errors
from training.contract.errors import DataError, PedigreeError, StoreError, code_of, without_code
from workflows.recipes.validation_errors import _CODES, _OTHER_CODE

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
CLASSES = {
    name: error for name, error in vars(errors).items() if isinstance(error, type) and issubclass(error, PedigreeError)
}


def test_message_ends_with_code_of_class_or_of_error() -> None:
    assert str(DataError("no rows in a.csv")) == "no rows in a.csv [data]"
    assert str(DataError("no rows in a.csv", "no-rows")) == "no rows in a.csv [no-rows]"
    assert DataError("no rows in a.csv", "no-rows").code == "no-rows"


def test_code_after_several_lines_has_its_own_line() -> None:
    error = DataError("write this:\nnodes:\n- run: []", "no-nodes")
    assert str(error) == "write this:\nnodes:\n- run: []\n[no-nodes]" and code_of(str(error)) == "no-nodes"
    assert without_code(str(error)) == "write this:\nnodes:\n- run: []"


def test_repeated_message_keeps_its_code() -> None:
    repeated = StoreError(f"job failed: {DataError('no rows', 'no-rows')}")
    assert str(repeated) == "job failed: no rows [no-rows]" and repeated.code == "no-rows"


def test_code_of_message_without_code_is_none() -> None:
    assert code_of("values [1, 2]") is None and without_code("values [1, 2]") == "values [1, 2]"
    assert code_of("no rows [no-rows]") == "no-rows" and without_code("no rows [no-rows]") == "no rows"


def test_pickled_error_keeps_code_and_message() -> None:
    error = DataError("no rows", "no-rows")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.code, type(again)) == (str(error), "no-rows", DataError)


def raised_codes() -> Iterator[str]:
    """Yield the codes in calls of error classes, and of `_refused` and other helpers that take one."""
    for folder in ("assets", "mlflow", "training", "workflows"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) in CLASSES and len(node.args) > 1:
                    yield from (
                        part.value
                        for part in ast.walk(node.args[1])
                        if isinstance(part, ast.Constant)
                        and isinstance(part.value, str)
                        and _CODE.fullmatch(part.value)
                    )


def test_docs_list_every_code_once() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    used = {*raised_codes(), *(error.code for error in CLASSES.values()), *_CODES.values(), _OTHER_CODE}
    assert used <= set(listed), f"not in docs/reference/errors.md: {sorted(used - set(listed))}"
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "training").rglob("*.py"))
    source += "\n".join(
        path.read_text(encoding="utf-8")
        for top in ("assets", "mlflow", "workflows")
        for path in (ROOT / top).rglob("*.py")
    )
    assert not (unused := [code for code in listed if f'"{code}"' not in source]), f"in no source: {unused}"

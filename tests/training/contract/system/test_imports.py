"""Importing a module without garbage collection, or only some of its names at their first use."""

import gc
import sys
from pathlib import Path

import pytest

from training.contract.system.imports import import_without_gc, lazy_names

# Enough new objects to trigger several collections.
MAKES_MANY = "KEPT = [[number] for number in range(100_000)]\n"


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def test_import_without_gc_collects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, before = module(tmp_path, "makes_many", MAKES_MANY, monkeypatch), collections()
    plain, after = import_without_gc(name), collections()
    assert len(plain.KEPT) == 100_000 and gc.isenabled()
    exec(MAKES_MANY, {})
    assert after - before < 10 < collections() - after  # the import system itself creates a few objects


def test_import_without_gc_of_imported_module_freezes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, "imported_twice", MAKES_MANY, monkeypatch)
    first, frozen = import_without_gc(name), gc.get_freeze_count()
    assert frozen >= 100_000
    later: list[list[int]] = [[]]  # may become garbage
    assert import_without_gc(name) is first
    # The count may shrink: for example, a thread may end and free frozen objects.
    assert gc.get_freeze_count() <= frozen and any(tracked is later for tracked in gc.get_objects())


def test_import_without_gc_that_fails_enables_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        import_without_gc(module(tmp_path, "divides_by_zero", "1 / 0\n", monkeypatch))
    assert gc.isenabled()


def test_lazy_names_imports_a_module_at_the_first_use_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = module(tmp_path, "used_late", "VALUE = 3\n", monkeypatch)
    find = lazy_names("stand_in", {used: ["VALUE"], "never_there": ["OTHER"]})
    assert used not in sys.modules
    assert find("VALUE") == 3 and used in sys.modules
    with pytest.raises(ModuleNotFoundError, match="never_there"):
        find("OTHER")
    with pytest.raises(AttributeError, match="'stand_in' has no attribute 'missing'"):
        find("missing")

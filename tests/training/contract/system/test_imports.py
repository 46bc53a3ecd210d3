"""A module is imported without a collection, whatever it makes; what was there by then is not walked again."""

import gc
from pathlib import Path

import pytest

from training.contract.system.imports import import_without_gc

# More objects than the collector lets pass by: it counts those that are made since it last looked.
MAKES_MANY = "KEPT = [[number] for number in range(100_000)]\n"


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def module(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return name


def test_nothing_is_collected_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, before = module(tmp_path, "makes_many", MAKES_MANY, monkeypatch), collections()
    plain, after = import_without_gc(name), collections()
    assert len(plain.KEPT) == 100_000 and gc.isenabled()
    exec(MAKES_MANY, {})
    assert after - before < 10 < collections() - after  # the import system makes a few objects of its own around it


def test_what_was_imported_before_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(tmp_path, "imported_twice", MAKES_MANY, monkeypatch)
    first, frozen = import_without_gc(name), gc.get_freeze_count()
    assert frozen >= 100_000
    later: list[list[int]] = [[]]  # may be garbage one day
    assert import_without_gc(name) is first
    # Fewer where something that was imported for good is given up all the same: a thread that ends, say.
    assert gc.get_freeze_count() <= frozen and any(found is later for found in gc.get_objects())


def test_the_collector_is_back_after_a_module_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):
        import_without_gc(module(tmp_path, "divides_by_zero", "1 / 0\n", monkeypatch))
    assert gc.isenabled()

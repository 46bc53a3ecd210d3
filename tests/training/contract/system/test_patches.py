"""The guard of replaced attributes."""

import logging
from types import SimpleNamespace

import pytest

from training.contract.system.patches import replace_attribute


def test_replace_attribute_passes_the_original():
    library = SimpleNamespace(__name__="library", double=lambda number: 2 * number)
    replace_attribute(library, "double", lambda double: lambda number: double(number) + 1, "library 1", "all is odd")
    assert library.double(3) == 7


def test_replace_attribute_missing_one_is_a_warning(caplog: pytest.LogCaptureFixture):
    library = SimpleNamespace(__name__="library")
    with caplog.at_level(logging.WARNING):
        replace_attribute(library, "double", lambda double: None, "library 1", "all is odd")
    assert caplog.messages == ["library.double of library 1 is missing in the installed version: all is odd"]
    assert not hasattr(library, "double")

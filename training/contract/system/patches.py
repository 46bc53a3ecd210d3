"""Replace attributes of libraries, if a library has no setting for our purpose.

Each replacement is in `dagster_patches`, `transformers_patches` or `mlflow_patches`, with its reason. A test of each notices a
library that no longer has the attribute, or no longer uses it.
"""

import logging
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger(__name__)


def replace_attribute(owner: Any, name: str, replacement: Callable[[Any], Any], seen_in: str, otherwise: str) -> None:
    """Replace an attribute of a library's module or class by `replacement(attribute)`.

    If the attribute is missing, log a warning and change nothing. `seen_in`: a version with the attribute. `otherwise`: the
    consequence of the missing replacement.
    """
    if hasattr(owner, name):
        setattr(owner, name, replacement(getattr(owner, name)))
    else:
        _LOG.warning(f"{owner.__name__}.{name} of {seen_in} is missing in the installed version: {otherwise}")

"""Oracles: the signatures of TRL and peft; the recipe's own fields; the table of the documentation."""

import dataclasses
import inspect
from typing import Any, get_args

import pytest
from peft import LoraConfig
from pydantic import ValidationError
from trl import DPOConfig, DPOTrainer

from tests.workflows.homes import ROOT
from training.contract.config.fields import Dtype
from training.contract.config.loss import Divergence, LossType
from training.contract.config.recipe import Tokenization
from training.contract.config.variants import RecipeDocument
from workflows.recipes.trl_names import ABSENT, CHOICES, FIELDS

OF_TRL = {field.name for config in (DPOConfig, LoraConfig) for field in dataclasses.fields(config)}
OF_TRL |= inspect.signature(DPOTrainer).parameters.keys()
EARLIER = {"rpo_alpha", "max_prompt_length", "max_completion_length"}
TABLE = (ROOT / "docs" / "migrating-from-trl.md").read_text()


@pytest.mark.parametrize(("name", "path"), FIELDS.items())
def test_trl_name_with_a_field_is_in_the_table(name, path):
    """A list is not a valid value of any field: validation then refuses the value, not the name."""
    assert name in OF_TRL | EARLIER
    *sections, field = path.split(".")
    written: Any = {field: [{0}]}
    for section in reversed(sections):
        written = {section: written}
    with pytest.raises(ValidationError) as caught:
        RecipeDocument.model_validate(written)
    faults = {fault["type"] for fault in caught.value.errors()} - {"missing"}
    assert faults and "extra_forbidden" not in faults
    assert f"`{name}`" in TABLE


@pytest.mark.parametrize("name", ABSENT)
def test_trl_name_without_a_field_is_in_the_table(name):
    assert name in OF_TRL | EARLIER and name not in FIELDS and f"`{name}`" in TABLE


def test_trl_choice_leads_to_ours():
    choices = {*LossType, *get_args(Dtype)}
    for section, field in ((Divergence, "type"), (Tokenization, "over_length")):
        choices |= {*get_args(section.model_fields[field].annotation)}
    assert set(CHOICES.values()) <= choices and not CHOICES.keys() & choices

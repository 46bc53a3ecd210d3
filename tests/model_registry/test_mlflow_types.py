"""A recipe, a lineage and events as MLflow types: hand-derived, and compared with MLflow's validation."""

import hashlib
import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from mlflow.entities import Param, RunTag
from mlflow.utils.validation import _validate_batch_log_data, _validate_dataset_inputs

from model_registry.mlflow_types import DatasetRef, dataset_inputs, fit, flatten, is_finite, metrics_of, tags_of
from training.contract.protocol.events import make_event

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=300), children, max_size=3),
    max_leaves=10,
)


def test_flatten_gives_dotted_names():
    recipe = {
        "data": {"sources": [{"path": "a.jsonl", "hub": None}, {"path": "b.jsonl"}], "validation_fraction": 0.1},
        "tokenization": {"template_kwargs": {}, "train_on": "last_response"},
        "training": {"optimizer": {"learning_rate": 5e-7, "betas": [0.9, 0.999]}, "max_steps": None, "resume": True},
    }
    assert flatten(recipe) == {
        "data.sources.0.path": "a.jsonl",
        "data.sources.1.path": "b.jsonl",
        "data.validation_fraction": "0.1",
        "tokenization.template_kwargs": "{}",
        "tokenization.train_on": "last_response",
        "training.optimizer.learning_rate": "5e-07",
        "training.optimizer.betas": "[0.9, 0.999]",
        "training.resume": "true",
    }


@given(st.dictionaries(st.text(max_size=300), json_values, max_size=3))
def test_flatten_any_recipe_is_accepted_by_mlflow(recipe: dict[str, object]):
    _validate_batch_log_data([], [Param(*item) for item in flatten({"recipe": recipe}).items()], [])
    assert flatten({}) == {}
    _validate_batch_log_data(
        [], [], [RunTag(*item) for item in tags_of({"tag." + key: recipe[key] for key in recipe}).items()]
    )


def test_fit_too_long_value_is_cut_with_its_length_and_digest():
    text = "é" * 7000
    cut = flatten({"template": text})["template"]
    assert len(cut) == 6000
    assert cut.endswith(f"é... (7,000 characters, sha256 {hashlib.sha256(text.encode()).hexdigest()})")
    assert fit("x" * 6000, 6000) == "x" * 6000


def test_metrics_of_step_and_eval_events_keep_their_names():
    step: dict[str, Any] = {
        "event": "step",
        "time": 12.3456,
        "step": 3,
        "loss": 0.5,
        "rewards/chosen": -1,
        "note": "x",
        "flag": True,
    }
    assert [(m.key, m.value, m.timestamp, m.step) for m in metrics_of(make_event(**step))] == [
        ("loss", 0.5, 12346, 3),
        ("rewards/chosen", -1.0, 12346, 3),
    ]
    assert [m.key for m in metrics_of(make_event("eval", step=3, **{"eval/loss": 0.5}))] == ["eval/loss"]
    assert metrics_of({"event": "progress", "time": 1.0, "done": 1, "total": 2, "unit": "steps"}) == []
    assert metrics_of({"event": "note", "time": 1.0, "text": "x"}) == []


def test_is_finite_nan_and_infinity_are_false():
    metrics = metrics_of(make_event("step", step=1, a=math.nan, b=-math.inf, c=0.0))
    assert [is_finite(metric) for metric in metrics] == [False, False, True]


def test_dataset_inputs_are_a_training_and_a_held_out_set_of_one_fingerprint():
    fingerprint = "0123456789abcdef" * 4
    used = dataset_inputs(DatasetRef(fingerprint, "preferences.jsonl", {"train": 90, "validation": 10}))
    _validate_dataset_inputs(used)
    assert [(one.dataset.name, one.tags[0].value, json.loads(one.dataset.profile)) for one in used] == [
        ("training pairs", "training", {"num_rows": 90}),
        ("held-out pairs", "evaluation", {"num_rows": 10}),
    ]
    assert all(len(one.dataset.digest) == 36 and fingerprint.startswith(one.dataset.digest) for one in used)
    assert len(dataset_inputs(DatasetRef(fingerprint, "preferences.jsonl", {"train": 90, "validation": 0}))) == 1

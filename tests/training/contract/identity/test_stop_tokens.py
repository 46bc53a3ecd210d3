"""The stop tokens of a released model, compared with transformers' reading of the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from training.contract.config.release import Generation
from training.contract.errors import ModelError
from training.contract.identity.stop_tokens import eos_token_ids, generation_settings, released_settings


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": 2}, {"eos_token_id": 5}, [5]),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 5]}, [5, 7]),
        ({"eos_token_id": 2}, {"temperature": 0.5}, [2]),
        ({"eos_token_id": [4, 3]}, None, [3, 4]),
        ({"text_config": {"eos_token_id": 9}}, None, [9]),
        ({}, {"eos_token_id": None}, []),
    ],
)
def test_stop_tokens_come_from_generation_config_json_else_from_config_json(tmp_path, config, generation, stops):
    assert eos_token_ids(generation_settings(write(tmp_path, config, generation))) == stops


def test_generation_settings_drop_sampling_settings_of_the_base(tmp_path):
    GenerationConfig(
        temperature=0.7, top_p=0.9, do_sample=True, eos_token_id=[1, 2], suppress_tokens=[9]
    ).save_pretrained(tmp_path)
    LlamaConfig(eos_token_id=5, pad_token_id=3).save_pretrained(tmp_path)
    settings = generation_settings(tmp_path)
    assert {name: settings[name] for name in ("eos_token_id", "pad_token_id", "suppress_tokens")} == {
        "eos_token_id": [1, 2],
        "pad_token_id": 3,
        "suppress_tokens": [9],
    }
    sampling = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9).to_diff_dict().keys()
    assert not (sampling | {"_from_model_config"}) & settings.keys()


@pytest.mark.parametrize(
    ("answering", "written"),
    [
        ({}, {"do_sample": False, "temperature": 0.0}),
        (
            {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.2},
            {"do_sample": False, "temperature": 0.0, "repetition_penalty": 1.2},
        ),
        (
            {"temperature": 0.5, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.0},
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "top_k": 0},
        ),
    ],
)
def test_released_settings_are_greedy_unless_the_recipe_sets_a_temperature(tmp_path, answering, written):
    """transformers reads the file: it samples only at a temperature above 0, and top_k does not drop tokens by default."""
    settings = released_settings({"pad_token_id": 0, "eos_token_id": 5}, [2, 5], Generation.model_validate(answering))
    assert settings == {"pad_token_id": 0, "eos_token_id": [2, 5], **written}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    read = GenerationConfig.from_pretrained(tmp_path)
    assert (read.do_sample, read.temperature, read.top_k or 0) == (written["do_sample"], written["temperature"], 0)


def test_generation_settings_of_invalid_json_raises_with_name(tmp_path):
    write(tmp_path, {}, None)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json .*\[bad-json\]"):
        generation_settings(tmp_path)

"""At which tokens a released model stops; the oracle is what transformers itself reads from the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from training.contract.errors import ModelError
from training.contract.generation import eos_token_ids, generation_settings


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
def test_stops_are_those_of_generation_config_json_else_those_of_config_json(tmp_path, config, generation, stops):
    assert eos_token_ids(generation_settings(write(tmp_path, config, generation))) == stops


def test_settings_are_what_transformers_reads(tmp_path):
    GenerationConfig(temperature=0.7, top_p=0.9, do_sample=True, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    LlamaConfig(eos_token_id=5, pad_token_id=3).save_pretrained(tmp_path)
    found, read = generation_settings(tmp_path), GenerationConfig.from_pretrained(tmp_path).to_dict()
    assert {name: read[name] for name in ("temperature", "top_p", "do_sample", "eos_token_id")}.items() <= found.items()
    assert found["pad_token_id"] == 3 and not {"transformers_version", "_from_model_config"} & found.keys()


def test_file_that_is_no_json_is_named(tmp_path):
    write(tmp_path, {}, None)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        generation_settings(tmp_path)

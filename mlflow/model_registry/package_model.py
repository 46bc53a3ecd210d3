"""Package a policy as an MLflow model: `python -m model_registry.package_model NAME POLICY TOKENIZER OUT`.

MLflow gets a checkpoint without weights: it would read and write all of them, and files.py links them afterwards anyway. So no
model is loaded. This is a separate process, as saving needs transformers, which Dagster's process never imports. It needs no
torch, whose import takes a quarter of the time.

The model loads with `mlflow.transformers.load_model`. As a `python_function`, for example in `mlflow models serve`, it is
answered by the copy of `pedigree_chat.py` in its folder `code/`. On failure, stdout holds the cause and the exit code is 1.
"""

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from model_registry.client.mlflow_patches import (
    hide_unused_libraries,
    name_pipeline_class,
    skip_comparison_of_requirements,
)
from training.contract.config.json_object import JsonObject
from training.contract.system.imports import import_without_gc
from training.contract.system.process import die_with_parent

_MLMODEL = "MLmodel"
_CODE = "code"
_ANSWERING = "pedigree_chat"
_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
    "temperature": 0.0,
    "max_tokens": 64,
}
# MLflow would guess them by loading the model again, and would add packages unused in text generation.
_REQUIRED = ("mlflow", "torch", "transformers")


def package(name: str, policy: Path, tokenizer: Path, out: Path) -> None:
    """Write the model in `policy`, without its weights, to the new folder `out`; its chat answers call it `name`."""
    flavor = import_without_gc("mlflow.transformers")
    name_pipeline_class()
    skip_comparison_of_requirements()
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    mlflow_model = import_without_gc("mlflow.models").Model()
    with TemporaryDirectory(dir=out.parent) as folder:
        flavor.save_model(
            _write_checkpoint(config, tokenizer, Path(folder) / "checkpoint"),
            str(out),
            mlflow_model=mlflow_model,
            task="llm/v1/chat",
            torch_dtype=f"torch.{config['dtype']}" if config.get("dtype") else None,
            code_paths=[str(Path(__file__).with_name(f"{_ANSWERING}.py"))],
            input_example=_EXAMPLE,
            pip_requirements=[f"{library}=={_public_version(library)}" for library in _REQUIRED],
        )
    mlflow_model.flavors[flavor.FLAVOR_NAME]["source_model_name"] = name
    mlflow_model.model_size_bytes += sum(file.stat().st_size for file in policy.glob("*.safetensors"))
    _use_our_chat_code(mlflow_model, name, out)
    # MLflow takes the name for a Hub id and writes a licence note with a link to the Hub.
    (out / "LICENSE.txt").unlink(missing_ok=True)


def _write_checkpoint(config: JsonObject, tokenizer: Path, folder: Path) -> str:
    """Write what MLflow reads of a checkpoint: the tokenizer, and the class of the model. Return the path of `folder`."""
    shutil.copytree(tokenizer, folder)
    # Without the type of the model: with it, transformers could take another class of tokenizer than from `tokenizer` alone.
    [architecture] = config["architectures"]
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}), encoding="utf-8")
    return str(folder)


def _use_our_chat_code(mlflow_model: Any, name: str, out: Path) -> None:
    """Let our code answer chats instead of MLflow's, in the `python_function` flavor only."""
    pyfunc = import_without_gc("mlflow.pyfunc")
    environment = mlflow_model.flavors[pyfunc.FLAVOR_NAME][pyfunc.ENV]
    pyfunc.add_to_model(
        mlflow_model,
        loader_module=_ANSWERING,
        code=_CODE,
        conda_env=environment["conda"],
        python_env=environment["virtualenv"],
        model_config={"model": name.removeprefix("models:/")},
    )
    mlflow_model.save(str(out / _MLMODEL))


def _public_version(library: str) -> str:
    """Return the version as in the package index: a CPU build of torch calls itself 2.13.0+cpu."""
    return importlib.metadata.version(library).partition("+")[0]


def main(name: str, policy: str, tokenizer: str, out: str) -> int:
    hide_unused_libraries()
    try:
        package(name, Path(policy), Path(tokenizer), Path(out))
    except Exception as error:  # the parent process raises an error with this cause
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()  # end with a killed run
    sys.exit(main(*sys.argv[1:]))

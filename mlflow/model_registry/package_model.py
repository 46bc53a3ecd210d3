"""Package a policy as an MLflow model: `python -m model_registry.package_model NAME POLICY TOKENIZER OUT`.

This is a separate process, as saving needs torch and transformers, which Dagster's process never imports. The model loads with
`mlflow.transformers.load_model`. As a `python_function`, for example in `mlflow models serve`, it is answered by the copy of
`pedigree_chat.py` in its folder `code/`. On failure, stdout holds the cause and the exit code is 1.
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

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
    """Write the model in `policy` to the new folder `out`, in its own dtype; its chat answers call it `name`."""
    import_without_gc("transformers.modeling_utils")  # imported by the code of every model; it takes most of the time
    transformers, flavor = import_without_gc("transformers"), import_without_gc("mlflow.transformers")
    [architecture] = transformers.AutoConfig.from_pretrained(policy, trust_remote_code=False).architectures
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(policy, dtype="auto", use_safetensors=True, trust_remote_code=False)
    model.config._name_or_path = model.name_or_path = name
    loaded_tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    loaded_tokenizer.name_or_path = name
    mlflow_model = import_without_gc("mlflow.models").Model()
    flavor.save_model(
        {"model": model, "tokenizer": loaded_tokenizer},
        str(out),
        mlflow_model=mlflow_model,
        task="llm/v1/chat",
        code_paths=[str(Path(__file__).with_name(f"{_ANSWERING}.py"))],
        input_example=_EXAMPLE,
        pip_requirements=[f"{library}=={_public_version(library)}" for library in _REQUIRED],
    )
    _use_our_chat_code(mlflow_model, name, out)
    # MLflow takes the name for a Hub id and writes a licence note with a link to the Hub.
    (out / "LICENSE.txt").unlink(missing_ok=True)


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
    try:
        package(name, Path(policy), Path(tokenizer), Path(out))
    except Exception as error:  # the parent process raises an error with this cause
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()  # end with a killed run
    sys.exit(main(*sys.argv[1:]))

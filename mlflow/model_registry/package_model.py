"""Package a policy as an MLflow model: `python -m model_registry.package_model NAME POLICY TOKENIZER OUT`.

A process of its own, since saving goes through torch and transformers, which the process of Dagster never imports. The
model loads with `mlflow.transformers.load_model`. As a `python_function`, so in `mlflow models serve`, `pedigree_chat.py`
answers for it: a copy lies in its folder `code/`. On failure the cause is what stdout holds and the exit code is 1.
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
# Named here, since MLflow's own guess loads the model again and asks for packages that text generation does not use.
_REQUIRED = ("mlflow", "torch", "transformers")


def package(name: str, policy: Path, tokenizer: Path, out: Path) -> None:
    """Write the model in `policy` to the new folder `out`, in its own dtype; its chat answers call it `name`."""
    import_without_gc("transformers.modeling_utils")  # which every model's code imports, and most of the time goes to
    transformers, flavor = import_without_gc("transformers"), import_without_gc("mlflow.transformers")
    [architecture] = transformers.AutoConfig.from_pretrained(policy, trust_remote_code=False).architectures
    kind = getattr(transformers, architecture)
    model = kind.from_pretrained(policy, dtype="auto", use_safetensors=True, trust_remote_code=False)
    model.config._name_or_path = model.name_or_path = name
    words = transformers.AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    words.name_or_path = name
    described = import_without_gc("mlflow.models").Model()
    flavor.save_model(
        {"model": model, "tokenizer": words},
        str(out),
        mlflow_model=described,
        task="llm/v1/chat",
        code_paths=[str(Path(__file__).with_name(f"{_ANSWERING}.py"))],
        input_example=_EXAMPLE,
        pip_requirements=[f"{library}=={_public_version(library)}" for library in _REQUIRED],
    )
    _answer_ourselves(described, name, out)
    # MLflow takes the name for one of the hub and writes a licence note that sends people there.
    (out / "LICENSE.txt").unlink(missing_ok=True)


def _answer_ourselves(described: Any, name: str, out: Path) -> None:
    """Have chats answered by our code instead of MLflow's, in the `python_function` flavor alone."""
    pyfunc = import_without_gc("mlflow.pyfunc")
    environment = described.flavors[pyfunc.FLAVOR_NAME][pyfunc.ENV]
    pyfunc.add_to_model(
        described,
        loader_module=_ANSWERING,
        code=_CODE,
        conda_env=environment["conda"],
        python_env=environment["virtualenv"],
        model_config={"model": name.removeprefix("models:/")},
    )
    described.save(str(out / _MLMODEL))


def _public_version(library: str) -> str:
    """The version as a package index knows it: a build of torch for the CPU calls itself 2.13.0+cpu."""
    return importlib.metadata.version(library).partition("+")[0]


def main(name: str, policy: str, tokenizer: str, out: str) -> int:
    try:
        package(name, Path(policy), Path(tokenizer), Path(out))
    except Exception as error:  # the parent process turns whatever it is into an error with its cause
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()  # a run that is killed leaves nothing behind
    sys.exit(main(*sys.argv[1:]))

"""MLflow and transformers have the attributes that we replace, and use our replacements. Torch stays out of this process."""

import json
import subprocess
import sys

PATCHED = """
import json, sys
from model_registry.client.mlflow_patches import hide_unused_libraries, name_pipeline_class, skip_comparison_of_requirements

hide_unused_libraries()
from mlflow.utils import environment
from transformers import pipelines

was_name = isinstance(pipelines.SUPPORTED_TASKS["text-generation"]["impl"], str)
compare = environment.warn_dependency_requirement_mismatches
name_pipeline_class()
skip_comparison_of_requirements()
environment._process_pip_requirements(["mlflow"], ["mlflow==0.0.1"])
print(json.dumps({
    "was a name": was_name,
    "is the class": pipelines.SUPPORTED_TASKS["text-generation"]["impl"] is pipelines.TextGenerationPipeline,
    "comparison replaced": environment.warn_dependency_requirement_mismatches is not compare,
    "torch": sys.modules["torch"] is not None,
}))
"""


def test_patches_of_mlflow_have_their_effect():
    done = subprocess.run([sys.executable, "-c", PATCHED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "was a name": True,
        "is the class": True,
        "comparison replaced": True,
        "torch": False,
    }
    assert "mismatch" not in done.stderr, "MLflow compares the installed version with 0.0.1 otherwise"

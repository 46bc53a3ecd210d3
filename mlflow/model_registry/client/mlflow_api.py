"""All that this package calls of MLflow, imported at its first use: `mlflow_api.MlflowClient`.

MLflow's import takes more CPU time than Dagster's, and most commands call nothing of it (records.py).
"""

from training.contract.system.imports import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "mlflow": ["MlflowClient"],
        "mlflow.artifacts": ["download_artifacts", "list_artifacts"],
        "mlflow.entities": [
            "Dataset",
            "DatasetInput",
            "InputTag",
            "LoggedModelOutput",
            "LoggedModelStatus",
            "Metric",
            "Param",
            "RunTag",
        ],
        "mlflow.exceptions": ["MlflowException", "RestException"],
        "mlflow.utils.mlflow_tags": ["MLFLOW_MODEL_VERSIONS"],
        "mlflow.store.artifact.artifact_repository_registry": ["get_artifact_repository"],
    },
)

"""All that `hub` calls of the Hub's client, imported at its first use: most recipes name no repository of the Hub."""

from training.contract.system.imports import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "huggingface_hub": ["HfApi", "constants", "get_cached_repo_tree", "snapshot_download"],
        "huggingface_hub.errors": [
            "CachedRepoTreeNotFoundError",
            "GatedRepoError",
            "HFValidationError",
            "HfHubHTTPError",
            "LocalEntryNotFoundError",
            "OfflineModeIsEnabled",
            "RepositoryNotFoundError",
            "RevisionNotFoundError",
            "RevisionResolutionError",
        ],
        "huggingface_hub.utils.tqdm": ["tqdm"],
    },
)

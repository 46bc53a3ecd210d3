"""What Dagster recorded of an asset, and what changed since."""

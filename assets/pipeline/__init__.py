"""The graph of the assets, and a recipe with its name and services."""

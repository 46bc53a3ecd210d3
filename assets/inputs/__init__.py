"""The files, models and data sets of a recipe."""

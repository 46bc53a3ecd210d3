"""The files, models and data sets that a recipe names."""

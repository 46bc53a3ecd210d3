"""The Python interface, for notebooks and scripts; `pedigree.py` offers it as `import pedigree`.

* `recipe`: `load_recipe` and `Recipe`: status, plan and run of a recipe, its artifacts, tables and versions.
* `home_session`: a home in this process: its environment, services and Dagster instance.
* `event_loop`: synchronous work inside a running event loop, as in a notebook.
* `tables`: artifacts as Arrow tables.
* `model_version`: a version of the released model.
"""

"""Schedules, sensors, the pool, and the folders in PEDIGREE_HOME."""

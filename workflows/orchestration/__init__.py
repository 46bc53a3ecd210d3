"""Schedules, sensors, the pool, and the places in PEDIGREE_HOME."""

"""Materialization of an asset: its artifact comes from the store or from a job."""

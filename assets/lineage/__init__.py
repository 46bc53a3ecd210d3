"""Recorded materializations of an asset, and changes since the latest one."""

"""The operating system: atomic writes, locks, memory limits, processes, imports, templates."""

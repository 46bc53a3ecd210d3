"""Find, read, validate and propose recipes."""

"""Settings, identities and file formats that all processes share. Nothing here imports torch."""

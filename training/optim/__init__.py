"""The optimizer and its learning rate."""

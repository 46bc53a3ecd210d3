"""The store of artifacts, and the cache of reference log-probs."""

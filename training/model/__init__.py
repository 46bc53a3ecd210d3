"""Language models: loading, adapters, attention, and log-probs of responses."""

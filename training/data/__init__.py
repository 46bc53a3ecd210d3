"""From preference files to tokenized pairs and batches."""

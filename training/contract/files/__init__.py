"""Files outside the store: local ones, and those of the Hugging Face hub."""

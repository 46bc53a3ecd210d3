"""Files outside the store: local files, and files of the Hugging Face Hub."""

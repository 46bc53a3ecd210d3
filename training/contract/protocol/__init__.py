"""What the launching process and a job exchange: `job.json`, events and input files."""

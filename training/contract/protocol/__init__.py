"""The exchange between the launcher and a job: `job.json`, events and input files."""

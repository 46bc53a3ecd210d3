"""How an asset gets its artifact: from the store, or from a job."""

"""Reading rows from files, and writing pairs and quarantined rows."""

"""Jobs in the queue of a cluster: the file of the engine, its launcher, and what runs on each node."""

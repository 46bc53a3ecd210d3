"""Jobs in the queue of a cluster: `engine.yaml`, the launcher of an engine, and the task that runs on each node."""

"""Body of `released_model`: registering a policy, the gate, and the aliases."""

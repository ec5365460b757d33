"""From an op to something that can be called: the resorts in order, each with its reason."""

"""A training layer of a transformer: what it has between its matrix products."""

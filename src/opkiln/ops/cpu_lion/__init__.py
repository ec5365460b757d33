"""Lion in place on host memory: step and rollback of a step."""

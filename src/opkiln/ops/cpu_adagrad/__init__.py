"""Adagrad in place on host memory, for dense and sparse gradients: step and rollback of a step."""

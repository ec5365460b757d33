"""The catalogue: one folder per op, each with its builder, reference, kernels and front end."""

"""The catalogue: one folder per op, each with its library, its functions, kernels and front end."""

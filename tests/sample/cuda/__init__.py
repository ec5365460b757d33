"""A package with three CUDA ops that know no torch, each with another arch filter."""

"""A package with a CUDA op in one file."""

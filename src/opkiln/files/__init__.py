"""Tensors and files, on the ops ``async_io`` and ``gds``; ``opkiln.io`` has the names."""

"""A package with one op on torch's stable ABI, with its reference."""

"""A package with one op on torch's stable ABI, with torch's headers and with op.h."""

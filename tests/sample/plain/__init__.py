"""A package with one op that knows no torch: three sources, three headers, 0.3 s to build."""

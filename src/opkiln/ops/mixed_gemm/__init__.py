"""Matrix products with weights of 4, 6 or 8 bits, and of tokens that are grouped by expert."""

"""Attention over listed blocks of keys: layouts, forward and backward."""

"""Reads libraries without loading them: what they need, and which GPU images they contain.

The files may come from anywhere. For any bytes, the outcome is a result or a LoadError. The file's
size limits the time, and a few tables of limited size are all the memory.
"""

"""Reads libraries without loading them: what they need, and which GPU images they hold.

Pure readers of files that may come from anywhere. Whatever the bytes are, the outcome is a result
or a LoadError; time is bounded by the file's size, and memory by a few tables of bounded size.
"""

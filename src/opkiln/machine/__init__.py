"""This machine: architectures, devices and compilers, and readers of its files."""

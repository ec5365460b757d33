"""Reads and writes of tensors that go on while the program does something else."""

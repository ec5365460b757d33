"""``gds``: reads and writes between files and the memory of GPUs."""

"""What a machine has: architectures, devices and compilers, and what its files say."""

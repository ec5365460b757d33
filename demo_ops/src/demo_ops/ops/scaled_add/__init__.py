"""scaled_add: its builder, its reference, its kernels."""

"""Page-locked host memory: buffers that devices and direct I/O reach without a copy."""

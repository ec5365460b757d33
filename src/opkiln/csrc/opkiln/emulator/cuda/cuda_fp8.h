// Replaces CUDA's header of this name.
#error "the emulator does not run 8-bit floats (cuda_fp8.h)"

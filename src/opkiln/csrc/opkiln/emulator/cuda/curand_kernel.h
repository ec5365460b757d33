// Replaces CUDA's header of this name.
#error "the emulator does not run cuRAND (curand_kernel.h)"

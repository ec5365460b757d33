// Replaces CUDA's header of this name.
#error "the emulator does not run tensor cores (mma.h)"

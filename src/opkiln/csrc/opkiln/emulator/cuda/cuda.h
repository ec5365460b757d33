// Replaces CUDA's header of this name.
#error "the emulator does not run CUDA's driver interface, tensor maps and TMA (cuda.h)"

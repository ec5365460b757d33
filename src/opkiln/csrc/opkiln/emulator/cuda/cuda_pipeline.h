// Replaces CUDA's header of this name.
#error "the emulator does not run asynchronous copies (cuda_pipeline.h)"

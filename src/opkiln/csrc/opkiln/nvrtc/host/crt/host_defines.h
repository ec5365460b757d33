// Replaces CUDA's header, which torch's wheels lack. prelude.h has the definitions.

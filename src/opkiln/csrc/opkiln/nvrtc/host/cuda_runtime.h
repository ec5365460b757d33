// In place of CUDA's runtime, which a library has only if nvcc compiled it. prelude.h has the vector types.
#pragma once

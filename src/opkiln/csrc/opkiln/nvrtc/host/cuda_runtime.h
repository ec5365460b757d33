// Replaces the header of CUDA's runtime, which only nvcc's libraries contain. prelude.h has the vector types.
#pragma once

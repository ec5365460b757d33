// What the CPU's binding hands to its kernels. Needs no torch header, so the two compile side by
// side.
#pragma once

#include <opkiln/streams.h>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

// The groups [first, last) of a call.
void quantize_groups(const deepspeed_quantizer::Work& work, int64_t first, int64_t last);
void dequantize_groups(const deepspeed_quantizer::Work& work, int64_t first, int64_t last);

OPKILN_NAMESPACE_END

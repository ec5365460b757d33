// What the CPU's binding hands to its kernels. Needs no torch header, so the two compile side by
// side.
#pragma once

#include <opkiln/streams.h>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

// The groups [first, last) of a call. `parts` are looked at where work.from is null.
void quantize_groups(const quantizer::Work& work, const quantizer::Parts& parts, int64_t first,
                     int64_t last);
void dequantize_groups(const quantizer::Work& work, int64_t first, int64_t last);

OPKILN_NAMESPACE_END

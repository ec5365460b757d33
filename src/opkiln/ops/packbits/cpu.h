// What the CPU's binding hands to its kernels. Needs no torch header, so the two compile side by
// side.
#pragma once

#include <opkiln/vec.h>

#include "kernel.h"

OPKILN_NAMESPACE_BEGIN

// The bytes [first, last), and the elements that belong to them.
void pack_bytes(const packbits::Signs& signs, int64_t first, int64_t last);
void unpack_bytes(const packbits::Signs& signs, int64_t first, int64_t last);

OPKILN_NAMESPACE_END

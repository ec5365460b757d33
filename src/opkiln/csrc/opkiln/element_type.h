// The storage types of elements as bindings and device code name them to each other. Needs no other
// header. (Host code has opkiln::Type of vec.h, in a namespace of its instruction set's own.)
#pragma once

#include <cstdint>

namespace opkiln {

enum class ElementType : uint8_t { kFloat, kBFloat16, kFloat16 };

}  // namespace opkiln

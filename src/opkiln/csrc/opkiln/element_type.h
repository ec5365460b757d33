// The storage types of elements, for bindings, host code and device code. Needs no other header.
#pragma once

#include <cstdint>

namespace opkiln {

enum class ElementType : uint8_t { kFloat, kBFloat16, kFloat16 };

constexpr int64_t size_of(ElementType type) {
  return type == ElementType::kFloat ? 4 : 2;
}

}  // namespace opkiln

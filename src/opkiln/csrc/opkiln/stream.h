// A tensor's memory and the type of its elements, for host code.
#pragma once

#include <cstddef>

#include "element_type.h"

namespace opkiln {

struct Stream {
  std::byte* data = nullptr;  // null if absent
  ElementType type = ElementType::kFloat;
  bool output = false;  // the kernel also writes it

  template <class T>
  T* at(int64_t i) const {
    return reinterpret_cast<T*>(data) + i;
  }
};

}  // namespace opkiln

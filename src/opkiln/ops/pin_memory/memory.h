// The op's argument, with the checks that both bindings make.
#pragma once

#include <opkiln/tensors.h>

OPKILN_NAMESPACE_BEGIN

inline void check_memory(const Tensor& memory) {
  if (!memory.is_cpu()) {
    refuse("memory is not on the CPU");
  }
  if (memory.scalar_type() != ScalarType::Byte) {
    refuse(std::string("memory has dtype ") + torch::headeronly::toString(memory.scalar_type()) +
           ", expected Byte");
  }
  if (!memory.is_contiguous()) {
    refuse("memory is not contiguous");
  }
}

inline void check_done(const char* what, const Tensor& memory, const char* error) {
  if (error != nullptr) {
    refuse(std::string("the system did not ") + what + " " + std::to_string(memory.numel()) +
           " bytes of memory: " + error);
  }
}

OPKILN_NAMESPACE_END

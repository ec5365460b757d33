// Shared by the CPU and CUDA versions: argument checks.
#pragma once

#include <opkiln/arguments.h>

OPK_PLAIN_BEGIN
namespace {

using opk::Tensor;

// Calls function(address, bytes) on the tensor's memory. The function returns null, or why it failed.
void call_on(Tensor& memory, const char* what, const char* (*function)(void*, size_t)) {
  OPK_CHECK(memory.is_cpu(), memory, " is not on the CPU");
  opk::check_dtype(memory, opk::DType::uint8);
  opk::check_contiguous(memory);
  const int64_t bytes = memory.numel();
  if (bytes == 0) {
    return;
  }
  if (const char* const why = function(memory.data(), static_cast<size_t>(bytes))) {
    opk::raise("the system did not ", what, " ", bytes, " bytes of memory: ", why);
  }
}

}  // namespace
OPK_PLAIN_END

// A second file with an op: a library's list has the ops of all its files.
#include "more.h"

namespace texts {

opk::String twice(const opk::Tensor&, const opk::String& text) {
  const auto size = static_cast<size_t>(text.size());
  opk::List<uint8_t> both(static_cast<int64_t>(2 * size));
  __builtin_memcpy(both.begin(), text.c_str(), size);
  __builtin_memcpy(both.begin() + size, text.c_str(), size);
  return opk::String(reinterpret_cast<const char*>(both.data()), 2 * size);
}

}  // namespace texts

void stream(const opk::Tensor&) noexcept(false) {
  opk::current_stream(0);
}
OPKILN_OP(stream, cpu);

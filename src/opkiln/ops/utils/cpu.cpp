// Copies in torch's thread pool.

#include "parts.h"

namespace {

// The last part that starts at or before this byte.
int64_t part_at(const opk::List<int64_t>& starts, int64_t byte) {
  int64_t low = 0, high = starts.size();  // the part is in [low, high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (starts[middle] <= byte ? low : high) = middle;
  }
  return low;
}

// Lays the parts end to end in one index space of bytes, so that threads get equal shares.
void copy(const Parts& parts) {
  opk::List<int64_t> starts(parts.size() + 1);
  for (int64_t i = 0; i < parts.size(); ++i) {
    starts[i + 1] = starts[i] + parts[i].bytes;
  }
  opk::parallel_for(0, starts[parts.size()], opk::kGrainBytes, [&](int64_t low, int64_t high) {
    for (int64_t i = part_at(starts, low); i < parts.size() && starts[i] < high; ++i) {
      const int64_t begin = low > starts[i] ? low - starts[i] : 0;
      const int64_t left = high - starts[i], end = left < parts[i].bytes ? left : parts[i].bytes;
      if (begin == end) {
        continue;  // a tensor without elements may have no address
      }
      __builtin_memcpy(parts[i].to + begin, parts[i].from + begin, static_cast<size_t>(end - begin));
    }
  });
}

}  // namespace

OPKILN_OP(flatten_list, cpu);
OPKILN_OP(unflatten_list_, cpu);

// From torch's tensors to copies in torch's own thread pool; the registration.

#include "parts.h"

namespace {

using namespace opkiln;

// The parts end to end in one index space of bytes, so that threads get equal shares.
void copy_all(const std::vector<Part>& parts) {
  std::vector<int64_t> starts(1, 0);
  for (const Part& part : parts) {
    starts.push_back(starts.back() + part.bytes);
  }
  if (starts.back() == 0) {
    return;
  }
  torch::stable::parallel_for(0, starts.back(), kGrainBytes, [&](int64_t low, int64_t high) {
    const auto after = std::upper_bound(starts.begin(), starts.end(), low);
    for (auto i = static_cast<std::size_t>(after - starts.begin()) - 1;
         i < parts.size() && starts[i] < high; ++i) {
      const int64_t begin = std::max<int64_t>(low - starts[i], 0);
      const int64_t end = std::min(high - starts[i], parts[i].bytes);
      if (begin == end) {
        continue;  // a tensor without elements may have no address
      }
      std::memcpy(parts[i].to + begin, parts[i].from + begin, static_cast<std::size_t>(end - begin));
    }
  });
}

Tensor flatten_list(TensorList tensors) {
  const int32_t device = device_of(tensors);
  const Flattened made = Flattened::of(tensors, device);
  copy_all(made.parts);
  return made.flat;
}

void unflatten_list(TensorList tensors, Tensor flat) {
  const int32_t device = device_of(tensors);
  copy_all(Flattened::back(tensors, flat, device).parts);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(opkiln, CPU, m) {
  m.impl("flatten_list", TORCH_BOX(&flatten_list));
  m.impl("unflatten_list_", TORCH_BOX(&unflatten_list));
}

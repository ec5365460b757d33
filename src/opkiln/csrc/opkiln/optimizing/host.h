// An optimizer's lists in host memory, as items for a kernel over Streams, and its numbers in tensors.
#pragma once

#include <map>

#include "lists.h"

OPKILN_NAMESPACE_BEGIN

inline double read(const char* name, const OptionalTensor& tensor, double otherwise,
                   bool or_double = false) {
  if (!tensor) {
    return otherwise;
  }
  check_number(name, *tensor, kCPU, or_double);
  const void* const at = tensor->const_data_ptr();
  return tensor->scalar_type() == ScalarType::Float ? *static_cast<const float*>(at)
                                                    : *static_cast<const double*>(at);
}

// The streams are in the order of the kernels: the stepped tensor, its gradient, its states. If there
// is a master, it is stepped, and the parameter receives a copy.
template <std::size_t N>
Item<N> host_item(const Lists& lists, std::size_t i) {
  const Model model(lists.params, i);
  Item<N> item;
  item.numel = model.numel();
  item.streams[0] = model.stream(lists.params, true);
  item.streams[1] = model.stream(lists.grads, false);
  for (std::size_t n = 2; n < N; ++n) {
    item.streams[n] = lists.state(model, n - 2, i);
  }
  if (lists.has_master(i)) {
    item.copy = item.streams[0];
    item.streams[0] = lists.master(model, i);
  }
  item.traffic = traffic(item);
  return item;
}

// The items, by the number of steps made before this one. All checks are made before the first item is
// stepped.
template <std::size_t N>
std::map<int64_t, std::vector<Item<N>>> host_items(const Lists& lists,
                                                   const std::vector<float*>& steps) {
  std::map<int64_t, std::vector<Item<N>>> out;
  for (std::size_t i = 0; i < lists.params.tensors.size(); ++i) {
    out[static_cast<int64_t>(*steps[steps.size() == 1 ? 0 : i])].push_back(host_item<N>(lists, i));
  }
  return out;
}

OPKILN_NAMESPACE_END

// Turns a fused optimizer's lists in host memory into the items of a sweep, and reads numbers from tensors.
#pragma once

#include "host_sweep.h"
#include "lists.h"

OPK_PLAIN_BEGIN
OPKILN_NAMESPACE_BEGIN

inline double read_number(const OptionalTensor& tensor, double otherwise, bool or_double = false) {
  if (!tensor) {
    return otherwise;
  }
  check_number(*tensor, kHost, or_double);
  return tensor->dtype() == DType::float32 ? *tensor->data<const float>() : *tensor->data<const double>();
}

// Makes every check. The streams are in the order that the kernels expect: the tensor to step, its gradient,
// its states. A master is stepped in place of its parameter, which receives a copy.
template <size_t N>
opk::List<Item<N>> host_items(const Lists& lists) {
  opk::List<Item<N>> out(lists.params.size());
  for (int64_t i = 0; i < out.size(); ++i) {
    const Model model(lists.params[i], kHost);
    Item<N>& item = out[i];
    item.numel = model.numel();
    item.streams[0] = model.stream(lists.params[i], true);
    item.streams[1] = model.stream(lists.grads[i], false);
    item.streams[2] = model.floats(lists.exp_avgs[i]);
    if constexpr (N == 4) {
      item.streams[3] = model.floats((*lists.exp_avg_sqs)[i]);
    }
    if (lists.has_master(i)) {
      item.copy = item.streams[0];
      item.streams[0] = lists.master(model, i);
    }
    item.traffic = traffic(item);
  }
  return out;
}

// The number of the next step. There is one count for all items, or one per item.
inline int64_t next_step(const opk::List<float*>& counts, int64_t i) {
  return static_cast<int64_t>(*counts[counts.size() == 1 ? 0 : i]) + 1;
}

inline void count_up(const opk::List<float*>& counts) {
  for (float* const made : counts) {
    *made += 1;
  }
}

OPKILN_NAMESPACE_END
OPK_PLAIN_END

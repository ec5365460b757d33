// From an optimizer's lists of tensors in host memory to the items of a sweep, every check included.
#pragma once

#include <atomic>
#include <cstdio>

#include "tensors.h"

OPKILN_NAMESPACE_BEGIN

// Lists that are walked in step: parameters, gradients, then the states; `copies` may be empty.
template <std::size_t N>
struct StepLists {
  std::array<Argument, N> streams;
  Argument copies;

  std::size_t size() const {
    return streams[0].tensors.size();
  }

  // Raises what is wrong with the tensors at i.
  Item<N> item(std::size_t i) const {
    const Model model(streams[0], i);
    Item<N> out;
    out.numel = model.numel();
    out.streams[0] = model.stream(streams[0], true);
    out.streams[1] = model.stream(streams[1], false);
    for (std::size_t n = 2; n < N; ++n) {
      out.streams[n] = model.state(streams[n]);
    }
    if (!copies.tensors.empty()) {
      out.copy = model.stream(copies, true);
    }
    out.traffic = traffic(out);
    return out;
  }

  // Every check is made here, before anything is written. Ten thousand tensors are mostly waited for
  // one by one, each somewhere else in memory, so threads share them; for a few hundred it is not
  // worth waking one.
  std::vector<Item<N>> items() const {
    for (std::size_t n = 1; n < N; ++n) {
      check_length(streams[n], streams[0]);
    }
    if (!copies.tensors.empty()) {
      check_length(copies, streams[0]);
    }
    std::vector<Item<N>> out(size());
    std::atomic<bool> refused = false;
    const auto fill = [&](int64_t low, int64_t high) {
      for (int64_t i = low; i < high; ++i) {
        out[i] = item(i);
      }
    };
    constexpr int64_t kGrainTensors = 4096;
    torch::stable::parallel_for(0, size(), kGrainTensors, [&](int64_t low, int64_t high) {
      // No exception may leave here: torch's C interface would keep its text.
      try {
        fill(low, high);
      } catch (...) {
        refused = true;
      }
    });
    if (refused) {
      fill(0, size());  // raises
    }
    return out;
  }
};

inline void check_step(int64_t step) {
  if (step < 1) {
    refuse("step is " + std::to_string(step) + ", expected at least 1");
  }
}

inline void check_scale(double grad_scale) {
  if (grad_scale == 0) {
    refuse("grad_scale is 0, expected a divisor");
  }
}

// As Python's format(value, "g").
inline std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

OPKILN_NAMESPACE_END

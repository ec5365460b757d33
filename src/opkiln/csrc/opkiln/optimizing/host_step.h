// Turns an optimizer's lists of tensors in host memory into the items of a sweep, with every check.
#pragma once

#include <opkiln/tensors.h>

#include <atomic>
#include <cstdio>
#include <optional>

OPKILN_NAMESPACE_BEGIN

// Lists that are walked together: parameters, gradients, then the states. `copies` may be empty.
template <std::size_t N>
struct StepLists {
  std::array<Argument, N> streams;
  Argument copies;

  std::size_t size() const {
    return streams[0].tensors.size();
  }

  // Raises an error if a tensor at index i is wrong.
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

  // Every check is made here, before anything is written. Raises an error for a wrong argument.
  std::vector<Item<N>> items() const {
    std::vector<Item<N>> out(size());
    if (!fill_in_parallel(out)) {
      fill(out, 0, out.size());  // raises
    }
    return out;
  }

  // Like items(), but returns nothing if a tensor is not laid out like its parameter.
  std::optional<std::vector<Item<N>>> items_if_laid_out_alike() const {
    std::vector<Item<N>> out(size());
    if (!fill_in_parallel(out)) {
      if (!all_laid_out_alike()) {
        return std::nullopt;
      }
      fill(out, 0, out.size());  // raises
    }
    return out;
  }

 private:
  void fill(std::vector<Item<N>>& out, int64_t low, int64_t high) const {
    for (int64_t i = low; i < high; ++i) {
      out[i] = item(i);
    }
  }

  // False if a tensor was refused. Most of the time is spent waiting for memory, because each of ten
  // thousand tensors is in another place. So threads share the work. For a few hundred tensors it is
  // not worth waking a thread.
  bool fill_in_parallel(std::vector<Item<N>>& out) const {
    for (std::size_t n = 1; n < N; ++n) {
      check_length(streams[n], streams[0]);
    }
    if (!copies.tensors.empty()) {
      check_length(copies, streams[0]);
    }
    std::atomic<bool> refused = false;
    constexpr int64_t kGrainTensors = 4096;
    torch::stable::parallel_for(0, size(), kGrainTensors, [&](int64_t low, int64_t high) {
      // No exception may leave this function: torch's C interface would not pass on its text.
      try {
        fill(out, low, high);
      } catch (...) {
        refused = true;
      }
    });
    return !refused;
  }

  [[gnu::cold]] bool all_laid_out_alike() const {
    for (std::size_t i = 0; i < size(); ++i) {
      const Tensor& param = streams[0].tensors[i];
      for (const Argument& list : streams) {
        if (!laid_out_alike(list.tensors[i], param)) {
          return false;
        }
      }
      if (!copies.tensors.empty() && !laid_out_alike(copies.tensors[i], param)) {
        return false;
      }
    }
    return true;
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

// The same text as Python's format(value, "g").
inline std::string shown(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

OPKILN_NAMESPACE_END

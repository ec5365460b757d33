// Turns an optimizer's lists of tensors in host memory into the items of a sweep, and makes every check.
#pragma once

#include "host_sweep.h"
#include "tensors.h"

OPK_PLAIN_BEGIN
OPKILN_NAMESPACE_BEGIN

// The lists of a step: parameters, gradients, then the states. `copies` may be empty.
template <size_t N>
struct StepLists {
  struct Named {
    const char* name;
    const TensorList& tensors;
  };
  Named streams[N];
  const TensorList& copies;

  const TensorList& params() const {
    return streams[0].tensors;
  }

  // Makes every check before anything is written. Raises an error for a wrong argument.
  [[gnu::noinline]] opk::List<Item<N>> items() const {
    opk::List<Item<N>> out(params().size());
    if (!fill_in_parallel(out)) {
      fill(out, 0, out.size());  // raises
    }
    return out;
  }

  // Like items(), but returns none if a tensor's layout differs from its parameter's.
  opk::optional<opk::List<Item<N>>> items_if_laid_out_alike() const {
    opk::List<Item<N>> out(params().size());
    if (!fill_in_parallel(out)) {
      if (!all_laid_out_alike()) {
        return opk::none;
      }
      fill(out, 0, out.size());  // raises
    }
    return out;
  }

 private:
  // Raises an error if one of the tensors is wrong.
  void fill(opk::List<Item<N>>& items, int64_t low, int64_t high) const {
    for (int64_t i = low; i < high; ++i) {
      Item<N>& out = items.begin()[i];
      const Model model(params().begin()[i], kHost);
      out.numel = model.numel();
      out.streams[0] = model.stream(params().begin()[i], true);
      out.streams[1] = model.stream(streams[1].tensors.begin()[i], false);
      for (size_t n = 2; n < N; ++n) {
        out.streams[n] = model.state(streams[n].tensors.begin()[i]);
      }
      if (!copies.empty()) {
        out.copy = model.stream(copies.begin()[i], true);
      }
      out.traffic = traffic(out);
    }
  }

  // Returns false if a tensor is wrong. Filling mostly waits for memory, because ten thousand tensors are in
  // ten thousand places, so threads share it. For a few hundred tensors, waking a thread does not pay.
  bool fill_in_parallel(opk::List<Item<N>>& out) const {
    for (const Named& list : streams) {
      check_length(list.name, list.tensors, params());
    }
    if (!copies.empty()) {
      check_length("copies", copies, params());
    }
    bool refused = false;
    constexpr int64_t kGrainTensors = 4096;
    opk::parallel_for(0, out.size(), kGrainTensors, [&](int64_t low, int64_t high) {
      try {
        fill(out, low, high);
      } catch (const opk::Error&) {  // any tensor's error: the caller finds the first in the list
        __atomic_store_n(&refused, true, __ATOMIC_RELAXED);
      }
    });
    return !refused;
  }

  [[gnu::cold]] bool all_laid_out_alike() const {
    for (int64_t i = 0; i < params().size(); ++i) {
      const Tensor& param = params()[i];
      for (const Named& list : streams) {
        if (!laid_out_alike(list.tensors[i], param)) {
          return false;
        }
      }
      if (!copies.empty() && !laid_out_alike(copies[i], param)) {
        return false;
      }
    }
    return true;
  }
};

inline void check_step(int64_t step) {
  OPK_CHECK(step >= 1, "step is ", step, ", expected at least 1");
}

inline void check_scale(double grad_scale) {
  OPK_CHECK(grad_scale != 0, "grad_scale is 0, expected a divisor");
}

OPKILN_NAMESPACE_END
OPK_PLAIN_END

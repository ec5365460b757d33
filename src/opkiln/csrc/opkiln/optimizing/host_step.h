// Turns an optimizer's lists of tensors in host memory into the items of a sweep, with every check.
#pragma once

#include "host_sweep.h"
#include "tensors.h"

OPK_PLAIN_BEGIN
OPKILN_NAMESPACE_BEGIN

// Lists that are walked together: parameters, gradients, then the states. `copies` may be empty.
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

  // Every check is made here, before anything is written. Raises an error for a wrong argument.
  [[gnu::noinline]] opk::List<Item<N>> items() const {
    opk::List<Item<N>> out(params().size());
    if (!fill_in_parallel(out)) {
      fill(out, 0, out.size());  // raises
    }
    return out;
  }

  // Like items(), but returns nothing if a tensor is not laid out like its parameter.
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
  // Raises an error if a tensor at index i is wrong.
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

  // False if a tensor was refused. Most of the time is spent waiting for memory, because each of ten
  // thousand tensors is in another place. So threads share the work. For a few hundred tensors it is
  // not worth waking a thread.
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
      } catch (const opk::Error&) {  // of whichever tensor came first; the caller finds the first in the list
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

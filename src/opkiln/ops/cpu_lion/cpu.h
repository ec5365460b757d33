// What the binding hands to the kernel. Needs no torch header, so the two compile side by side.
#pragma once

#include <opkiln/streams.h>

OPKILN_NAMESPACE_BEGIN

enum : std::size_t { kParam, kGrad, kExpAvg, kStreams };

struct Hyper {
  double lr, beta1, beta2, weight_decay;
  bool maximize;
  double grad_scale;
};

// A step, and its inverse, over the elements that belong to [low, high) of the list's index space.
void lion_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);
void lion_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);

OPKILN_NAMESPACE_END

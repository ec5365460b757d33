// What the binding hands to the kernel. Needs no torch header, so the two compile side by side.
#pragma once

#include <opkiln/streams.h>

OPKILN_NAMESPACE_BEGIN

enum : std::size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kStreams };

struct Hyper {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw_mode, bias_correction, maximize;
  double grad_scale;
};

// A step, and its inverse, over the elements that belong to [low, high) of the list's index space.
void adam_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);
void adam_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);

OPKILN_NAMESPACE_END

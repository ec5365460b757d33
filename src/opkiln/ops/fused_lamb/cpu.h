// What the binding hands to the kernel. Needs no torch header, so the two compile side by side.
#pragma once

#include <opkiln/streams.h>

OPKILN_NAMESPACE_BEGIN

enum : std::size_t { kParam, kGrad, kExpAvg, kExpAvgSq, kStreams };

struct Hyper {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool eps_inside_sqrt, bias_correction, maximize;
  double min_coeff, max_coeff, grad_scale;
};

// Sums of squares of a parameter and of its update.
struct Squares {
  double params = 0, updates = 0;
};

// The new averages of the elements [begin, end) of an item; its first stream is only read.
Squares lamb_average(const Hyper& hyper, const Item<kStreams>& item, int64_t begin, int64_t end);

// By which the update of a tensor with these sums is multiplied.
double lamb_trust(const Hyper& hyper, const Squares& sums);

// Moves the elements [begin, end): the first stream, from the averages after the step.
void lamb_apply(const Hyper& hyper, double trust, const Item<kStreams>& item, int64_t begin,
                int64_t end);

OPKILN_NAMESPACE_END

// What the binding hands to the kernel. Needs no torch header, so the two compile side by side.
#pragma once

#include <opkiln/streams.h>

OPKILN_NAMESPACE_BEGIN

enum : std::size_t { kParam, kGrad, kSum, kStreams };

struct Hyper {
  int64_t step;
  double lr, lr_decay, eps, weight_decay;
  bool maximize;
  double grad_scale;
};

// A tensor of which the gradient has some rows only: `indices[r]` says which one its row r is.
struct Rows {
  Item<kStreams> item;  // numel is that of the gradient's values
  const int64_t* indices;
  int64_t count, width;
};

// A step, and its inverse, over the elements that belong to [low, high) of the list's index space.
void adagrad_step(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);
void adagrad_rollback(const Hyper& hyper, const Flat<kStreams>& list, int64_t low, int64_t high);

// The same over the rows [low, high) that the gradient has.
void adagrad_step_rows(const Hyper& hyper, const Rows& rows, int64_t low, int64_t high);
void adagrad_rollback_rows(const Hyper& hyper, const Rows& rows, int64_t low, int64_t high);

OPKILN_NAMESPACE_END

// Device kernels that step the tensors of a plan. `Coefficients` describes an optimizer:
// `of(hyper, steps_made, lr, grad_scale)` computes them in double, `skip` means that nothing may
// be written, `kStates` is 1 or 2, and `step(grad, value, states)` is the arithmetic of one
// element. No warp intrinsics, so that hipify can translate this file.
#pragma once

#include <opkiln/device_element.h>

#include "plan.h"

namespace opkiln {
namespace multi_tensor {

using device::Bits16;
using device::load;
using device::narrow;
using device::Pack;
using device::store;
using device::widen;

// Blocks per multiprocessor: 12 with up to 40 registers per thread, 10 with 48, which the code for mixed
// types needs. More blocks keep more loads in flight. One register too many spills, which costs 5 to 20%. To
// save registers, division and square root omit their last bit (op.py).
constexpr int blocks_per_processor(bool plain) {
  return plain ? 12 : 10;
}

// One thread block's part of an item: the elements [begin, begin + count).
struct Share {
  const Item& item;
  const void* grads;
  ElementType grad_type;
  int64_t begin;
  int count;
  bool fours;
};

__device__ inline Share share_of(const Plan& plan, const Item& item, uint32_t index,
                                 uint32_t chunk) {
  const uint64_t gradient = plan.gradients[index];
  const auto grad_type = static_cast<ElementType>(gradient >> kTypeShift);
  const uint64_t address = gradient & kAddress;
  const int64_t begin = static_cast<int64_t>(chunk - item.first) * kChunk;
  const int64_t left = item.numel - begin;
  return {
      item,
      reinterpret_cast<const void*>(address),
      grad_type,
      begin,
      left < kChunk ? static_cast<int>(left) : kChunk,
      item.fours && address % (grad_type == ElementType::kFloat ? 16 : 8) == 0,
  };
}

// Steps the elements [at, at + kWidth) of an item: of the parameter, or of its
// master. With a master, the parameter receives a copy of type Copy.
template <class Value, class Copy, class Grad, int kWidth, class Coefficients>
__device__ inline void step_pack(const Share& share, const Coefficients& c, int64_t at) {
  constexpr bool kMaster = sizeof(Value) != sizeof(Copy);
  const Item& item = share.item;
  Value* const values = static_cast<Value*>(kMaster ? static_cast<void*>(item.master) : item.param);
  Pack<Value, kWidth> p;
  Pack<Grad, kWidth> g;
  Pack<float, kWidth> states[Coefficients::kStates];
  load(p, values + at);
  load(g, static_cast<const Grad*>(share.grads) + at);
#pragma unroll
  for (int s = 0; s < Coefficients::kStates; ++s) {
    load(states[s], item.states[s] + at);
  }
  if (c.skip) {  // after the loads, so that they do not wait for it
    return;
  }
  Pack<Copy, kWidth> copy;
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    float value = widen(p.at[k], item.param_type);
    float here[Coefficients::kStates];
#pragma unroll
    for (int s = 0; s < Coefficients::kStates; ++s) {
      here[s] = states[s].at[k];
    }
    c.step(widen(g.at[k], share.grad_type), value, here);
    p.at[k] = narrow<Value>(value, item.param_type);
    copy.at[k] = narrow<Copy>(value, item.param_type);
#pragma unroll
    for (int s = 0; s < Coefficients::kStates; ++s) {
      states[s].at[k] = here[s];
    }
  }
  store(p, values + at);
  if (kMaster) {
    store(copy, static_cast<Copy*>(item.param) + at);
  }
#pragma unroll
  for (int s = 0; s < Coefficients::kStates; ++s) {
    store(states[s], item.states[s] + at);
  }
}

// Calls body.template at<kWidth>(index) for this thread's elements of a share.
template <class Body>
__device__ inline void each_pack(const Share& share, const Body& body) {
  const int thread = static_cast<int>(threadIdx.x);
  if (share.fours) {
    const int i = thread * 4;
    if (i + 4 <= share.count) {
      body.template at<4>(share.begin + i);
    } else {
      for (int k = i; k < share.count; ++k) {  // the last one to three elements
        body.template at<1>(share.begin + k);
      }
    }
  } else {
    for (int i = thread; i < share.count; i += kThreads) {
      body.template at<1>(share.begin + i);
    }
  }
}

template <class Value, class Copy, class Grad, class Coefficients>
struct Step {
  const Share& share;
  const Coefficients& coefficients;

  template <int kWidth>
  __device__ void at(int64_t index) const {
    step_pack<Value, Copy, Grad, kWidth>(share, coefficients, index);
  }
};

// Runs Body<Value, Copy, Grad, Context>{share, context} over this
// thread's elements, with the types of the tensors.
template <bool kPlain, template <class, class, class, class> class Body, class Context>
__device__ inline void dispatch_types(const Share& share, const Context& context) {
  const bool wide = share.grad_type == ElementType::kFloat;
  if (kPlain) {
    each_pack(share, Body<float, float, float, Context>{share, context});
  } else if (share.item.param_type == ElementType::kFloat) {
    if (wide) {
      each_pack(share, Body<float, float, float, Context>{share, context});
    } else {
      each_pack(share, Body<float, float, Bits16, Context>{share, context});
    }
  } else if (share.item.master == nullptr) {
    if (wide) {
      each_pack(share, Body<Bits16, Bits16, float, Context>{share, context});
    } else {
      each_pack(share, Body<Bits16, Bits16, Bits16, Context>{share, context});
    }
  } else {
    if (wide) {
      each_pack(share, Body<float, Bits16, float, Context>{share, context});
    } else {
      each_pack(share, Body<float, Bits16, Bits16, Context>{share, context});
    }
  }
}

template <class Coefficients>
__device__ inline const Coefficients& coefficients_of(const Plan& plan, const Item& item) {
  static_assert(sizeof(Coefficients) <= kCoefficientBytes);
  return *reinterpret_cast<const Coefficients*>(plan.coefficients + item.step * kCoefficientBytes);
}

// kPlain: all tensors are fp32, the usual case.
template <class Coefficients, bool kPlain>
__global__ void __launch_bounds__(kThreads, blocks_per_processor(kPlain))
step_kernel(const Plan plan) {
  const uint32_t chunk = blockIdx.x;
  const uint32_t index = plan.table[chunk];
  const Item item = plan.items[index];
  dispatch_types<kPlain, Step>(share_of(plan, item, index, chunk), coefficients_of<Coefficients>(plan, item));
}

__device__ inline double learning_rate(const Numbers& numbers) {
  if (numbers.lr_float != nullptr) {
    return *numbers.lr_float;
  }
  return numbers.lr_double != nullptr ? *numbers.lr_double : numbers.lr;
}

// Runs before the step: computes the coefficients for each step count, and increments the counts. kCounted is
// false for the first half of a two-part step, which does not count.
template <class Coefficients, class Hyper, bool kCounted>
__global__ void prepare_kernel(const Plan plan, const Hyper hyper) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= plan.sizes.steps) {
    return;
  }
  const Numbers& numbers = hyper.numbers;
  const bool skip = numbers.found_inf != nullptr && *numbers.found_inf != 0;
  const double scale = numbers.grad_scale == nullptr ? 1 : *numbers.grad_scale;
  float& made = *plan.steps[i];
  Coefficients c = Coefficients::of(hyper, made, learning_rate(numbers), scale);
  c.skip = skip;
  *reinterpret_cast<Coefficients*>(plan.coefficients + i * kCoefficientBytes) = c;
  if (kCounted && !skip) {
    made += 1;
  }
}

#if !defined(__CUDACC_RTC__)

template <class Coefficients, bool kCounted = true, class Hyper>
void enqueue_prepare(const Hyper& hyper, const Plan& plan) {
  opk::launch(prepare_kernel<Coefficients, Hyper, kCounted>,
              (plan.sizes.steps + kThreads - 1) / kThreads, kThreads, 0, plan, hyper);
}

// Enqueues a step of all items and increments each step count, in two launches for any number of items.
template <class Coefficients, class Hyper>
void enqueue_step(const Hyper& hyper, const Plan& plan) {
  enqueue_prepare<Coefficients>(hyper, plan);
  opk::launch(plan.plain ? step_kernel<Coefficients, true> : step_kernel<Coefficients, false>,
              plan.sizes.chunks, kThreads, 0, plan);
}

#endif

}  // namespace multi_tensor
}  // namespace opkiln

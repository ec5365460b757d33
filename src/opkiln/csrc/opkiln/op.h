// PyTorch operators in plain C++: no torch header, no namespace, no registration code.
//
//   #include <opkiln/op.h>
//   using opk::Tensor;
//
//   Tensor scaled_add(const Tensor& x, const Tensor& y, double scale) {
//     opk::check_same_shape(x, y);
//     opk::check_contiguous(x, y);
//     Tensor out = opk::empty_like(x);
//     const float* a = x.data<const float>();
//     const float* b = y.data<const float>();
//     float* o = out.data<float>();
//     opk::parallel_for(0, x.numel(), 1 << 15, [=](int64_t begin, int64_t end) {
//       for (int64_t i = begin; i < end; ++i) o[i] = a[i] + float(scale) * b[i];
//     });
//     return out;
//   }
//   OPKILN_OP(scaled_add, cpu);
//
// op.h uses only the C functions of torch's stable ABI as of torch 2.10, so one binary runs on every later
// torch. It includes no heavy standard header: a file like this one compiles in a tenth of the time that
// torch's own headers take. docs/op-header.md describes each part.
#pragma once

#if defined(OPKILN_EMULATED)  // stands in for what nvcc predefines
#include "emulator/language.h"
#endif

#include "op/types.h"
#include "op/overlap.h"

#if defined(__CUDACC_RTC__)  // NVRTC compiles device code alone

#include "op/nvrtc_device.h"

#else

#include "op/error.h"
#include "op/tensor.h"
#include "op/message.h"
#include "op/check.h"
#include "op/values.h"
#include "op/boxing.h"
#include "op/running.h"
#include "op/registering.h"
#include "op/launch.h"

#endif

#include "op/parameters.h"  // last: it defines macros

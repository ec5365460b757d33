// Launches of the op's kernels. Contains the kernels that quantize
// 16-bit elements, and those that dequantize.

#include <opkiln/op.h>

#include "back.h"
#include "functions.h"
#include "launches.h"

namespace opkiln {
namespace quantizer {
namespace {

Launch launch_of(const Work& work) {
  Launch l{};
  l.work = work;
  l.aligned = is_aligned(work.from, 16) && is_aligned(work.out, 16) &&
      is_aligned(work.error, 16) &&
      is_aligned(work.to.values, static_cast<size_t>(work.format.bits));
  l.keys = random_keys<kRounds>(work.random.seed);
  return l;
}

void run_quantize(const Work& work, const Parts* parts) {
  Launch l = launch_of(work);
  if (parts != nullptr || work.error != nullptr) {
    Reduction r{};
    r.launch = l;
    if (parts != nullptr) {
      r.parts = *parts;
    }
    for (int i = 0; i < r.parts.count; ++i) {
      r.launch.aligned = r.launch.aligned &&
          is_aligned(r.parts.at[i].values, static_cast<size_t>(r.parts.format.bits));
    }
    launch_computed(r);
    return;
  }
  switch (work.type) {
    case ElementType::kFloat:
      return launch_float(l);
    case ElementType::kBFloat16:
      return launch_quantize<TensorSource<BFloat>>(l, l);
    case ElementType::kFloat16:
      return launch_quantize<TensorSource<Half>>(l, l);
  }
}

template <class Type>
void (*back_kernel(const Format& format))(const Launch) {
  if (format.bits == 8) {
    return format.symmetric ? dequantize_kernel<Type, 8, true> : dequantize_kernel<Type, 8, false>;
  }
  return format.symmetric ? dequantize_kernel<Type, 4, true> : dequantize_kernel<Type, 4, false>;
}

template <class Type>
void launch_back(Launch& l) {
  constexpr int64_t a_block = kBackThreads * kBackUnits;
  const unsigned log2 = log2_at_least(l.work.format.group_size);
  l.log2_group = int64_t{1} << log2 == l.work.format.group_size ? log2 : 0;
  const int64_t units = (l.work.numel + Type::kUnit - 1) / Type::kUnit;
  const int64_t blocks = l.aligned ? l.work.numel / Type::kUnit / a_block : 0;
  l.first = blocks * a_block;
  opk::launch(back_kernel<Type>(l.work.format), blocks, kBackThreads, 0, l);
  opk::launch(dequantize_any_kernel<Type>, (units - l.first + kBackThreads - 1) / kBackThreads, kBackThreads, 0,
              l);
}

void run_dequantize(const Work& work) {
  Launch l = launch_of(work);
  switch (work.type) {
    case ElementType::kFloat:
      return launch_back<Float>(l);
    case ElementType::kBFloat16:
      return launch_back<BFloat>(l);
    case ElementType::kFloat16:
      return launch_back<Half>(l);
  }
}

OPKILN_OP(quantize, cuda);
OPKILN_OP(quantize_with_feedback, cuda);
OPKILN_OP(dequantize, cuda);
OPKILN_OP(fake_quantize, cuda);
OPKILN_OP(fake_quantize_, cuda);
OPKILN_OP(quantized_reduce, cuda);
OPKILN_OP(quantized_reduce_with_feedback, cuda);

}  // namespace
}  // namespace quantizer
}  // namespace opkiln

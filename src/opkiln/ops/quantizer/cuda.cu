// Quantizing tensors of 16-bit elements, and dequantizing; how a call is launched.

#include "back.h"
#include "launches.h"

namespace opkiln {
namespace quantizer {
namespace {

Launch launch_of(const Work& work) {
  Launch l{};
  l.work = work;
  l.aligned = is_aligned(work.from, 16) && is_aligned(work.out, 16) &&
      is_aligned(work.error, 16) &&
      is_aligned(work.to.values, static_cast<std::size_t>(work.format.bits));
  l.keys = random_keys<kRounds>(work.random.seed);
  return l;
}

cudaError_t quantize(const Work& work, const Parts& parts, cudaStream_t stream) {
  if (work.numel == 0) {
    return cudaSuccess;
  }
  Launch l = launch_of(work);
  if (work.from == nullptr || work.error != nullptr) {
    Reduction r;
    r.launch = l;
    r.parts = parts;
    for (int i = 0; i < parts.count; ++i) {
      r.launch.aligned = r.launch.aligned &&
          is_aligned(parts.at[i].values, static_cast<std::size_t>(parts.format.bits));
    }
    return enqueue_worked_out(r, stream);
  }
  switch (work.type) {
    case ElementType::kFloat:
      return enqueue_float(l, stream);
    case ElementType::kBFloat16:
      return launch_quantize<TensorSource<BFloat>>(l, l, stream);
    case ElementType::kFloat16:
      return launch_quantize<TensorSource<Half>>(l, l, stream);
  }
  return cudaErrorInvalidValue;
}

template <class Type>
void (*back_kernel(const Format& format))(const Launch) {
  if (format.bits == 8) {
    return format.symmetric ? dequantize_kernel<Type, 8, true> : dequantize_kernel<Type, 8, false>;
  }
  return format.symmetric ? dequantize_kernel<Type, 4, true> : dequantize_kernel<Type, 4, false>;
}

template <class Type>
cudaError_t launch_back(Launch& l, cudaStream_t stream) {
  constexpr int64_t a_block = kBackThreads * kBackUnits;
  const unsigned log2 = log2_at_least(l.work.format.group_size);
  l.log2_group = int64_t{1} << log2 == l.work.format.group_size ? log2 : 0;
  const int64_t units = (l.work.numel + Type::kUnit - 1) / Type::kUnit;
  const int64_t blocks = l.aligned ? l.work.numel / Type::kUnit / a_block : 0;
  l.first = blocks * a_block;
  cudaError_t error = cudaSuccess;
  if (blocks > 0) {
    error = device::launch(back_kernel<Type>(l.work.format), static_cast<unsigned>(blocks),
                           kBackThreads, stream, l);
  }
  if (error == cudaSuccess && l.first < units) {
    const int64_t rest = (units - l.first + kBackThreads - 1) / kBackThreads;
    error = device::launch(dequantize_any_kernel<Type>, static_cast<unsigned>(rest), kBackThreads,
                           stream, l);
  }
  return error;
}

cudaError_t dequantize(const Work& work, cudaStream_t stream) {
  if (work.numel == 0) {
    return cudaSuccess;
  }
  Launch l = launch_of(work);
  switch (work.type) {
    case ElementType::kFloat:
      return launch_back<Float>(l, stream);
    case ElementType::kBFloat16:
      return launch_back<BFloat>(l, stream);
    case ElementType::kFloat16:
      return launch_back<Half>(l, stream);
  }
  return cudaErrorInvalidValue;
}

const char* text_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace

const char* enqueue_quantize(const Work& work, const Parts& parts, void* stream) {
  return text_of(quantize(work, parts, static_cast<cudaStream_t>(stream)));
}

const char* enqueue_dequantize(const Work& work, void* stream) {
  return text_of(dequantize(work, static_cast<cudaStream_t>(stream)));
}

}  // namespace quantizer
}  // namespace opkiln

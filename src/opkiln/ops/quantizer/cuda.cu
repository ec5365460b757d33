// Quantizing tensors of 16-bit elements, and dequantizing; how a call is launched.

#include "launches.h"

namespace opkiln {
namespace quantizer {
namespace {

bool is_aligned(const void* pointer, std::size_t bytes) {
  return reinterpret_cast<std::size_t>(pointer) % bytes == 0;  // null is
}

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

// As launch_quantize.
template <class Type>
cudaError_t launch_back(Launch& l, cudaStream_t stream) {
  const int64_t groups = groups_of(l.work.numel, l.work.format);
  const int64_t units = units_in_group<Type>(l.work);
  unsigned threads = 0;
  cudaError_t error = cudaSuccess;
  l.last = l.aligned ? l.work.numel / l.work.format.group_size : 0;
  if (l.last > 0 && units <= kWarp) {
    const unsigned blocks = lay_out(l, units, 4, 1, threads);
    error = device::launch(dequantize_kernel<Type, 4, 1, true>, blocks, threads, stream, l);
  } else if (l.last > 0) {
    const unsigned blocks = lay_out(l, units, 1, 4, threads);
    error = device::launch(dequantize_kernel<Type, 1, 4, true>, blocks, threads, stream, l);
  }
  if (error == cudaSuccess && l.last < groups) {
    l.first = l.last;
    l.last = groups;
    const unsigned blocks = lay_out(l, units, 1, 1, threads);
    error = device::launch(dequantize_kernel<Type, 1, 1, false>, blocks, threads, stream, l);
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

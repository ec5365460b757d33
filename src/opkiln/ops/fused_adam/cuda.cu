// Adam and AdamW over a list of tensors of mixed sizes and types in one launch, or few: what is to
// be done travels in the kernel's parameters. No torch header, no warp intrinsics: hipify turns this
// file into HIP as it is.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "element.h"

#if defined(__NVCC__)
#define OPKILN_GRID_CONSTANT __grid_constant__  // indexed where it lies, not copied to the stack
#else
#define OPKILN_GRID_CONSTANT
#endif

namespace opkiln {
namespace fused_adam {
namespace {

// Four blocks of 256 threads run on a multiprocessor at up to 64 registers a thread. Each thread has
// an access of four elements to each of four tensors in flight, 64 kB per multiprocessor in all:
// more than twice what it takes to cover the memory's latency.
constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 4;
constexpr int kChunk = kThreads * 16;  // elements that a block steps at a time

// What fits into the parameters of a launch: 4 kB, and since CUDA 12.1 on compute capability 7.0 and
// later, which is all that CUDA 13 knows, 32764 bytes.
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13000
constexpr std::size_t kParameterBytes = 32764;
#else
constexpr std::size_t kParameterBytes = 4096;
#endif

struct Work {
  static constexpr std::size_t kItems =
      (kParameterBytes - sizeof(Hyper) - 16) / (sizeof(Item) + sizeof(uint32_t));

  uint32_t count;
  uint32_t first[kItems + 1];  // chunk of each item; 2^32 chunks are more than any memory holds
  Item items[kItems];
};
static_assert(sizeof(Work) + sizeof(Hyper) <= kParameterBytes);

struct Steps {
  static constexpr std::size_t kSteps = 500;

  uint32_t count;
  float* at[kSteps];
};

// Kernels are compiled for the sizes of elements; which of the two 16-bit types it is, is asked when
// an element is converted. For each type of its own there would be thirty copies of the loop.
struct Bits16 {
  uint16_t bits;
};

__device__ float widen(float value, Type) {
  return value;
}
__device__ float widen(Bits16 value, Type type) {
  return type == Type::kBFloat16 ? __uint_as_float(static_cast<uint32_t>(value.bits) << 16)
                                 : __half2float(__ushort_as_half(value.bits));
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <class T>
__device__ T narrow(float value, Type type);
template <>
__device__ float narrow<float>(float value, Type) {
  return value;
}
template <>
__device__ Bits16 narrow<Bits16>(float value, Type type) {
  if (type == Type::kFloat16) {
    return {__half_as_ushort(__float2half_rn(value))};
  }
  const uint32_t bits = __float_as_uint(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(nan ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// As many elements as one access moves.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T at[kWidth];
};

template <int kWidth, class T>
__device__ void load(Pack<T, kWidth>& pack, const T* from) {
  pack = *reinterpret_cast<const Pack<T, kWidth>*>(from);
}

template <int kWidth, class T>
__device__ void store(const Pack<T, kWidth>& pack, T* to) {
  *reinterpret_cast<Pack<T, kWidth>*>(to) = pack;
}

// The elements [begin, begin + count) of an item; count is a multiple of kWidth. What is stepped is
// the parameter itself, or its master, of which the parameter (Copy) then receives a copy.
template <class Value, class Copy, class Grad, int kWidth>
__device__ void step_chunk(const Item& item, const Coefficients& c, int64_t begin, int count) {
  constexpr bool kMaster = sizeof(Value) != sizeof(Copy);
  Value* const values = static_cast<Value*>(kMaster ? static_cast<void*>(item.master) : item.param);
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < count; i += kThreads * kWidth) {
    const int64_t at = begin + i;
    Pack<Value, kWidth> p;
    Pack<Copy, kWidth> copy;
    Pack<Grad, kWidth> g;
    Pack<float, kWidth> m, v;
    load(p, values + at);
    load(g, static_cast<const Grad*>(item.grad) + at);
    load(m, item.exp_avg + at);
    load(v, item.exp_avg_sq + at);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      float value = widen(p.at[k], item.param_type);
      c.step(widen(g.at[k], item.grad_type), value, m.at[k], v.at[k]);
      p.at[k] = narrow<Value>(value, item.param_type);
      copy.at[k] = narrow<Copy>(value, item.param_type);
    }
    store(p, values + at);
    if (kMaster) {
      store(copy, static_cast<Copy*>(item.param) + at);
    }
    store(m, item.exp_avg + at);
    store(v, item.exp_avg_sq + at);
  }
}

template <class Value, class Copy, class Grad>
__device__ void by_width(const Item& item, const Coefficients& c, int64_t begin, int count) {
  if (item.fours && count % 4 == 0) {
    step_chunk<Value, Copy, Grad, 4>(item, c, begin, count);
  } else {
    step_chunk<Value, Copy, Grad, 1>(item, c, begin, count);
  }
}

template <class Value, class Copy>
__device__ void by_grad(const Item& item, const Coefficients& c, int64_t begin, int count) {
  if (item.grad_type == Type::kFloat) {
    by_width<Value, Copy, float>(item, c, begin, count);
  } else {
    by_width<Value, Copy, Bits16>(item, c, begin, count);
  }
}

__device__ void by_type(const Item& item, const Coefficients& c, int64_t begin, int count) {
  if (item.param_type == Type::kFloat) {
    by_grad<float, float>(item, c, begin, count);
  } else if (item.master == nullptr) {
    by_grad<Bits16, Bits16>(item, c, begin, count);
  } else {
    by_grad<float, Bits16>(item, c, begin, count);
  }
}

// The item that a chunk belongs to.
__device__ uint32_t item_of(const Work& work, uint32_t chunk) {
  uint32_t low = 0, high = work.count;  // it is in [low, high)
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (work.first[middle] <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ double learning_rate(const Hyper& h) {
  if (h.lr_float != nullptr) {
    return *h.lr_float;
  }
  return h.lr_double != nullptr ? *h.lr_double : h.lr;
}

__device__ bool skipped(const float* found_inf) {
  return found_inf != nullptr && *found_inf != 0;
}

// As many blocks as run at once, each taking every so manieth chunk: the coefficients, which are
// worked out in double, cost each block once (and again where parameters are at other steps).
__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
step_kernel(const OPKILN_GRID_CONSTANT Work work, const OPKILN_GRID_CONSTANT Hyper hyper) {
  if (skipped(hyper.found_inf)) {
    return;
  }
  __shared__ Coefficients c;
  const float* step = nullptr;  // that c was worked out for
  for (uint32_t chunk = blockIdx.x; chunk < work.first[work.count]; chunk += gridDim.x) {
    const uint32_t index = item_of(work, chunk);
    const Item& item = work.items[index];
    if (item.step != step) {
      step = item.step;
      __syncthreads();  // the others may still be reading the last ones
      if (threadIdx.x == 0) {
        const double scale = hyper.grad_scale == nullptr ? 1 : *hyper.grad_scale;
        c = Coefficients::of(hyper, *step, learning_rate(hyper), scale);
      }
      __syncthreads();
    }
    const int64_t begin = static_cast<int64_t>(chunk - work.first[index]) * kChunk;
    const int64_t left = item.numel - begin;
    by_type(item, c, begin, left < kChunk ? static_cast<int>(left) : kChunk);
  }
}

__global__ void advance_kernel(const OPKILN_GRID_CONSTANT Steps steps, const float* found_inf) {
  if (!skipped(found_inf) && threadIdx.x < steps.count) {
    *steps.at[threadIdx.x] += 1;
  }
}

bool is_aligned(const void* pointer, Type type) {
  const std::size_t bytes = type == Type::kFloat ? 16 : 8;
  return reinterpret_cast<std::size_t>(pointer) % bytes == 0;
}

bool takes_fours(const Item& item) {
  return is_aligned(item.param, item.param_type) && is_aligned(item.grad, item.grad_type) &&
      is_aligned(item.exp_avg, Type::kFloat) && is_aligned(item.exp_avg_sq, Type::kFloat) &&
      is_aligned(item.master, Type::kFloat);  // null is aligned
}

cudaError_t processors(unsigned& count) {
  int device = 0, found = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device);
  }
  count = static_cast<unsigned>(found);
  return error;
}

template <class... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
                   cudaStream_t stream, const Parameters&... parameters) {
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                          arguments, 0, stream);
}

cudaError_t enqueue_all(const Hyper& hyper, const Item* items, std::size_t count,
                        float* const* steps, std::size_t step_count, cudaStream_t stream) {
  unsigned blocks = 0;
  cudaError_t error = processors(blocks);
  blocks *= kBlocksPerProcessor;
  for (std::size_t i = 0; error == cudaSuccess && i < count;) {
    Work work;
    work.count = 0;
    work.first[0] = 0;
    for (; i < count && work.count < Work::kItems; ++i) {
      if (items[i].numel > 0) {
        const auto chunks = static_cast<uint32_t>((items[i].numel + kChunk - 1) / kChunk);
        work.items[work.count] = items[i];
        work.items[work.count].fours = takes_fours(items[i]);
        work.first[work.count + 1] = work.first[work.count] + chunks;
        ++work.count;
      }
    }
    if (work.count > 0) {
      const unsigned chunks = work.first[work.count];
      error = launch<Work, Hyper>(step_kernel, chunks < blocks ? chunks : blocks, kThreads, stream,
                                  work, hyper);
    }
  }
  for (std::size_t i = 0; error == cudaSuccess && i < step_count; i += Steps::kSteps) {
    Steps part;
    const std::size_t left = step_count - i;
    part.count = static_cast<uint32_t>(left < Steps::kSteps ? left : Steps::kSteps);
    for (uint32_t k = 0; k < part.count; ++k) {
      part.at[k] = steps[i + k];
    }
    error = launch<Steps, const float*>(advance_kernel, 1, (part.count + 31) / 32 * 32, stream, part,
                                        hyper.found_inf);
  }
  return error;
}

}  // namespace

const char* enqueue(const Hyper& hyper, const Item* items, std::size_t count, float* const* steps,
                    std::size_t step_count, void* stream) {
  const cudaError_t error = enqueue_all(hyper, items, count, steps, step_count,
                                        static_cast<cudaStream_t>(stream));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace fused_adam
}  // namespace opkiln

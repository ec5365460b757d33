// Kernels for tests/build/test_emulator.py: right ones, and ones with a planted mistake. Called from
// Python with ctypes. A function gives null, or what the emulator reports.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <exception>

namespace cg = cooperative_groups;

namespace {

template <class T>
struct Same {
  using type = T;
};

struct Shape {
  dim3 blocks, threads;
  std::size_t shared = 0;
  bool cooperative = false;
  dim3 cluster = 1;
  bool overlap = false;
};

template <class... P>
const char* launch(void (*kernel)(P...), const Shape& how, typename Same<P>::type... arguments) {
  static char report[4096];
  void* addresses[] = {static_cast<void*>(&arguments)..., nullptr};
  try {
    opk::emulator::run_kernel(
        kernel,
        {how.blocks, how.threads, how.shared, how.cooperative, how.overlap, how.cluster, nullptr},
        addresses);
    return nullptr;
  } catch (const std::exception& error) {
    std::snprintf(report, sizeof report, "%s", error.what());
    return report;
  }
}

// ---- right kernels

__global__ void index_kernel(int* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  out[block * threads + thread] = static_cast<int>(
      blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * threadIdx.x + 10000 * threadIdx.y +
      100000 * threadIdx.z);
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) sum_kernel(const float* __restrict__ x, float* out, int n) {
  __shared__ float partial[kThreads];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  partial[threadIdx.x] = i < n ? __ldg(x + i) : 0.0f;
  __syncthreads();
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) partial[threadIdx.x] += partial[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) atomicAdd(out, partial[0]);
}

// Two arrays in the dynamic shared memory, one after the other.
__global__ void reverse_kernel(const double* x, float* out, int n) {
  extern __shared__ double
      values[];
  float* const narrow = reinterpret_cast<float*>(values + n);
  const int i = threadIdx.x;
  values[i] = x[i];
  __syncthreads();
  narrow[i] = static_cast<float>(values[n - 1 - i]);
  __syncthreads();
  out[i] = narrow[(i + 1) % n];
}

__global__ void warp_kernel(int* out) {
  const int i = threadIdx.x, lane = i % 32;
  int sum = i;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  int* const mine = out + 12 * i;
  mine[0] = __shfl_sync(0xffffffffu, sum, 0);
  mine[1] = __shfl_xor_sync(0xffffffffu, i, 5);
  mine[2] = __shfl_up_sync(0xffffffffu, i, 3, 8);
  mine[3] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  mine[4] = __any_sync(0xffffffffu, lane == 40) + 2 * __all_sync(0xffffffffu, lane < 40);
  mine[5] = static_cast<int>(__match_any_sync(0xffffffffu, lane / 4));
  mine[6] = __reduce_add_sync(0xffffffffu, lane);
  mine[7] = __reduce_max_sync(0xffffffffu, -lane);
  mine[8] = 0;
  if (lane % 2 == 1) {
    const unsigned odd = __activemask();
    mine[8] = static_cast<int>(odd);
    mine[8] += __shfl_sync(odd, lane, 31);
  }
  const auto tile = cg::tiled_partition<8>(cg::this_thread_block());
  mine[9] = cg::reduce(tile, i, cg::plus<int>());
  mine[10] = static_cast<int>(__reduce_or_sync(0xffffffffu, 1u << (lane & 3)));
  mine[11] = __shfl_sync(0xffffffffu, static_cast<short>(lane), 7);
}

// Threads that have ended are not waited for in a warp.
__global__ void leaving_kernel(int* out) {
  if (threadIdx.x >= 20) return;
  out[threadIdx.x] = static_cast<int>(__ballot_sync(0xffffffffu, 1));
}

__global__ void vote_kernel(int* out) {
  const int i = threadIdx.x;
  out[3 * i] = __syncthreads_count(i % 5 == 0);
  out[3 * i + 1] = __syncthreads_and(i < 1000);
  out[3 * i + 2] = __syncthreads_or(i == 1000);
}

__global__ void histogram_kernel(const unsigned char* x, unsigned* out, int n) {
  __shared__ unsigned bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    atomicAdd(&bins[x[i] & 15], 1);
  }
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(out + threadIdx.x, bins[threadIdx.x]);
}

// A lock in shared memory orders what it protects.
__global__ void lock_kernel(int* out) {
  __shared__ int lock, value;
  if (threadIdx.x == 0) lock = value = 0;
  __syncthreads();
  while (atomicCAS(&lock, 0, 1) != 0) {
  }
  value += static_cast<int>(threadIdx.x);
  __threadfence_block();
  atomicExch(&lock, 0);
  __syncthreads();
  if (threadIdx.x == 0) *out = value;
}

// The last block to come adds up what all have written.
__global__ void last_block_kernel(float* parts, unsigned* arrived, float* out) {
  __shared__ bool last;
  parts[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<float>(blockIdx.x + 1);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 0) {
    float sum = 0;
    for (unsigned i = 0; i < gridDim.x * blockDim.x; ++i) sum += parts[i];
    *out = sum;
  }
}

// __syncwarp is enough within a warp.
__global__ void neighbour_kernel(int* out) {
  __shared__ int seen[64];
  seen[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = seen[threadIdx.x ^ 1];
}

__global__ void grid_kernel(int* parts, int* out) {
  __shared__ int mine;
  if (threadIdx.x == 0) mine = static_cast<int>(blockIdx.x) + 1;
  __syncthreads();
  parts[blockIdx.x] = 0;
  cg::this_grid().sync();
  if (threadIdx.x == 0) parts[(blockIdx.x + 1) % gridDim.x] = mine;
  cg::this_grid().sync();
  if (threadIdx.x == 0) atomicAdd(out, parts[blockIdx.x] * mine);
}

template <class T>
__global__ void sixteen_bits_kernel(const float* x, unsigned short* bits, float* back, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    const T narrow = T(x[i]);
    bits[i] = *reinterpret_cast<const unsigned short*>(&narrow);
    back[i] = static_cast<float>(narrow * narrow + narrow);
  }
}

__global__ void vector_kernel(const float4* x, float4* out, int fours) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < fours) {
    const float4 v = x[i];
    out[i] = make_float4(v.w, v.z, v.y, v.x);
  }
}

__global__ void number_kernel(float* out) {
  out[0] = __fmul_rz(1.0f / 3, 1.0f / 3) < __fmul_ru(1.0f / 3, 1.0f / 3);
  out[1] = static_cast<float>(__popc(0xf0f0u) + 100 * __clz(1) + 10000 * __ffs(8));
  out[2] = static_cast<float>(__float2int_rn(2.5f) + 10 * __float2int_ru(2.1f) + 100 * __float2int_rz(-2.9f));
  out[3] = static_cast<float>(__byte_perm(0x33221100u, 0x77665544u, 0x5140u) == 0x55114400u);
  out[4] = rsqrtf(4.0f) + __saturatef(7.0f) + max(1, 2) + min(3.0f, 4.0f);
  out[5] = static_cast<float>(__umulhi(0x80000000u, 6u) + __brev(1u) / 0x80000000u + __dp4a(0x01020304, 0x01010101, 0));
}

// ---- kernels with a mistake

__global__ void race_kernel(const float* x, float* out) {
  __shared__ float tile[64];
  const int i = threadIdx.x;
  tile[i] = x[i];
  // __syncthreads() is missing here
  out[i] = tile[63 - i];
}

__global__ void tail_kernel(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) out[i] = 2 * x[i];  // must be i < n
}

__global__ void far_kernel(const float* x, float* out) {
  out[threadIdx.x] = x[static_cast<int>(threadIdx.x) - 1];
}

__global__ void dynamic_kernel(float* out) {
  extern __shared__ float buffer[];
  buffer[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = buffer[threadIdx.x];
}

__device__ void fill(float* values, int count) {
  for (int i = threadIdx.x; i <= count; i += blockDim.x) values[i] = 0;
}
__global__ void pointer_kernel(float* out) {
  __shared__ float small[16];
  fill(small, 16);
  __syncthreads();
  out[threadIdx.x] = small[0];
}

__global__ void index_mistake_kernel(float* out, int at) {
  __shared__ float small[16];
  small[threadIdx.x + at] = 1;
  __syncthreads();
  out[threadIdx.x] = small[threadIdx.x];
}

__global__ void divergence_kernel(float* out, int n) {
  if (threadIdx.x >= n) return;
  out[threadIdx.x] = 1;
  __syncthreads();
}

__global__ void two_barriers_kernel(float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    out[threadIdx.x] = 1;
    __syncthreads();
  }
}

__global__ void block_race_kernel(float* out) {
  out[0] += static_cast<float>(threadIdx.x == 0);
}

__global__ void assert_kernel(float* in) {
  assert(in[0] < 0);
}

__global__ void null_kernel(float* out) {
  out[threadIdx.x] = 1;
}

__global__ void host_memory_kernel(const int* host, int* out) {
  out[0] = *host;
}

__global__ void unaligned_kernel(const float* x, float* out) {
  const float4 v = *reinterpret_cast<const float4*>(x + 1);
  out[threadIdx.x] = v.x;
}

__global__ void mask_kernel(int* out) {
  out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 0);
}

__global__ void lonely_kernel(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  __syncwarp();
}

__global__ void lone_grid_kernel() {
  cg::this_grid().sync();
}

__global__ void too_early_kernel(float* out) {
  if (threadIdx.x < 32) opk::emulator::wait_for_previous();
  out[threadIdx.x] = 1;
}

__global__ void waiting_kernel(volatile int* flag) {
  if (blockIdx.x == 0) {
    while (*flag == 0) {
    }
  } else {
    *flag = 1;
  }
}

__global__ void unwritten_kernel(float* out) {
  __shared__ float never[4];
  if (out == nullptr) never[threadIdx.x] = 0;
  out[threadIdx.x] = never[threadIdx.x];
}

}  // namespace

// Each case gets memory that Python made: x and out, and how many bytes each has.
#define X(type) static_cast<type*>(x)
#define OUT(type) static_cast<type*>(out)
#define CASE(name, ...) \
  if (std::strcmp(which, name) == 0) return __VA_ARGS__
extern "C" const char* emulate(const char* which, void* x, std::size_t x_bytes, void* out, std::size_t out_bytes,
                               std::size_t element, int n) {
  const opk::emulator::OpCall tensors;
  opk::emulator::add_tensor(x, x_bytes, element);
  opk::emulator::add_tensor(out, out_bytes, element);
  CASE("index", launch(index_kernel, {dim3(2, 3, 2), dim3(4, 2, 3)}, OUT(int)));
  CASE("sum", launch(sum_kernel<64>, {dim3((n + 63) / 64), dim3(64)}, X(float), OUT(float), n));
  CASE("reverse", launch(reverse_kernel, {1, n, n * sizeof(double) + n * sizeof(float)}, X(double), OUT(float), n));
  CASE("warp", launch(warp_kernel, {1, 64}, OUT(int)));
  CASE("leaving", launch(leaving_kernel, {1, 32}, OUT(int)));
  CASE("vote", launch(vote_kernel, {1, 96}, OUT(int)));
  CASE("histogram", launch(histogram_kernel, {3, 64}, X(unsigned char), OUT(unsigned), n));
  CASE("lock", launch(lock_kernel, {1, 64}, OUT(int)));
  CASE("last block", launch(last_block_kernel, {4, 32}, OUT(float), X(unsigned), OUT(float) + 128));
  CASE("neighbour", launch(neighbour_kernel, {1, 64}, OUT(int)));
  CASE("grid", launch(grid_kernel, {5, 1, 0, true}, X(int), OUT(int)));
  CASE("half", launch(sixteen_bits_kernel<__half>, {dim3((n + 255) / 256), 256}, X(float), OUT(unsigned short), OUT(float) + n, n));
  CASE("bfloat16", launch(sixteen_bits_kernel<__nv_bfloat16>, {dim3((n + 255) / 256), 256}, X(float), OUT(unsigned short), OUT(float) + n, n));
  CASE("vector", launch(vector_kernel, {1, 32}, X(float4), OUT(float4), n / 4));
  CASE("number", launch(number_kernel, {1, 1}, OUT(float)));
  CASE("race", launch(race_kernel, {1, 64}, X(float), OUT(float)));
  CASE("tail", launch(tail_kernel, {dim3((n + 31) / 32), 32}, X(float), OUT(float), n));
  CASE("far", launch(far_kernel, {1, 32}, X(float), OUT(float)));
  CASE("dynamic", launch(dynamic_kernel, {1, 32, 32 * sizeof(float)}, OUT(float)));
  CASE("pointer", launch(pointer_kernel, {1, 32}, OUT(float)));
  CASE("index mistake", launch(index_mistake_kernel, {1, 16}, OUT(float), 1));
  CASE("divergence", launch(divergence_kernel, {2, 96}, OUT(float), 64));
  CASE("two barriers", launch(two_barriers_kernel, {1, 64}, OUT(float)));
  CASE("block race", launch(block_race_kernel, {2, 1}, OUT(float)));
  CASE("assertion", launch(assert_kernel, {1, 1}, X(float)));
  CASE("null", launch(null_kernel, {1, 1}, nullptr));
  int on_the_stack = 3;
  CASE("host memory", launch(host_memory_kernel, {1, 1}, &on_the_stack, OUT(int)));
  CASE("unaligned", launch(unaligned_kernel, {1, 1}, X(float), OUT(float)));
  CASE("mask", launch(mask_kernel, {1, 32}, OUT(int)));
  CASE("lonely", launch(lonely_kernel, {1, 32}, OUT(int)));
  CASE("lone grid", launch(lone_grid_kernel, {2, 1}));
  CASE("waiting", launch(waiting_kernel, {2, 1}, OUT(int)));
  CASE("waiting together", launch(waiting_kernel, {2, 1, 0, true}, OUT(int)));
  CASE("unwritten", launch(unwritten_kernel, {1, 4}, OUT(float)));
  CASE("cluster", launch(null_kernel, {4, 1, 0, false, 2}, OUT(float)));
  CASE("too early", launch(too_early_kernel, {1, 64, 0, false, 1, true}, OUT(float)));
  CASE("early", launch(too_early_kernel, {1, 32, 0, false, 1, true}, OUT(float)));
  CASE("too many threads", launch(null_kernel, {1, dim3(64, 32)}, OUT(float)));
  return "there is no case of this name";
}

// Products of a warpgroup on tensor cores (wgmma), copies of tiles by the copy engine (TMA), and the barriers
// that these copies complete: instructions of compute capability 9.0a, and of no other.
//
// A warpgroup is four warps, the first with a number divisible by 4. Each warp holds 16 of 64 rows: left
// fragments and sums are those of warp_matrix.h, with a fragment of a sum for every 8 columns.
//
// The other factor is a panel in shared memory, whose rows have 128 or 64 bytes, swizzled as the copy engine
// writes them. A panel begins at a multiple of 1024 bytes. Wider tiles are several panels.
//
// Code for other architectures has none of this. There a kernel is an empty function that is declared to
// run in one thread, by warpgroup_threads(), and opk::runs_as says that it does not run here. So is it in
// the emulator.
#pragma once

#include "warp_matrix.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define OPK_WARPGROUPS 1
#endif

namespace opkiln {
namespace device {

// A tensor as the copy engine sees it: a CUtensorMap. Kernels take it as OPK_GRID_CONSTANT.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// The limit for __launch_bounds__.
constexpr int warpgroup_threads(int threads) {
#if defined(__CUDA_ARCH__) && !defined(OPK_WARPGROUPS)
  return threads > 0 ? 1 : 0;
#else
  return threads;
#endif
}

// ---- softmax on sums of products, of a warp's 16 rows: for warps and warpgroups --------------------------

// Packs sums into left fragments, for the next product.
template <class Element, int kSteps>
__device__ inline void pack_left(uint32_t (&out)[kSteps][4], const float (&sums)[2 * kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    const float(&pair)[4] = sums[i / 2];
    out[i / 4][i % 4] = narrow_two<Element>(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
  }
}

template <int kEights>
__device__ inline void scale_rows(float (&sums)[kEights][4], const float (&factors)[2]) {
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] *= factors[i / 2];
  }
}

// Turns scores into weights, 2 to the power of score * factor - base, and adds them to the lane's sums. The base of
// a row begins at minus infinity. It follows the greatest score, but not each small step: weights are at most 256.
// Returns whether it did; then sums over earlier weights are to be multiplied by `shrink`.
template <int kEights>
__device__ inline bool weigh(float (&scores)[kEights][4], float (&base)[2], float (&sum)[2], float (&shrink)[2],
                             float factor) {
  constexpr unsigned kLanes = 0xffffffffu;
  const float minus_infinity = __uint_as_float(0xff800000u);
  float most[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // rows lane / 4 and lane / 4 + 8
    most[i] = fmaxf(scores[0][2 * i], scores[0][2 * i + 1]);
#pragma unroll
    for (int n = 1; n < kEights; ++n) most[i] = fmaxf(most[i], fmaxf(scores[n][2 * i], scores[n][2 * i + 1]));
    most[i] = fmaxf(most[i], __shfl_xor_sync(kLanes, most[i], 1));
    most[i] = fmaxf(most[i], __shfl_xor_sync(kLanes, most[i], 2)) * factor;
  }
  const bool raised = __any_sync(kLanes, most[0] > base[0] + 8 || most[1] > base[1] + 8);
  if (raised) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float top = fmaxf(base[i], most[i]);
      shrink[i] = top == minus_infinity ? 1.f : fast_exp2(base[i] - top);
      base[i] = top;
      sum[i] *= shrink[i];
    }
  }
  const float from[2] = {base[0] == minus_infinity ? 0.f : base[0], base[1] == minus_infinity ? 0.f : base[1]};
#pragma unroll
  for (int n = 0; n < kEights; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = fast_exp2(fmaf(scores[n][i], factor, -from[i / 2]));
      sum[i / 2] += scores[n][i];
    }
  }
  return raised;
}

#if defined(OPK_WARPGROUPS)

// ---- barriers ---------------------------------------------------------------------------------------

// Each phase of a barrier ends when `arrivals` threads have arrived and all expected bytes have been written.
__device__ inline void make_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes new barriers visible to the copy engine. A __syncthreads() makes them visible to other threads.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of a phase: the first, third, … has the parity 0. Before the first, parity 1 is over.
__device__ inline void wait_for_phase(uint64_t* barrier, uint32_t parity) {
  uint32_t over;
  do {
    asm volatile(
        "{\n.reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n}"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (over == 0);
}

// A barrier for so many threads, by number; __syncthreads() has number 0.
__device__ inline void sync_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// ---- copies -----------------------------------------------------------------------------------------

// Fetches a map, which the first copy would wait for.
__device__ inline void prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

// Starts copying a box of a tensor, of the map's size, from this place on. Zeros are written past the tensor's ends.
// One thread calls this; the barrier must expect the box's bytes.
__device__ inline void load_tile(void* to, const TensorMap& map, uint64_t* barrier, int column, int row, int third,
                                 int fourth, int fifth = 0) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(to)),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(third),
      "r"(fourth), "r"(fifth)
      : "memory");
}

// ---- registers --------------------------------------------------------------------------------------

// A warpgroup that only starts copies leaves its registers to the others. All its warps call this; all kernels with it
// declare their threads and blocks (__launch_bounds__).
template <int kLeft>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft));
}
template <int kThen>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kThen));
}

// ---- products ---------------------------------------------------------------------------------------

// Describes the panel at this address, whose rows have kWide bytes, as a factor.
template <int kWide>
__device__ inline uint64_t matrix(const void* panel) {
  static_assert(kWide == 128 || kWide == 64, "the swizzles in use");
  constexpr uint64_t kSwizzle = kWide == 128 ? 1 : 2, kEightRows = 8 * kWide;
  return kSwizzle << 62 | kEightRows >> 4 << 32 | uint64_t{1} << 16 | (shared_address(panel) & 0x3ffff) >> 4;
}

// The same, so many bytes further: 32 for the next 16 columns, 16 * kWide for the next 16 rows.
__device__ inline uint64_t move(uint64_t matrix, int bytes) { return matrix + static_cast<uint64_t>(bytes >> 4); }

// Before the first product after other instructions wrote its registers.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Groups the products since the last call.
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kLeft groups, the latest, are running.
template <int kLeft>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// After the wait: the compiler may not read these results before it.
template <int kEights>
__device__ inline void take(float (&sum)[kEights][4]) {
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    asm volatile("" : "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])::"memory");
  }
}

#define OPK_4(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define OPK_16(i) OPK_4(i), OPK_4(i + 1), OPK_4(i + 2), OPK_4(i + 3)
#define OPK_FIRST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define OPK_FIRST_32 OPK_FIRST_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define OPK_WGMMA(columns, type) "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " "
#define OPK_BY_TYPE                                                \
  if constexpr (opk::dtype_of<Element> == opk::DType::float16) {   \
    OPK_PRODUCT("f16");                                            \
  } else {                                                         \
    OPK_PRODUCT("bf16");                                           \
  }

// sum = left * right, or sum += with `add`: 16 columns of left. The columns of the sum are the panel's rows, or its
// columns with kDown: then 16 rows of the panel are multiplied. It runs until wait_for_products.
template <class Element, bool kDown>
__device__ inline void multiply_later(float (&sum)[8][4], const uint32_t (&left)[4], uint64_t right, bool add) {
#define OPK_PRODUCT(type)                                                                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n" OPK_WGMMA("64", type) "{" OPK_FIRST_32           \
               "}, {%32,%33,%34,%35}, %36, add, 1, 1, %38;\n}"                                                 \
               : OPK_16(0), OPK_16(4)                                                                          \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int{add}), "n"(kDown))
  OPK_BY_TYPE
#undef OPK_PRODUCT
}

template <class Element, bool kDown>
__device__ inline void multiply_later(float (&sum)[4][4], const uint32_t (&left)[4], uint64_t right, bool add) {
#define OPK_PRODUCT(type)                                                                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n" OPK_WGMMA("32", type) "{" OPK_FIRST_16           \
               "}, {%16,%17,%18,%19}, %20, add, 1, 1, %22;\n}"                                                 \
               : OPK_16(0)                                                                                     \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(int{add}), "n"(kDown))
  OPK_BY_TYPE
#undef OPK_PRODUCT
}

// The same for a left factor in shared memory: 64 rows of a panel.
template <class Element, bool kDown>
__device__ inline void multiply_later(float (&sum)[8][4], uint64_t left, uint64_t right, bool add) {
#define OPK_PRODUCT(type)                                                                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n" OPK_WGMMA("64", type) "{" OPK_FIRST_32           \
               "}, %32, %33, add, 1, 1, 0, %35;\n}"                                                            \
               : OPK_16(0), OPK_16(4)                                                                          \
               : "l"(left), "l"(right), "r"(int{add}), "n"(kDown))
  OPK_BY_TYPE
#undef OPK_PRODUCT
}

#undef OPK_4
#undef OPK_16
#undef OPK_FIRST_16
#undef OPK_FIRST_32
#undef OPK_WGMMA
#undef OPK_BY_TYPE

#else  // only the declarations are needed

__device__ void make_barrier(uint64_t* barrier, int arrivals);
__device__ void publish_barriers();
__device__ void arrive(uint64_t* barrier);
__device__ void arrive_expecting(uint64_t* barrier, int bytes);
__device__ void wait_for_phase(uint64_t* barrier, uint32_t parity);
__device__ void load_tile(void* to, const TensorMap& map, uint64_t* barrier, int column, int row, int third, int fourth,
                          int fifth = 0);
template <int kWide>
__device__ uint64_t matrix(const void* panel);

#endif  // OPK_WARPGROUPS

// Slots of shared memory that one thread fills and kReaders warps read, in turn: arrival n has slot n % kCount.
// All is found from n, because registers are scarce.
template <int kCount, int kBytes, int kReaders>
struct Slots {
  static constexpr int kAll = kCount * kBytes;
  char* first;
  uint64_t* barriers;  // 2 * kCount

  __device__ void prepare() const {
    for (int i = 0; i < kCount; ++i) {
      make_barrier(barriers + i, 1);
      make_barrier(barriers + kCount + i, kReaders);
    }
  }
  __device__ char* slot(unsigned n) const { return first + n % kCount * kBytes; }
  // Waits until all readers have left the slot. Its copies end the phase of this barrier.
  __device__ uint64_t* fill(unsigned n, int bytes = kBytes) const {
    wait_for_phase(barriers + kCount + n % kCount, n / kCount % 2 ^ 1);
    arrive_expecting(barriers + n % kCount, bytes);
    return barriers + n % kCount;
  }
  __device__ const char* wait(unsigned n) const {
    wait_for_phase(barriers + n % kCount, n / kCount % 2);
    return slot(n);
  }
  __device__ void release(unsigned n) const {
    if (threadIdx.x % 32 == 0) arrive(barriers + kCount + n % kCount);
  }
};

}  // namespace device

// ---- the host ---------------------------------------------------------------------------------------

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

// Maps a tensor of 16-bit elements for copies of boxes. The order is that of load_tile: `sizes` and `strides`,
// in elements, begin with the columns, which lie together. Boxes have `rows` rows of `columns` columns: 64, or 32.
// False for expanded tensors, and if the driver does not take it: for strides that are no multiples of 16 bytes.
inline bool map_tensor(device::TensorMap& out, const void* data, const int64_t (&sizes)[5], const int64_t (&strides)[5],
                       uint32_t columns, uint32_t rows) {
  using Encode = int(void*, int type, uint32_t rank, void* data, const uint64_t* sizes, const uint64_t* bytes,
                     const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill);
  static Encode* const encode = [] {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<Encode*>(driver ? dlsym(driver, "cuTensorMapEncodeTiled") : nullptr);
  }();
  if (!encode) return false;
  for (int i = 0; i < 5; ++i) {
    if (sizes[i] > 1 && strides[i] < 1) return false;  // expanded
  }
  uint64_t counts[5], bytes[5];
  for (int i = 0; i < 5; ++i) {
    counts[i] = static_cast<uint64_t>(sizes[i]);
    bytes[i] = 2 * static_cast<uint64_t>(sizes[i] == 1 ? 8 : strides[i]);  // a dimension of one is never stepped along
  }
  const uint32_t box[5] = {columns, rows, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  enum : int { kTwoBytes = 1, kNone = 0, kSwizzle64 = 2, kSwizzle128 = 3, kPromote128 = 2 };  // of cuda.h
  const int swizzle = rows == 1 ? kNone : columns == 64 ? kSwizzle128 : kSwizzle64;
  return encode(&out, kTwoBytes, 5, const_cast<void*>(data), counts, bytes + 1, box, steps, kNone, swizzle, kPromote128,
                kNone) == 0;
}

OPK_PLAIN_END
#endif

}  // namespace opkiln

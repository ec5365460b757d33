// Warp-wide operations on tensor cores, and asynchronous copies: thin wrappers of instructions of compute
// capability 8.0. The emulator's form of each computes the same from the same registers, so a wrong fragment
// gives wrong numbers there, too.
//
// A fragment is a small matrix that is spread over the registers of a warp. With group = lane / 4 and pair =
// 2 * (lane % 4), a thread holds two neighbours of a row in each register:
//   left, 16 x 16:      row group (+ 8 in registers 1, 3), columns pair, pair + 1 (+ 8 in registers 2, 3)
//   right, 16 x 8:      rows pair, pair + 1 (+ 8 in register 1), column group
//   sum, 16 x 8, float: row group (+ 8 in numbers 2, 3), columns pair and pair + 1
#pragma once

#include "fast_math.h"
#include "sixteen_bytes.h"

namespace opkiln {
namespace device {

#if defined(OPKILN_EMULATED)

namespace emulated {

struct Registers {
  uint32_t at[4];
};

template <class Value>
inline opk::emulator::LaneValues gather_warp(const Value& value) {
  return opk::emulator::gather_values(opk::emulator::Exchange::kShuffle, 0xffffffffu, value);
}

template <class Value>
inline Value lane_value(const opk::emulator::LaneValues& all, int lane) {
  return opk::emulator::value_of<Value>(all, static_cast<unsigned>(lane));
}

}  // namespace emulated

template <class Element>
inline void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  using namespace emulated;
  const auto lefts = gather_warp(Registers{{left[0], left[1], left[2], left[3]}});
  const auto rights = gather_warp(Registers{{right[0], right[1], 0, 0}});
  const int group = static_cast<int>(lefts.lane) / 4, pair = static_cast<int>(lefts.lane) % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2;
      const auto a = lane_value<Registers>(lefts, group * 4 + holder);
      const auto b = lane_value<Registers>(rights, (pair + i % 2) * 4 + holder);
      sum[i] += widen_one<Element>(a.at[i / 2 + k / 8 * 2], k % 2) * widen_one<Element>(b.at[k / 8], k % 2);
    }
  }
}

inline void load_matrices(uint32_t (&out)[4], const void* row) {
  using namespace emulated;
  const auto rows = gather_warp(row);
  const int lane = static_cast<int>(rows.lane);
  for (int i = 0; i < 4; ++i) {
    out[i] = static_cast<const uint32_t*>(lane_value<const void*>(rows, i * 8 + lane / 4))[lane % 4];
  }
}

inline void load_transposed(uint32_t (&out)[4], const void* row) {
  using namespace emulated;
  const auto rows = gather_warp(row);
  const int lane = static_cast<int>(rows.lane), first = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const auto at = [&](int which) -> uint32_t {
      return static_cast<const uint16_t*>(lane_value<const void*>(rows, i * 8 + first + which))[lane / 4];
    };
    out[i] = at(0) | at(1) << 16;
  }
}

inline uint32_t transpose(uint32_t value) {
  using namespace emulated;
  const auto all = gather_warp(value);
  const int row = static_cast<int>(all.lane) % 4 * 2, column = static_cast<int>(all.lane) / 4;
  const auto at = [&](int which) {
    return lane_value<uint32_t>(all, (row + which) * 4 + column / 2) >> (16 * (column % 2)) & 0xffffu;
  };
  return at(0) | at(1) << 16;
}

inline void copy_later(uint4* to, const void* from, bool there) {
  *to = there ? *static_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
}
inline void end_batch() {}
template <int kLeft>
inline void wait_for_batches() {}

#elif defined(__CUDA_ARCH__)

// sum += left * right.
template <class Element>
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  if constexpr (opk::dtype_of<Element> == opk::DType::float16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  }
}

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads four 8 x 8 matrices from shared memory, one register each. Lanes 0 to 7 give the row addresses of the
// first, lanes 8 to 15 those of the second, and so on. A row has 16 bytes.
__device__ inline void load_matrices(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, with each matrix transposed.
__device__ inline void load_transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// Transposes an 8 x 8 matrix in the registers of the warp.
__device__ inline uint32_t transpose(uint32_t value) {
  uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(value));
  return out;
}

// Starts an asynchronous copy of 16 bytes to shared memory. If
// `there` is false it writes zeros and reads nothing.
__device__ inline void copy_later(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// Groups the copies that this thread started since the last call into one batch, which may be empty.
__device__ inline void end_batch() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kLeft batches of this thread, the latest, are in flight. Copies by other threads are
// visible after a barrier that follows.
template <int kLeft>
__device__ inline void wait_for_batches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

#else  // the host compiler's pass: only the declarations are needed

template <class Element>
__device__ void multiply_add(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]);
__device__ void load_matrices(uint32_t (&out)[4], const void* row);
__device__ void load_transposed(uint32_t (&out)[4], const void* row);
__device__ uint32_t transpose(uint32_t value);
__device__ void copy_later(uint4* to, const void* from, bool there);
__device__ void end_batch();
template <int kLeft>
__device__ void wait_for_batches();

#endif

}  // namespace device
}  // namespace opkiln

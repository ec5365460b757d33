// The emulator's runtime (runtime.cpp), as kernels and launches call it. Everything is hidden: each library
// has an emulator of its own, whatever else the process has loaded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

// Functions that kernels call are inlined, so that reports name the kernel's own line.
#define OPKILN_INLINE __attribute__((always_inline)) inline

#pragma GCC visibility push(hidden)

// A kernel's built-in variables. The scheduler sets them when it switches threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace opk {
namespace emulator {

constexpr unsigned kWarp = 32;
constexpr std::size_t kMostShared = 227 * 1024;  // per block, static and dynamic: an H100's limit

struct Grid {
  dim3 blocks, threads;
  std::size_t shared;  // bytes of dynamic shared memory
  bool cooperative;
  bool overlap;  // every thread must call opk::wait_for_previous()
  dim3 cluster;
  const void* kernel;
};

// Calls `body(call)` as every thread of every block. Throws a std::runtime_error that describes a fault of
// the kernel or of the launch. `call` is `call_bytes` long and holds the arguments; threads may read it.
void run(const Grid& grid, void (*body)(const void*), const void* call, std::size_t call_bytes);

// Registers a tensor's memory, which kernels launched from this thread may touch. Once one tensor is known,
// accesses to other memory are reported. Two threads may access neighbouring units of `element` bytes.
void add_tensor(const void* begin, std::size_t bytes, std::size_t element);

// The scope of a call of an op. The outermost call forgets the tensors of earlier
// calls. An op that it calls in the same library adds to its tensors.
struct OpCall {
  OpCall();
  ~OpCall();
};

// The dynamic shared memory of the block.
void* dynamic_shared();

// Barriers. Each returns what CUDA's function of that name returns.
enum class Vote { kNone, kCount, kAnd, kOr };
int sync_block(bool predicate, Vote vote);
void sync_grid();
void sync_warp(unsigned mask);
void wait_for_previous();

// The values that the threads of a warp exchange: one for each lane in `present`.
constexpr std::size_t kLargestValue = 16;
struct LaneValues {
  unsigned lane;     // of the calling thread
  unsigned present;  // lanes of the mask that have not ended
  alignas(16) unsigned char value[kWarp][kLargestValue];
};
enum class Exchange { kShuffle, kVote, kMatch, kReduce };
const char* name_of(Exchange kind);
void gather(Exchange kind, unsigned mask, const void* value, std::size_t size, LaneValues& out);
unsigned active_mask();

// Announces an atomic operation on this memory.
void before_atomic(const void* address, std::size_t size);
void fence();

// Ends the launch with this report.
[[noreturn]] void stop(const char* what, const char* why = nullptr);

}  // namespace emulator
}  // namespace opk

#pragma GCC visibility pop

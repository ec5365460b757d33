// What kernels and launches ask of the emulator's runtime (runtime.cpp). Everything is hidden: each
// library has an emulator of its own, whatever else the process has loaded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vectors.h"

// What a kernel calls is inlined into it, so that a report names the kernel's line.
#define OPKILN_INLINE __attribute__((always_inline)) inline

#pragma GCC visibility push(hidden)

// What a kernel reads of itself. The scheduler sets them whenever it changes threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace opk {
namespace emulator {

constexpr unsigned kWarp = 32;
constexpr std::size_t kMostShared = 227 * 1024;  // of a block, static and dynamic: an H100's

struct Grid {
  dim3 blocks, threads;
  std::size_t shared;  // bytes of dynamic shared memory
  bool cooperative;
  bool overlap;  // every thread must wait for the kernel before this one
  dim3 cluster;
  const void* kernel;
};

// Calls `body(call)` as every thread of every block. Throws a std::runtime_error that says what is
// wrong with the kernel, or with the launch.
// `call` and the bytes after it are the arguments, which threads may read.
void run(const Grid& grid, void (*body)(const void*), const void* call, std::size_t call_bytes);

// Tells of memory that the kernels of this thread may touch: a tensor's. Accesses to other memory are
// reported as soon as one tensor is known. `element` is the size of what threads share without a race.
void add_tensor(const void* begin, std::size_t bytes, std::size_t element);

// A call of an op: the tensors of the calls before it are forgotten. An op that the call makes, in the
// same library, adds to the tensors of its caller.
struct OpCall {
  OpCall();
  ~OpCall();
};

// The dynamic shared memory of the block.
void* dynamic_shared();

// Barriers. Each returns what its CUDA name returns.
enum class Vote { kNone, kCount, kAnd, kOr };
int sync_block(bool predicate, Vote vote);
void sync_grid();
void sync_warp(unsigned mask);
void wait_for_previous();

// What the threads of a warp exchange: the value of each lane in `present`.
constexpr std::size_t kLargestValue = 16;
struct Gathered {
  unsigned lane;     // of the thread that asks
  unsigned present;  // lanes that are in the mask and have not ended
  alignas(16) unsigned char value[kWarp][kLargestValue];
};
enum class Exchange { kShuffle, kVote, kMatch, kReduce };
const char* name_of(Exchange kind);
void gather(Exchange kind, unsigned mask, const void* value, std::size_t size, Gathered& out);
unsigned active_mask();

// An atomic operation on this memory comes next.
void before_atomic(const void* address, std::size_t size);
void fence();

// Ends the launch with this report.
[[noreturn]] void stop(const char* what, const char* why = nullptr);

}  // namespace emulator
}  // namespace opk

#pragma GCC visibility pop

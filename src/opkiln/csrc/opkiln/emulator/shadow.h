// Records who accessed which memory since the last barrier. Two accesses to the same bytes by two threads are
// a race if at least one is a write, not both are atomic, and nothing orders them: no barrier of the block,
// no __syncwarp, no atomics on one address. Included by runtime.cpp only.
//
// Time is divided into phases. A barrier of a block begins a new phase, and each phase has
// its own number in a launch. Accesses of one block in different phases are ordered. Within
// a phase each thread has a vector clock (Lamport, Mattern): its own time, and what it
// knows of the other threads' times. __syncwarp and atomics update it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace opk {
namespace emulator {

struct Access {
  uint32_t phase = 0;  // 0: no access yet
  uint32_t clock = 0;
  uint32_t where = 0;  // the instruction, as an offset in the library
  uint16_t thread = 0;
  bool atomic = false;
};

// Two readers are enough: a writer differs from at least one of them.
struct Cell {
  Access write, read[2];
};

// The vector clocks of a block's threads in the current phase.
class Clocks {
 public:
  void begin(unsigned threads) {
    threads_ = threads;
    own_.assign(threads, 1);
    known_.assign(threads, {});
    released_.clear();
  }

  void begin_phase() {
    for (unsigned i = 0; i < threads_; ++i) {
      own_[i] = 1;
      known_[i].clear();
    }
    released_.clear();
  }

  uint32_t now(unsigned thread) const {
    return own_[thread];
  }

  // Whether what `other` did at this time happened before the current action of `thread`.
  bool knows(unsigned thread, unsigned other, uint32_t clock) const {
    return thread == other || (!known_[thread].empty() && known_[thread][other] >= clock);
  }

  // __syncwarp: merges the clocks of these threads.
  void meet(const std::vector<unsigned>& threads) {
    std::vector<uint32_t> all(threads_, 0);
    for (const unsigned thread : threads) {
      join(all, known_[thread]);
      all[thread] = own_[thread];
    }
    for (const unsigned thread : threads) {
      known_[thread] = all;
      ++own_[thread];
    }
  }

  // An atomic orders the threads that use this address, as a lock does.
  void acquire_and_release(unsigned thread, uintptr_t address) {
    std::vector<uint32_t>& released = released_[address];
    if (known_[thread].empty()) {
      known_[thread].assign(threads_, 0);
    }
    if (!released.empty()) {
      join(known_[thread], released);
    }
    known_[thread][thread] = own_[thread]++;
    released = known_[thread];
  }

 private:
  static void join(std::vector<uint32_t>& all, const std::vector<uint32_t>& more) {
    for (std::size_t i = 0; i < more.size(); ++i) {
      all[i] = all[i] < more[i] ? more[i] : all[i];
    }
  }

  unsigned threads_ = 0;
  std::vector<uint32_t> own_;
  std::vector<std::vector<uint32_t>> known_;
  std::unordered_map<uintptr_t, std::vector<uint32_t>> released_;
};

// The cells of one piece of memory, allocated on first use.
class Shadow {
 public:
  Shadow(uintptr_t begin, std::size_t bytes, std::size_t granule)
      : begin_(begin), bytes_(bytes), granule_(granule) {}

  bool watches(uintptr_t address, std::size_t size) const {
    const uintptr_t offset = address - begin_;
    return bytes_ > 0 && offset % granule_ == 0 && size % granule_ == 0;
  }

  Cell* cells(uintptr_t address) {
    if (cells_.empty()) {
      cells_.resize((bytes_ + granule_ - 1) / granule_);
    }
    return &cells_[(address - begin_) / granule_];
  }

  std::size_t granule() const {
    return granule_;
  }

  void clear() {
    cells_.clear();
  }

 private:
  uintptr_t begin_;
  std::size_t bytes_, granule_;
  std::vector<Cell> cells_;
};

// Records an access in a cell. Returns an access that it races with, or null.
// `ordered(access)` says whether an earlier access happened before this one.
template <class Ordered>
const Access* note(Cell& cell, const Access& now, bool writes, const Ordered& ordered) {
  const Access& wrote = cell.write;
  // Atomics on one address are ordered among themselves, so the last one stands for all of them.
  if (wrote.phase != 0 && !(wrote.atomic && now.atomic) && !ordered(wrote)) {
    return &wrote;
  }
  if (!writes) {
    for (Access& read : cell.read) {
      const bool own = read.phase == now.phase && read.thread == now.thread;
      if (read.phase == 0 || own || ordered(read)) {
        read = now;
        return nullptr;
      }
    }
    // Two threads have read it already. A reader from another warp than theirs makes more writes visible.
    if (cell.read[0].thread / 32 == cell.read[1].thread / 32) {
      cell.read[1] = now;
    }
    return nullptr;
  }
  for (const Access& read : cell.read) {
    if (read.phase != 0 && !(read.atomic && now.atomic) && !ordered(read)) {
      return &read;
    }
  }
  cell.write = now;
  cell.read[0] = cell.read[1] = Access{};
  return nullptr;
}

}  // namespace emulator
}  // namespace opk

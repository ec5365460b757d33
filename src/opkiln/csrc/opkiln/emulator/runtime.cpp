// The emulator's runtime. A block's threads are fibers of the launching thread. They switch at barriers and
// at exchanges within a warp. Blocks run one after the other, or interleaved in a cooperative launch, so that
// they can wait for each other. This file is compiled without instrumentation; kernels are compiled with
// g++'s -fsanitize=thread, whose calls go to hooks.h instead of libtsan.

#include "runtime.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_set>

#include "memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace opk {
namespace emulator {
class Launch;
}
}  // namespace opk

// The launch that this thread runs. Image::kMark names this variable.
extern "C" __attribute__((visibility("hidden"))) __thread opk::emulator::Launch*
    opkiln_emulator_launch;
__thread opk::emulator::Launch* opkiln_emulator_launch = nullptr;

// The number of launches, for tests.
extern "C" {
__attribute__((visibility("default"))) uint64_t opkiln_emulator_launches = 0;
}

namespace opk {
namespace emulator {

namespace {

constexpr std::size_t kStack = 256 * 1024;
constexpr std::size_t kPage = 64 * 1024;  // the largest page size of a supported machine
constexpr unsigned kMostCooperating = 16384;  // threads that may exist at once
constexpr unsigned kSpinsBeforeOthersRun = 1000;
constexpr unsigned kSpinsInVain = 2000;

enum class State : uint8_t { kNew, kReady, kRunning, kAtBarrier, kAtGrid, kInWarp, kAsksWhoIsActive, kEnded };

struct Fiber {
  ucontext_t context;
  char* stack;
};

// A rendezvous of threads of a warp.
struct Meeting {
  unsigned mask;
  int kind;  // an Exchange, or -1 for __syncwarp
  unsigned arrived = 0;
  unsigned left = 0;
  bool complete = false;
  unsigned char value[kWarp][kLargestValue];
};

struct Thread {
  Fiber* fiber = nullptr;
  State state = State::kNew;
  const void* where = nullptr;  // the instruction where it waits
  Meeting* meeting = nullptr;
  unsigned active = 0;
  bool waited = false;  // it has called opk::wait_for_previous()
};

struct Warp {
  unsigned live = 0;  // lanes that have not ended
  std::vector<std::unique_ptr<Meeting>> meetings;
};

struct Block {
  uint3 index;
  unsigned number = 0;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Clocks clocks;
  unsigned started = 0, ended = 0, at_barrier = 0, at_grid = 0;
  int count = 0, result = 0;  // predicates that were true at the barrier
  const void *barrier = nullptr, *other_barrier = nullptr;
  uint32_t phase = 0;
  bool synchronised = false;     // it used atomics, fences or volatile accesses to tensors
  std::vector<char> shared;  // a copy of its shared memory while another block runs
};

std::string triple(const uint3& v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

Memory memory;
std::mutex launching;

const Image& image() {
  static const Image image;
  return image;
}

std::string line_of(const void* code) {
  // A return address points behind the call.
  return image().line(image().offset_of(code) - 1);
}

}  // namespace

class __attribute__((visibility("hidden"))) Launch {
 public:
  Launch(const Grid& grid, void (*body)(const void*), const void* call, std::size_t call_bytes)
      : grid_(grid),
        body_(body),
        call_(call),
        call_bytes_(call_bytes),
        threads_(grid.threads.x * grid.threads.y * grid.threads.z) {}

  ~Launch() {
    if (stacks_ != nullptr) {
      munmap(stacks_, stack_count_ * (kStack + kPage));
    }
  }

  void run() {
    const uint64_t blocks = uint64_t{grid_.blocks.x} * grid_.blocks.y * grid_.blocks.z;
    memory.prepare(image(), &opkiln_emulator_launch, grid_.shared);
    blockDim = grid_.threads;
    gridDim = grid_.blocks;
    if (grid_.cooperative) {
      run_together(static_cast<unsigned>(blocks));
      return;
    }
    reserve_stacks(threads_);
    Block block;
    for (uint64_t i = 0; i < blocks && !failed(); ++i) {
      begin(block, static_cast<unsigned>(i));
      memory.poison_shared();
      advance(block);
      if (!failed() && block.ended < threads_) {
        fail_stalled(block);
      }
    }
  }

  bool failed() const {
    return !report_.empty();
  }
  const std::string& report() const {
    return report_;
  }

  // Ends the launch from within a thread. Waiting fibers are not resumed.
  [[noreturn]] void fail(const std::string& what, const std::string& more) {
    const uint3 thread = index_of(current_);
    report_ = "emulator: " + what + "\n  kernel: " + image().function(grid_.kernel) +
        "\n  block: " + triple(block_->index) + "\n  thread: " + triple(thread) + more;
    leave();
  }

  int sync_block(bool predicate, Vote vote, const void* where) {
    Block& block = *block_;
    block.count += predicate;
    if (block.barrier == nullptr) {
      block.barrier = where;
    } else if (where != block.barrier) {
      block.other_barrier = where;
    }
    if (++block.at_barrier == threads_) {
      check_same_barrier(block);
      block.result = block.count;
      block.count = 0;
      block.at_barrier = 0;
      block.barrier = block.other_barrier = nullptr;
      begin_phase(block);
      release(block, State::kAtBarrier);
    } else {
      wait(State::kAtBarrier, where);
    }
    switch (vote) {
      case Vote::kAnd:
        return block.result == static_cast<int>(threads_);
      case Vote::kOr:
        return block.result != 0;
      default:
        return block.result;
    }
  }

  void sync_grid(const void* where) {
    if (!grid_.cooperative) {
      fail("a grid barrier in a launch that is not cooperative", at(where) +
           "\nhint: opk::launch(kernel, opk::Launch{.grid = ..., .cooperative = true}, ...)");
    }
    ++block_->at_grid;
    if (++at_grid_ == threads_ * blocks_.size()) {
      at_grid_ = 0;
      for (Block& each : blocks_) {
        each.at_grid = 0;
        begin_phase(each);
        release(each, State::kAtGrid);
      }
      grid_floor_ = blocks_.front().phase;
    } else {
      wait(State::kAtGrid, where);
    }
  }

  // Waits for the other threads in the mask. `kind` is -1 for __syncwarp.
  void meet(int kind, unsigned mask, const void* value, std::size_t size, LaneValues* out,
            const void* where) {
    const unsigned lane = current_ % kWarp;
    Warp& warp = block_->warps[current_ / kWarp];
    const std::string name = kind < 0 ? "__syncwarp()" : name_of(static_cast<Exchange>(kind));
    if ((mask >> lane & 1) == 0) {
      fail(name + " with a mask that leaves out the thread itself",
           at(where) + "\n  lane: " + std::to_string(lane) + ", mask: " + hex(mask));
    }
    Meeting* meeting = nullptr;
    for (const auto& each : warp.meetings) {
      if (!each->complete && each->mask == mask && (each->arrived >> lane & 1) == 0) {
        meeting = each.get();
        break;
      }
    }
    if (meeting == nullptr) {
      warp.meetings.push_back(std::make_unique<Meeting>());
      meeting = warp.meetings.back().get();
      meeting->mask = mask;
      meeting->kind = kind;
    } else if (meeting->kind != kind) {
      const std::string other =
          meeting->kind < 0 ? "__syncwarp()" : name_of(static_cast<Exchange>(meeting->kind));
      fail("the threads of a warp are at different operations",
           at(where) + "\n  this thread: " + name + "\n  others in the mask: " + other);
    }
    std::memcpy(meeting->value[lane], value, size);
    meeting->arrived |= 1u << lane;
    Thread& thread = block_->threads[current_];
    thread.meeting = meeting;
    settle(*block_, current_ / kWarp);
    if (!meeting->complete) {
      wait(State::kInWarp, where);
    }
    if (out != nullptr) {
      out->lane = lane;
      out->present = meeting->arrived;
      std::memcpy(out->value, meeting->value, sizeof out->value);
    }
    thread.meeting = nullptr;
    meeting->left |= 1u << lane;
    if (meeting->left == meeting->arrived) {
      auto& all = warp.meetings;
      all.erase(std::find_if(all.begin(), all.end(), [&](auto& m) { return m.get() == meeting; }));
    }
  }

  // Waits until no thread can run any more. Then the active threads
  // are those that wait here at the same place.
  unsigned active_mask(const void* where) {
    wait(State::kAsksWhoIsActive, where);
    return block_->threads[current_].active;
  }

  void fence() {
    block_->synchronised = true;
  }

  void wait_for_previous() {
    block_->threads[current_].waited = true;
  }

  void atomic(uintptr_t address, std::size_t size, const void* where) {
    if (address % size != 0) {
      fail("an atomic at an address that is not aligned", at(where));
    }
    access(address, size, true, true, where);
    block_->clocks.acquire_and_release(current_, address);
    const Piece* const piece = memory.find(address, size);
    if (piece == nullptr || piece->place != Place::kShared) {
      block_->synchronised = true;
    }
    spin(where);
  }

  // Volatile accesses to tensors count as synchronization, because blocks report progress to
  // each other that way. In shared memory, volatile orders nothing.
  void volatile_access(uintptr_t address, std::size_t size, bool writes, const void* where) {
    const Piece* const piece = memory.find(address, size);
    const bool shared = piece != nullptr && piece->place == Place::kShared;
    access(address, size, writes, !shared, where);
    if (!shared && !is_private(address)) {
      block_->synchronised = true;
    }
    if (!writes) {
      spin(where);
    }
  }

  // Called before each load and store in a kernel.
  void access(uintptr_t address, std::size_t size, bool writes, bool atomic, const void* where) {
    if (is_private(address)) {
      return;
    }
    Piece* const piece = memory.find(address, size);
    if (piece == nullptr) {
      check_outside(address, size, writes, where);
      return;
    }
    if (grid_.overlap && piece->place != Place::kShared && !block_->threads[current_].waited) {
      fail("memory is touched before opk::wait_for_previous()",
           at(where) + "\n  memory: " + place_of(*piece, address) +
               "\n  why: the kernel is launched with .overlap, so the one before it may still run" +
               "\nhint: opk::wait_for_previous();    // the first line of the kernel");
    }
    if (!piece->shadow.watches(address, size)) {
      return;
    }
    Access now;
    now.phase = block_->phase;
    now.clock = block_->clocks.now(current_);
    now.where = static_cast<uint32_t>(image().offset_of(where));
    now.thread = static_cast<uint16_t>(current_);
    now.atomic = atomic;
    const bool shared = piece->place == Place::kShared;
    const auto ordered = [&](const Access& earlier) { return is_ordered(earlier, shared); };
    Cell* cell = piece->shadow.cells(address);
    for (std::size_t i = 0; i < size; i += piece->shadow.granule(), ++cell) {
      // Recorded like an atomic access, but a volatile read does not write.
      if (const Access* const other = note(*cell, now, writes, ordered)) {
        const bool wrote = other == &cell->write;
        fail_race(*piece, address + i, size, *other, wrote, writes, where);
      }
    }
  }

  // Called when a function is entered. The first time, its shared variables begin to exist.
  void enter_function(const void* inside) {
    if (entered_.insert(inside).second) {
      if (const char* const function = image().symbol(inside)) {
        memory.enter(function);
      }
    }
  }

  void fail_out_of_array(const char* index, const char* type, const char* file, unsigned line) {
    fail(std::string("index ") + index + " is outside of an array of type " + type,
         std::string("\n  line: ") + file + ":" + std::to_string(line));
  }

  void fail_misaligned(uintptr_t address, std::size_t alignment, const char* type, const char* file,
                  unsigned line) {
    const Piece* const piece = memory.find_before(address);
    const bool inside = piece != nullptr && address < piece->end;
    fail(std::string("an access to ") + type + " at an address that is not aligned to " +
             std::to_string(alignment) + " bytes",
         std::string("\n  line: ") + file + ":" + std::to_string(line) +
             (inside ? "\n  memory: " + place_of(*piece, address) : "") +
             "\n  why: a GPU faults here");
  }

  static std::string at(const void* where) {
    return "\n  line: " + line_of(where);
  }

 private:
  static std::string hex(unsigned value) {
    char text[16];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
  }

  uint3 index_of(unsigned thread) const {
    const dim3& shape = grid_.threads;
    return {thread % shape.x, thread / shape.x % shape.y, thread / shape.x / shape.y};
  }

  // Allocates the stacks in a row, with an inaccessible page below each.
  void reserve_stacks(std::size_t count) {
    stack_count_ = count;
    void* const all = mmap(nullptr, count * (kStack + kPage), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) {
      throw std::runtime_error("emulator: no memory for the stacks of " + std::to_string(count) +
                               " threads");
    }
    stacks_ = static_cast<char*>(all);
  }

  Fiber* take_fiber() {
    if (!free_.empty()) {
      Fiber* const fiber = free_.back();
      free_.pop_back();
      return fiber;
    }
    char* const stack = stacks_ + fibers_.size() * (kStack + kPage) + kPage;
    if (mprotect(stack, kStack, PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("emulator: no memory for a thread's stack");
    }
    fibers_.push_back(std::make_unique<Fiber>());
    fibers_.back()->stack = stack;
    return fibers_.back().get();
  }

  void begin(Block& block, unsigned number) {
    const dim3& grid = grid_.blocks;
    block.number = number;
    block.index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    block.threads.assign(threads_, Thread{});
    block.warps = std::vector<Warp>((threads_ + kWarp - 1) / kWarp);
    for (unsigned i = 0; i < threads_; ++i) {
      block.warps[i / kWarp].live |= 1u << i % kWarp;
    }
    block.clocks.begin(threads_);
    block.started = block.ended = 0;
    block.synchronised = false;
    begin_phase(block);
  }

  void begin_phase(Block& block) {
    block.phase = static_cast<uint32_t>(phase_block_.size());
    phase_block_.push_back(block.number);
    block.clocks.begin_phase();
    spins_in_vain_ = 0;
  }

  // Runs the block's threads until none can run. In a cooperative launch, each thread gets one turn.
  bool advance(Block& block) {
    bool ever = false;
    for (;;) {
      bool moved = false;
      for (unsigned i = 0; i < block.started && !failed(); ++i) {
        if (block.threads[i].state == State::kReady) {
          moved = true;
          resume(block, i);
        }
      }
      while (block.started < threads_ && !failed()) {
        moved = true;
        start(block);
      }
      ever = ever || moved;
      if (failed() || block.ended == threads_) {
        return ever;
      }
      if (!moved && !settle_active(block)) {
        return ever;
      }
      if (grid_.cooperative) {
        return true;
      }
    }
  }

  void run_together(unsigned blocks) {
    if (uint64_t{blocks} * threads_ > kMostCooperating) {
      throw std::runtime_error(
          "emulator: a cooperative launch of " + std::to_string(uint64_t{blocks} * threads_) +
          " threads\n  why: they exist all at once, and the emulator has room for " +
          std::to_string(kMostCooperating) + "\nhint: launch fewer blocks when emulated");
    }
    reserve_stacks(std::size_t{blocks} * threads_);
    blocks_ = std::vector<Block>(blocks);
    for (unsigned i = 0; i < blocks; ++i) {
      begin(blocks_[i], i);
      memory.poison_shared();
      memory.save_shared(blocks_[i].shared);
    }
    for (unsigned left = blocks; left > 0;) {
      bool moved = false;
      left = 0;
      for (Block& block : blocks_) {
        if (block.ended < threads_) {
          memory.restore_shared(block.shared);
          moved = advance(block) || moved;
          if (failed()) {
            return;
          }
          memory.save_shared(block.shared);
          left += block.ended < threads_;
        }
      }
      if (!moved && left > 0) {
        for (Block& block : blocks_) {
          if (block.ended < threads_) {
            return fail_stalled(block);
          }
        }
      }
    }
  }

  // Fibers

  // A fiber runs one thread after the other until one has to wait. Most kernels need one fiber.
  void start(Block& block) {
    Fiber* const fiber = take_fiber();
    getcontext(&fiber->context);
    fiber->context.uc_stack = {};
    fiber->context.uc_stack.ss_sp = fiber->stack;
    fiber->context.uc_stack.ss_size = kStack;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, &Launch::enter, 0);
    enter_block(block);
    fiber_ = fiber;
    swapcontext(&scheduler_, &fiber->context);
  }

  static void enter() {
    opkiln_emulator_launch->run_threads();
  }

  void run_threads() {
    Fiber* const fiber = fiber_;
    while (block_->started < threads_) {
      const unsigned i = block_->started++;
      become(i);
      Thread& thread = block_->threads[i];
      thread.fiber = fiber;
      try {
        body_(call_);
      } catch (const std::exception& error) {
        fail(std::string("an exception in a kernel: ") + error.what(), "");
      }
      Thread& self = block_->threads[current_];
      self.state = State::kEnded;
      ++block_->ended;
      spins_in_vain_ = 0;
      block_->warps[current_ / kWarp].live &= ~(1u << current_ % kWarp);
      settle(*block_, current_ / kWarp);
    }
    free_.push_back(fiber);
    leave();
  }

  void resume(Block& block, unsigned i) {
    enter_block(block);
    become(i);
    fiber_ = block.threads[i].fiber;
    swapcontext(&scheduler_, &fiber_->context);
  }

  void enter_block(Block& block) {
    block_ = &block;
    blockIdx = block.index;
  }

  void become(unsigned i) {
    current_ = i;
    threadIdx = index_of(i);
    block_->threads[i].state = State::kRunning;
    spins_ = 0;
  }

  void wait(State state, const void* where) {
    Thread& thread = block_->threads[current_];
    thread.state = state;
    thread.where = where;
    swapcontext(&thread.fiber->context, &scheduler_);
  }

  [[noreturn]] void leave() {
    setcontext(&scheduler_);
    __builtin_unreachable();
  }

  // Called in loops that poll. After many turns, the other threads run.
  void spin(const void* where) {
    if (++spins_ < kSpinsBeforeOthersRun) {
      return;
    }
    if (++spins_in_vain_ > kSpinsInVain) {
      fail("a thread waits in a loop for something that never comes",
           at(where) +
               "\n  why: no other thread that exists can move. Blocks of a launch that is not "
               "cooperative run one after the other.");
    }
    wait(State::kReady, where);
  }

  void release(Block& block, State state) {
    for (Thread& thread : block.threads) {
      if (thread.state == state) {
        thread.state = State::kReady;
      }
    }
  }

  // Completes the meetings of a warp whose threads have all arrived. Ended threads do not count.
  void settle(Block& block, unsigned warp) {
    for (const auto& meeting : block.warps[warp].meetings) {
      if (meeting->complete || (meeting->mask & block.warps[warp].live & ~meeting->arrived) != 0) {
        continue;
      }
      meeting->complete = true;
      spins_in_vain_ = 0;
      std::vector<unsigned> met;
      for (unsigned lane = 0; lane < kWarp; ++lane) {
        if ((meeting->arrived >> lane & 1) != 0) {
          const unsigned i = warp * kWarp + lane;
          met.push_back(i);
          if (block.threads[i].state == State::kInWarp &&
              block.threads[i].meeting == meeting.get()) {
            block.threads[i].state = State::kReady;
          }
        }
      }
      if (meeting->kind < 0) {  // only __syncwarp orders memory
        block.clocks.meet(met);
      }
    }
  }

  bool settle_active(Block& block) {
    bool found = false;
    for (unsigned first = 0; first < threads_; first += kWarp) {
      const void* where = nullptr;
      unsigned mask = 0;
      const unsigned end = std::min(first + kWarp, threads_);
      for (int pass = 0; pass < 2; ++pass) {
        for (unsigned i = first; i < end; ++i) {
          Thread& thread = block.threads[i];
          if (thread.state != State::kAsksWhoIsActive) {
            continue;
          }
          if (where == nullptr) {
            where = thread.where;
          }
          if (thread.where != where) {
            continue;
          }
          if (pass == 0) {
            mask |= 1u << (i - first);
          } else {
            thread.active = mask;
            thread.state = State::kReady;
            found = true;
          }
        }
      }
    }
    return found;
  }

  // Checks

  bool is_private(uintptr_t address) const {
    return address - reinterpret_cast<uintptr_t>(stacks_) < stack_count_ * (kStack + kPage) ||
        address - reinterpret_cast<uintptr_t>(call_) < call_bytes_;
  }

  bool is_ordered(const Access& earlier, bool shared) const {
    if (earlier.phase == 0) {
      return true;
    }
    if (earlier.phase == block_->phase) {
      return block_->clocks.knows(current_, earlier.thread, earlier.clock);
    }
    const bool same_block = phase_block_[earlier.phase] == block_->number;
    return same_block || shared || earlier.phase < grid_floor_ || block_->synchronised;
  }

  static std::string offset_in(const Piece& piece, uintptr_t address) {
    return "byte " + std::to_string(address - piece.begin) + " of " +
        std::to_string(piece.end - piece.begin);
  }

  std::string place_of(const Piece& piece, uintptr_t address) const {
    return piece.name + ", " + offset_in(piece, address);
  }

  // Handles an access outside of every tensor and shared variable.
  void check_outside(uintptr_t address, std::size_t size, bool writes, const void* where) {
    const std::string what =
        std::string(writes ? "writes " : "reads ") + std::to_string(size) + " bytes";
    const auto arena = reinterpret_cast<uintptr_t>(dynamic_arena);
    if (memory.is_shared(address)) {
      const Piece* const near = memory.find_before(address);
      std::string memory_line = "\n  memory: outside of every shared variable";
      if (near != nullptr && near->place == Place::kShared) {
        const std::size_t bytes = near->end - near->begin;
        memory_line = "\n  memory: " + near->name + ", which has " + std::to_string(bytes) +
            " bytes; this is at byte " + std::to_string(address - near->begin);
      }
      const bool dynamic = address - arena < sizeof dynamic_arena;
      fail(what + " outside of shared memory",
           at(where) + memory_line +
               (dynamic ? "\nhint: the bytes of dynamic shared memory are an argument of the launch"
                        : ""));
    }
    if (image().holds(address)) {
      return;  // constants, and other variables of the library
    }
    if (address < 65536) {
      fail(what + " through a null pointer", at(where));
    }
    if (!memory.knows_tensors()) {
      return;
    }
    const Piece* const below = memory.find_before(address);
    const Piece* const above = memory.find_after(address);
    std::string told = "\n  memory: no tensor of this call is near this address";
    constexpr uintptr_t kNear = 1 << 20;
    const bool past = below != nullptr && below->place == Place::kTensor && address - below->begin < below->end - below->begin + kNear;
    const bool ahead = above != nullptr && above->place == Place::kTensor && above->begin - address < kNear;
    if (past && (!ahead || address - below->end <= above->begin - address)) {
      told = "\n  memory: " + below->name + "; this is at byte " +
          std::to_string(address - below->begin);
    } else if (ahead) {
      told = "\n  memory: " + above->name + "; this is " + std::to_string(above->begin - address) +
          " bytes before it";
    }
    fail(what + " outside of every tensor", at(where) + told);
  }

  [[noreturn]] void fail_race(const Piece& piece, uintptr_t address, std::size_t size,
                              const Access& other, bool other_wrote, bool writes, const void* where) {
    const bool shared = piece.place == Place::kShared;
    const unsigned other_block = phase_block_[other.phase];
    const bool same_block = other_block == block_->number;
    const dim3& grid = grid_.blocks;
    const uint3 other_index{other_block % grid.x, other_block / grid.x % grid.y,
                            other_block / grid.x / grid.y};
    const auto describe_access = [](bool wrote, bool atomic) {
      return std::string(atomic ? "uses it atomically" : wrote ? "writes" : "reads");
    };
    std::string more = "\n  memory: " + place_of(piece, address);
    more += "\n  first: thread " + triple(index_of(other.thread)) +
        (same_block ? "" : " of block " + triple(other_index)) + " " +
        describe_access(other_wrote, other.atomic) + ", " + image().line(other.where - 1);
    more += "\n  then: thread " + triple(index_of(current_)) +
        (same_block ? "" : " of block " + triple(block_->index)) + " " + describe_access(writes, false) + " " +
        std::to_string(size) + " bytes, " + line_of(where);
    more += same_block ? "\n  why: no barrier is between the two, so either may come first"
                       : "\n  why: blocks run in any order";
    more += same_block ? "\nhint: __syncthreads() between the two lines"
                       : "\nhint: use an atomic, or let each block write its own elements";
    fail(std::string("a race in ") + (shared ? "shared memory" : "a tensor"), more);
  }

  void check_same_barrier(const Block& block) {
    if (block.other_barrier == nullptr) {
      return;
    }
    const std::string one = line_of(block.barrier), two = line_of(block.other_barrier);
    if (one != two) {
      fail("threads of a block wait at different barriers",
           "\n  some: " + one + "\n  others: " + two +
               "\n  why: CUDA allows __syncthreads() only where all threads of a block reach the "
               "same one");
    }
  }

  // Reports that no thread of the block can run.
  void fail_stalled(const Block& block) {
    struct Group {
      std::string what;
      unsigned count;
      unsigned first;
    };
    std::vector<Group> groups;
    for (unsigned i = 0; i < threads_; ++i) {
      const Thread& thread = block.threads[i];
      std::string what;
      switch (thread.state) {
        case State::kEnded:
          what = "ended";
          break;
        case State::kAtBarrier:
          what = "wait at __syncthreads(), " + line_of(thread.where);
          break;
        case State::kAtGrid:
          what = "wait for all blocks, " + line_of(thread.where);
          break;
        default: {
          const Meeting* const meeting = thread.meeting;
          const bool sync = meeting == nullptr || meeting->kind < 0;
          what = std::string("wait at ") +
              (sync ? "__syncwarp()" : name_of(static_cast<Exchange>(meeting->kind))) +
              " with mask " + hex(meeting == nullptr ? 0 : meeting->mask) + ", " +
              line_of(thread.where);
        }
      }
      const auto same = std::find_if(groups.begin(), groups.end(),
                                     [&](const Group& group) { return group.what == what; });
      if (same == groups.end()) {
        groups.push_back({what, 1, i});
      } else {
        ++same->count;
      }
    }
    const bool barrier = block.at_barrier > 0;
    report_ = "emulator: " +
        (barrier ? std::to_string(threads_ - block.at_barrier) + " of the " +
                 std::to_string(threads_) + " threads of a block never reach __syncthreads()"
                 : std::string("threads wait for others that never come")) +
        "\n  kernel: " + image().function(grid_.kernel) + "\n  block: " + triple(block.index);
    for (const Group& group : groups) {
      report_ += "\n  " + std::to_string(group.count) + " threads " + group.what +
          "; the first is " + triple(index_of(group.first));
    }
    report_ += barrier ? "\nhint: let every thread of the block reach it; leave out the work, not the "
                         "barrier"
                       : "\nhint: the mask must name the threads that get there";
  }

  const Grid grid_;
  void (*const body_)(const void*);
  const void* const call_;
  const std::size_t call_bytes_;
  const unsigned threads_;

  char* stacks_ = nullptr;
  std::size_t stack_count_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
  Fiber* fiber_ = nullptr;
  ucontext_t scheduler_;

  Block* block_ = nullptr;
  unsigned current_ = 0;  // the thread that is running
  std::vector<Block> blocks_;  // the blocks of a cooperative launch
  std::size_t at_grid_ = 0;
  std::vector<unsigned> phase_block_{0};  // the block of each phase; phase 0 belongs to none
  uint32_t grid_floor_ = 0;               // earlier phases are over in all blocks
  unsigned spins_ = 0, spins_in_vain_ = 0;
  std::unordered_set<const void*> entered_;
  std::string report_;
};

namespace {

void check(const Grid& grid) {
  const dim3 &b = grid.blocks, &t = grid.threads;
  const auto refuse = [](const std::string& what) { throw std::runtime_error("emulator: " + what); };
  if (uint64_t{grid.cluster.x} * grid.cluster.y * grid.cluster.z > 1) {
    refuse("thread block clusters are not emulated\nhint: launch without a cluster when "
           "OPKILN_EMULATED is defined");
  }
  const uint64_t threads = uint64_t{t.x} * t.y * t.z;
  if (threads == 0 || threads > 1024 || t.z > 64 || b.x == 0 || b.y == 0 || b.z == 0 ||
      b.x > 0x7fffffffu || b.y > 65535 || b.z > 65535) {
    refuse("invalid configuration argument: a grid of " + triple(b) + " blocks of " + triple(t) +
           " threads\n  why: a block has 1 to 1024 threads, at most 64 of them in z; a grid has at "
           "most 2147483647 x 65535 x 65535 blocks");
  }
  if (grid.shared > kMostShared) {
    refuse("invalid argument: " + std::to_string(grid.shared) + " bytes of shared memory\n  why: a "
           "block has at most " + std::to_string(kMostShared));
  }
  if (opkiln_emulator_launch != nullptr) {
    refuse("a kernel that launches kernels is not emulated");
  }
}

// The launch that this thread runs. Throws if there is none.
Launch& current_launch(const char* name) {
  if (opkiln_emulator_launch == nullptr) {
    throw std::runtime_error(std::string("emulator: ") + name + " outside of a kernel");
  }
  return *opkiln_emulator_launch;
}

}  // namespace

void run(const Grid& grid, void (*body)(const void*), const void* call, std::size_t call_bytes) {
  check(grid);
  const std::lock_guard<std::mutex> one_at_a_time(launching);
  ++opkiln_emulator_launches;
  Launch launch(grid, body, call, call_bytes);
  opkiln_emulator_launch = &launch;
  try {
    launch.run();
  } catch (...) {
    opkiln_emulator_launch = nullptr;
    throw;
  }
  opkiln_emulator_launch = nullptr;
  if (launch.failed()) {
    throw std::runtime_error(launch.report());
  }
}

void add_tensor(const void* begin, std::size_t bytes, std::size_t element) {
  if (bytes > 0) {
    const auto at = reinterpret_cast<uintptr_t>(begin);
    tensors_here.push_back({at, at + bytes, element});
  }
}

OpCall::OpCall() {
  if (op_depth++ == 0) {
    tensors_here.clear();
  }
}

OpCall::~OpCall() {
  --op_depth;
}

void* dynamic_shared() {
  return dynamic_arena;
}

const char* name_of(Exchange kind) {
  static const char* const names[] = {"a shuffle", "a vote", "__match_..._sync()", "__reduce_..._sync()"};
  return names[static_cast<int>(kind)];
}

int sync_block(bool predicate, Vote vote) {
  return current_launch("__syncthreads()").sync_block(predicate, vote, __builtin_return_address(0));
}

void sync_grid() {
  current_launch("a grid barrier").sync_grid(__builtin_return_address(0));
}

void sync_warp(unsigned mask) {
  current_launch("__syncwarp()").meet(-1, mask, "", 0, nullptr, __builtin_return_address(0));
}

void wait_for_previous() {
  current_launch("opk::wait_for_previous()").wait_for_previous();
}

void gather(Exchange kind, unsigned mask, const void* value, std::size_t size, LaneValues& out) {
  current_launch(name_of(kind))
      .meet(static_cast<int>(kind), mask, value, size, &out, __builtin_return_address(0));
}

unsigned active_mask() {
  return current_launch("__activemask()").active_mask(__builtin_return_address(0));
}

void before_atomic(const void* address, std::size_t size) {
  if (opkiln_emulator_launch != nullptr) {
    opkiln_emulator_launch->atomic(reinterpret_cast<uintptr_t>(address), size, __builtin_return_address(0));
  }
}

void fence() {
  if (opkiln_emulator_launch != nullptr) {
    opkiln_emulator_launch->fence();
  }
}

void stop(const char* what, const char* why) {
  current_launch(what).fail(what, Launch::at(__builtin_return_address(0)) +
                      (why != nullptr ? std::string("\n  why: ") + why : std::string()));
}

}  // namespace emulator
}  // namespace opk

#include "hooks.h"

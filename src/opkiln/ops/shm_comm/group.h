// The shared memory of a group of ranks: its layout, how ranks wait
// for each other, and how they notice that one died.
//
// The memory is a memfd. It has no name, so nothing is left behind however the ranks
// end. Each rank holds a record lock on the byte at its number. The kernel releases the
// lock when the process ends, and a forked child does not inherit it. So a rank that
// waits in vain can ask the kernel which ranks still hold their locks.
//
// A collective is a sequence of turns. In a turn a rank writes its own slot, announces that, waits for the
// announcements of all others, and reads their slots. Turns alternate between two sets of slots. A rank
// writes to a set that was last read two turns ago. This is safe: every rank has announced the turn in
// between, and no rank does so before it has finished reading the turn before.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <opkiln/op.h>

#include "reduce.h"

namespace {

constexpr int64_t kMostRanks = 256;
constexpr int64_t kSets = 2;
constexpr int64_t kSlice = 50;  // milliseconds of sleep between two checks of who is alive

enum Kind : uint32_t { kAllReduce = 1, kReduceScatter, kAllGather };
enum Presence : uint32_t { kAbsent, kPresent, kLeft };
enum Fault : uint32_t { kNone, kDied, kGone, kLate };  // why a group is broken

// The call of a rank. All ranks must make the same call.
struct Call {
  uint32_t kind, dtype, op, unused;
  int64_t count;
};

// A rank's state, on cache lines that only this rank writes (except for `waiters`).
struct alignas(128) Member {
  uint32_t progress;  // number of announcements; a futex
  uint32_t waiters;   // ranks that sleep until the next announcement
  uint32_t presence;
  int32_t pid;
  Call calls[kSets];
};

struct Shared {
  alignas(128) uint32_t broken;  // the fault and the rank, set by the first rank that notices
  Member members[1];             // one per rank
};

constexpr int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }
constexpr int64_t slots_begin(int64_t size) {
  return round_up(static_cast<int64_t>(sizeof(Shared) + sizeof(Member) * static_cast<size_t>(size)), 4096);
}

inline int64_t now() {  // milliseconds
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline const char* name_of(uint32_t kind) {
  return kind == kAllReduce ? "all_reduce" : kind == kReduceScatter ? "reduce_scatter" : "all_gather";
}

// Describes a call: "all_reduce (sum) of 12 elements of float32".
struct CallText {
  char text[160];
  explicit CallText(const Call& call) {
    __builtin_snprintf(text, sizeof text, "%s (%s) of %lld elements of %s", name_of(call.kind),
                       call.kind == kAllGather ? "bytes" : kReduceNames[call.op],
                       static_cast<long long>(call.count), opk::name_of(static_cast<opk::DType>(call.dtype)));
  }
};

class Group {
 public:
  // Takes ownership of the descriptor, unless it raises.
  Group(int fd, int64_t rank, int64_t size, int64_t slot, int64_t timeout)
      : rank_(rank), size_(size), slot_(slot), timeout_(timeout), fd_(fd), pid_(getpid()) {
    bytes_ = static_cast<size_t>(slots_begin(size) + kSets * size * slot);
    struct stat file;
    OPK_CHECK(fstat(fd, &file) == 0 && file.st_size >= static_cast<off_t>(bytes_),
              "the shared memory has less than ", bytes_, " bytes");
    void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (memory == MAP_FAILED) {
      opk::raise("the system did not map ", bytes_, " bytes of shared memory: ", strerror(errno));
    }
    shared_ = static_cast<Shared*>(memory);
    struct flock mine = lock_of(rank);
    if (fcntl(fd, F_SETLK, &mine) != 0) {
      const int why = errno;
      munmap(memory, bytes_);
      opk::raise("rank ", rank, " of the group is taken: ", strerror(why));
    }
    member(rank).pid = pid_;
    __atomic_store_n(&member(rank).presence, kPresent, __ATOMIC_RELEASE);
    cpu_set_t usable;
    CPU_ZERO(&usable);
    // With a CPU for each rank, the others answer soon. With fewer,
    // spinning would take the CPU that they need.
    spins_ = sched_getaffinity(0, sizeof usable, &usable) == 0 && CPU_COUNT(&usable) >= size ? 4000 : 0;
    pthread_mutex_init(&mutex_, nullptr);
  }

  ~Group() {
    if (getpid() == pid_) __atomic_store_n(&member(rank_).presence, kLeft, __ATOMIC_RELEASE);
    munmap(shared_, bytes_);
    close(fd_);  // this releases the lock
    pthread_mutex_destroy(&mutex_);
  }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  int64_t slot_bytes() const { return slot_; }
  pthread_mutex_t* mutex() { return &mutex_; }

  // Begins a collective. Its first turn compares the ranks' calls.
  void begin(const Call& call) {
    call_ = call;
    compared_ = false;
    raise_if_broken();
  }

  // A rank's slot in this turn.
  template <class T>
  T* slot(int64_t rank) const {
    char* const first = reinterpret_cast<char*>(shared_) + slots_begin(size_);
    return reinterpret_cast<T*>(first + ((turn_ % kSets) * size_ + rank) * slot_);
  }

  // Announces that this rank's slot is written, and waits for all others.
  void announce_written() {
    if (!compared_) member(rank_).calls[turn_ % kSets] = call_;
    meet();
    if (!compared_) compare();
  }

  // Announces that this rank's result is in its slot, and waits for all others.
  void announce_reduced() { meet(); }

  void next_turn() { ++turn_; }

 private:
  Member& member(int64_t rank) const { return shared_->members[rank]; }

  struct flock lock_of(int64_t rank) const {
    struct flock found = {};
    found.l_type = F_WRLCK;
    found.l_whence = SEEK_SET;
    found.l_start = rank;
    found.l_len = 1;
    return found;
  }

  bool is_alive(int64_t rank) const {
    struct flock found = lock_of(rank);
    // If the kernel gives no answer, the timeout decides.
    return fcntl(fd_, F_GETLK, &found) != 0 || found.l_type != F_UNLCK;
  }

  bool has_arrived(int64_t rank) const {
    const uint32_t progress = __atomic_load_n(&member(rank).progress, __ATOMIC_ACQUIRE);
    return static_cast<int32_t>(progress - step_) >= 0;  // the numbers wrap around
  }

  void meet() {
    ++step_;
    Member& mine = member(rank_);
    // Sequentially consistent, as in wait(): either this rank sees
    // the waiter, or the waiter sees the progress.
    __atomic_store_n(&mine.progress, step_, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&mine.waiters, __ATOMIC_SEQ_CST) != 0) wake(mine);
    for (int64_t i = 1; i < size_; ++i) wait((rank_ + i) % size_);
  }

  static void wake(Member& member) {
    syscall(SYS_futex, &member.progress, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }

  void wait(int64_t rank) {
    for (int64_t i = 0; i < spins_; ++i) {
      if (has_arrived(rank)) return;
      relax();
    }
    for (int64_t i = 0; i < 4; ++i) {
      if (has_arrived(rank)) return;
      sched_yield();
    }
    if (!has_arrived(rank)) sleep_until(rank);
  }

  [[gnu::noinline]] void sleep_until(int64_t rank) {
    Member& other = member(rank);
    int64_t time = now();
    const int64_t deadline = time + timeout_;
    int64_t look = time + kSlice;  // the next check of who is alive; signals may end sleeps earlier
    __atomic_add_fetch(&other.waiters, 1, __ATOMIC_SEQ_CST);
    uint32_t fault = kNone;
    while (fault == kNone) {
      const uint32_t seen = __atomic_load_n(&other.progress, __ATOMIC_SEQ_CST);
      if (static_cast<int32_t>(seen - step_) >= 0) break;
      if (__atomic_load_n(&shared_->broken, __ATOMIC_ACQUIRE) != 0) break;
      const timespec slice{0, (look > time ? look - time : 1) * 1000000};
      syscall(SYS_futex, &other.progress, FUTEX_WAIT, seen, &slice, nullptr, 0);
      time = now();
      if (time < look) continue;
      look = time + kSlice < deadline ? time + kSlice : deadline;
      // Reads the progress after the lock: an announcement that a rank made before it ended counts.
      if (!is_alive(rank) && !has_arrived(rank)) {
        fault = __atomic_load_n(&other.presence, __ATOMIC_ACQUIRE) == kLeft ? kGone : kDied;
      } else if (time >= deadline && !has_arrived(rank)) {
        fault = kLate;
      }
    }
    __atomic_sub_fetch(&other.waiters, 1, __ATOMIC_SEQ_CST);
    if (fault != kNone) break_group(fault, rank);
    raise_if_broken();
  }

  void break_group(uint32_t fault, int64_t rank) {
    uint32_t expected = 0;
    const uint32_t code = fault << 16 | static_cast<uint32_t>(rank);
    __atomic_compare_exchange_n(&shared_->broken, &expected, code, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    for (int64_t i = 0; i < size_; ++i) wake(member(i));  // so that all ranks notice at once
  }

  void raise_if_broken() const {
    const uint32_t code = __atomic_load_n(&shared_->broken, __ATOMIC_ACQUIRE);
    if (__builtin_expect(code == 0, 1)) return;
    const int64_t rank = code & 0xffff;
    const char* const what = code >> 16 == kDied ? " died"
        : code >> 16 == kGone                    ? " left the group"
                                                 : " did not arrive";
    if (code >> 16 == kLate) {
      opk::raise("rank ", rank, " (process ", member(rank).pid, ")", what, " at ",
                 ::name_of(call_.kind), " within ", static_cast<double>(timeout_) / 1000,
                 " s, so the group cannot be used any more");
    }
    opk::raise("rank ", rank, " (process ", member(rank).pid, ")", what,
               ", so the group cannot be used any more");
  }

  // All ranks compare all calls, so all of them raise at the same point, and the group stays usable.
  void compare() {
    compared_ = true;
    const Call first = member(0).calls[turn_ % kSets];
    for (int64_t i = 1; i < size_; ++i) {
      const Call other = member(i).calls[turn_ % kSets];
      if (__builtin_expect(__builtin_memcmp(&first, &other, sizeof first) == 0, 1)) continue;
      next_turn();
      opk::raise("rank 0 calls ", CallText(first).text, ", but rank ", i, " calls ", CallText(other).text);
    }
  }

  const int64_t rank_, size_, slot_, timeout_;
  const int fd_;
  const int pid_;
  int64_t spins_ = 0;
  size_t bytes_ = 0;
  Shared* shared_ = nullptr;
  pthread_mutex_t mutex_;
  uint32_t step_ = 0;
  int64_t turn_ = 0;
  Call call_ = {};
  bool compared_ = false;
};

}  // namespace

// The three engines. io_uring and libaio are reached by system calls, so no library is needed.

#include "engines.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <memory>

#include "workers.h"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#define AIO_HAS_URING 1
#endif

// Defined here because headers may be older than the kernel. The numbers are the same on all architectures.
#if !defined(SYS_io_uring_setup)
#define SYS_io_uring_setup 425
#define SYS_io_uring_enter 426
#define SYS_io_uring_register 427
#endif

namespace aio {
namespace {

void nap() {  // waits until the kernel has resources again
  const timespec a_millisecond{0, 1000 * 1000};
  nanosleep(&a_millisecond, nullptr);
}

#if defined(AIO_HAS_URING)

// Memory that is shared with the kernel.
struct Mapping {
  void* start = MAP_FAILED;
  size_t size = 0;
  bool map(int ring, size_t bytes, int64_t what) {
    size = bytes;
    start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, what);
    return start != MAP_FAILED;
  }
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(start) + offset);
  }
  ~Mapping() {
    if (start != MAP_FAILED) munmap(start, size);
  }
};

class Uring : public Engine {
  static constexpr int64_t kLarge = 1 << 20;  // bytes

 public:
  int open(unsigned depth, int event) {
    io_uring_params params{};
    ring_ = static_cast<int>(syscall(SYS_io_uring_setup, depth, &params));
    if (ring_ < 0) return errno;
    size_t sent = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    const size_t ended = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    const bool one_mapping = params.features & IORING_FEAT_SINGLE_MMAP;
    if (one_mapping && ended > sent) sent = ended;
    if (!sent_.map(ring_, sent, IORING_OFF_SQ_RING)) return errno;
    if (!one_mapping && !ended_.map(ring_, ended, IORING_OFF_CQ_RING)) return errno;
    if (!entries_.map(ring_, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES)) return errno;
    const Mapping& ends = one_mapping ? sent_ : ended_;
    tail_ = sent_.at<unsigned>(params.sq_off.tail);
    mask_ = *sent_.at<unsigned>(params.sq_off.ring_mask);
    order_ = sent_.at<unsigned>(params.sq_off.array);
    ends_head_ = ends.at<unsigned>(params.cq_off.head);
    ends_tail_ = ends.at<unsigned>(params.cq_off.tail);
    ends_mask_ = *ends.at<unsigned>(params.cq_off.ring_mask);
    ends_at_ = ends.at<io_uring_cqe>(params.cq_off.cqes);
    if (syscall(SYS_io_uring_register, ring_, IORING_REGISTER_EVENTFD, &event, 1) != 0) return errno;
    return 0;
  }

  ~Uring() override {
    if (ring_ >= 0) close(ring_);
  }

  void start(Piece* piece) override {
    // Only this thread writes the tail, and at most `depth` pieces are in flight, so there is always room.
    const unsigned tail = *tail_, place = tail & mask_;
    io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[place];
    memset(&entry, 0, sizeof entry);
    piece->vector = {piece->memory, static_cast<size_t>(piece->size)};
    entry.opcode = piece->write ? IORING_OP_WRITEV : IORING_OP_READV;  // supported since the first io_uring
    entry.fd = piece->descriptor();
    entry.off = static_cast<uint64_t>(piece->offset);
    entry.addr = reinterpret_cast<uint64_t>(&piece->vector);
    entry.len = 1;
    // Large pieces go to the kernel's threads. Faulting in fresh pages takes as long as the
    // transfer, and would otherwise block the one thread that submits.
    if (piece->size >= kLarge) entry.flags = IOSQE_ASYNC;
    entry.user_data = reinterpret_cast<uint64_t>(piece);
    order_[place] = place;
    __atomic_store_n(tail_, tail + 1, __ATOMIC_RELEASE);
    ++waiting_;
  }

  void submit() override {
    while (waiting_ > 0) {
      const long taken = syscall(SYS_io_uring_enter, ring_, waiting_, 0, 0, nullptr, 0);
      if (taken >= 0) {
        waiting_ -= static_cast<unsigned>(taken);
      } else if (errno != EINTR) {
        nap();  // EAGAIN, EBUSY or ENOMEM: requests in flight must end first
      }
    }
  }

  void collect(std::vector<Finished>& out) override {
    unsigned head = *ends_head_;
    const unsigned tail = __atomic_load_n(ends_tail_, __ATOMIC_ACQUIRE);
    for (; head != tail; ++head) {
      const io_uring_cqe& end = ends_at_[head & ends_mask_];
      out.push_back({reinterpret_cast<Piece*>(end.user_data), end.res});
    }
    __atomic_store_n(ends_head_, head, __ATOMIC_RELEASE);
  }

 private:
  int ring_ = -1;
  Mapping sent_, ended_, entries_;
  unsigned *tail_ = nullptr, *order_ = nullptr, *ends_head_ = nullptr, *ends_tail_ = nullptr;
  unsigned mask_ = 0, ends_mask_ = 0, waiting_ = 0;
  io_uring_cqe* ends_at_ = nullptr;
};

#endif

class Libaio : public Engine {
 public:
  int open(unsigned depth, int event) {
    event_ = event;
    return syscall(SYS_io_setup, depth, &context_) == 0 ? 0 : errno;
  }
  ~Libaio() override {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
  }

  void start(Piece* piece) override {
    iocb& block = piece->block;
    block = {};
    block.aio_data = reinterpret_cast<uint64_t>(piece);
    block.aio_lio_opcode = piece->write ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(piece->descriptor());
    block.aio_buf = reinterpret_cast<uint64_t>(piece->memory);
    block.aio_nbytes = static_cast<uint64_t>(piece->size);
    block.aio_offset = piece->offset;
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<uint32_t>(event_);
    waiting_.push_back(&block);
  }

  void submit() override {
    size_t sent = 0;
    while (sent < waiting_.size()) {
      const long taken = syscall(SYS_io_submit, context_, waiting_.size() - sent, waiting_.data() + sent);
      if (taken > 0) {
        sent += static_cast<size_t>(taken);
      } else if (taken == 0 || errno == EAGAIN) {
        nap();
      } else if (errno != EINTR) {
        // The error is about the first block, which will never produce an event.
        refused_.push_back({reinterpret_cast<Piece*>(waiting_[sent]->aio_data), -errno});
        ++sent;
      }
    }
    waiting_.clear();
  }

  void collect(std::vector<Finished>& out) override {
    out.insert(out.end(), refused_.begin(), refused_.end());
    refused_.clear();
    io_event events[64];
    for (;;) {
      timespec at_once{0, 0};
      const long count = syscall(SYS_io_getevents, context_, 0, 64, events, &at_once);
      for (long i = 0; i < count; ++i) {
        out.push_back({reinterpret_cast<Piece*>(events[i].data), events[i].res});
      }
      if (count < 64 && !(count < 0 && errno == EINTR)) return;
    }
  }

 private:
  aio_context_t context_ = 0;
  int event_ = -1;
  std::vector<iocb*> waiting_;
  std::vector<Finished> refused_;
};

int64_t transfer(Piece& piece) {
  const size_t size = static_cast<size_t>(piece.size);
  const ssize_t count = piece.write ? pwrite(piece.descriptor(), piece.memory, size, piece.offset)
                                    : pread(piece.descriptor(), piece.memory, size, piece.offset);
  return count >= 0 ? count : -errno;
}

class Threads : public Engine {
 public:
  explicit Threads(int event) : workers_(event, transfer) {}

  int open(unsigned count) { return workers_.open(count); }
  void start(Piece* piece) override { workers_.start(piece); }
  void collect(std::vector<Finished>& out) override { workers_.collect(out); }

 private:
  Workers workers_;
};

template <class E>
Engine* release_engine(std::unique_ptr<E> engine, int error_of_open, int& error) {
  error = error_of_open;
  return error == 0 ? engine.release() : nullptr;
}

}  // namespace

Engine* open_engine(const char* name, unsigned depth, unsigned threads, int event, int& error) {
  if (strcmp(name, "io_uring") == 0) {
#if defined(AIO_HAS_URING)
    auto engine = std::make_unique<Uring>();
    const int code = engine->open(depth, event);
    return release_engine(std::move(engine), code, error);
#else
    error = kNotCompiled;
    return nullptr;
#endif
  }
  if (strcmp(name, "libaio") == 0) {
    auto engine = std::make_unique<Libaio>();
    const int code = engine->open(depth, event);
    return release_engine(std::move(engine), code, error);
  }
  if (strcmp(name, "threads") == 0) {
    auto engine = std::make_unique<Threads>(event);
    const int code = engine->open(threads);
    return release_engine(std::move(engine), code, error);
  }
  opk::raise("engine is ", name, ", expected io_uring, libaio or threads");
}

}  // namespace aio

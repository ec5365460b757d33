// The op's functions: queues by their numbers, and the checks of what is asked of them.

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "queue.h"

using opk::Tensor;
using Ints = opk::List<int64_t>;

namespace {

// A queue belongs to the process that opened it: a fork has its memory, but not its thread.
struct Opened {
  std::shared_ptr<aio::Queue> queue;
  pid_t process;
};

std::mutex& guard_of_queues() {
  static std::mutex& lock = *new std::mutex;
  return lock;
}

// Never destroyed: a thread may use it while the process ends.
std::map<int64_t, Opened>& queues() {
  static auto& all = *new std::map<int64_t, Opened>;
  return all;
}

// Signals are for the threads of the program. The new thread takes over the mask of its maker.
struct SignalsBlocked {
  sigset_t before;
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

Tensor numbers(const std::vector<int64_t>& values) {
  const opk::Device host{opk::DeviceType::cpu, 0};
  Tensor out = opk::empty({static_cast<int64_t>(values.size())}, opk::DType::int64, host);
  int64_t* const to = out.data<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) to[i] = values[i];
  return out;
}

int64_t number_of(const Tensor& queue) {
  opk::check_dtype(queue, opk::DType::int64);
  OPK_CHECK(queue.numel() == 1, queue, " has ", queue.numel(), " elements, expected 1");
  return *queue.data<const int64_t>();
}

std::shared_ptr<aio::Queue> queue_of(const Tensor& queue) {
  const int64_t number = number_of(queue);
  const std::lock_guard<std::mutex> guard(guard_of_queues());
  const auto found = queues().find(number);
  OPK_CHECK(found != queues().end(), "there is no queue ", number, ": it was closed");
  OPK_CHECK(found->second.process == getpid(), "queue ", number, " was opened in process ",
            found->second.process, ", of which this one is a fork");
  return found->second.queue;
}

// Where the system reads and writes: a tensor that is read from a file is written to.
char* start_of(const Tensor& memory, bool) {
  return const_cast<char*>(static_cast<const char*>(memory.data()));
}
char* start_of(Tensor& memory, int) { return static_cast<char*>(memory.data()); }

template <class List, class Kind>
Tensor add(const Tensor& queue, List& memory, Kind kind, const Ints& offsets, const Ints& files,
           const Ints& descriptors, bool write) {
  // The files are the request's before anything is checked: they are closed also if this raises.
  auto request = std::make_shared<aio::Request>();
  request->write = write;
  request->files.reserve(static_cast<size_t>(descriptors.size() + 1) / 2);
  for (int64_t i = 0; i < descriptors.size(); i += 2) {
    const int64_t direct = i + 1 < descriptors.size() ? descriptors[i + 1] : -1;
    request->files.emplace_back(static_cast<int>(descriptors[i]), static_cast<int>(direct));
  }
  const auto to = queue_of(queue);
  OPK_CHECK(memory.size() == offsets.size() && memory.size() == files.size(), "memory has ", memory.size(),
            " tensors, offsets has ", offsets.size(), " numbers, files has ", files.size());
  OPK_CHECK(descriptors.size() % 2 == 0, "descriptors has ", descriptors.size(), " numbers, expected pairs");
  for (int64_t i = 0; i < memory.size(); ++i) {
    auto& each = memory[i];
    OPK_CHECK(each.is_cpu(), each, " is not on the CPU");
    opk::check_dtype(each, opk::DType::uint8);
    opk::check_contiguous(each);
    OPK_CHECK(offsets[i] >= 0 && offsets[i] <= INT64_MAX - each.numel(), "offsets[", i, "] is ", offsets[i],
              ", expected 0 to ", INT64_MAX - each.numel());
    OPK_CHECK(files[i] >= 0 && 2 * files[i] < descriptors.size(), "files[", i, "] is ", files[i],
              ", but there are ", descriptors.size() / 2, " files");
    request->parts.push_back(
        {Tensor(each), start_of(each, kind), each.numel(), offsets[i], files[i], 0});
  }
  return numbers({to->add(std::move(request))});
}

}  // namespace

Tensor aio_probe(const Tensor&, const opk::String& engine) {
  const SignalsBlocked blocked;
  const int event = eventfd(0, EFD_CLOEXEC);
  OPK_CHECK(event >= 0, "no eventfd: ", strerror(errno));
  int error = 0;
  delete aio::open_engine(engine.c_str(), 4, 1, event, error);
  close(event);
  return numbers({error});
}

Tensor aio_open(const Tensor&, const opk::String& engine, int64_t depth, int64_t block_size,
                int64_t threads) {
  OPK_CHECK(depth >= 1 && depth <= 4096, "depth is ", depth, ", expected 1 to 4096");
  OPK_CHECK(threads >= 1 && threads <= 1024, "threads is ", threads, ", expected 1 to 1024");
  OPK_CHECK(block_size >= 512 && block_size <= 1 << 30, "block_size is ", block_size,
            ", expected 512 to 1073741824");
  const SignalsBlocked blocked;
  const int event = eventfd(0, EFD_CLOEXEC);
  OPK_CHECK(event >= 0, "no eventfd: ", strerror(errno));
  int error = 0;
  std::unique_ptr<aio::Engine> opened(aio::open_engine(
      engine.c_str(), static_cast<unsigned>(depth), static_cast<unsigned>(threads), event, error));
  if (!opened) {
    close(event);
    opk::raise(engine.c_str(), " cannot be used: ",
               error == aio::kNotCompiled ? "its header was not there when this op was compiled" : strerror(error));
  }
  auto queue = std::make_shared<aio::Queue>(std::move(opened), event, depth, block_size);
  const std::lock_guard<std::mutex> guard(guard_of_queues());
  static int64_t last = 0;
  queues().emplace(++last, Opened{std::move(queue), getpid()});
  return numbers({last});
}

Tensor aio_read_(Tensor& queue, opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return add(queue, memory, 0, offsets, files, descriptors, false);
}

Tensor aio_write(Tensor& queue, const opk::TensorList& memory, const Ints& offsets, const Ints& files,
                 const Ints& descriptors) {
  return add(queue, memory, true, offsets, files, descriptors, true);
}

// The state, the error, the part that failed, and the bytes of each part.
Tensor aio_wait(Tensor& queue, int64_t request, int64_t milliseconds) {
  aio::Outcome out;
  OPK_CHECK(queue_of(queue)->wait(request, milliseconds, out), "there is no request ", request,
            ": it was forgotten");
  std::vector<int64_t> all{out.state, out.error, out.failed};
  all.insert(all.end(), out.ends.begin(), out.ends.end());
  return numbers(all);
}

// Apart from aio_wait, so that a caller who is interrupted between the two can wait again.
void aio_forget(Tensor& queue, int64_t request) { queue_of(queue)->forget(request); }

void aio_cancel(Tensor& queue, int64_t request) { queue_of(queue)->cancel(request); }

// Waits for all requests.
void aio_close(Tensor& queue) {
  std::shared_ptr<aio::Queue> last;
  const int64_t number = number_of(queue);
  {
    const std::lock_guard<std::mutex> guard(guard_of_queues());
    const auto found = queues().find(number);
    if (found == queues().end() || found->second.process != getpid()) return;  // nothing to wait for
    last = std::move(found->second.queue);
    queues().erase(found);
  }
}

OPKILN_OP(aio_probe, cpu);
OPKILN_OP(aio_open, cpu);
OPKILN_OP(aio_read_, cpu);
OPKILN_OP(aio_write, cpu);
OPKILN_OP(aio_wait, cpu);
OPKILN_OP(aio_forget, cpu);
OPKILN_OP(aio_cancel, cpu);
OPKILN_OP(aio_close, cpu);

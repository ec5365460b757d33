// The registry of queues by number, and the argument checks of the ops' functions.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "queue.h"

namespace aio {

using opk::Tensor;
using Ints = opk::List<int64_t>;

// Each op has its own registry: in a named namespace, the dynamic
// linker would merge the maps of all libraries.
namespace {

// A queue belongs to the process that opened it. A fork has the queue's memory, but not its thread.
struct OpenQueue {
  std::shared_ptr<Queue> queue;
  pid_t process;
};

std::mutex& guard_of_queues() {
  static std::mutex& lock = *new std::mutex;
  return lock;
}

// Never destroyed: a thread may use it while the process exits.
std::map<int64_t, OpenQueue>& queues() {
  static auto& all = *new std::map<int64_t, OpenQueue>;
  return all;
}

// Blocks all signals, which are meant for the program's threads. A
// new thread inherits the mask of its creator.
struct BlockSignals {
  sigset_t before;
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
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
  OPK_CHECK(queue.is_cpu(), queue, " is not on the CPU");
  OPK_CHECK(queue.numel() == 1, queue, " has ", queue.numel(), " elements, expected 1");
  return *queue.data<const int64_t>();
}

std::shared_ptr<Queue> queue_of(const Tensor& queue) {
  const int64_t number = number_of(queue);
  const std::lock_guard<std::mutex> guard(guard_of_queues());
  const auto found = queues().find(number);
  OPK_CHECK(found != queues().end(), "there is no queue ", number, ": it was closed");
  OPK_CHECK(found->second.process == getpid(), "queue ", number, " was opened in process ",
            found->second.process, ", of which this one is a fork");
  return found->second.queue;
}

// Owns the eventfd of an engine until a queue takes it.
struct Event {
  int descriptor;
  Event() : descriptor(eventfd(0, EFD_CLOEXEC)) {
    OPK_CHECK(descriptor >= 0, "no eventfd: ", strerror(errno));
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (descriptor >= 0) close(descriptor);
  }
};

void check_sizes(int64_t depth, int64_t block_size, int64_t threads) {
  OPK_CHECK(depth >= 1 && depth <= 4096, "depth is ", depth, ", expected 1 to 4096");
  OPK_CHECK(threads >= 1 && threads <= 1024, "threads is ", threads, ", expected 1 to 1024");
  OPK_CHECK(block_size >= 512 && block_size <= 1 << 30, "block_size is ", block_size,
            ", expected 512 to 1073741824");
}

// Registers a new queue and returns its number. Signals must be blocked.
Tensor enter(std::unique_ptr<Engine> engine, Event& event, int64_t depth, int64_t block_size) {
  auto queue = std::make_shared<Queue>(std::move(engine), event.descriptor, depth, block_size);
  event.descriptor = -1;
  const std::lock_guard<std::mutex> guard(guard_of_queues());
  static int64_t last = 0;
  queues().emplace(++last, OpenQueue{std::move(queue), getpid()});
  return numbers({last});
}

// The memory to transfer. A tensor that is read from a file is written, so it needs mutable memory.
char* start_of(const Tensor& memory, bool) {
  return const_cast<char*>(static_cast<const char*>(memory.data()));
}
char* start_of(Tensor& memory, int) { return static_cast<char*>(memory.data()); }

// Starts a read or a write. `device_of` returns the number of the GPU that holds a
// tensor, or -1, and raises for memory that the engine cannot handle.
template <class List, class Kind, class DeviceOf>
Tensor add(const Tensor& queue, List& memory, Kind kind, const Ints& offsets, const Ints& files,
           const Ints& descriptors, bool write, const DeviceOf& device_of) {
  // The request owns the files before any check, so that they are closed even if a check raises.
  auto request = std::make_shared<Request>();
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
    const int device = device_of(each, *to);
    opk::check_dtype(each, opk::DType::uint8);
    opk::check_contiguous(each);
    OPK_CHECK(offsets[i] >= 0 && offsets[i] <= INT64_MAX - each.numel(), "offsets[", i, "] is ", offsets[i],
              ", expected 0 to ", INT64_MAX - each.numel());
    OPK_CHECK(files[i] >= 0 && 2 * files[i] < descriptors.size(), "files[", i, "] is ", files[i],
              ", but there are ", descriptors.size() / 2, " files");
    request->parts.push_back(
        {Tensor(each), start_of(each, kind), each.numel(), offsets[i], files[i], 0, device});
  }
  return numbers({to->add(std::move(request))});
}

// Returns the state, the error, the part that failed, and the bytes of each part.
Tensor wait(const Tensor& queue, int64_t request, int64_t milliseconds) {
  Outcome out;
  OPK_CHECK(queue_of(queue)->wait(request, milliseconds, out), "there is no request ", request,
            ": it was forgotten");
  std::vector<int64_t> all{out.state, out.error, out.failed};
  all.insert(all.end(), out.ends.begin(), out.ends.end());
  return numbers(all);
}

// Waits for all requests and closes the queue.
void leave(const Tensor& queue) {
  std::shared_ptr<Queue> last;
  const int64_t number = number_of(queue);
  {
    const std::lock_guard<std::mutex> guard(guard_of_queues());
    const auto found = queues().find(number);
    if (found == queues().end() || found->second.process != getpid()) return;  // nothing to wait for
    last = std::move(found->second.queue);
    queues().erase(found);
  }
}

}  // namespace
}  // namespace aio

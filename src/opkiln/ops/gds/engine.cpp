#include "engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <map>

namespace gds {
namespace {

constexpr size_t kPage = 4096;
constexpr unsigned kPortable = 1;     // CU_MEMHOSTALLOC_PORTABLE: locked for all devices
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: not ordered with torch's default stream

int64_t round_down(int64_t value, int64_t step) { return value / step * step; }
int64_t round_up(int64_t value, int64_t step) { return round_down(value + step - 1, step); }

// A thread's streams and buffer, which live until the thread ends.
struct ThreadState {
  const Driver* driver = nullptr;
  int device = -1;  // the device whose context is current
  std::map<int, void*> streams;
  char* buffer = nullptr;
  size_t capacity = 0;
  bool locked = false;
  bool refused = false;  // the driver refused to lock memory

  bool enter(const Driver& with, int to, std::string& why) {
    driver = &with;
    if (device == to) return true;
    device = -1;
    if (!with.enter(to, why)) return false;
    void*& stream = streams[to];
    if (stream == nullptr) {
      if (const int error = with.cuStreamCreate(&stream, kNonBlocking); error != 0) {
        stream = nullptr;
        why = with.describe("cuStreamCreate", error);
        return false;
      }
    }
    device = to;
    return true;
  }

  // A buffer of at least `bytes`, or null. Copies from memory that cannot be locked are slower.
  char* reserve(int64_t bytes) {
    const size_t size = static_cast<size_t>(round_up(bytes, kPage));
    const bool asks = device >= 0 && !locked && !refused;  // a buffer made for the host is not locked
    if (size <= capacity && !asks) return buffer;
    drop_buffer();
    void* made = nullptr;
    locked = device >= 0 && !refused && driver->cuMemHostAlloc(&made, size, kPortable) == 0;
    refused = refused || (device >= 0 && !locked);
    if (!locked) made = aligned_alloc(kPage, size);
    buffer = static_cast<char*>(made);
    capacity = made == nullptr ? 0 : size;
    return buffer;
  }

  void drop_buffer() {
    if (locked) {
      driver->cuMemFreeHost(buffer);
    } else {
      free(buffer);
    }
    buffer = nullptr;
    capacity = 0;
  }

  ~ThreadState() {
    drop_buffer();
    for (const auto& each : streams) {
      if (each.second != nullptr) driver->cuStreamDestroy(each.second);
    }
  }
};

ThreadState& thread_state() {
  static thread_local ThreadState mine;
  return mine;
}

// The memory registered with cuFile, as start and size.
struct MemoryTable {
  std::mutex lock;
  std::map<const char*, size_t> memory;
};

MemoryTable& memory_table() {
  static MemoryTable& all = *new MemoryTable;
  return all;
}

// The start of the registered memory that contains all of these bytes, or `memory` if there is none.
char* base_of(char* memory, int64_t size) {
  MemoryTable& all = memory_table();
  const std::lock_guard<std::mutex> guard(all.lock);
  auto next = all.memory.upper_bound(memory);
  if (next == all.memory.begin()) return memory;
  --next;
  const size_t end = static_cast<size_t>(memory - next->first) + static_cast<size_t>(size);
  return end <= next->second ? const_cast<char*>(next->first) : memory;
}

}  // namespace

DeviceEngine::DeviceEngine(int event, const Driver& driver, const CuFile* cufile, bool host_too)
    : driver_(driver), cufile_(cufile), host_too_(host_too),
      workers_(event, [this](aio::Piece& piece) { return run(piece); }) {}

int DeviceEngine::device_of(const opk::Tensor& memory) const {
  if (memory.is_cpu()) return host_too_ ? 0 : -1;
  OPK_CHECK(memory.is_cuda(), memory, " is neither on the CPU nor on a GPU of CUDA");
  return memory.device().index;
}

Ways DeviceEngine::ways() {
  const std::lock_guard<std::mutex> guard(lock_);
  return ways_;
}

void DeviceEngine::note(std::string Ways::*what, std::string words) {
  const std::lock_guard<std::mutex> guard(lock_);
  ways_.*what = std::move(words);
}

// Called in the queue's thread.
void DeviceEngine::begin(aio::Request& request) {
  if (cufile_ == nullptr) return;
  for (aio::File& each : request.files) {
    if (each.direct < 0) {
      note(&Ways::refused, "a file is not open for direct I/O");
      continue;
    }
    Descriptor given{};
    given.type = 1;
    given.descriptor = each.direct;
    const Status status = cufile_->cuFileHandleRegister(&each.registered, &given);
    if (status.code == 0) continue;
    each.registered = nullptr;
    note(&Ways::refused, describe(driver_, "cuFileHandleRegister", status));
  }
}

void DeviceEngine::end(aio::Request& request) {
  for (aio::File& each : request.files) {
    if (each.registered != nullptr) cufile_->cuFileHandleDeregister(each.registered);
    each.registered = nullptr;
  }
}

// Called in a worker thread, like everything below.
int64_t DeviceEngine::run(aio::Piece& piece) {
  const aio::Part& part = piece.request->parts[piece.part];
  const aio::File& file = piece.request->files[static_cast<size_t>(part.file)];
  if (part.device >= 0) {
    std::string why;
    if (!thread_state().enter(driver_, part.device, why)) {
      note(&Ways::failed, std::move(why));
      return -EIO;
    }
    if (piece.direct && file.registered != nullptr) {
      char* const base = base_of(piece.memory, piece.size);
      const size_t size = static_cast<size_t>(piece.size);
      const ssize_t count = piece.write
          ? cufile_->cuFileWrite(file.registered, base, size, piece.offset, piece.memory - base)
          : cufile_->cuFileRead(file.registered, base, size, piece.offset, piece.memory - base);
      if (count >= 0 && count <= piece.size) {
        const std::lock_guard<std::mutex> guard(lock_);
        ways_.by_cufile += count;
        return count;
      }
      // The host retries the same range. If that fails, too, the system's reason is the error.
      note(&Ways::refused, describe(piece.write ? "cuFileWrite" : "cuFileRead", count, errno));
    }
  }
  const int64_t count = piece.write ? write(piece, file, part.device) : read(piece, file, part.device);
  if (count > 0 && part.device >= 0) {
    const std::lock_guard<std::mutex> guard(lock_);
    ways_.by_host += count;
  }
  return count;
}

int64_t DeviceEngine::read(aio::Piece& piece, const aio::File& file, int device) {
  // Direct I/O reads whole steps.
  const int64_t step = piece.direct ? file.offset_step : 1;
  const int64_t first = round_down(piece.offset, step), skip = piece.offset - first;
  const int64_t size = round_up(skip + piece.size, step);
  char* const buffer = thread_state().reserve(size);
  if (buffer == nullptr) return -ENOMEM;
  int64_t count = pread(piece.descriptor(), buffer, static_cast<size_t>(size), first);
  if (count < 0) return -errno;
  char* from = buffer + skip;
  if (count > 0 && count <= skip) {  // a part of the first step: more may follow in the file
    from = buffer;
    count = pread(file.plain, buffer, static_cast<size_t>(piece.size), piece.offset);
    if (count < 0) return -errno;
  } else {
    count = std::max<int64_t>(0, std::min(count - skip, piece.size));
  }
  return copy(piece.memory, from, count, device, true) ? count : -EIO;
}

int64_t DeviceEngine::write(aio::Piece& piece, const aio::File&, int device) {
  char* const buffer = thread_state().reserve(piece.size);
  if (buffer == nullptr) return -ENOMEM;
  if (!copy(piece.memory, buffer, piece.size, device, false)) return -EIO;
  const ssize_t count = pwrite(piece.descriptor(), buffer, static_cast<size_t>(piece.size), piece.offset);
  return count < 0 ? -errno : count;
}

bool DeviceEngine::copy(char* memory, char* buffer, int64_t bytes, int device, bool to_memory) {
  const size_t size = static_cast<size_t>(bytes);
  if (size == 0) return true;
  if (device < 0) {
    memcpy(to_memory ? memory : buffer, to_memory ? buffer : memory, size);
    return true;
  }
  const uint64_t there = reinterpret_cast<uint64_t>(memory);
  void* const stream = thread_state().streams[device];
  int error = to_memory ? driver_.cuMemcpyHtoDAsync(there, buffer, size, stream)
                        : driver_.cuMemcpyDtoHAsync(buffer, there, size, stream);
  if (error == 0) error = driver_.cuStreamSynchronize(stream);
  if (error != 0) note(&Ways::failed, driver_.describe(to_memory ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", error));
  return error == 0;
}

std::string register_memory(const Driver& driver, const CuFile& cufile, const void* memory, size_t size) {
  MemoryTable& all = memory_table();
  const std::lock_guard<std::mutex> guard(all.lock);
  const auto* const begin = static_cast<const char*>(memory);
  if (size == 0) return "";
  if (all.memory.count(begin) != 0) return "this memory is registered already";
  const Status status = cufile.cuFileBufRegister(memory, size, 0);
  if (status.code != 0) return describe(driver, "cuFileBufRegister", status);
  all.memory.emplace(begin, size);
  return "";
}

std::string unregister_memory(const Driver& driver, const CuFile& cufile, const void* memory) {
  MemoryTable& all = memory_table();
  const std::lock_guard<std::mutex> guard(all.lock);
  if (all.memory.erase(static_cast<const char*>(memory)) == 0) return "";
  const Status status = cufile.cuFileBufDeregister(memory);
  return status.code == 0 ? "" : describe(driver, "cuFileBufDeregister", status);
}

}  // namespace gds

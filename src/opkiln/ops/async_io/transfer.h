// The units of a transfer: requests, their parts, and the single reads and writes of which they consist.
#pragma once

#include <linux/aio_abi.h>
#include <stdint.h>
#include <sys/uio.h>

#include <atomic>
#include <vector>

#include <opkiln/op.h>

namespace aio {

// A file that is open twice: normally, and for direct I/O if the file
// system supports it. Owns both descriptors.
struct File {
  int plain = -1;
  int direct = -1;
  int64_t offset_step = 4096;  // direct I/O needs file offsets that are multiples of this,
  int64_t memory_step = 4096;  // and at multiples of this in memory
  int64_t size;                // size when it was opened, for a regular file
  void* registered = nullptr;  // by an engine, which also removes it

  File(int plain, int direct);
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();
  void release();  // gives the descriptors back to the caller
};

// One tensor and the range of a file that it is read from or written to.
struct Part {
  opk::Tensor owner;  // keeps the memory alive
  char* memory;
  int64_t size;
  int64_t offset;
  int64_t file;
  int64_t end;  // end of the transferred bytes without a gap, from the start of the part
  int device;   // the number of the GPU that holds the memory; -1: host memory
};

struct Request {
  int64_t id = 0;
  bool write = false;
  std::vector<File> files;
  std::vector<Part> parts;
  std::atomic<bool> cancelled{false};

  // Used only by the queue's thread, until `done` is set.
  bool begun = false;
  size_t part = 0;  // where the next piece begins
  int64_t position = 0;
  int64_t running = 0;  // pieces in flight
  int error = 0;
  int64_t failed = -1;  // the part that failed

  bool done = false;  // guarded by the queue's lock

  bool exhausted() const { return part == parts.size() || error != 0 || cancelled.load(); }
  void fail(int code, size_t at) {
    if (error == 0) {
      error = code;
      failed = static_cast<int64_t>(at);
    }
  }
};

// One read or write of at most a block. The rest of a short transfer is retried.
struct Piece {
  Request* request = nullptr;
  size_t part = 0;
  bool write = false;
  bool direct = false;
  int64_t offset = 0;  // file offset of the remaining bytes
  char* memory = nullptr;
  int64_t size = 0;  // remaining bytes
  int64_t done = 0;
  int tries = 0;

  // Set if the transfer goes through a buffer of the queue: `wanted`
  // bytes of it, from `skip` on, belong to the tensor at `target`.
  char* buffer = nullptr;
  int64_t capacity = 0;
  int64_t skip = 0, wanted = 0;
  char* target = nullptr;

  iovec vector{};  // io_uring's argument
  iocb block{};    // libaio's

  int descriptor() const {
    const File& file = request->files[static_cast<size_t>(request->parts[part].file)];
    return direct ? file.direct : file.plain;
  }
};

struct Finished {
  Piece* piece;
  int64_t result;  // bytes, or a negative errno
};

}  // namespace aio

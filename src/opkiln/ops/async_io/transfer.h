// What is transferred: requests, their parts, and the single reads and writes that they are made of.
#pragma once

#include <linux/aio_abi.h>
#include <stdint.h>
#include <sys/uio.h>

#include <atomic>
#include <vector>

#include <opkiln/op.h>

namespace aio {

// A file, open twice: as usual, and for direct I/O where the file system has that. Owns both.
struct File {
  int plain = -1;
  int direct = -1;
  int64_t offset_step = 4096;  // direct I/O is at multiples of this in the file,
  int64_t memory_step = 4096;  // and at multiples of this in memory
  int64_t size;                // of a regular file when it was opened
  void* registered = nullptr;  // by an engine, which takes it back

  File(int plain, int direct);
  File(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();
  void release();  // the descriptors are the caller's again
};

// One tensor and the range of a file that it is read from or written to.
struct Part {
  opk::Tensor owner;  // keeps the memory alive
  char* memory;
  int64_t size;
  int64_t offset;
  int64_t file;
  int64_t end;  // of what was transferred without a gap, from the part's begin
  int device;   // the number of the GPU whose memory it is, or -1: the host's
};

struct Request {
  int64_t id = 0;
  bool write = false;
  std::vector<File> files;
  std::vector<Part> parts;
  std::atomic<bool> cancelled{false};

  // Known to the queue's thread alone, until `done`.
  bool begun = false;
  size_t part = 0;  // where the next piece begins
  int64_t position = 0;
  int64_t running = 0;  // pieces
  int error = 0;
  int64_t failed = -1;  // the part that did

  bool done = false;  // under the queue's lock

  bool exhausted() const { return part == parts.size() || error != 0 || cancelled.load(); }
  void fail(int code, size_t at) {
    if (error == 0) {
      error = code;
      failed = static_cast<int64_t>(at);
    }
  }
};

// One read or write of at most a block. What a call of the system leaves over is tried again.
struct Piece {
  Request* request = nullptr;
  size_t part = 0;
  bool write = false;
  bool direct = false;
  int64_t offset = 0;  // in the file, of what is left
  char* memory = nullptr;
  int64_t size = 0;  // of what is left
  int64_t done = 0;
  int tries = 0;

  // If the system reads and writes a buffer of ours in the tensor's place: `wanted` bytes of it, from
  // `skip` on, are the tensor's, from `target` on.
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
  int64_t result;  // bytes, or an error's number below 0
};

}  // namespace aio

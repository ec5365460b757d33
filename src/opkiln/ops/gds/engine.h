// The engine for GPU memory: cuFile, or host reads and writes plus a copy.
#pragma once

#include "../async_io/engines.h"
#include "../async_io/workers.h"
#include "libraries.h"

namespace gds {

// What an engine has done so far.
struct Ways {
  int64_t by_cufile = 0;  // bytes
  int64_t by_host = 0;
  std::string refused;  // the last reason why cuFile refused a request
  std::string failed;   // the last reason why a copy failed
};

// Threads that each run one piece at a time. cuFile handles direct pieces of files that it has
// accepted. All others go through a page-locked buffer of the thread. Threads work in parallel, so file
// access and copies overlap. The host retries what cuFile cannot do.
class DeviceEngine : public aio::Engine {
 public:
  // `cufile` may be null. `host_too`: host memory counts as memory of device 0, for tests without a GPU.
  DeviceEngine(int event, const Driver& driver, const CuFile* cufile, bool host_too);

  int open(size_t threads) { return workers_.open(threads); }
  bool stages() const override { return true; }
  void begin(aio::Request& request) override;
  void end(aio::Request& request) override;
  void start(aio::Piece* piece) override { workers_.start(piece); }
  void collect(std::vector<aio::Finished>& out) override { workers_.collect(out); }

  int device_of(const opk::Tensor& memory) const;
  Ways ways();

 private:
  int64_t run(aio::Piece& piece);
  int64_t read(aio::Piece& piece, const aio::File& file, int device);
  int64_t write(aio::Piece& piece, const aio::File& file, int device);
  bool copy(char* memory, char* buffer, int64_t size, int device, bool to_memory);
  void note(std::string Ways::*what, std::string words);

  const Driver& driver_;
  const CuFile* const cufile_;
  const bool host_too_;
  std::mutex lock_;
  Ways ways_;
  aio::Workers workers_;  // the last member, so that its threads end first
};

// Registers memory with cuFile, which then transfers without a copy inside the GPU. The
// device must be current. Returns an empty string, or why it failed.
std::string register_memory(const Driver& driver, const CuFile& cufile, const void* memory, size_t size);
std::string unregister_memory(const Driver& driver, const CuFile& cufile, const void* memory);

}  // namespace gds

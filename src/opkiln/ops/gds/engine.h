// The engine for memory of GPUs: cuFile, or reads and writes of the host and a copy.
#pragma once

#include "../async_io/engines.h"
#include "../async_io/workers.h"
#include "libraries.h"

namespace gds {

// What an engine has done so far.
struct Ways {
  int64_t by_cufile = 0;  // bytes
  int64_t by_host = 0;
  std::string refused;  // why cuFile did not take what it was asked to, the last time
  std::string failed;   // why a copy could not be made, the last time
};

// Threads that run a piece at a time. cuFile takes what is direct and in a file that it has accepted. All else is read
// to a page-locked buffer of the thread and copied from there, or the other way round, while other threads do the
// same: reads and copies overlap. What cuFile cannot do, the host tries again.
class DeviceEngine : public aio::Engine {
 public:
  // `cufile` may be null. `host_too`: memory of the host counts as that of device 0, for tests without a GPU.
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
  aio::Workers workers_;  // the last member: its threads end first
};

// Memory that cuFile knows: it reads and writes there without a copy in the GPU. The device must be current. Empty, or
// why it could not be done.
std::string register_memory(const Driver& driver, const CuFile& cufile, const void* memory, size_t size);
std::string unregister_memory(const Driver& driver, const CuFile& cufile, const void* memory);

}  // namespace gds

// The engines that run pieces: io_uring, Linux's native asynchronous I/O, or blocking threads.
#pragma once

#include "transfer.h"

namespace aio {

// Runs pieces, at most `depth` at a time. Used by one thread. Each finished piece increments the eventfd.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void start(Piece* piece) = 0;
  virtual void submit() {}  // submits what was started since the last call
  virtual void collect(std::vector<Finished>& out) = 0;  // collects finished pieces; does not wait

  // Whether the engine itself moves bytes to and from any memory at any address. Otherwise the kernel does,
  // and pieces that direct I/O cannot handle go through a buffer of the queue.
  virtual bool stages() const { return false; }
  virtual void begin(Request&) {}  // called before the request's first piece
  virtual void end(Request&) {}    // called after the last one, while the files are still open
};

constexpr int kNotCompiled = -1;  // the engine's header was missing at compile time

// Opens an engine. Returns null and sets an errno on failure. Raises if no engine has this name.
Engine* open_engine(const char* name, unsigned depth, unsigned threads, int event, int& error);

}  // namespace aio

// How pieces are run: by io_uring, by Linux's native asynchronous I/O, or by threads that block.
#pragma once

#include "transfer.h"

namespace aio {

// Runs pieces, at most `depth` at a time. Used by one thread. Each piece that ends counts the eventfd up.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual void start(Piece* piece) = 0;
  virtual void submit() {}  // what was started since
  virtual void collect(std::vector<Finished>& out) = 0;  // what has ended; does not wait

  // Whether it takes bytes from a tensor's memory and brings them there itself, whatever memory that is and
  // wherever it begins. Else the system does, and pieces that direct I/O cannot do have a buffer of the queue's.
  virtual bool stages() const { return false; }
  virtual void begin(Request&) {}  // before its first piece
  virtual void end(Request&) {}    // after its last one, while its files are open
};

constexpr int kNotCompiled = -1;  // there was no header for the engine

// An engine, or null and why, as an error's number. Raises if there is none of this name.
Engine* open_engine(const char* name, unsigned depth, unsigned threads, int event, int& error);

}  // namespace aio

// A queue of requests, and the thread that splits them into pieces and keeps an engine busy.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "engines.h"

namespace aio {

// The result of a request.
struct Outcome {
  enum State : int64_t { kRunning, kDone, kCancelled } state = kRunning;
  int error = 0;
  int64_t failed = -1;
  std::vector<int64_t> ends;  // for each part, the bytes that were transferred
};

class Queue {
 public:
  // Takes ownership of the engine and of the eventfd that it increments.
  Queue(std::unique_ptr<Engine> engine, int event, int64_t depth, int64_t block);
  ~Queue();  // waits for all requests

  int64_t add(std::shared_ptr<Request> request);
  // Waits for at most this long, or forever if negative. Returns false if there is no such request.
  bool wait(int64_t id, int64_t milliseconds, Outcome& out);
  void forget(int64_t id);  // only if the request has ended
  void cancel(int64_t id);
  Engine& engine() { return *engine_; }

 private:
  void run();
  void fill();
  bool next_piece(Request& request);
  void begin(Request& request);
  void take(const Finished& finished);
  void finish_piece(Piece* piece);
  void finish_requests();
  Piece* piece();
  void give_buffer(Piece& piece, int64_t size);
  void wake();

  const std::unique_ptr<Engine> engine_;
  const int event_;
  const int64_t block_;

  std::mutex lock_;
  std::condition_variable ended_;
  std::map<int64_t, std::shared_ptr<Request>> requests_;
  std::vector<Request*> added_;
  int64_t last_ = 0;
  bool closing_ = false;

  // Used only by the queue's thread.
  std::vector<Request*> active_;  // in order of arrival
  std::vector<std::unique_ptr<Piece>> pieces_;  // all of them
  std::vector<Piece*> free_;
  std::vector<Finished> finished_;
  std::thread thread_;
};

}  // namespace aio

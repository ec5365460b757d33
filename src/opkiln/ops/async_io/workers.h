// Threads for engines whose calls block.
#pragma once

#include <errno.h>
#include <sys/eventfd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "transfer.h"

namespace aio {

// Threads that each run one piece at a time. Each finished piece increments the eventfd.
class Workers {
 public:
  // Runs a piece and returns its result, as in Finished.
  using Work = std::function<int64_t(Piece&)>;

  Workers(int event, Work work) : event_(event), work_(std::move(work)) {}

  // Starts the threads. Returns 0, or an errno if not even one could be started.
  int open(size_t count) {
    try {
      for (size_t i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
    } catch (const std::exception&) {  // one thread is enough to continue
      if (threads_.empty()) return EAGAIN;
    }
    return 0;
  }

  ~Workers() {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      stopping_ = true;
    }
    more_.notify_all();
    for (std::thread& each : threads_) each.join();
  }

  void start(Piece* piece) {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      waiting_.push_back(piece);
    }
    more_.notify_one();
  }

  void collect(std::vector<Finished>& out) {
    const std::lock_guard<std::mutex> guard(lock_);
    out.insert(out.end(), ended_.begin(), ended_.end());
    ended_.clear();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      more_.wait(guard, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Piece* const piece = waiting_.front();
      waiting_.pop_front();
      guard.unlock();
      const int64_t result = work_(*piece);
      guard.lock();
      ended_.push_back({piece, result});
      eventfd_write(event_, 1);
    }
  }

  const int event_;
  const Work work_;
  std::mutex lock_;
  std::condition_variable more_;
  std::deque<Piece*> waiting_;
  std::vector<Finished> ended_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace aio

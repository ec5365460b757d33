// Splits requests into pieces, and handles pieces that the system completed only partly or not at all.

#include "queue.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace aio {
namespace {

constexpr int64_t kPage = 4096;
constexpr int kMostTries = 1000;  // for a piece that the system refuses for now

int64_t round_down(int64_t value, int64_t step) { return value / step * step; }
int64_t round_up(int64_t value, int64_t step) { return round_down(value + step - 1, step); }

int64_t size_of(int descriptor) {
  struct stat found;
  if (fstat(descriptor, &found) != 0) return -1;
  return S_ISREG(found.st_mode) ? static_cast<int64_t>(found.st_size) : -1;
}

bool fits(const void* memory, int64_t step) {
  return reinterpret_cast<uintptr_t>(memory) % static_cast<uintptr_t>(step) == 0;
}

}  // namespace

File::File(int plain_, int direct_) : plain(plain_), direct(direct_) {
#if defined(STATX_DIOALIGN)
  struct statx found{};
  if (direct >= 0 && statx(direct, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
      (found.stx_mask & STATX_DIOALIGN)) {
    if (found.stx_dio_offset_align == 0) {  // the file does not support direct I/O
      close(direct);
      direct = -1;
    }
    memory_step = std::max<int64_t>(1, found.stx_dio_mem_align);
    // At least whole pages: the ends of a range go through the page cache, and a
    // page written both ways at once would lose one of the writes.
    offset_step = std::max<int64_t>(kPage, found.stx_dio_offset_align);
  }
#endif
  offset_step = std::max<int64_t>(offset_step, sysconf(_SC_PAGESIZE));
  size = size_of(plain);
  if (size < 0) size = INT64_MAX;
}

File::File(File&& other) noexcept
    : plain(other.plain), direct(other.direct), offset_step(other.offset_step),
      memory_step(other.memory_step), size(other.size), registered(other.registered) {
  other.release();
}

File::~File() {
  if (plain >= 0) close(plain);
  if (direct >= 0) close(direct);
}

void File::release() { plain = direct = -1; }

Queue::Queue(std::unique_ptr<Engine> engine, int event, int64_t depth, int64_t block)
    : engine_(std::move(engine)), event_(event), block_(round_up(block, kPage)) {
  for (int64_t i = 0; i < depth; ++i) {
    pieces_.push_back(std::make_unique<Piece>());
    free_.push_back(pieces_.back().get());
  }
  thread_ = std::thread([this] { run(); });
}

Queue::~Queue() {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    closing_ = true;
  }
  wake();
  thread_.join();
  for (const auto& each : pieces_) free(each->buffer);
  close(event_);
}

int64_t Queue::add(std::shared_ptr<Request> request) {
  int64_t id;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    id = request->id = ++last_;
    added_.push_back(request.get());
    requests_.emplace(id, std::move(request));
  }
  wake();
  return id;
}

bool Queue::wait(int64_t id, int64_t milliseconds, Outcome& out) {
  std::unique_lock<std::mutex> guard(lock_);
  const auto found = requests_.find(id);
  if (found == requests_.end()) return false;
  const std::shared_ptr<Request> request = found->second;  // keeps it alive if another thread forgets it
  const auto done = [&request] { return request->done; };
  if (milliseconds < 0) {
    ended_.wait(guard, done);
  } else if (!ended_.wait_for(guard, std::chrono::milliseconds(milliseconds), done)) {
    return true;
  }
  out.state = request->cancelled.load() ? Outcome::kCancelled : Outcome::kDone;
  out.error = request->error;
  out.failed = request->failed;
  for (const Part& each : request->parts) out.ends.push_back(each.end);
  return true;
}

void Queue::forget(int64_t id) {
  const std::lock_guard<std::mutex> guard(lock_);
  const auto found = requests_.find(id);
  if (found != requests_.end() && found->second->done) requests_.erase(found);
}

void Queue::cancel(int64_t id) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    const auto found = requests_.find(id);
    if (found == requests_.end() || found->second->done) return;
    found->second->cancelled = true;
  }
  wake();
}

void Queue::wake() { eventfd_write(event_, 1); }

// ---- in the queue's thread ---------------------------------------------------------------------------

void Queue::run() {
  for (;;) {
    bool closing;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      active_.insert(active_.end(), added_.begin(), added_.end());
      added_.clear();
      closing = closing_;
    }
    fill();
    engine_->submit();
    finished_.clear();
    engine_->collect(finished_);
    for (const Finished& each : finished_) take(each);
    finish_requests();
    if (!finished_.empty()) continue;
    if (active_.empty()) {
      if (closing) return;
      for (Piece* each : free_) {  // an idle queue keeps no buffers
        free(each->buffer);
        each->buffer = nullptr;
        each->capacity = 0;
      }
    }
    // Every event (a request, a cancellation, a finished piece) increments the eventfd.
    // If one came since the checks above, the read returns at once.
    eventfd_t count;
    while (eventfd_read(event_, &count) != 0 && errno == EINTR) {
    }
  }
}

// Starts pieces until the engine is full or no work is left, oldest request first.
void Queue::fill() {
  for (Request* each : active_) {
    if (!each->begun) begin(*each);
    while (!free_.empty() && next_piece(*each)) {
    }
    if (free_.empty()) return;
  }
}

// Reserves space for writes that extend a file. So a full disk is detected before anything is written,
// and writes at the end of the file need not wait for each other.
void Queue::begin(Request& request) {
  request.begun = true;
  engine_->begin(request);
  for (Part& each : request.parts) each.end = each.size;
  if (!request.write) return;
  for (size_t i = 0; i < request.parts.size() && request.error == 0; ++i) {
    const Part& part = request.parts[i];
    const int file = request.files[static_cast<size_t>(part.file)].plain;
    const int64_t size = size_of(file);
    if (part.size < block_ || size < 0 || part.offset + part.size <= size) continue;
    int code;
    do {
      code = fallocate(file, 0, part.offset, part.size) == 0 ? 0 : errno;
    } while (code == EINTR);
    // Other errors mean that the file system cannot reserve space. Writes work without.
    if (code == ENOSPC || code == EDQUOT || code == EFBIG) request.fail(code, i);
  }
}

Piece* Queue::piece() {
  Piece* const found = free_.back();
  free_.pop_back();
  char* const buffer = found->buffer;
  const int64_t capacity = found->capacity;
  *found = Piece();
  found->buffer = buffer;
  found->capacity = capacity;
  return found;
}

void Queue::give_buffer(Piece& piece, int64_t size) {
  if (piece.capacity < size) {
    free(piece.buffer);
    piece.capacity = std::max(size, block_);
    piece.buffer = static_cast<char*>(aligned_alloc(kPage, static_cast<size_t>(round_up(piece.capacity, kPage))));
    if (piece.buffer == nullptr) piece.capacity = 0;
  }
  piece.memory = piece.buffer;
}

// Starts the next piece of a request. Returns false if there is none.
bool Queue::next_piece(Request& request) {
  while (!request.exhausted() && request.position == request.parts[request.part].size) {
    ++request.part;
    request.position = 0;
  }
  if (request.exhausted()) return false;
  const Part& part = request.parts[request.part];
  const File& file = request.files[static_cast<size_t>(part.file)];
  const int64_t step = file.offset_step, block = round_up(block_, step);
  const int64_t left = part.size - request.position, from = part.offset + request.position;
  char* const memory = part.memory + request.position;

  Piece& piece = *this->piece();
  piece.request = &request;
  piece.part = request.part;
  piece.write = request.write;
  piece.target = memory;
  piece.memory = memory;
  piece.offset = from;
  // A direct read overwrites memory up to the end of the step in which the file ends.
  const int64_t direct = request.write ? left : std::min(left, file.size - from);
  const bool whole_steps = file.direct >= 0 && from % step == 0 && direct >= step;
  const bool in_place = engine_->stages() || fits(memory, file.memory_step);
  if (file.direct < 0) {
    piece.size = piece.wanted = std::min(left, block);
  } else if (whole_steps && (request.write || in_place)) {
    piece.direct = true;
    piece.size = piece.wanted = std::min(round_down(direct, step), block);
    if (!in_place) {
      give_buffer(piece, piece.size);
      if (piece.memory != nullptr) memcpy(piece.memory, memory, static_cast<size_t>(piece.size));
    }
  } else if (request.write) {
    // Less than a step goes through the page cache: other data of the file surrounds it.
    piece.size = piece.wanted = std::min(left, round_up(from + 1, step) - from);
  } else if (engine_->stages()) {
    piece.direct = true;
    piece.size = piece.wanted = std::min(left, round_up(from + 1, block) - from);
  } else {
    // Reads the surrounding whole steps into a buffer. If only the
    // beginning is unaligned, the rest needs no buffer.
    const int64_t first = round_down(from, step), next = first + step;
    const bool only_begin = from != first && fits(memory + (next - from), file.memory_step);
    piece.direct = true;
    piece.offset = first;
    piece.skip = from - first;
    piece.wanted = std::min(left, (only_begin ? next : first + block) - from);
    piece.size = round_up(piece.skip + piece.wanted, step);
    give_buffer(piece, piece.size);
  }
  request.position += piece.wanted;
  ++request.running;
  if (piece.memory == nullptr) {
    request.fail(ENOMEM, piece.part);
    finish_piece(&piece);
    return true;
  }
  engine_->start(&piece);
  return true;
}

void Queue::take(const Finished& finished) {
  Piece& piece = *finished.piece;
  Request& request = *piece.request;
  const File& file = request.files[static_cast<size_t>(request.parts[piece.part].file)];
  const auto again = [&] { engine_->start(&piece); };
  if (finished.result < 0) {
    const int code = static_cast<int>(-finished.result);
    if ((code == EINTR || code == EAGAIN) && ++piece.tries < kMostTries) return again();
    if (code == EINVAL && piece.direct) {  // the file system needs larger steps than it reports
      piece.direct = false;
      return again();
    }
    request.fail(code, piece.part);
    return finish_piece(&piece);
  }
  piece.done += finished.result;
  piece.offset += finished.result;
  piece.memory += finished.result;
  piece.size -= finished.result;
  const bool enough = piece.done >= piece.skip + piece.wanted;
  if (enough || request.error != 0) return finish_piece(&piece);
  if (finished.result == 0) {
    if (piece.write) request.fail(EIO, piece.part);  // it would be retried forever
    return finish_piece(&piece);
  }
  // A short transfer. If the file ends here, no further read is needed to find out.
  if (!piece.write && size_of(file.plain) == piece.offset) return finish_piece(&piece);
  if (piece.direct && (piece.write || !engine_->stages())) {
    piece.direct = piece.offset % file.offset_step == 0 && piece.size % file.offset_step == 0 &&
        (engine_->stages() || fits(piece.memory, file.memory_step));
  }
  again();
}

void Queue::finish_piece(Piece* piece) {
  Request& request = *piece->request;
  Part& part = request.parts[piece->part];
  const int64_t got = std::max<int64_t>(0, std::min(piece->done - piece->skip, piece->wanted));
  const bool buffered = piece->buffer != nullptr && piece->memory == piece->buffer + piece->done;
  if (!piece->write && buffered && got > 0) {
    memcpy(piece->target, piece->buffer + piece->skip, static_cast<size_t>(got));
  }
  // Pieces end in any order. The result is where the first gap begins.
  if (got < piece->wanted) part.end = std::min<int64_t>(part.end, piece->target + got - part.memory);
  --request.running;
  free_.push_back(piece);
}

// Completes requests whose pieces have all ended, and wakes their waiters.
void Queue::finish_requests() {
  std::vector<opk::Tensor> owners;  // released last, because that may wait for Python
  size_t kept = 0;
  for (Request* each : active_) {
    // Everything is started if nothing is left of the last part, or if the request failed or was cancelled.
    const bool all_started = each->exhausted() ||
        (each->part + 1 == each->parts.size() && each->position == each->parts[each->part].size);
    if (each->running > 0 || !each->begun || !all_started) {
      active_[kept++] = each;
      continue;
    }
    for (size_t i = each->part; i < each->parts.size(); ++i) {  // parts that never started
      const int64_t reached = i == each->part ? each->position : 0;
      each->parts[i].end = std::min(each->parts[i].end, reached);
    }
    for (Part& part : each->parts) owners.push_back(static_cast<opk::Tensor&&>(part.owner));
    engine_->end(*each);
    each->files.clear();
    const std::lock_guard<std::mutex> guard(lock_);
    each->done = true;  // from here on the request may be forgotten and deleted
    ended_.notify_all();
  }
  active_.resize(kept);
}

}  // namespace aio

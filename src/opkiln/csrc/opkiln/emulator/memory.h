// The memory that a kernel may touch: a block's shared memory, the
// tensors, and each thread's own stack. Included by runtime.cpp only.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "image.h"
#include "runtime.h"
#include "shadow.h"

namespace opk {
namespace emulator {

// Separates the dynamic shared memory from what follows it in the library.
constexpr std::size_t kGuard = 64 * 1024;
alignas(1024) char dynamic_arena[kMostShared + kGuard];

// The limit of tensor cells per launch, at 48 bytes each. Memory beyond it is not watched for races.
constexpr std::size_t kMostCells = std::size_t{4} << 20;

enum class Place { kShared, kTensor, kOther };

struct Piece {
  Place place;
  uintptr_t begin, end;
  std::string name;
  Shadow shadow;
  // the function of a shared variable, which exists once the function is entered
  const char* function = nullptr;
  bool exists = true;

  bool holds(uintptr_t address, std::size_t size) const {
    return begin <= address && size <= end - begin && address - begin <= end - begin - size;
  }
};

struct Tensor {
  uintptr_t begin, end;
  std::size_t element;
};

// The tensors of the op that this thread runs.
thread_local std::vector<Tensor> tensors_here;
thread_local unsigned op_depth = 0;

class Memory {
 public:
  // Collects the pieces for one launch. Pieces are found by address, so overlapping tensors become one piece.
  void prepare(const Image& image, const void* tls_mark, std::size_t dynamic_bytes) {
    pieces_.clear();
    last_ = nullptr;
    if (const uintptr_t block = image.tls_block(tls_mark)) {
      for (const SharedVariable& variable : image.shared_variables()) {
        const uintptr_t begin = block + variable.offset;
        add(Place::kShared, begin, begin + variable.size, demangle(variable.symbol), 1);
        pieces_.back().function = variable.function;
        pieces_.back().exists = variable.function == nullptr;
      }
    }
    const auto arena = reinterpret_cast<uintptr_t>(dynamic_arena);
    add(Place::kShared, arena, arena + dynamic_bytes, "the dynamic shared memory", 1);
    std::vector<Tensor> tensors = tensors_here;
    knows_tensors_ = !tensors.empty();
    std::sort(tensors.begin(), tensors.end(),
              [](const Tensor& a, const Tensor& b) { return a.begin < b.begin; });
    std::size_t cells = 0;
    for (std::size_t i = 0; i < tensors.size();) {
      Tensor all = tensors[i];
      for (++i; i < tensors.size() && tensors[i].begin < all.end; ++i) {
        all.end = std::max(all.end, tensors[i].end);
        all.element = std::min(all.element, tensors[i].element);
      }
      cells += (all.end - all.begin) / all.element + 1;
      add(Place::kTensor, all.begin, all.end,
          "a tensor of " + std::to_string(all.end - all.begin) + " bytes",
          cells > kMostCells ? 0 : all.element);
    }
    std::sort(pieces_.begin(), pieces_.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  }

  bool knows_tensors() const {
    return knows_tensors_;
  }

  // Makes the shared variables of this function exist.
  void enter(const char* function) {
    for (Piece& piece : pieces_) {
      if (piece.function != nullptr && Image::is_of(piece.function, function)) {
        piece.exists = true;
      }
    }
  }

  // The piece that holds an access, or null if none holds all of it.
  Piece* find(uintptr_t address, std::size_t size) {
    if (last_ != nullptr && last_->holds(address, size)) {
      return last_;
    }
    Piece* const piece = find_before(address);
    if (piece == nullptr || !piece->exists || !piece->holds(address, size)) {
      return nullptr;
    }
    return last_ = piece;
  }

  // The last piece that begins at or before an address, even if it ends before it.
  Piece* find_before(uintptr_t address) {
    auto next = std::upper_bound(
        pieces_.begin(), pieces_.end(), address,
        [](uintptr_t value, const Piece& piece) { return value < piece.begin; });
    while (next != pieces_.begin()) {
      if ((--next)->exists) {
        return &*next;
      }
    }
    return nullptr;
  }

  // The first piece that begins after an address.
  Piece* find_after(uintptr_t address) {
    auto found = std::upper_bound(
        pieces_.begin(), pieces_.end(), address,
        [](uintptr_t value, const Piece& piece) { return value < piece.begin; });
    return found == pieces_.end() ? nullptr : &*found;
  }

  // Whether an address is in or near the memory of shared variables.
  bool is_shared(uintptr_t address) const {
    uintptr_t low = UINTPTR_MAX, high = 0;
    const auto arena = reinterpret_cast<uintptr_t>(dynamic_arena);
    for (const Piece& piece : pieces_) {
      if (piece.place == Place::kShared && piece.begin != arena) {
        low = std::min(low, piece.begin);
        high = std::max(high, piece.end);
      }
    }
    return address - arena < sizeof dynamic_arena || (low < high && low <= address + 64 && address < high + 64);
  }

  // Fills shared memory with NaN before a block runs: its contents are undefined.
  void poison_shared() {
    each_shared([](char* at, std::size_t bytes) { std::memset(at, 0xff, bytes); });
  }

  void save_shared(std::vector<char>& to) {
    to.clear();
    each_shared([&](const char* at, std::size_t bytes) { to.insert(to.end(), at, at + bytes); });
  }

  void restore_shared(const std::vector<char>& from) {
    const char* next = from.data();
    each_shared([&](char* at, std::size_t bytes) {
      std::memcpy(at, next, bytes);
      next += bytes;
    });
  }

 private:
  void add(Place place, uintptr_t begin, uintptr_t end, std::string name, std::size_t granule) {
    const std::size_t watched = granule > 0 ? end - begin : 0;
    pieces_.push_back(
        {place, begin, end, std::move(name), Shadow(begin, watched, std::max<std::size_t>(granule, 1))});
  }

  template <class Visit>
  void each_shared(const Visit& visit) {
    for (const Piece& piece : pieces_) {
      if (piece.place == Place::kShared && piece.begin < piece.end) {
        visit(reinterpret_cast<char*>(piece.begin), piece.end - piece.begin);
      }
    }
  }

  std::vector<Piece> pieces_;
  Piece* last_ = nullptr;
  bool knows_tensors_ = false;
};

}  // namespace emulator
}  // namespace opk

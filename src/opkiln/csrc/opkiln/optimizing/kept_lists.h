// Lists of tensors that an op keeps from call to call. Passing ten thousand tensors to an op takes
// longer than stepping them, and all except the gradients are usually the same as last time.
//
// The op keeps the tensors, not their addresses. So every call sees each tensor's current memory, size
// and type, and repeats every check.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include <opkiln/tensors.h>

OPKILN_NAMESPACE_BEGIN

class KeptLists {
 public:
  using Lists = std::vector<TensorList>;

  // Keeps the lists, and returns a ticket for them: a number in a tensor.
  static Tensor keep(Lists lists) {
    Tensor ticket = torch::stable::empty({1}, ScalarType::Long);
    Shelf& here = shelf();
    const std::lock_guard guard(here.lock);
    here.lists.emplace(++here.last, std::make_shared<const Lists>(std::move(lists)));
    number(ticket) = here.last;
    return ticket;
  }

  // Null if no lists are kept for the ticket. The lists last as long as the pointer, even if another
  // thread forgets them.
  static std::shared_ptr<const Lists> find(const Tensor& ticket) {
    Shelf& here = shelf();
    const std::lock_guard guard(here.lock);
    const auto found = here.lists.find(number(ticket));
    return found == here.lists.end() ? nullptr : found->second;
  }

  static void forget(const Tensor& ticket) {
    std::shared_ptr<const Lists> last;  // declared first, so that tensors are freed without the lock
    Shelf& here = shelf();
    const std::lock_guard guard(here.lock);
    const auto found = here.lists.find(number(ticket));
    if (found != here.lists.end()) {
      last = std::move(found->second);
      here.lists.erase(found);
    }
  }

 private:
  struct Shelf {
    std::mutex lock;
    std::unordered_map<int64_t, std::shared_ptr<const Lists>> lists;
    // Starts at an address. So if this library has replaced another one of the same op, the numbers of
    // the two differ. The shift keeps it positive: an address may have 48 bits, and the highest would
    // be the sign.
    int64_t last = static_cast<int64_t>(reinterpret_cast<uintptr_t>(this) << 16 >> 1);
  };

  // Never destroyed: at exit torch may be unloaded first.
  static Shelf& shelf() {
    static Shelf* const only = new Shelf;
    return *only;
  }

  static int64_t& number(const Tensor& ticket) {
    if (!ticket.is_cpu() || ticket.scalar_type() != ScalarType::Long || ticket.numel() != 1) {
      refuse("ticket is not from this op: expected one Long on the CPU");
    }
    return *static_cast<int64_t*>(ticket.mutable_data_ptr());
  }
};

OPKILN_NAMESPACE_END

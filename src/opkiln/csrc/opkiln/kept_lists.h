// Lists of tensors that an op keeps from call to call. To hand ten thousand tensors over to it takes
// longer than to step them, and but for the gradients they are mostly the same as last time.
//
// What is kept are the tensors, not their addresses: one that has got other memory, another size or
// another type is seen as it is now, and every check is made anew at each call.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "tensors.h"

OPKILN_NAMESPACE_BEGIN

class KeptLists {
 public:
  using Lists = std::vector<TensorList>;

  // A ticket for the lists: a number in a tensor.
  static Tensor keep(Lists lists) {
    Tensor ticket = torch::stable::empty({1}, ScalarType::Long);
    Shelf& here = shelf();
    const std::lock_guard guard(here.lock);
    here.lists.emplace(++here.last, std::make_shared<const Lists>(std::move(lists)));
    number(ticket) = here.last;
    return ticket;
  }

  // Raises where nothing is kept for the ticket. The lists last as long as the pointer, also where
  // another thread forgets them.
  static std::shared_ptr<const Lists> of(const Tensor& ticket) {
    const int64_t wanted = number(ticket);
    Shelf& here = shelf();
    const std::lock_guard guard(here.lock);
    const auto found = here.lists.find(wanted);
    if (found == here.lists.end()) {
      refuse("ticket " + std::to_string(wanted) + ": no lists are kept for it, or no longer");
    }
    return found->second;
  }

  static void forget(const Tensor& ticket) {
    std::shared_ptr<const Lists> last;  // declared first: tensors are let go of without the lock
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
    // No number that another library of the same op has given, which this one may have replaced.
    // Never negative: addresses may have 48 bits, the highest of which would be the sign.
    int64_t last = static_cast<int64_t>(reinterpret_cast<uintptr_t>(this) << 16 >> 1);
  };

  // Never destroyed: at the process's end torch may be gone before it.
  static Shelf& shelf() {
    static Shelf* const only = new Shelf;
    return *only;
  }

  static int64_t& number(const Tensor& ticket) {
    if (!ticket.is_cpu() || ticket.scalar_type() != ScalarType::Long || ticket.numel() != 1) {
      refuse("ticket is not one that lists were kept for: expected one Long on the CPU");
    }
    return *static_cast<int64_t*>(ticket.mutable_data_ptr());
  }
};

OPKILN_NAMESPACE_END

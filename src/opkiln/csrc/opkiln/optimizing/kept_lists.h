// Lists of tensors that an op keeps between calls. Passing ten thousand tensors to an op takes longer than
// stepping them, and all except the gradients are usually the same as in the last call.
//
// The op keeps the tensors, so every call sees each tensor's current memory. In host memory it also
// repeats every check. A plan on a GPU has addresses: the op notes them, and sees if one has changed.
#pragma once

#include "tensors.h"

#if !defined(__CUDACC_RTC__)

// Declared here: <sched.h> and <pthread.h> declare clock(), which CUDA has with another type.
extern "C" int sched_yield() noexcept;

OPK_PLAIN_BEGIN
namespace opkiln __attribute__((visibility("hidden"))) {

class KeptLists {
  struct Record {
    int64_t number;
    int64_t users;  // the registry itself, and each Kept
    opk::List<TensorList> lists;
    opk::List<int64_t> notes;
    Record* next;
  };

 public:
  // The lists for a ticket, or none. They stay valid while this
  // object lives, even if another thread forgets them.
  class Kept {
   public:
    explicit Kept(const Tensor& ticket) {
      const int64_t number = number_in(ticket);
      const Lock guard;
      record_ = *place_of(number);
      if (record_) ++record_->users;
    }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;
    ~Kept() {
      leave(record_);
    }
    explicit operator bool() const {
      return record_ != nullptr;
    }
    const TensorList& operator[](int64_t i) const {
      return record_->lists[i];
    }
    const opk::List<TensorList>& lists() const {
      return record_->lists;
    }
    // What the op noted when it kept the lists, and may change.
    int64_t* notes() const {
      return record_->notes.begin();
    }

   private:
    Record* record_;
  };

  // Keeps the lists and returns a ticket for them: a number in a tensor.
  static Tensor keep(opk::List<TensorList> lists, opk::List<int64_t> notes = {}) {
    Tensor ticket = opk::empty({1}, DType::int64, opk::Device());
    auto* const record = new Record{0, 1, static_cast<opk::List<TensorList>&&>(lists),
                                     static_cast<opk::List<int64_t>&&>(notes), nullptr};
    const Lock guard;
    *ticket.data<int64_t>() = record->number = ++last;
    record->next = first;
    first = record;
    return ticket;
  }

  static void forget(const Tensor& ticket) {
    const int64_t number = number_in(ticket);
    Record* found;
    {
      const Lock guard;
      Record** const place = place_of(number);
      found = *place;
      if (found) *place = found->next;
    }
    leave(found);
  }

 private:
  // Held for a few instructions, so waiting for it takes no more than a turn of the scheduler.
  struct Lock {
    Lock() {
      while (__atomic_test_and_set(&locked, __ATOMIC_ACQUIRE)) sched_yield();
    }
    ~Lock() {
      __atomic_clear(&locked, __ATOMIC_RELEASE);
    }
  };

  // Frees tensors outside of the lock. At exit nothing is freed: torch may be unloaded first.
  static void leave(Record* record) {
    if (!record) return;
    int64_t left;
    {
      const Lock guard;
      left = --record->users;
    }
    if (left == 0) delete record;
  }

  // The link to the record with this number, or the null link at the end.
  static Record** place_of(int64_t number) {
    Record** place = &first;
    while (*place && (*place)->number != number) place = &(*place)->next;
    return place;
  }

  static int64_t number_in(const Tensor& ticket) {
    if (!ticket.is_cpu() || ticket.dtype() != DType::int64 || ticket.numel() != 1) {
      raise_form("ticket is not from this op: expected one int64 on the CPU");
    }
    return *ticket.data<const int64_t>();
  }

  inline static bool locked = false;
  inline static Record* first = nullptr;
  // Counts from an address, so that a library and the one that replaced it use different numbers.
  // Addresses have up to 48 bits; the shift keeps the number positive.
  inline static int64_t last = static_cast<int64_t>(reinterpret_cast<uintptr_t>(&locked) << 16 >> 1);
};

}  // namespace opkiln
OPK_PLAIN_END

#endif

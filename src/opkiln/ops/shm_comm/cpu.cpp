// Collectives of the ranks of one host. Each rank copies through slots of shared memory
// that stay in the caches. group.h defines how the ranks take turns.

#include "group.h"

#include <opkiln/arguments.h>

using opk::Tensor;

namespace {

// ---- the groups of this process --------------------------------------------------------------------------

struct Entry {
  Group* group = nullptr;
  int64_t number = -1;
  int64_t users = 0;
  bool closed = false;
};

// Numbers are never reused, so a closed group is not mistaken for another one.
struct Table {
  static constexpr int64_t kMost = 1024;
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  Entry entries[kMost];
  int64_t next = 0;
  int pid = 0;  // the process that opened the groups; a forked child has none
};
Table table;

struct Lock {
  explicit Lock(pthread_mutex_t* mutex) : mutex_(mutex) { pthread_mutex_lock(mutex_); }
  ~Lock() { pthread_mutex_unlock(mutex_); }
  Lock(const Lock&) = delete;
  pthread_mutex_t* mutex_;
};

// Deletes a group that is closed and unused. The table must be locked.
void drop_unused(Entry& entry) {
  if (!entry.closed || entry.users != 0) return;
  delete entry.group;
  entry = Entry{};
}

// Borrows a group by number, for one call.
class Use {
 public:
  explicit Use(int64_t number) {
    OPK_SERVED(number >= 0, "the ranks of this group share no memory");
    // Checked before locking: another thread may have held the lock when this process was forked.
    OPK_CHECK(table.pid == getpid(),
              "the group belongs to another process; a forked child cannot use its parent's group");
    const Lock lock(&table.mutex);
    entry_ = &table.entries[number % Table::kMost];
    OPK_CHECK(entry_->number == number && !entry_->closed, "the group is closed");
    ++entry_->users;
  }
  ~Use() {
    if (locked_) pthread_mutex_unlock(entry_->group->mutex());
    const Lock lock(&table.mutex);
    --entry_->users;
    drop_unused(*entry_);
  }
  Use(const Use&) = delete;

  // Begins a call. Calls of other threads on the same group come before or after it.
  Group& begin(Kind kind, const Tensor& x, Reduce how, int64_t count) {
    pthread_mutex_lock(entry_->group->mutex());
    locked_ = true;
    entry_->group->begin({kind, static_cast<uint32_t>(x.dtype()), static_cast<uint32_t>(how), 0, count});
    return *entry_->group;
  }
  int64_t size() const { return entry_->group->size(); }

 private:
  Entry* entry_ = nullptr;
  bool locked_ = false;
};

Reduce reduce_of(const opk::String& name) {
  for (uint32_t i = 0; i < sizeof kReduceNames / sizeof *kReduceNames; ++i) {
    if (__builtin_strcmp(name.c_str(), kReduceNames[i]) == 0) return static_cast<Reduce>(i);
  }
  opk::raise("op is ", name.c_str(), ", expected sum, mean, product, max or min");
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
void copy(T* to, const T* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
}

// ---- the collectives -------------------------------------------------------------------------------------

// Up to this many bytes, each rank combines everything itself. Every rank then
// reads all the data, but the ranks meet only once instead of twice.
constexpr int64_t kWholeBytes = 64 << 10;

// `in` may equal `out`.
template <class T>
void all_reduce(Group& group, Reduce how, const T* in, T* out, int64_t count) {
  const int64_t size = group.size(), rank = group.rank();
  if (size == 1) return in == out ? void() : copy(out, in, count);
  const T* sources[kMostRanks];
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (bytes * (size - 1) <= kWholeBytes && bytes <= group.slot_bytes()) {
    copy(group.slot<T>(rank), in, count);
    group.announce_written();
    for (int64_t r = 0; r < size; ++r) sources[r] = group.slot<T>(r);
    combine(how, sources, size, count, out, static_cast<T*>(nullptr));
    group.next_turn();
    return;
  }
  // Rank p combines part p of each stretch. Its slot holds its own
  // elements of the other ranks' parts, and the result at its own part.
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t most = group.slot_bytes() / static_cast<int64_t>(sizeof(T)) / size / kLine * kLine;
  for (int64_t begin = 0; begin < count; begin += most * size) {
    const int64_t length = least(count - begin, most * size);
    const int64_t step = round_up((length + size - 1) / size, kLine);
    const auto first = [&](int64_t p) { return least(p * step, length); };
    const auto long_ = [&](int64_t p) { return first(p + 1) - first(p); };
    const T* const from = in + begin;
    T* const to = out + begin;
    for (int64_t p = 0; p < size; ++p) {
      if (p != rank) copy(group.slot<T>(rank) + p * step, from + first(p), long_(p));
    }
    group.announce_written();
    for (int64_t r = 0; r < size; ++r) sources[r] = group.slot<T>(r) + rank * step;
    sources[rank] = from + first(rank);
    combine(how, sources, size, long_(rank), to + first(rank), group.slot<T>(rank) + rank * step);
    group.announce_reduced();
    for (int64_t i = 1; i < size; ++i) {
      const int64_t p = (rank + i) % size;
      copy(to + first(p), group.slot<T>(p) + p * step, long_(p));
    }
    group.next_turn();
  }
}

// `in` has `count` elements for each rank. `out` must not overlap it.
template <class T>
void reduce_scatter(Group& group, Reduce how, const T* in, T* out, int64_t count) {
  const int64_t size = group.size(), rank = group.rank();
  const T* sources[kMostRanks];
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t most = group.slot_bytes() / static_cast<int64_t>(sizeof(T)) / size / kLine * kLine;
  int64_t begin = 0;
  do {  // runs once even without elements, so that the ranks compare their calls
    const int64_t length = least(count - begin, most);
    for (int64_t p = 0; p < size; ++p) {
      if (p != rank) copy(group.slot<T>(rank) + p * most, in + p * count + begin, length);
    }
    group.announce_written();
    for (int64_t r = 0; r < size; ++r) sources[r] = group.slot<T>(r) + rank * most;
    sources[rank] = in + rank * count + begin;
    combine(how, sources, size, length, out + begin, static_cast<T*>(nullptr));
    group.next_turn();
    begin += most;
  } while (begin < count);
}

// Each rank contributes `bytes`.
void all_gather(Group& group, const char* in, char* out, int64_t bytes) {
  const int64_t size = group.size(), rank = group.rank();
  int64_t begin = 0;
  do {
    const int64_t length = least(bytes - begin, group.slot_bytes());
    copy(group.slot<char>(rank), in + begin, length);
    if (in != out + rank * bytes) copy(out + rank * bytes + begin, in + begin, length);
    group.announce_written();
    for (int64_t i = 1; i < size; ++i) {
      const int64_t r = (rank + i) % size;
      copy(out + r * bytes + begin, group.slot<char>(r), length);
    }
    group.next_turn();
    begin += length;
  } while (begin < bytes);
}

// ---- the ops ---------------------------------------------------------------------------------------------

// The sizes of x, with another first one.
opk::List<int64_t> sizes_with_first(const Tensor& x, int64_t first) {
  opk::List<int64_t> sizes(x.dim());
  for (int64_t i = 0; i < x.dim(); ++i) sizes[i] = i == 0 ? first : x.size(i);
  return sizes;
}

void reduce_into(Use& use, const Tensor& x, Tensor& out, Reduce how) {
  OPK_ELEMENT(opk::element_of(x), T, (float, opkiln::BFloat16, opkiln::Float16), {
    all_reduce(use.begin(kAllReduce, x, how, x.numel()), how, static_cast<const T*>(x.data()),
               static_cast<T*>(out.data()), x.numel());
  });
}

void scatter_into(Use& use, const Tensor& x, Tensor& out, Reduce how) {
  OPK_ELEMENT(opk::element_of(x), T, (float, opkiln::BFloat16, opkiln::Float16), {
    reduce_scatter(use.begin(kReduceScatter, x, how, x.numel()), how, static_cast<const T*>(x.data()),
                   static_cast<T*>(out.data()), out.numel());
  });
}

void gather_into(Use& use, const Tensor& x, Tensor& out) {
  all_gather(use.begin(kAllGather, x, Reduce::kSum, x.numel()), static_cast<const char*>(x.data()),
             static_cast<char*>(out.data()), x.numel() * x.element_size());
}

void check_rows(const Tensor& x, int64_t size) {
  OPK_CHECK(x.dim() > 0 && x.size(0) % size == 0, x, " has shape ", x.sizes(),
            ", expected a multiple of ", size, " rows, which is the number of ranks");
}

}  // namespace

int64_t shm_join(const Tensor& /*host*/, int64_t fd, int64_t rank, int64_t size, int64_t slot,
                 int64_t milliseconds) {
  OPK_CHECK(size >= 1 && size <= kMostRanks, "size is ", size, ", expected 1 to ", kMostRanks);
  OPK_CHECK(rank >= 0 && rank < size, "rank is ", rank, ", expected 0 to ", size - 1);
  OPK_CHECK(slot >= 4096 * size && slot % 4096 == 0, "slot is ", slot, ", expected a page for each rank");
  if (table.pid != getpid()) {  // the first group in this process, or the first in a forked child
    pthread_mutex_init(&table.mutex, nullptr);
    for (Entry& entry : table.entries) entry = Entry{};  // the parent's groups stay mapped
    table.pid = getpid();
  }
  const Lock lock(&table.mutex);
  for (int64_t tried = 0; tried < Table::kMost; ++tried, ++table.next) {
    Entry& entry = table.entries[table.next % Table::kMost];
    if (entry.group != nullptr) continue;
    entry.group = new Group(static_cast<int>(fd), rank, size, slot, milliseconds);
    entry.number = table.next++;
    return entry.number;
  }
  opk::raise("this process has ", Table::kMost, " groups, and cannot have more");
}

void shm_leave(const Tensor& /*host*/, int64_t number) {
  if (number < 0 || table.pid != getpid()) return;
  const Lock lock(&table.mutex);
  Entry& entry = table.entries[number % Table::kMost];
  if (entry.number != number) return;
  entry.closed = true;
  drop_unused(entry);
}

Tensor shm_all_reduce(const Tensor& x, int64_t group, const opk::String& op) {
  Use use(group);
  const Tensor from = opk::contiguous(x);
  Tensor out = opk::empty(x.sizes(), x);
  reduce_into(use, from, out, reduce_of(op));
  return out;
}

void shm_all_reduce_(Tensor& x, int64_t group, const opk::String& op) {
  Use use(group);
  if (x.is_contiguous()) return reduce_into(use, x, x, reduce_of(op));
  // Handled here instead of by the reference, because on another rank the tensor may be contiguous.
  Tensor whole = opk::contiguous(x);
  reduce_into(use, whole, whole, reduce_of(op));
  opk::call("aten::copy_", "", x, whole, false);
}

Tensor shm_reduce_scatter(const Tensor& x, int64_t group, const opk::String& op) {
  Use use(group);
  check_rows(x, use.size());
  const Tensor from = opk::contiguous(x);
  Tensor out = opk::empty(sizes_with_first(x, x.size(0) / use.size()), x);
  scatter_into(use, from, out, reduce_of(op));
  return out;
}

void shm_reduce_scatter_into(Tensor& out, const Tensor& x, int64_t group, const opk::String& op) {
  Use use(group);
  opk::check_contiguous(out, x);
  opk::check_same_dtype(x, out);
  opk::check_numel(x, out.numel() * use.size());
  scatter_into(use, x, out, reduce_of(op));
}

Tensor shm_all_gather(const Tensor& x, int64_t group) {
  Use use(group);
  OPK_CHECK(x.dim() > 0, x, " has no dimensions, expected at least one");
  const Tensor from = opk::contiguous(x);
  Tensor out = opk::empty(sizes_with_first(x, x.size(0) * use.size()), x);
  gather_into(use, from, out);
  return out;
}

void shm_all_gather_into(Tensor& out, const Tensor& x, int64_t group) {
  Use use(group);
  opk::check_contiguous(out, x);
  opk::check_same_dtype(x, out);
  opk::check_numel(out, x.numel() * use.size());
  gather_into(use, x, out);
}

OPKILN_OP(shm_join, cpu);
OPKILN_OP(shm_leave, cpu);
OPKILN_OP(shm_all_reduce, cpu);
OPKILN_OP(shm_all_reduce_, cpu);
OPKILN_OP(shm_reduce_scatter, cpu);
OPKILN_OP(shm_reduce_scatter_into, cpu);
OPKILN_OP(shm_all_gather, cpu);
OPKILN_OP(shm_all_gather_into, cpu);

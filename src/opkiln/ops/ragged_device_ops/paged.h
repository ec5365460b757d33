// Shared by the paged cache's kernels: their parameters, argument checks, and the op's functions.
#pragma once

#include <opkiln/arguments.h>
#include <opkiln/turns.h>

namespace paged {

using Element = opkiln::ElementType;

// The heads of all tokens. Strides are in elements.
struct Heads {
  const void* x;
  int64_t token, head;
  int heads;
};

// [blocks, block size, kv heads, head]
struct Cache {
  void* data;
  int64_t block, place, head;
};

// The parameters of copying keys and values.
struct Copy {
  Heads k, v;
  Cache k_cache, v_cache;
  const int32_t *table, *sequences, *positions;
  int64_t table_row;
  int batch, sequence_blocks, blocks, block_size;
  int tokens, head;
};

struct Work : Copy {
  Heads q;      // has no heads if nothing is rotated
  void* q_out;  // contiguous
  int pairs;                  // rotated pairs per head
  const void *cos, *sin;      // null: the frequencies are used
  int64_t table_positions, cos_row, sin_row;
  Element element, angles;
  opkiln::Frequencies frequencies;
};

// The parameters of building a block table from lists that are given by address.
struct Lists {
  const int64_t* lists;
  const int32_t* lengths;  // in tokens
  int32_t* table;
  int64_t entries;  // entries of the table
  int width, block_size;
};

#if !defined(__CUDACC_RTC__)
OPK_PLAIN_BEGIN

using opk::Tensor;
using MaybeTensor = opk::optional<Tensor>;

void run(const Work& work);    // called only if there is at least one token
void run(const Lists& lists);  // called only if there is at least one entry

inline int small(const Tensor& of, int64_t size) {
  OPK_SERVED(size < 0x7fffffff, of, " has shape ", of.sizes(), ": too large");
  return static_cast<int>(size);
}

inline void check_last(const Tensor& x) {
  OPK_SERVED(x.size(-1) <= 1 || x.stride(-1) == 1, x, " has strides ", x.strides(), ", expected 1 as the last");
}

// Only the number of tokens or blocks may be 0.
inline void check_some(const Tensor& x, int64_t from) {
  for (int64_t i = from; i < x.dim(); ++i) {
    OPK_CHECK(x.size(i) > 0, x, " has shape ", x.sizes(), ", expected at least 1 in dimension ", i);
  }
}

inline Heads heads_of(const Tensor& x) {
  check_last(x);
  return {x.data(), x.stride(0), x.stride(1), small(x, x.size(1))};
}

inline Cache cache_of(Tensor& cache, const Tensor& k, opk::Ints shape) {
  opk::check_same_dtype(k, cache);
  opk::check_same_device(k, cache);
  opk::check_shape(cache, shape);
  check_last(cache);
  return {cache.data(), cache.stride(0), cache.stride(1), cache.stride(2)};
}

inline void check_indices(const Tensor& indices, const Tensor& k) {
  opk::check_dtype(indices, opk::DType::int32);
  opk::check_same_device(k, indices);
}

// One index per token. Keeps the tensor or its copy alive.
class TokenIndices {
 public:
  TokenIndices(const Tensor& indices, const Tensor& k) {
    check_indices(indices, k);
    opk::check_shape(indices, {k.size(0)});
    used_ = opk::contiguous(indices);
  }
  const int32_t* data() const { return used_.data<const int32_t>(); }

 private:
  Tensor used_;
};

// Sets what copying needs.
inline void set_copy(Work& work, const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                     const Tensor& block_table, const TokenIndices& sequences,
                     const TokenIndices& positions) {
  work.element = opk::element_of(k);
  check_some(k, 1);
  opk::check_same_dtype(k, v);
  opk::check_same_device(k, v);
  opk::check_shape(v, k.sizes());
  work.tokens = small(k, k.size(0)), work.head = small(k, k.size(2));
  work.k = heads_of(k), work.v = heads_of(v);
  opk::check_dim(k_cache, 4);
  check_some(k_cache, 1);
  const int64_t shape[] = {k_cache.size(0), k_cache.size(1), k.size(1), k.size(2)};
  work.k_cache = cache_of(k_cache, k, {shape, 4});
  work.v_cache = cache_of(v_cache, k, {shape, 4});
  work.blocks = small(k_cache, shape[0]), work.block_size = small(k_cache, shape[1]);
  opk::check_dim(block_table, 2);
  check_indices(block_table, k);
  check_last(block_table);
  work.table = block_table.data<const int32_t>();
  work.table_row = block_table.stride(0);
  work.batch = small(block_table, block_table.size(0));
  work.sequence_blocks = small(block_table, block_table.size(1));
  work.sequences = sequences.data(), work.positions = positions.data();
  work.q = {nullptr, 0, 0, 0}, work.q_out = nullptr;
  work.pairs = 0;
  work.cos = work.sin = nullptr, work.table_positions = work.cos_row = work.sin_row = 0;
  work.angles = Element::kFloat;
}

inline void set_angles(Work& work, const Tensor& q, const MaybeTensor& cos, const MaybeTensor& sin,
                       int64_t dim, double theta) {
  const int64_t most = work.head < 2 * opkiln::kMostPairs ? work.head : 2 * opkiln::kMostPairs;
  const int64_t rotated = dim ? dim : work.head;
  OPK_CHECK(rotated > 0 && rotated <= most && rotated % 2 == 0, "dim is ", rotated,
            ", expected an even number from 2 to ", most);
  OPK_CHECK(cos.has_value() == sin.has_value(), "cos and sin are given together, or neither");
  work.pairs = static_cast<int>(rotated / 2);
  if (!cos) {
    OPK_CHECK(theta > 0, "theta is ", theta, ", expected a positive number");
    return opkiln::set_frequencies(work.frequencies, theta, work.pairs);
  }
  work.angles = opk::element_of(*cos);
  opk::check_same_dtype(*cos, *sin);
  for (const Tensor* each : {&*cos, &*sin}) {
    opk::check_same_device(q, *each);
    opk::check_dim(*each, 2);
    opk::check_shape(*each, {cos->size(0), int64_t{work.pairs}});
    check_last(*each);
  }
  work.cos = cos->data(), work.sin = sin->data();
  work.cos_row = cos->stride(0), work.sin_row = sin->stride(0);
  work.table_positions = cos->size(0);
}

inline void paged_kv_copy(const Tensor& k, const Tensor& v, Tensor& k_cache, Tensor& v_cache,
                          const Tensor& block_table, const Tensor& sequences, const Tensor& positions) {
  opk::check_dim(k, 3);
  const TokenIndices rows(sequences, k), places(positions, k);
  Work work;
  set_copy(work, k, v, k_cache, v_cache, block_table, rows, places);
  if (work.tokens > 0) run(work);
}

inline Tensor listed_blocks(const Tensor& lists, const Tensor& lengths, int64_t block_size, int64_t width) {
  opk::check_dim(lists, 1);
  opk::check_dtype(lists, opk::DType::int64);
  opk::check_dtype(lengths, opk::DType::int32);
  opk::check_same_device(lists, lengths);
  opk::check_shape(lengths, lists.sizes());
  OPK_CHECK(block_size > 0 && block_size < 0x7fffffff && width >= 0 && width < 0x7fffffff, "block_size is ",
            block_size, ", width is ", width, ", expected at least 1 and 0");
  const Tensor addresses = opk::contiguous(lists), tokens = opk::contiguous(lengths);
  const int64_t shape[] = {lists.size(0), width};
  Tensor table = opk::empty({shape, 2}, lengths);
  const Lists work = {addresses.data<const int64_t>(), tokens.data<const int32_t>(), table.data<int32_t>(),
                      table.numel(), static_cast<int>(width), static_cast<int>(block_size)};
#if defined(OPKILN_EMULATED)
  for (int64_t row = 0; row < lists.size(0); ++row) {  // memory outside of the call's tensors
    const int64_t blocks = (work.lengths[row] + block_size - 1) / block_size;
    const auto* const list = reinterpret_cast<const int32_t*>(work.lists[row]);
    if (blocks > 0) opk::emulator::add_tensor(list, static_cast<size_t>(blocks * 4), 4);
  }
#endif
  if (work.entries > 0) run(work);
  return table;
}

inline Tensor paged_kv_rotary(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& k_cache,
                              Tensor& v_cache, const Tensor& block_table, const Tensor& sequences,
                              const Tensor& positions, const MaybeTensor& cos, const MaybeTensor& sin,
                              int64_t dim, double theta) {
  opk::check_dim(k, 3);
  const TokenIndices rows(sequences, k), places(positions, k);
  Work work;
  set_copy(work, k, v, k_cache, v_cache, block_table, rows, places);
  opk::check_dim(q, 3);
  check_some(q, 1);
  opk::check_same_dtype(k, q);
  opk::check_same_device(k, q);
  opk::check_shape(q, {k.size(0), q.size(1), k.size(2)});
  set_angles(work, q, cos, sin, dim, theta);
  work.q = heads_of(q);
  Tensor out = opk::empty(q.sizes(), q);
  work.q_out = out.data();
  if (work.tokens > 0) run(work);
  return out;
}

OPK_PLAIN_END
#endif

}  // namespace paged

// Random layer-token drop on host memory, in torch's thread pool.

#include <algorithm>

#include "masks.h"
#include "sort.h"
#include "tokens.h"

namespace {

// The number of rows of this many bytes for which another thread pays.
int64_t grain_of(int64_t row) { return opk::kGrainBytes / (row > 0 ? row : 1) + 1; }

// Runs before anything is written.
void check_places(const Indices& indices, int64_t count, int64_t tokens) {
  for (int64_t i = 0; i < count; ++i) {
    OPK_CHECK(indices[i] >= 0 && indices[i] < tokens, "indices has ", indices[i], ", expected 0 to ", tokens - 1);
  }
}

// Calls f(sequence, position) for all tokens, in the order of memory.
template <class F>
void parallel_tokens(const Tokens& tokens, int64_t count, const F& f) {
  opk::parallel_for(0, tokens.batch * count, grain_of(tokens.row), [&](int64_t first, int64_t end) {
    const int64_t inner = tokens.batch_first ? count : tokens.batch;
    int64_t outer = first / inner, place = first % inner;
    for (int64_t i = first; i < end; ++i) {
      f(tokens.batch_first ? outer : place, tokens.batch_first ? place : outer);
      if (++place == inner) {
        place = 0;
        ++outer;
      }
    }
  });
}

void gather(const Tokens& tokens) {
  check_places(tokens.indices, tokens.batch * tokens.kept, tokens.count);
  parallel_tokens(tokens, tokens.kept, [&](int64_t b, int64_t k) {
    const int64_t index = tokens.indices[b * tokens.kept + k];
    __builtin_memcpy(tokens.out.at(b, k), tokens.all.at(b, index), tokens.row);
  });
}

void scatter(const Tokens& tokens) {
  check_places(tokens.indices, tokens.batch * tokens.kept, tokens.count);
  parallel_tokens(tokens, tokens.kept, [&](int64_t b, int64_t k) {
    const int64_t index = tokens.indices[b * tokens.kept + k];
    __builtin_memcpy(tokens.all.at(b, index), tokens.part.at(b, k), tokens.row);
  });
}

void merge(const Tokens& tokens) {
  check_places(tokens.indices, tokens.batch * tokens.kept, tokens.count);
  const opk::Device host{opk::DeviceType::cpu, 0};
  Tensor places = opk::empty({tokens.batch * tokens.count}, opk::DType::int64, host);
  int64_t* const place = places.data<int64_t>();  // index in `part`, or -1
  for (int64_t i = 0; i < tokens.batch * tokens.count; ++i) place[i] = -1;
  for (int64_t b = 0; b < tokens.batch; ++b) {
    for (int64_t k = 0; k < tokens.kept; ++k) {
      place[b * tokens.count + tokens.indices[b * tokens.kept + k]] = k;
    }
  }
  parallel_tokens(tokens, tokens.count, [&](int64_t b, int64_t s) {
    const int64_t k = place[b * tokens.count + s];
    const Side& side = k < 0 ? tokens.all : tokens.part;
    if (side.data == nullptr) {
      __builtin_memset(tokens.out.at(b, s), 0, tokens.row);
    } else {
      __builtin_memcpy(tokens.out.at(b, s), side.at(b, k < 0 ? s : k), tokens.row);
    }
  });
}

struct Sixteen {
  uint64_t words[2];
};

template <class T>
void gather_elements(const Masks& masks) {
  const int64_t kept = masks.kept, rows = masks.layers * masks.batch * masks.heads * kept;
  opk::parallel_for(0, rows, grain_of(kept * masks.size), [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      const int64_t i = row % kept, image = row / kept, head = image % masks.heads;
      const int64_t sequence = image / masks.heads;  // counts the sequences of all layers
      const int64_t start = sequence * kept;         // the start of its indices
      const T* const mask = reinterpret_cast<const T*>(masks.mask) +
          sequence % masks.batch * masks.batch_step + head * masks.head_step;
      T* const out = reinterpret_cast<T*>(masks.out) + row * kept;
      if (masks.indices.data == nullptr) {
        __builtin_memcpy(out, mask + i * masks.row_step, kept * sizeof(T));
        continue;
      }
      const T* const from = mask + masks.indices[start + i] * masks.row_step;
      for (int64_t j = 0; j < kept; ++j) out[j] = from[masks.indices[start + j]];
    }
  });
}

void gather_masks(const Masks& masks) {
  if (masks.indices.data != nullptr) {
    check_places(masks.indices, masks.layers * masks.batch * masks.kept, masks.tokens);
  }
  switch (masks.size) {
    case 1: return gather_elements<uint8_t>(masks);
    case 2: return gather_elements<uint16_t>(masks);
    case 4: return gather_elements<uint32_t>(masks);
    case 8: return gather_elements<uint64_t>(masks);
    default: return gather_elements<Sixteen>(masks);
  }
}

// Sets a bit per token: reading the bits in order sorts. With duplicate indices, or
// if `tokens` is 0, there are too few bits, and std::sort is used.
template <class T>
void sort_row(const T* in, T* out, int64_t kept, int64_t tokens, uint64_t* bits, int64_t words) {
  __builtin_memset(bits, 0, words * sizeof(bits[0]));
  for (int64_t i = 0; i < kept; ++i) {
    if (tokens > 0) bits[in[i] / 64] |= uint64_t{1} << in[i] % 64;
  }
  int64_t found = 0;
  for (int64_t w = 0; w < words; ++w) found += __builtin_popcountll(bits[w]);
  if (found != kept) {
    if (in != out) __builtin_memcpy(out, in, kept * sizeof(T));
    std::sort(out, out + kept);
    return;
  }
  for (int64_t w = 0; w < words; ++w) {
    for (uint64_t left = bits[w]; left != 0; left &= left - 1) {
      *out++ = static_cast<T>(w * 64 + __builtin_ctzll(left));
    }
  }
}

template <class T>
void sort_rows(const Rows& rows) {
  // With far more tokens than indices, scanning the bits would take longer than sorting.
  const int64_t tokens = rows.tokens <= rows.kept * 1024 ? rows.tokens : 0;
  const int64_t words = (tokens + 63) / 64;
  const opk::Device host{opk::DeviceType::cpu, 0};
  Tensor scratch = opk::empty({opk::num_threads() * words}, opk::DType::int64, host);
  uint64_t* const bits = reinterpret_cast<uint64_t*>(scratch.data<int64_t>());
  const int64_t cost = 8 * (rows.kept + words) * static_cast<int64_t>(sizeof(T));
  opk::parallel_for(0, rows.rows, grain_of(cost), [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      sort_row(static_cast<const T*>(rows.in) + row * rows.kept,
               static_cast<T*>(rows.out) + row * rows.kept, rows.kept, tokens,
               bits + opk::thread_index() * words, words);
    }
  });
}

void sort(const Rows& rows) {
  check_places({rows.in, rows.wide}, rows.rows * rows.kept, rows.tokens);
  rows.wide ? sort_rows<int64_t>(rows) : sort_rows<int32_t>(rows);
}

}  // namespace

OPKILN_OP(token_sort, cpu);
OPKILN_OP(token_sort_, cpu);
OPKILN_OP(token_gather, cpu);
OPKILN_OP(token_scatter, cpu);
OPKILN_OP(token_scatter_, cpu);
OPKILN_OP(token_spread, cpu);
OPKILN_OP(token_clear, cpu);
OPKILN_OP(mask_gather_bert, cpu);
OPKILN_OP(mask_gather_gpt, cpu);

// Rotary position embedding on host memory. A token's cosines and sines are computed once for all heads. The
// loops over pairs are plain, so that the compiler vectorizes them.

#include <opkiln/floats.h>

#include "rotary.h"

namespace {

using rotary::Side;
using rotary::Work;

// A thread's scratch memory.
struct Buffer {
  explicit Buffer(const Work& work)
      : cos(new float[static_cast<size_t>(6 * work.pairs)]),
        sin(cos + work.pairs),
        head(sin + work.pairs),
        out(head + 2 * work.pairs) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { delete[] cos; }

  float *cos, *sin, *head, *out;
};

void set_angles(const Work& work, int64_t batch, int64_t seq, const Buffer& buffer) {
  const int64_t position = rotary::position_of(work, batch, seq);
  if (work.cos) {
    for (int i = 0; i < work.pairs; ++i) rotary::cos_sin_of(work, position, i, buffer.cos + i, buffer.sin + i);
    return;
  }
  float *const c = buffer.cos, *const s = buffer.sin;
  for (int i = 0; i < work.pairs; ++i) {
    opkiln::cos_sin(static_cast<uint64_t>(position) * work.frequencies.turns[i], c + i, s + i);
  }
  if (work.inverse) {
    for (int i = 0; i < work.pairs; ++i) s[i] = -s[i];
  }
}

void rotate_halves(const float* x, const Buffer& buffer, int pairs, float* out) {
  const float *const c = buffer.cos, *const s = buffer.sin;
  for (int i = 0; i < pairs; ++i) {
    out[i] = x[i] * c[i] - x[pairs + i] * s[i];
    out[pairs + i] = x[pairs + i] * c[i] + x[i] * s[i];
  }
}

void rotate_neighbours(const float* x, const Buffer& buffer, int pairs, float* out) {
  const float *const c = buffer.cos, *const s = buffer.sin;
  for (int i = 0; i < pairs; ++i) {
    out[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
    out[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
  }
}

template <class T>
void rotate_head(const Work& work, const T* x, T* out, const Side& side, const Buffer& buffer) {
  const int count = 2 * work.pairs;
  if (side.step == 1) {
    opkiln::load_floats(x, buffer.head, count);
  } else {
    for (int i = 0; i < count; ++i) buffer.head[i] = opkiln::as_float(x[i * side.step]);
  }
  (work.interleaved ? rotate_neighbours : rotate_halves)(buffer.head, buffer, work.pairs, buffer.out);
  if (side.out_step == 1) {
    opkiln::store_floats(buffer.out, out, count);
  } else {
    for (int i = 0; i < count; ++i) opkiln::set_from(buffer.out[i], out + i * side.out_step);
  }
  for (int i = count; i < count + work.rest; ++i) out[i * side.out_step] = x[i * side.step];
}

template <class T>
void rotate(const Work& work) {
  const int64_t heads = work.q.heads + work.k.heads;
  const int64_t bytes = heads * 2 * (2 * work.pairs + work.rest) * int64_t{sizeof(T)};
  opk::parallel_for(0, work.tokens, 1 + opk::kGrainBytes / 4 / bytes, [&](int64_t first, int64_t last) {
    const Buffer buffer(work);
    for (int64_t token = first; token < last; ++token) {
      const int64_t batch = token / work.seq, seq = token % work.seq;
      set_angles(work, batch, seq, buffer);
      for (const Side* side : {&work.q, &work.k}) {
        const T* const x = static_cast<const T*>(side->x) + batch * side->batch + seq * side->seq;
        T* const out = static_cast<T*>(side->out) + batch * side->out_batch + seq * side->out_seq;
        for (int h = 0; h < side->heads; ++h) {
          rotate_head(work, x + h * side->head, out + h * side->out_head, *side, buffer);
        }
      }
    }
  });
}

}  // namespace

void rotary::run(const Work& work) {
  for (int64_t token = 0; work.cos && work.positions && token < work.tokens; ++token) {
    const int64_t position = rotary::position_of(work, token / work.seq, token % work.seq);
    OPK_CHECK(position >= 0 && position < work.table_rows, "positions has ", position, ", expected 0 to ",
              work.table_rows - 1, ", the rows of cos and sin");
  }
  OPK_ELEMENT(work.element, T, (float, opkiln::BFloat16, opkiln::Float16), rotate<T>(work));
}

OPKILN_OP(rotary::rotary, cpu);
OPKILN_OP(rotary::rotary_, cpu);
OPKILN_OP(rotary::rotary_qk, cpu);
OPKILN_OP(rotary::rotary_qk_, cpu);

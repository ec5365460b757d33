// The forward pass on host memory. Threads share the rows and heads.
#include "host.h"

using opk::Tensor;
using evoformer::MaybeTensor;
using evoformer::Sizes;
using evoformer::Strides;

namespace {

using namespace opkiln::evoformer;
using opkiln::Vec;

struct Work {
  const void *q, *k, *v, *mask, *pair;
  Strides q_strides, k_strides, v_strides;
  void* out;
  float* moments;
  Sizes sizes;
  float scale;
};

// Turns scores into weights relative to the greatest score. Sets
// `greatest`, and `share`: 1 / the sum of the weights.
void take_weights(float* scores, int64_t count, float* greatest, float* share) {
  Vec most = Vec::all(kMinusInfinity), sum = Vec::all(0);
  for (int64_t i = 0; i < count; i += Vec::kLanes) most = at_least(most, Vec::load(scores + i));
  float lanes[Vec::kLanes];
  most.store(lanes);
  float found = kMinusInfinity;
  for (float each : lanes) found = found < each || each != each ? each : found;
  const Vec shift = Vec::all(found == kMinusInfinity ? 0 : found);
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const Vec weight = opkiln::exp2<24>(Vec::load(scores + i) - shift);
    weight.store(scores + i);
    sum = sum + weight;
  }
  *greatest = found;
  *share = found == kMinusInfinity ? __builtin_nanf("") : 1 / opkiln::sum_of_lanes(sum);
}

template <class T>
void attend(const Work& work, int64_t first, int64_t last) {
  const Sizes& s = work.sizes;
  const int64_t keys = pad_count(s.length), elements = pad_count(s.head), per_moment = s.batch * s.rows * s.heads * s.length;
  Buffer buffer(s.head * keys + (s.length + 2 * kQueries) * elements + (kQueries + 2) * keys);
  const Matrix k{buffer.take(s.head * keys), keys}, v{buffer.take(s.length * elements), elements};
  const Matrix q{buffer.take(kQueries * elements), elements}, out{buffer.take(kQueries * elements), elements};
  const Matrix scores{buffer.take(kQueries * keys), keys};
  float *const mask = buffer.take(keys), *const bias = buffer.take(keys);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t head = unit % s.heads, row = unit / s.heads % s.rows, batch = unit / s.heads / s.rows;
    Head<T>(work.k, work.k_strides, batch, row, head).load_columns(k, s.length, s.head);
    Head<T>(work.v, work.v_strides, batch, row, head).load_rows(v, 0, s.length, s.head);
    load_mask<T>(work.mask, unit / s.heads, s.length, mask);
    for (int64_t query = 0; query < s.length; query += kQueries) {
      const int64_t count = s.length - query < kQueries ? s.length - query : kQueries;
      Head<T>(work.q, work.q_strides, batch, row, head).load_rows(q, query, count, s.head);
      multiply<false>(q, k, scores, count, keys, s.head);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t line = (batch * s.heads + head) * s.length + query + i;
        const T* const pair = work.pair ? static_cast<const T*>(work.pair) + line * s.length : nullptr;
        float* const weights = scores.at + i * keys;
        add_biases(weights, pair, mask, work.scale, s.length, bias);
        float* const moments = work.moments + unit * s.length + query + i;
        take_weights(weights, keys, moments, moments + per_moment);
      }
      multiply<false>(scores, v, out, count, elements, s.length);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = ((batch * s.rows + row) * s.length + query + i) * s.heads + head;
        const float share = work.moments[per_moment + unit * s.length + query + i];
        opkiln::store_floats(out.at + i * elements, static_cast<T*>(work.out) + place * s.head, s.head, share);
      }
    }
  }
}

opk::tuple<Tensor, Tensor> evoformer_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                               const MaybeTensor& mask_bias, const MaybeTensor& pair_bias,
                                               double scale) {
  const Sizes s = evoformer::check_inputs(q, k, v, mask_bias, pair_bias);
  const opkiln::ElementType type = opk::element_of(q);
  Tensor out = opk::empty({s.batch, s.rows, s.length, s.heads, s.head}, q);
  Tensor moments = evoformer::empty_moments(s, q);
  if (moments.numel() == 0) return {out, moments};
  const Tensor queries = evoformer::make_heads_contiguous(q), keys = evoformer::make_heads_contiguous(k);
  const Tensor values = evoformer::make_heads_contiguous(v);
  const Tensor mask = evoformer::make_contiguous(mask_bias), pair = evoformer::make_contiguous(pair_bias);
  const Work work = {queries.data(), keys.data(), values.data(),
                     mask.defined() ? mask.data() : nullptr, pair.defined() ? pair.data() : nullptr,
                     evoformer::strides_of(queries), evoformer::strides_of(keys), evoformer::strides_of(values),
                     out.data(), moments.data<float>(), s, static_cast<float>(scale)};
  OPK_ELEMENT(type, T, (float, opkiln::BFloat16, opkiln::Float16), {
    opk::parallel_for(0, s.batch * s.rows * s.heads, 1,
                      [&](int64_t first, int64_t last) { attend<T>(work, first, last); });
  });
  return {out, moments};
}

}  // namespace

OPKILN_OP(evoformer_attention, cpu);

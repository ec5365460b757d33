// sparse_attn on the CPU: a thread handles a block of queries at a
// time, and loops over its listed blocks of keys.
#include <opkiln/op.h>

#include "blocks.h"

using namespace sparse;

namespace {

struct Call {
  const Tensor &q, &k, &v;
  Tensor& out;
  float* lse;
  const bool* layout;  // [heads or 1, blocks, blocks]
  Sizes sizes;
  Rules rules;
  int64_t block, blocks;
};

float greatest(const float* from, int64_t count) {
  Vec most = Vec::all(kMinusInfinity);
  for (int64_t j = 0; j < count; j += Vec::kLanes) most = at_least(most, Vec::load(from + j));
  float lanes[Vec::kLanes], out = kMinusInfinity;
  most.store(lanes);
  for (float each : lanes) out = each > out ? each : out;
  return out;
}

// Replaces a row by its powers of 2, and returns their sum.
float take_powers(float* row, int64_t count, float base) {
  Vec sum = Vec::all(0);
  for (int64_t j = 0; j < count; j += Vec::kLanes) {
    const Vec power = opkiln::exp2<24>(Vec::load(row + j) - Vec::all(base));
    power.store(row + j);
    sum = sum + power;
  }
  float lanes[Vec::kLanes], out = 0;
  sum.store(lanes);
  for (float each : lanes) out += each;
  return out;
}

template <class T>
void attend(const Call& call, int64_t first, int64_t last) {
  const int64_t block = call.block, wide = round_up_to_16(call.sizes.columns);
  const Buffer queries(block * wide), keys(block * wide), values(block * wide), out(block * wide);
  const Buffer scores(block * block), most(block), sum(block);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t number = unit % call.blocks, line = unit / call.blocks;
    const int64_t batch = line / call.sizes.heads, head = line % call.sizes.heads;
    const auto q = head_of(static_cast<const T*>(call.q.data()), call.q, batch, head, block);
    const auto k = head_of(static_cast<const T*>(call.k.data()), call.k, batch, head, block);
    const auto v = head_of(static_cast<const T*>(call.v.data()), call.v, batch, head, block);
    const Seen<T> seen(call.rules, batch, head, call.sizes.tokens, block);
    const bool* const listed =
        call.layout + ((call.sizes.layout_heads == 1 ? 0 : head) * call.blocks + number) * call.blocks;
    q.load(number, queries, wide);
    for (int64_t i = 0; i < block * wide; ++i) out[i] = 0;
    for (int64_t i = 0; i < block; ++i) most[i] = kMinusInfinity, sum[i] = 0;
    for (int64_t other = 0; other < call.blocks; ++other) {
      if (!listed[other]) continue;
      k.load_transposed(other, keys, wide);
      v.load(other, values, wide);
      for (int64_t i = 0; i < block * block; ++i) scores[i] = 0;
      add_product(scores, queries, wide, 1, keys, block, block, wide);
      seen.finish(scores, number, other);
      for (int64_t i = 0; i < q.rows(number); ++i) {
        float* const row = scores + i * block;
        const float found = greatest(row, block), greater = found > most[i] ? found : most[i];
        const float base = greater == kMinusInfinity ? 0 : greater;  // no key is visible yet
        const float shrink = most[i] == kMinusInfinity ? 0 : __builtin_exp2f(most[i] - base);
        sum[i] = sum[i] * shrink + take_powers(row, block, base);
        most[i] = greater;
        const Vec by = Vec::all(shrink);
        for (int64_t j = 0; j < wide; j += Vec::kLanes) {
          (Vec::load(out + i * wide + j) * by).store(out + i * wide + j);
        }
      }
      add_product(out, scores, block, 1, values, block, wide, block);
    }
    const auto to = head_of(static_cast<T*>(call.out.data()), call.out, batch, head, block);
    for (int64_t i = 0; i < q.rows(number); ++i) {
      call.lse[line * call.sizes.tokens + number * block + i] =
          sum[i] == 0 ? __builtin_inff() : (most[i] + __builtin_log2f(sum[i])) * kLn2;
      sum[i] = sum[i] == 0 ? 0 : 1 / sum[i];
    }
    to.store(number, out, wide, 1, sum);
  }
}

}  // namespace

opk::tuple<Tensor, Tensor> sparse_attn(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& layout,
                                       const opk::TensorList&, const MaybeTensor& key_bias, const MaybeTensor& mask,
                                       int64_t block, double scale, bool causal, int64_t window, bool multiply) {
  const Sizes sizes = sizes_of(q, layout, block);
  const Rules rules = rules_of(q, key_bias, mask, scale, causal, window, multiply);
  opk::check_same_shape(q, k, v);
  opk::check_same_dtype(q, k, v);
  Tensor out = opk::empty_like(q);
  Tensor lse = opk::empty({q.size(0), q.size(1), q.size(2)}, opk::DType::float32, q.device());
  const int64_t blocks = layout.size(1);
  const Call call{q, k, v, out, lse.data<float>(), layout.data<const bool>(), sizes, rules, block, blocks};
  OPK_ELEMENT(opk::element_of(q), T, (float, opkiln::BFloat16, opkiln::Float16), {
    opk::parallel_for(0, blocks * sizes.batch * sizes.heads, 1,
                      [&](int64_t first, int64_t last) { attend<T>(call, first, last); });
  });
  return {static_cast<Tensor&&>(out), static_cast<Tensor&&>(lse)};
}

OPKILN_OP(sparse_attn, cpu);

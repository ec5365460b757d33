// The gradients of sparse_attn on the CPU. One pass handles a block of queries at a
// time, for their gradient; the other a block of keys, for the gradients of keys and
// values. So no two threads add to the same sum, and the order is fixed.
#include <opkiln/op.h>

#include "blocks.h"

using namespace sparse;

namespace {

struct Call {
  const Tensor &grad, &q, &k, &v, &out;
  Tensor &q_grad, &k_grad, &v_grad;
  const float* lse;
  const bool* layout;  // [heads or 1, blocks, blocks]
  Sizes sizes;
  Rules rules;
  int64_t block, blocks;
};

template <class T>
Head<const T> read(const Tensor& x, int64_t batch, int64_t head, int64_t block) {
  return head_of(static_cast<const T*>(x.data()), x, batch, head, block);
}

// For one head: the weights of a block of queries and a block of keys, and the gradients of their scores.
template <class T>
class Pair {
 public:
  Pair(int64_t block, int64_t wide)
      : queries(block * wide), grads(block * wide), weights(block * block), of_scores(block * block), block_(block),
        wide_(wide), keys_(block * wide), values_(block * wide), inner_(block), lse_(block), out_(block * wide) {}

  void take(const Call& call, int64_t line) {
    const int64_t batch = line / call.sizes.heads, head = line % call.sizes.heads;
    call_ = &call, line_ = line, batch_ = batch, head_ = head;
    q = read<T>(call.q, batch, head, block_);
    k = read<T>(call.k, batch, head, block_);
    v = read<T>(call.v, batch, head, block_);
    grad_ = read<T>(call.grad, batch, head, block_);
    out_of_ = read<T>(call.out, batch, head, block_);
  }

  // Loads a block of queries and their gradients, and computes the inner products of these with the output.
  void take_queries(int64_t number) {
    q.load(number, queries, wide_);
    grad_.load(number, grads, wide_);
    out_of_.load(number, out_, wide_);
    for (int64_t i = 0; i < block_; ++i) {
      float sum = 0;
      for (int64_t j = 0; j < wide_; ++j) sum += grads[i * wide_ + j] * out_[i * wide_ + j];
      inner_[i] = sum;
      const bool there = i < q.rows(number);
      lse_[i] = there ? call_->lse[line_ * call_->sizes.tokens + number * block_ + i] * kLog2E : __builtin_inff();
    }
  }

  void take_keys(int64_t number) {
    k.load_transposed(number, keys_, wide_);
    v.load_transposed(number, values_, wide_);
  }

  void compute(int64_t queries_number, int64_t keys_number) {
    for (int64_t i = 0; i < block_ * block_; ++i) weights[i] = of_scores[i] = 0;
    add_product(weights, queries, wide_, 1, keys_, block_, block_, wide_);
    add_product(of_scores, grads, wide_, 1, values_, block_, block_, wide_);
    const Seen<T> seen(call_->rules, batch_, head_, call_->sizes.tokens, block_);
    seen.finish(weights, queries_number, keys_number);
    for (int64_t i = 0; i < block_; ++i) {
      const Vec lse = Vec::all(lse_[i]), inner = Vec::all(inner_[i]);
      for (int64_t j = i * block_; j < (i + 1) * block_; j += Vec::kLanes) {
        const Vec weight = opkiln::exp2<24>(Vec::load(weights + j) - lse);
        weight.store(weights + j);
        (weight * (Vec::load(of_scores + j) - inner)).store(of_scores + j);
      }
    }
  }

  Head<const T> q{}, k{}, v{};
  const Buffer queries, grads, weights, of_scores;

 private:
  int64_t block_, wide_, line_ = 0, batch_ = 0, head_ = 0;
  const Buffer keys_, values_, inner_, lse_, out_;
  Head<const T> grad_{}, out_of_{};
  const Call* call_ = nullptr;
};

template <class T>
void queries_part(const Call& call, int64_t first, int64_t last) {
  const int64_t block = call.block, blocks = call.blocks, wide = round_up_to_16(call.sizes.columns);
  const Buffer keys(block * wide), sums(block * wide);
  Pair<T> pair(block, wide);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t number = unit % blocks, line = unit / blocks, head = line % call.sizes.heads;
    const bool* const listed = call.layout + ((call.sizes.layout_heads == 1 ? 0 : head) * blocks + number) * blocks;
    pair.take(call, line);
    pair.take_queries(number);
    for (int64_t i = 0; i < block * wide; ++i) sums[i] = 0;
    for (int64_t other = 0; other < blocks; ++other) {
      if (!listed[other]) continue;
      pair.take_keys(other);
      pair.compute(number, other);
      pair.k.load(other, keys, wide);
      add_product(sums, pair.of_scores, block, 1, keys, block, wide, block);
    }
    const auto to = head_of(static_cast<T*>(call.q_grad.data()), call.q_grad, line / call.sizes.heads, head, block);
    to.store(number, sums, wide, call.rules.scale);
  }
}

template <class T>
void keys_part(const Call& call, int64_t first, int64_t last) {
  const int64_t block = call.block, blocks = call.blocks, wide = round_up_to_16(call.sizes.columns);
  const Buffer k_sums(block * wide), v_sums(block * wide);
  Pair<T> pair(block, wide);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t number = unit % blocks, line = unit / blocks, head = line % call.sizes.heads;
    const bool* const listed = call.layout + (call.sizes.layout_heads == 1 ? 0 : head) * blocks * blocks + number;
    pair.take(call, line);
    pair.take_keys(number);
    for (int64_t i = 0; i < block * wide; ++i) k_sums[i] = v_sums[i] = 0;
    for (int64_t other = 0; other < blocks; ++other) {
      if (!listed[other * blocks]) continue;
      pair.take_queries(other);
      pair.compute(other, number);
      add_product(k_sums, pair.of_scores, 1, block, pair.queries, block, wide, block);
      add_product(v_sums, pair.weights, 1, block, pair.grads, block, wide, block);
    }
    const int64_t batch = line / call.sizes.heads;
    head_of(static_cast<T*>(call.k_grad.data()), call.k_grad, batch, head, block)
        .store(number, k_sums, wide, call.rules.scale);
    head_of(static_cast<T*>(call.v_grad.data()), call.v_grad, batch, head, block).store(number, v_sums, wide, 1);
  }
}

}  // namespace

opk::tuple<Tensor, Tensor, Tensor> sparse_attn_backward(const Tensor& grad, const Tensor& q, const Tensor& k,
                                                        const Tensor& v, const Tensor& out, const Tensor& lse,
                                                        const Tensor& layout, const opk::TensorList&,
                                                        const MaybeTensor& key_bias, const MaybeTensor& mask,
                                                        int64_t block, double scale, bool causal, int64_t window,
                                                        bool multiply) {
  const Sizes sizes = sizes_of(q, layout, block);
  const Rules rules = rules_of(q, key_bias, mask, scale, causal, window, multiply);
  opk::check_same_shape(q, k, v, out, grad);
  opk::check_same_dtype(q, k, v, out, grad);
  opk::check_shape(lse, {q.size(0), q.size(1), q.size(2)});
  opk::check_contiguous(lse);
  Tensor q_grad = opk::empty_like(q), k_grad = opk::empty_like(k), v_grad = opk::empty_like(v);
  const int64_t blocks = layout.size(1), units = blocks * sizes.batch * sizes.heads;
  const Call call{grad, q, k, v, out, q_grad, k_grad, v_grad, lse.data<const float>(), layout.data<const bool>(),
                  sizes, rules, block, blocks};
  OPK_ELEMENT(opk::element_of(q), T, (float, opkiln::BFloat16, opkiln::Float16), {
    opk::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { queries_part<T>(call, first, last); });
    opk::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { keys_part<T>(call, first, last); });
  });
  return {static_cast<Tensor&&>(q_grad), static_cast<Tensor&&>(k_grad), static_cast<Tensor&&>(v_grad)};
}

OPKILN_OP(sparse_attn_backward, cpu);

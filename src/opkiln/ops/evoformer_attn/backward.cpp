// The backward pass on host memory. No two threads share a sum. The first pass gives each thread rows, and
// computes the gradients of q, k, v and the mask. The second gives each thread some queries of a head, goes
// through all rows, and computes the gradient of the pair bias. Both passes recompute the weights.
#include "host.h"

using opk::Tensor;
using evoformer::MaybeTensor;
using evoformer::Sizes;
using evoformer::Strides;

namespace {

using namespace opkiln::evoformer;
using opkiln::Vec;

// queries per unit of the second pass, which share the transposed keys and values
constexpr int64_t kPairQueries = 64;

struct Work {
  const void *grad, *q, *k, *v, *output, *mask, *pair;
  Strides grad_strides, q_strides, k_strides, v_strides, output_strides;
  const float* moments;
  void *q_grad, *k_grad, *v_grad, *mask_grad, *pair_grad;  // the last two may be null
  Sizes sizes;
  float scale;
};

// Computes the weights of a block of queries and the gradients of their scores, for one head of a row.
template <class T>
class Block {
 public:
  explicit Block(const Work& w)
      : work(w), s(w.sizes), keys(pad_count(s.length)), elements(pad_count(s.head)),
        buffer_(2 * s.head * keys + 2 * kQueries * elements + (2 * kQueries + 2) * keys + elements),
        k{buffer_.take(s.head * keys), keys}, v{buffer_.take(s.head * keys), keys},
        q{buffer_.take(kQueries * elements), elements}, grad{buffer_.take(kQueries * elements), elements},
        weights{buffer_.take(kQueries * keys), keys}, through{buffer_.take(kQueries * keys), keys},
        mask_(buffer_.take(keys)), bias_(buffer_.take(keys)), output_(buffer_.take(elements)) {}

  void enter(int64_t batch, int64_t row, int64_t head) {
    batch_ = batch, row_ = row, head_ = head;
    Head<T>(work.k, work.k_strides, batch, row, head).load_columns(k, s.length, s.head);
    Head<T>(work.v, work.v_strides, batch, row, head).load_columns(v, s.length, s.head);
    load_mask<T>(work.mask, batch * s.rows + row, s.length, mask_);
  }

  void compute(int64_t query, int64_t count) {
    Head<T>(work.q, work.q_strides, batch_, row_, head_).load_rows(q, query, count, s.head);
    Head<T>(work.grad, work.grad_strides, batch_, row_, head_).load_rows(grad, query, count, s.head);
    const Head<T> output(work.output, work.output_strides, batch_, row_, head_);
    multiply<false>(q, k, weights, count, keys, s.head);
    multiply<false>(grad, v, through, count, keys, s.head);
    const int64_t per_moment = s.batch * s.rows * s.heads * s.length;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t line = (batch_ * s.heads + head_) * s.length + query + i;
      const T* const pair = work.pair ? static_cast<const T*>(work.pair) + line * s.length : nullptr;
      float *const w = weights.at + i * keys, *const g = through.at + i * keys;
      add_biases(w, pair, mask_, work.scale, s.length, bias_);
      const float* const moments =
          work.moments + ((batch_ * s.rows + row_) * s.heads + head_) * s.length + query + i;
      const Vec greatest = Vec::all(moments[0]), share = Vec::all(moments[per_moment]);
      opkiln::load_floats(output.at + (query + i) * output.place, output_, s.head);
      Vec delta = Vec::all(0);
      for (int64_t d = 0; d < elements; d += Vec::kLanes) {
        delta = multiply_add(Vec::load(output_ + d), Vec::load(grad.at + i * elements + d), delta);
      }
      const Vec sum = Vec::all(opkiln::sum_of_lanes(delta));
      for (int64_t key = 0; key < keys; key += Vec::kLanes) {
        const Vec weight = opkiln::exp2<24>(Vec::load(w + key) - greatest) * share;
        weight.store(w + key);
        (weight * (Vec::load(g + key) - sum)).store(g + key);
      }
    }
  }

  const Work& work;
  const Sizes& s;
  const int64_t keys, elements;

 private:
  Buffer buffer_;

 public:
  const Matrix k, v;  // transposed: [element, key]
  const Matrix q, grad;
  const Matrix weights, through;  // [query, key]

 private:
  float *mask_, *bias_, *output_;
  int64_t batch_ = 0, row_ = 0, head_ = 0;
};

template <class T>
void rows(const Work& work, int64_t first, int64_t last) {
  Block<T> block(work);
  const Sizes& s = work.sizes;
  const int64_t keys = block.keys, elements = block.elements;
  Buffer buffer((3 * s.length + kQueries) * elements + keys);
  const Matrix k{buffer.take(s.length * elements), elements}, q_grad{buffer.take(kQueries * elements), elements};
  const Matrix k_grad{buffer.take(s.length * elements), elements}, v_grad{buffer.take(s.length * elements), elements};
  float* const mask_grad = buffer.take(keys);
  for (int64_t line = first; line < last; ++line) {
    const int64_t row = line % s.rows, batch = line / s.rows;
    clear(mask_grad, keys);
    for (int64_t head = 0; head < s.heads; ++head) {
      const auto place = [&](void* data, int64_t at) {
        return static_cast<T*>(data) + ((line * s.length + at) * s.heads + head) * s.head;
      };
      block.enter(batch, row, head);
      Head<T>(work.k, work.k_strides, batch, row, head).load_rows(k, 0, s.length, s.head);
      clear(k_grad.at, s.length * elements);
      clear(v_grad.at, s.length * elements);
      for (int64_t query = 0; query < s.length; query += kQueries) {
        const int64_t count = s.length - query < kQueries ? s.length - query : kQueries;
        block.compute(query, count);
        multiply<false>(block.through, k, q_grad, count, elements, s.length);
        multiply<true>(block.through.transpose(), block.q, k_grad, s.length, elements, count);
        multiply<true>(block.weights.transpose(), block.grad, v_grad, s.length, elements, count);
        for (int64_t i = 0; i < count; ++i) {
          opkiln::store_floats(q_grad.at + i * elements, place(work.q_grad, query + i), s.head, work.scale);
          for (int64_t key = 0; key < keys; ++key) mask_grad[key] += block.through.at[i * keys + key];
        }
      }
      for (int64_t key = 0; key < s.length; ++key) {
        opkiln::store_floats(k_grad.at + key * elements, place(work.k_grad, key), s.head, work.scale);
        opkiln::store_floats(v_grad.at + key * elements, place(work.v_grad, key), s.head, 1);
      }
    }
    if (work.mask_grad) opkiln::store_floats(mask_grad, static_cast<T*>(work.mask_grad) + line * s.length, s.length, 1);
  }
}

template <class T>
void pairs(const Work& work, int64_t first, int64_t last) {
  Block<T> block(work);
  const Sizes& s = work.sizes;
  const int64_t keys = block.keys, blocks = (s.length + kPairQueries - 1) / kPairQueries;
  Buffer buffer(kPairQueries * keys);
  float* const sums = buffer.take(kPairQueries * keys);
  for (int64_t unit = first; unit < last; ++unit) {
    const int64_t begin = unit % blocks * kPairQueries, head = unit / blocks % s.heads, batch = unit / blocks / s.heads;
    const int64_t count = s.length - begin < kPairQueries ? s.length - begin : kPairQueries;
    clear(sums, kPairQueries * keys);
    for (int64_t row = 0; row < s.rows; ++row) {
      block.enter(batch, row, head);
      for (int64_t i = 0; i < count; i += kQueries) {
        const int64_t some = count - i < kQueries ? count - i : kQueries;
        block.compute(begin + i, some);
        for (int64_t at = 0; at < some * keys; ++at) sums[i * keys + at] += block.through.at[at];
      }
    }
    T* const out = static_cast<T*>(work.pair_grad) + ((batch * s.heads + head) * s.length + begin) * s.length;
    for (int64_t i = 0; i < count; ++i) opkiln::store_floats(sums + i * keys, out + i * s.length, s.length, 1);
  }
}

using Five = opk::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Five evoformer_attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& output, const Tensor& moments, const MaybeTensor& mask_bias,
                                  const MaybeTensor& pair_bias, double scale, bool mask_grad, bool pair_grad) {
  const Sizes s = evoformer::check_inputs(q, k, v, mask_bias, pair_bias);
  evoformer::check_results(s, q, grad, output, moments);
  const opkiln::ElementType type = opk::element_of(q);
  evoformer::Gradients out(s, q, mask_grad, pair_grad);
  if (q.numel() != 0) {
    const Tensor given[] = {evoformer::make_heads_contiguous(grad), evoformer::make_heads_contiguous(q),
                            evoformer::make_heads_contiguous(k), evoformer::make_heads_contiguous(v),
                            evoformer::make_heads_contiguous(output), opk::contiguous(moments)};
    const Tensor mask = evoformer::make_contiguous(mask_bias), pair = evoformer::make_contiguous(pair_bias);
    const Work work = {given[0].data(), given[1].data(), given[2].data(), given[3].data(), given[4].data(),
                       mask.defined() ? mask.data() : nullptr, pair.defined() ? pair.data() : nullptr,
                       evoformer::strides_of(given[0]), evoformer::strides_of(given[1]),
                       evoformer::strides_of(given[2]), evoformer::strides_of(given[3]),
                       evoformer::strides_of(given[4]), given[5].data<const float>(),
                       out.q.data(), out.k.data(), out.v.data(),
                       mask_grad ? out.mask.data() : nullptr, pair_grad ? out.pair.data() : nullptr,
                       s, static_cast<float>(scale)};
    OPK_ELEMENT(type, T, (float, opkiln::BFloat16, opkiln::Float16), {
      opk::parallel_for(0, s.batch * s.rows, 1, [&](int64_t first, int64_t last) { rows<T>(work, first, last); });
      if (pair_grad) {
        const int64_t units = s.batch * s.heads * ((s.length + kPairQueries - 1) / kPairQueries);
        opk::parallel_for(0, units, 1, [&](int64_t first, int64_t last) { pairs<T>(work, first, last); });
      }
    });
  }
  return {out.q, out.k, out.v, out.mask, out.pair};
}

}  // namespace

OPKILN_OP(evoformer_attention_backward, cpu);

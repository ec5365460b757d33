// AdamW as one plain streaming loop: the memory's limit, written by hand.
//
// It reads p, g, m, v and writes p, m, v: 28 bytes an element, what every AdamW has to move. It
// checks nothing and looks nothing up, so an optimizer that comes close to it wastes nothing. It
// runs on torch's own threads: a second pool would fight for the cores with the first one, whose
// workers keep spinning for a while after each parallel region.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <torch/csrc/stable/ops.h>

namespace {

struct Constants {
  float decay, beta1, beta2, step_size, root_correction, eps;
};

void update(float* __restrict p, const float* __restrict g, float* __restrict m,
            float* __restrict v, int64_t n, Constants c) {
  for (int64_t i = 0; i < n; ++i) {
    const float mi = c.beta1 * m[i] + (1 - c.beta1) * g[i];
    const float vi = c.beta2 * v[i] + (1 - c.beta2) * g[i] * g[i];
    m[i] = mi;
    v[i] = vi;
    p[i] = p[i] * c.decay - c.step_size * mi / (std::sqrt(vi) * c.root_correction + c.eps);
  }
}

}  // namespace

// ends[k] is the number of elements in tensors 0..k.
extern "C" void adamw_stream(int64_t tensors, float* const* p, const float* const* g,
                             float* const* m, float* const* v, const int64_t* ends, int64_t step,
                             float lr, float beta1, float beta2, float eps, float weight_decay) {
  const Constants c{1 - lr * weight_decay,
                    beta1,
                    beta2,
                    lr / static_cast<float>(1 - std::pow(static_cast<double>(beta1), step)),
                    static_cast<float>(1 / std::sqrt(1 - std::pow(static_cast<double>(beta2), step))),
                    eps};
  // 16,384 elements: 256 KiB of the four arrays, so that two threads share small lists evenly.
  torch::stable::parallel_for(0, ends[tensors - 1], 16384, [&](int64_t begin, int64_t end) {
    int64_t k = std::upper_bound(ends, ends + tensors, begin) - ends;
    while (begin < end) {
      const int64_t start = k ? ends[k - 1] : 0;
      const int64_t stop = std::min(end, ends[k]);
      const int64_t at = begin - start;
      update(p[k] + at, g[k] + at, m[k] + at, v[k] + at, stop - begin, c);
      begin = stop;
      ++k;
    }
  });
}

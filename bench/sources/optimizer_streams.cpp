// AdamW, Lion and Adagrad as plain streaming loops: the memory's limit, written by hand.
//
// AdamW reads p, g, m, v and writes p, m, v: 28 bytes an element, what every AdamW has to move; Lion
// and Adagrad have one state, and move 20. They check nothing and look nothing up, so an optimizer
// that comes close to them wastes nothing. They run on torch's own threads: a second pool would fight
// for the cores with the first one, whose workers keep spinning for a while after each parallel region.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <torch/csrc/stable/ops.h>

namespace {

struct AdamW {
  float decay, beta1, beta2, step_size, root_correction, eps;

  void operator()(float* __restrict p, const float* __restrict g, float* __restrict m,
                  float* __restrict v, int64_t n) const {
    const AdamW c = *this;  // a local: no store below can change it
    for (int64_t i = 0; i < n; ++i) {
      const float mi = c.beta1 * m[i] + (1 - c.beta1) * g[i];
      const float vi = c.beta2 * v[i] + (1 - c.beta2) * g[i] * g[i];
      m[i] = mi;
      v[i] = vi;
      p[i] = p[i] * c.decay - c.step_size * mi / (std::sqrt(vi) * c.root_correction + c.eps);
    }
  }
};

struct Lion {
  float decay, beta1, beta2, lr;

  void operator()(float* __restrict p, const float* __restrict g, float* __restrict m,
                  int64_t n) const {
    const Lion c = *this;
    for (int64_t i = 0; i < n; ++i) {
      const float mean = c.beta1 * m[i] + (1 - c.beta1) * g[i];
      p[i] = p[i] * c.decay - (mean > 0 ? c.lr : mean < 0 ? -c.lr : 0);
      m[i] = c.beta2 * m[i] + (1 - c.beta2) * g[i];
    }
  }
};

struct Adagrad {
  float lr, eps;

  void operator()(float* __restrict p, const float* __restrict g, float* __restrict s,
                  int64_t n) const {
    const Adagrad c = *this;
    for (int64_t i = 0; i < n; ++i) {
      const float si = s[i] + g[i] * g[i];
      s[i] = si;
      p[i] -= c.lr * g[i] / (std::sqrt(si) + c.eps);
    }
  }
};

// The traffic of AdamW on 16-bit parameters with fp32 states, 22 bytes an element, and next to no
// arithmetic: the bits of parameters and gradients are added as they are.
struct Mixed {
  void operator()(uint16_t* __restrict p, const uint16_t* __restrict g, float* __restrict m,
                  float* __restrict v, int64_t n) const {
    for (int64_t i = 0; i < n; ++i) {
      p[i] = static_cast<uint16_t>(p[i] + g[i]);
      m[i] += 1e-3f;
      v[i] += 1e-3f;
    }
  }
};

// ends[k] is the number of elements in tensors 0..k.
template <class Update, class... Lists>
void sweep(int64_t tensors, const int64_t* ends, const Update& update, Lists... lists) {
  // 16,384 elements: 256 KiB of the four arrays, so that two threads share small lists evenly.
  torch::stable::parallel_for(0, ends[tensors - 1], 16384, [&](int64_t begin, int64_t end) {
    int64_t k = std::upper_bound(ends, ends + tensors, begin) - ends;
    while (begin < end) {
      const int64_t start = k ? ends[k - 1] : 0;
      const int64_t stop = std::min(end, ends[k]);
      update(lists[k] + (begin - start)..., stop - begin);
      begin = stop;
      ++k;
    }
  });
}

}  // namespace

extern "C" void adamw_stream(int64_t tensors, float* const* p, const float* const* g,
                             float* const* m, float* const* v, const int64_t* ends, int64_t step,
                             float lr, float beta1, float beta2, float eps, float weight_decay) {
  const double correction1 = 1 - std::pow(static_cast<double>(beta1), step);
  const double correction2 = 1 - std::pow(static_cast<double>(beta2), step);
  const AdamW update{1 - lr * weight_decay,
                     beta1,
                     beta2,
                     lr / static_cast<float>(correction1),
                     static_cast<float>(1 / std::sqrt(correction2)),
                     eps};
  sweep(tensors, ends, update, p, g, m, v);
}

extern "C" void mixed_stream(int64_t tensors, uint16_t* const* p, const uint16_t* const* g,
                             float* const* m, float* const* v, const int64_t* ends) {
  sweep(tensors, ends, Mixed{}, p, g, m, v);
}

extern "C" void lion_stream(int64_t tensors, float* const* p, const float* const* g,
                            float* const* m, const int64_t* ends, float lr, float beta1,
                            float beta2, float weight_decay) {
  sweep(tensors, ends, Lion{1 - lr * weight_decay, beta1, beta2, lr}, p, g, m);
}

extern "C" void adagrad_stream(int64_t tensors, float* const* p, const float* const* g,
                               float* const* s, const int64_t* ends, float lr, float eps) {
  sweep(tensors, ends, Adagrad{lr, eps}, p, g, s);
}

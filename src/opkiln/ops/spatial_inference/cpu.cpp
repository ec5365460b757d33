// Adds biases and residuals on host memory, in stretches of rows, so that the inner loop is long for any
// number of channels. The biases are widened once, and repeated until they fill a stretch.

#include <opkiln/vec.h>

#include "work.h"

namespace {

using opkiln::BFloat16;
using opkiln::Float16;
using opkiln::Vec;

constexpr int64_t kStretch = 2048;  // floats of biases; two tables stay in the L1 cache

// Like Vec, for doubles. The compiler vectorizes it.
struct Doubles {
  static constexpr int kLanes = 4;
  double value[kLanes];

  template <class Lane>
  static Doubles each(const Lane& lane) {
    Doubles out;
    for (int i = 0; i < kLanes; ++i) out.value[i] = lane(i);
    return out;
  }
  static Doubles load(const double* from) {
    return each([&](int i) { return from[i]; });
  }
  void store(double* to) const {
    for (int i = 0; i < kLanes; ++i) to[i] = value[i];
  }
  friend Doubles operator+(const Doubles& a, const Doubles& b) {
    return each([&](int i) { return a.value[i] + b.value[i]; });
  }
};

template <class T>
struct Kind {
  using Register = Vec;
  using Wide = float;
};
template <>
struct Kind<double> {
  using Register = Doubles;
  using Wide = double;
};

// One to four streams of a stretch. `other` and `other_biases` may be null.
template <class T>
struct Streams {
  const T* x;
  const typename Kind<T>::Wide* biases;
  const T* other;
  const typename Kind<T>::Wide* other_biases;
  T* out;

  typename Kind<T>::Register sum(int64_t i) const {
    using Register = typename Kind<T>::Register;
    const Register first = Register::load(x + i) + Register::load(biases + i);
    if (other == nullptr) return first;
    const Register second = Register::load(other + i);
    return first + (other_biases == nullptr ? second : second + Register::load(other_biases + i));
  }
};

// Adds `count` elements. The remainder goes through a padded register. (Non-temporal stores were not faster:
// the memory of a new result was just cleared, so it is in a cache.)
template <class T>
void add_stretch(const Streams<T>& given, int64_t count) {
  using Register = typename Kind<T>::Register;
  using Wide = typename Kind<T>::Wide;
  const Streams<T> streams = given;
  const int64_t whole = count / Register::kLanes * Register::kLanes;
  for (int64_t i = 0; i < whole; i += Register::kLanes) {
    opkiln::prefetch_ahead(streams.x + i);
    if (streams.other != nullptr) opkiln::prefetch_ahead(streams.other + i);
    streams.sum(i).store(streams.out + i);
  }
  if (whole == count) return;
  const auto rest = static_cast<size_t>(count - whole);
  T x[Register::kLanes] = {}, other[Register::kLanes] = {}, out[Register::kLanes];
  Wide biases[Register::kLanes] = {}, other_biases[Register::kLanes] = {};
  std::memcpy(x, streams.x + whole, rest * sizeof(T));
  std::memcpy(biases, streams.biases + whole, rest * sizeof(Wide));
  Streams<T> padded{x, biases, nullptr, nullptr, out};
  if (streams.other != nullptr) {
    std::memcpy(other, streams.other + whole, rest * sizeof(T));
    padded.other = other;
  }
  if (streams.other_biases != nullptr) {
    std::memcpy(other_biases, streams.other_biases + whole, rest * sizeof(Wide));
    padded.other_biases = other_biases;
  }
  padded.sum(0).store(out);
  std::memcpy(streams.out + whole, out, rest * sizeof(T));
}

// Widens the biases, and repeats them `times` times.
template <class T>
void repeat(const void* biases, int64_t channels, int64_t times, typename Kind<T>::Wide* to) {
  using Register = typename Kind<T>::Register;
  const T* const from = static_cast<const T*>(biases);
  int64_t i = 0;
  for (; i + Register::kLanes <= channels; i += Register::kLanes) {
    Register::load(from + i).store(to + i);
  }
  if (i < channels) {
    T padded[Register::kLanes] = {};
    typename Kind<T>::Wide wide[Register::kLanes];
    const auto rest = static_cast<size_t>(channels - i);
    std::memcpy(padded, from + i, rest * sizeof(T));
    Register::load(padded).store(wide);
    std::memcpy(to + i, wide, rest * sizeof(wide[0]));
  }
  for (int64_t filled = channels; filled < channels * times;) {
    const int64_t more = filled < channels * times - filled ? filled : channels * times - filled;
    std::memcpy(to + filled, to, static_cast<size_t>(more) * sizeof(to[0]));
    filled += more;
  }
}

template <class T>
Streams<T> streams_at(const Work& work, int64_t at, const typename Kind<T>::Wide* biases,
                 const typename Kind<T>::Wide* other_biases) {
  return {static_cast<const T*>(work.x) + at, biases,
          work.other ? static_cast<const T*>(work.other) + at : nullptr, other_biases,
          static_cast<T*>(work.out) + at};
}

template <class T>
void add_all(const Work& work) {
  using Wide = typename Kind<T>::Wide;
  const int64_t size = static_cast<int64_t>(sizeof(T));
  // With channels last, a stretch is whole rows. Otherwise it is (a part of) one channel of an image.
  const bool last = work.inner == 1;
  const int64_t times = !last || work.channels >= kStretch ? 1 : kStretch / work.channels;
  const int64_t table = last ? work.channels * times : kStretch;
  const int64_t tables = work.other_bias ? 2 : 1;
  const opk::Device host{opk::DeviceType::cpu, 0};
  const int64_t owners = last ? 1 : opk::num_threads();
  Tensor scratch = opk::empty({owners * tables * table},
                              sizeof(Wide) == 8 ? opk::DType::float64 : opk::DType::float32, host);
  Wide* const memory = static_cast<Wide*>(scratch.data());
  if (last) {
    repeat<T>(work.bias, work.channels, times, memory);
    if (work.other_bias) repeat<T>(work.other_bias, work.channels, times, memory + table);
    const int64_t stretches = (work.numel + table - 1) / table;
    const int64_t grain = (opk::kGrainBytes + table * size - 1) / (table * size);
    opk::parallel_for(0, stretches, grain, [&](int64_t first, int64_t end) {
      for (int64_t at = first * table; at < work.numel && at < end * table; at += table) {
        const int64_t count = work.numel - at < table ? work.numel - at : table;
        add_stretch(streams_at<T>(work, at, memory, work.other_bias ? memory + table : nullptr), count);
      }
    });
    return;
  }
  const int64_t grain = (opk::kGrainBytes + work.inner * size - 1) / (work.inner * size);
  opk::parallel_for(0, work.numel / work.inner, grain, [&](int64_t first, int64_t end) {
    Wide* const biases = memory + opk::thread_index() * tables * table;
    for (int64_t row = first; row < end; ++row) {
      const int64_t channel = row % work.channels;
      const int64_t filled = work.inner < table ? work.inner : table;
      repeat<T>(static_cast<const T*>(work.bias) + channel, 1, filled, biases);
      if (work.other_bias) {
        repeat<T>(static_cast<const T*>(work.other_bias) + channel, 1, filled, biases + table);
      }
      for (int64_t at = 0; at < work.inner; at += table) {
        const int64_t count = work.inner - at < table ? work.inner - at : table;
        add_stretch(streams_at<T>(work, row * work.inner + at, biases,
                             work.other_bias ? biases + table : nullptr), count);
      }
    }
  });
}

void add(const Work& work, opk::DType dtype) {
  switch (dtype) {
    case opk::DType::float32: return add_all<float>(work);
    case opk::DType::bfloat16: return add_all<BFloat16>(work);
    case opk::DType::float16: return add_all<Float16>(work);
    default: return add_all<double>(work);
  }
}

}  // namespace

OPKILN_OP(spatial_bias_add, cpu);

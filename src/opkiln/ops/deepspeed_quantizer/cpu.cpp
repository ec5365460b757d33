// Quantizes and dequantizes on host memory, one group at a time: widens it into scratch memory, finds its
// range, and rounds. The loops are plain, so that the compiler vectorizes them.

#include <opkiln/blocks.h>

#include "element.h"

namespace {

using opkiln::kBlock;
using opkiln::narrow;
using opkiln::widen;

constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

opkiln::Stream stream_of(const void* data, ElementType type) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), type, true};
}

// Loads `count` levels from `at` on, in whole bytes, as floats.
void load_levels(const Groups& from, int64_t at, int64_t count, float* to) {
  if (from.bits == 8) {
    const auto* const levels = reinterpret_cast<const int8_t*>(from.levels) + at;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<float>(levels[i]);
    }
    return;
  }
  const uint8_t* const bytes = from.levels + at / 2;
  for (int64_t i = 0; i < count / 2; ++i) {
    to[2 * i] = static_cast<float>(((bytes[i] >> 4) ^ 8) - 8);
    to[2 * i + 1] = static_cast<float>(((bytes[i] & 15) ^ 8) - 8);
  }
}

void store_levels(const uint32_t* levels, const Groups& to, int64_t at, int64_t count) {
  if (to.bits == 8) {
    for (int64_t i = 0; i < count; ++i) {
      to.levels[at + i] = static_cast<uint8_t>(levels[i]);
    }
    return;
  }
  for (int64_t i = 0; i < count / 2; ++i) {
    to.levels[at / 2 + i] =
        static_cast<uint8_t>((levels[2 * i] & 15) << 4 | (levels[2 * i + 1] & 15));
  }
}

void scale_levels(float* values, int64_t count, const Back& back) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = back(values[i]);
  }
}

// Rounds the values to fp16 precision.
void round_to_half(float* values, int64_t count) {
  opkiln::Float16 halves[kBlock];
  narrow(values, halves, count);
  widen(halves, values, count);
}

// The sum of the parts' elements [begin, begin + count). Parts and sums are rounded to fp16.
void load_parts(const Work& work, int64_t begin, int64_t count, float* to) {
  const Groups& parts = work.parts;
  const int64_t elements = parts.count * parts.size / work.number_of_parts;
  alignas(64) float part[kBlock], sum[kBlock];
  for (int64_t done = 0; done < count;) {
    const int64_t at = begin + done, end = (at / parts.size + 1) * parts.size;
    const int64_t here = least(least(count - done, end - at), kBlock);
    for (float& each : sum) {
      each = 0.0f;
    }
    for (int i = 0; i < work.number_of_parts; ++i) {
      const int64_t from = i * elements + at;
      load_levels(parts, from, here, part);
      scale_levels(part, here, Back::of(parts, from / parts.size));
      round_to_half(part, here);
      for (int64_t k = 0; k < here; ++k) {
        sum[k] = sum[k] + part[k];
      }
      round_to_half(sum, here);
    }
    for (int64_t k = 0; k < here; ++k) {
      to[done + k] = sum[k];
    }
    done += here;
  }
}

// NaN is ignored, because every comparison with it is false.
Scale symmetric_scale(const float* values, int64_t count, const Work& work) {
  float most = work.with_zero ? 0.0f : -infinity();
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = __builtin_fabsf(values[i]);
    most = magnitude > most ? magnitude : most;
  }
  return Scale::symmetric(most, work.to.bits);
}

Scale asymmetric_scale(const float* values, int64_t count, const Work& work) {
  float most = work.with_zero ? 0.0f : -infinity(), least = work.with_zero ? 0.0f : infinity();
  for (int64_t i = 0; i < count; ++i) {
    most = values[i] > most ? values[i] : most;
    least = values[i] < least ? values[i] : least;
  }
  return Scale::asymmetric(least, most, work.to.bits);
}

template <bool kSymmetric>
void round_group(const Work& work, const float* values, int64_t group, const Scale& given) {
  const Scale scale = given;  // a local, so that the stores below cannot alias it
  const int64_t size = work.to.size, place = place_of(group, work.order);
  alignas(64) uint32_t levels[kBlock];
  for (int64_t at = 0; at < size; at += kBlock) {
    const int64_t here = least(size - at, kBlock);
    for (int64_t i = 0; i < here; ++i) {
      levels[i] = scale.level<kSymmetric>(values[at + i]);
    }
    store_levels(levels, work.to, place * size + at, here);
  }
  scale.store<kSymmetric>(work.to.params, place);
}

void quantize_groups(const Work& work, int64_t first, int64_t last) {
  const int64_t size = work.to.size;
  // padded: narrow types write whole registers
  opk::List<float> scratch(opkiln::whole_registers(size + opkiln::Vec::kLanes));
  for (int64_t group = first; group < last; ++group) {
    if (work.from != nullptr) {
      widen(stream_of(work.from, work.type), group * size, size, scratch.begin());
    } else {
      load_parts(work, group * size, size, scratch.begin());
    }
    if (work.to.symmetric) {
      round_group<true>(work, scratch.begin(), group, symmetric_scale(scratch.begin(), size, work));
    } else {
      round_group<false>(work, scratch.begin(), group, asymmetric_scale(scratch.begin(), size, work));
    }
  }
}

void dequantize_groups(const Work& work, int64_t first, int64_t last) {
  alignas(64) float values[kBlock];
  const int64_t size = work.to.size;
  for (int64_t group = first; group < last; ++group) {
    const Back back = Back::of(work.to, group);
    for (int64_t at = 0; at < size; at += kBlock) {
      const int64_t here = least(size - at, kBlock);
      load_levels(work.to, group * size + at, here, values);
      scale_levels(values, here, back);
      narrow(values, stream_of(work.out, work.type), group * size + at, here);
    }
  }
}

// Runs the body in torch's thread pool. Small tensors stay on the calling thread.
void parallel_groups(const Work& work, void (*body)(const Work&, int64_t, int64_t)) {
  const int64_t grain = opk::kGrainBytes / (int64_t{4} * work.to.size);
  opk::parallel_for(0, work.to.count, grain < 1 ? 1 : grain,
                    [&](int64_t first, int64_t last) { body(work, first, last); });
}

void quantize(const Work& work) {
  parallel_groups(work, quantize_groups);
}

void dequantize(const Work& work) {
  parallel_groups(work, dequantize_groups);
}

}  // namespace

OPKILN_OP(deepspeed_quantize, cpu);
OPKILN_OP(deepspeed_dequantize, cpu);
OPKILN_OP(deepspeed_reduce, cpu);

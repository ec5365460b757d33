// Quantizes and dequantizes on host memory, one group at a time: widens it into scratch memory that stays in
// the cache, finds its extent, and rounds. The loops are plain, so that the compiler vectorizes them.
// Comparisons are between integers, whose order needs no special case for NaN.

#include <opkiln/blocks.h>

#include "element.h"
#include "functions.h"

namespace opkiln {
namespace quantizer {
namespace {

constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

Stream stream_of(const void* data, ElementType type) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), type, true};
}

// Loads levels [at, at + count) of a part or a tensor as floats. `at` is even.
void load_levels(const Quantized& from, const Format& format, int64_t at, int64_t count,
                 float* to) {
  if (format.bits == 8) {
    const uint8_t* const bytes = from.values + at;
    const int flip = format.symmetric ? 0x80 : 0;
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<float>((bytes[i] ^ flip) - flip);
    }
    return;
  }
  const uint8_t* const bytes = from.values + at / 2;
  const int flip = format.symmetric ? 8 : 0;
  for (int64_t i = 0; i < count / 2; ++i) {
    to[2 * i] = static_cast<float>(((bytes[i] & 15) ^ flip) - flip);
    to[2 * i + 1] = static_cast<float>(((bytes[i] >> 4) ^ flip) - flip);
  }
  if (count % 2 != 0) {
    to[count - 1] = static_cast<float>(((bytes[count / 2] & 15) ^ flip) - flip);
  }
}

void store_levels(const float* rounded, const Format& format, uint32_t keep, int64_t at,
                  int64_t count, uint8_t* values) {
  if (format.bits == 8) {
    for (int64_t i = 0; i < count; ++i) {
      values[at + i] = static_cast<uint8_t>(as_bits(rounded[i]) & keep);
    }
    return;
  }
  uint8_t* const bytes = values + at / 2;
  for (int64_t i = 0; i < count / 2; ++i) {
    const uint32_t low = as_bits(rounded[2 * i]), high = as_bits(rounded[2 * i + 1]);
    bytes[i] = static_cast<uint8_t>(((low & 15) | (high & 15) << 4) & keep);
  }
  if (count % 2 != 0) {
    bytes[count / 2] = static_cast<uint8_t>(as_bits(rounded[count - 1]) & 15 & keep);
  }
}

// levels * scale + offset, as in Level::back.
void scale_levels(float* values, int64_t count, float scale, float offset, bool symmetric) {
  if (symmetric) {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = values[i] * scale;
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      values[i] = values[i] * scale + offset;
    }
  }
}

// The sum of the parts' elements [begin, begin + count), which may span groups.
void load_parts(const Parts& parts, int64_t begin, int64_t count, float* to) {
  float part[kBlock];
  for (int64_t done = 0; done < count;) {
    const int64_t at = begin + done;
    const int64_t group = at / parts.format.group_size;
    const int64_t end = (group + 1) * parts.format.group_size;
    const int64_t here = least(least(count - done, end - at), kBlock);
    for (int i = 0; i < parts.count; ++i) {
      const Quantized& from = parts.at[i];
      load_levels(from, parts.format, at, here, part);
      scale_levels(part, here, from.scales[group],
                   parts.format.symmetric ? 0 : from.offsets[group], parts.format.symmetric);
      for (int64_t k = 0; k < here; ++k) {
        to[done + k] = i == 0 ? part[k] : to[done + k] + part[k];
      }
    }
    for (int64_t k = 0; k < here; ++k) {
      to[done + k] *= parts.factor;
    }
    done += here;
  }
}

float greatest_magnitude(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = as_bits(values[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return as_float(most);
}

// Maps a float's bits to an integer of the same order; NaN is beyond
// the infinity of its sign. It is its own inverse.
int32_t order_bits(uint32_t bits) {
  const int32_t value = static_cast<int32_t>(bits);
  return value ^ (value >> 31 & 0x7fffffff);
}

Level asymmetric_level(const float* values, int64_t count, int bits, bool stochastic) {
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = order_bits(as_bits(values[i]));
    lowest = value < lowest ? value : lowest;
    highest = value > highest ? value : highest;
  }
  const auto back = [](int32_t value) {
    return as_float(static_cast<uint32_t>(order_bits(static_cast<uint32_t>(value))));
  };
  return Level::asymmetric(back(lowest), back(highest), bits, stochastic);
}

// The random numbers of the elements [begin, begin + count), at most kBlock of them.
// Returns where they begin in `to`, which has room for one more row. Computes
// random_words() over rows of counters, round by round, which compilers vectorize.
const float* random_numbers(const Random& random, uint64_t offset, int64_t begin, int64_t count,
                            float* to) {
  constexpr int kRows = kBlock / kRandomElements + 1;
  const int64_t skipped = begin % kRandomElements;
  const int rows = static_cast<int>((skipped + count + kRandomElements - 1) / kRandomElements);
  alignas(64) uint32_t c0[kRows], c1[kRows], c2[kRows], c3[kRows];
  for (int i = 0; i < kRows; ++i) {
    const uint64_t counter = static_cast<uint64_t>(begin / kRandomElements + i);
    c0[i] = static_cast<uint32_t>(counter);
    c1[i] = static_cast<uint32_t>(counter >> 32);
    c2[i] = static_cast<uint32_t>(offset);
    c3[i] = static_cast<uint32_t>(offset >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(random.seed), k1 = static_cast<uint32_t>(random.seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < kRows; ++i) {
      random_round(c0[i], c1[i], c2[i], c3[i], k0, k1);
    }
    next_random_key(k0, k1);
  }
  for (int i = 0; i < rows; ++i) {
    const RandomWords words{{c0[i], c1[i], c2[i], c3[i]}};
    for (int k = 0; k < kRandomElements; ++k) {  // 128, with the random bits below its point
      to[i * kRandomElements + k] = as_float(0x43000000u | sixteen_bits(words, k));
    }
  }
  return to + skipped;
}

// Rounds a group. `values` is scratch memory, or the tensor itself if it is fp32.
template <Scheme kScheme>
void round_group(const Work& work, int64_t begin, int64_t count, int64_t place, uint64_t offset,
                 const float* values, const Level& given) {
  constexpr bool kSymmetric = kScheme != Scheme::kAsymmetric;
  const Level level = given;  // a local, so that the stores below cannot alias it
  alignas(64) float rounded[kBlock];
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t here = least(count - at, kBlock);
    const float* const from = values + at;
    if (work.random.stochastic) {
      float numbers[kBlock + kRandomElements];
      const float* const random = random_numbers(work.random, offset, begin + at, here, numbers);
      for (int64_t i = 0; i < here; ++i) {
        rounded[i] = level.stochastic<kScheme>(level.divide_by_scale<kSymmetric>(from[i]), random[i]);
      }
    } else {
      for (int64_t i = 0; i < here; ++i) {
        rounded[i] = level.nearest<kScheme>(level.divide_by_scale<kSymmetric>(from[i]));
      }
    }
    if (work.to.values != nullptr) {
      store_levels(rounded, work.format, level.keep, place * work.format.group_size + at, here,
                   work.to.values);
      if (work.error == nullptr) {
        continue;
      }
    }
    for (int64_t i = 0; i < here; ++i) {
      rounded[i] = level.back<kSymmetric>(rounded[i] - kRounder);
    }
    if (work.error != nullptr) {
      for (int64_t i = 0; i < here; ++i) {
        work.error[begin + at + i] = from[i] - rounded[i];
      }
    } else {
      narrow(rounded, stream_of(work.out, work.type), begin + at, here);
    }
  }
  if (work.to.values != nullptr) {
    work.to.scales[place] = level.scale;
    if (!kSymmetric) {
      work.to.offsets[place] = level.offset;
    }
  }
}

void quantize_groups(const Work& work, const Parts* parts, int64_t first, int64_t last) {
  const int64_t size = work.format.group_size;
  const int bits = work.format.bits;
  const bool in_place = work.from != nullptr && work.type == ElementType::kFloat &&
      work.error == nullptr;
  // Padded, because whole registers are written.
  opk::List<float> scratch(in_place ? 0 : whole_registers(size + Vec::kLanes));
  const uint64_t offset = work.random.stochastic ? offset_of(work.random) : 0;
  for (int64_t group = first; group < last; ++group) {
    const int64_t begin = group * size, count = least(size, work.numel - begin);
    const float* values = scratch.begin();
    if (in_place) {
      values = static_cast<const float*>(work.from) + begin;
    } else if (work.from != nullptr) {
      widen(stream_of(work.from, work.type), begin, count, scratch.begin());
    } else {
      load_parts(*parts, begin, count, scratch.begin());
    }
    if (work.error != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        scratch.begin()[i] += work.error[begin + i];
      }
    }
    const int64_t place = place_of(group, work.order);
    const bool stochastic = work.random.stochastic;
    if (!work.format.symmetric) {
      const Level level = asymmetric_level(values, count, bits, stochastic);
      round_group<Scheme::kAsymmetric>(work, begin, count, place, offset, values, level);
      continue;
    }
    const Level level = Level::symmetric(greatest_magnitude(values, count), bits, stochastic,
                                         work.format.full);
    if (work.format.full) {
      round_group<Scheme::kFull>(work, begin, count, place, offset, values, level);
    } else {
      round_group<Scheme::kSymmetric>(work, begin, count, place, offset, values, level);
    }
  }
}

void dequantize_groups(const Work& work, int64_t first, int64_t last) {
  alignas(64) float values[kBlock];
  const int64_t size = work.format.group_size;
  for (int64_t group = first; group < last; ++group) {
    const int64_t begin = group * size, count = least(size, work.numel - begin);
    const int64_t place = place_of(group, work.order);
    const float offset = work.format.symmetric ? 0 : work.to.offsets[place];
    for (int64_t at = 0; at < count; at += kBlock) {
      const int64_t here = least(count - at, kBlock);
      load_levels(work.to, work.format, place * size + at, here, values);
      scale_levels(values, here, work.to.scales[place], offset, work.format.symmetric);
      narrow(values, stream_of(work.out, work.type), begin + at, here);
    }
  }
}

// Runs the body in torch's thread pool. Small tensors stay on the calling thread.
template <class Body>
void parallel_groups(const Work& work, const Body& body) {
  const int64_t grain = opk::kGrainBytes / (int64_t{4} * work.format.group_size);
  opk::parallel_for(0, groups_of(work.numel, work.format), grain < 1 ? 1 : grain, body);
}

void run_quantize(const Work& work, const Parts* parts) {
  parallel_groups(work, [&](int64_t first, int64_t last) { quantize_groups(work, parts, first, last); });
}

void run_dequantize(const Work& work) {
  parallel_groups(work, [&](int64_t first, int64_t last) { dequantize_groups(work, first, last); });
}

OPKILN_OP(quantize, cpu);
OPKILN_OP(quantize_with_feedback, cpu);
OPKILN_OP(dequantize, cpu);
OPKILN_OP(fake_quantize, cpu);
OPKILN_OP(fake_quantize_, cpu);
OPKILN_OP(quantized_reduce, cpu);
OPKILN_OP(quantized_reduce_with_feedback, cpu);

}  // namespace
}  // namespace quantizer
}  // namespace opkiln

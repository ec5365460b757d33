// Quantizes and dequantizes on the host, in blocks that stay in the L1 cache and
// loops that the compiler vectorizes. The arithmetic is number.h's.

#include <opkiln/blocks.h>

#include "dequantize.h"
#include "quantize.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

constexpr int64_t kGrainElements = 32 * 1024;  // below this, waking another thread does not pay

constexpr int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The elements [begin, begin + count) as floats. Elements of other types are widened into `scratch`.
const float* floats(const Quantize& work, int64_t begin, int64_t count, float* scratch) {
  if (work.type == ElementType::kFloat) {
    return static_cast<const float*>(work.input) + begin;
  }
  widen({static_cast<std::byte*>(const_cast<void*>(work.input)), work.type, false}, begin, count, scratch);
  return scratch;
}

// The bits of the largest magnitude. NaN and infinity are larger than any number.
[[gnu::noinline]] uint32_t absmax(const float* values, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = bits_of(values[i]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

template <class F>
[[gnu::noinline]] void encode(const float* values, float inverse, uint32_t* codes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = nearest<F>(values[i] * inverse);
  }
}

// `first` is the index of the first value in the whole input, a multiple of 16.
template <class F>
[[gnu::noinline]] void encode_stochastic(const float* values, float inverse, uint32_t* codes,
                                         int64_t count, uint64_t first, uint64_t offset,
                                         const Quantize& work) {
  const Keys keys = random_keys<kRounds>(work.seed);
  uint32_t random[kBlock];
  for (int64_t i = 0; i < count; i += kRandomElements) {
    const uint64_t block = (first + static_cast<uint64_t>(i)) / kRandomElements;
    const RandomWords words = random_words(block, offset, keys);
    for (int k = 0; k < kRandomElements; ++k) {
      random[i + k] = sixteen_bits(words, k);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    codes[i] = stochastic<F>(values[i] * inverse, random[i]);
  }
}

// Packs codes, starting at a whole byte. It also reads the codes
// after the last one, up to a whole byte, which must be 0.
template <class F>
[[gnu::noinline]] void pack(const uint32_t* codes, int64_t count, uint8_t* to) {
  const auto byte = [](uint32_t bits) { return static_cast<uint8_t>(bits); };
  if constexpr (F::kBits == 8) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = byte(codes[i]);
    }
  } else if constexpr (F::kBits == 4) {
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
      to[i] = byte(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  } else {
    constexpr int kEach = 24 / F::kBits;  // codes in three bytes
    const int64_t bytes = (count * F::kBits + 7) / 8;
    for (int64_t i = 0; i < bytes / 3; ++i) {
      uint32_t all = 0;
      for (int k = 0; k < kEach; ++k) {
        all |= codes[kEach * i + k] << (F::kBits * k);
      }
      to[3 * i] = byte(all);
      to[3 * i + 1] = byte(all >> 8);
      to[3 * i + 2] = byte(all >> 16);
    }
    if (bytes % 3 != 0) {
      uint32_t all = 0;
      for (int k = 0; k < kEach; ++k) {
        all |= codes[bytes / 3 * kEach + k] << (F::kBits * k);
      }
      for (int64_t i = bytes / 3 * 3; i < bytes; ++i, all >>= 8) {
        to[i] = byte(all);
      }
    }
  }
}

template <class F>
void quantize_group(const Quantize& work, uint64_t offset, int64_t group) {
  const int64_t begin = group * work.group_size;
  const int64_t end = least(work.numel, begin + work.group_size);
  alignas(64) float scratch[kBlock];
  alignas(64) uint32_t codes[kBlock + 4];
  uint32_t most = 0;
  const float* values = nullptr;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = least(kBlock, end - at);
    values = floats(work, at, count, scratch);
    const uint32_t here = absmax(values, count);
    most = here > most ? here : most;
  }
  const float scale = scale_of<F>(most), inverse = 1.0f / scale;
  work.scales[group] = scale;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = least(kBlock, end - at);
    if (work.group_size > kBlock) {
      values = floats(work, at, count, scratch);
    }
    if (most >= kInfinity) {
      for (int64_t i = 0; i < count; ++i) {
        codes[i] = 0;
      }
    } else if (work.stochastic) {
      encode_stochastic<F>(values, inverse, codes, count, static_cast<uint64_t>(at), offset, work);
    } else {
      encode<F>(values, inverse, codes, count);
    }
    for (int64_t i = 0; i < 4; ++i) {
      codes[count + i] = 0;
    }
    pack<F>(codes, count, work.codes + at * F::kBits / 8);
  }
}

// Unpacks the codes from an element on. `index` may be in the middle of a byte.
template <class F>
[[gnu::noinline]] void unpack(const uint8_t* from, int64_t index, int64_t count, uint32_t* codes) {
  if constexpr (F::kBits == 8) {
    for (int64_t i = 0; i < count; ++i) {
      codes[i] = from[index + i];
    }
  } else {
    constexpr int kEach = F::kBits == 4 ? 2 : 24 / F::kBits, kBytes = kEach * F::kBits / 8;
    const auto one = [&](int64_t i) {
      const int64_t bit = (index + i) * F::kBits;
      const int shift = static_cast<int>(bit & 7);
      uint32_t all = from[bit >> 3];
      if (shift + F::kBits > 8) {
        all |= static_cast<uint32_t>(from[(bit >> 3) + 1]) << 8;
      }
      codes[i] = all >> shift;
    };
    int64_t i = 0;
    for (; i < count && (index + i) % kEach != 0; ++i) {
      one(i);
    }
    const uint8_t* at = from + (index + i) / kEach * kBytes;
    for (; i + kEach <= count; i += kEach, at += kBytes) {
      uint32_t all = at[0];
      for (int k = 1; k < kBytes; ++k) {
        all |= static_cast<uint32_t>(at[k]) << (8 * k);
      }
      for (int k = 0; k < kEach; ++k) {
        codes[i + k] = all >> (F::kBits * k);
      }
    }
    for (; i < count; ++i) {
      one(i);
    }
  }
}

template <class F>
[[gnu::noinline]] void decode(const uint32_t* codes, float scale, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = number_of<F>(codes[i]) * scale;
  }
}

template <class F>
void dequantize(const Dequantize& work, int64_t source, int64_t target, int64_t count) {
  alignas(64) float values[kBlock];
  alignas(64) uint32_t codes[kBlock];
  while (count > 0) {
    const int64_t now = least(count, kBlock);
    unpack<F>(work.codes, source, now, codes);
    for (int64_t done = 0; done < now;) {
      const int64_t group = (source + done) / work.group_size;
      const int64_t part = least(now - done, (group + 1) * work.group_size - (source + done));
      decode<F>(codes + done, work.scales[group], values + done, part);
      done += part;
    }
    const int64_t whole = whole_registers(now + Vec::kLanes - 1);
    for (int64_t i = now; i < whole; ++i) {
      values[i] = 0.0f;  // narrow reads whole registers
    }
    narrow(values, {static_cast<std::byte*>(work.output), work.type, true}, target, now);
    source += now;
    target += now;
    count -= now;
  }
}

void run(const Quantize& work) {
  const uint64_t offset = offset_of(work);
  const int64_t grain = kGrainElements / work.group_size;
  opk::parallel_for(0, group_count(work.numel, work.group_size), grain < 1 ? 1 : grain,
                    [&](int64_t low, int64_t high) {
                      with_format(work.bits, work.mantissa_bits, [&](auto format) {
                        for (int64_t group = low; group < high; ++group) {
                          quantize_group<decltype(format)>(work, offset, group);
                        }
                      });
                    });
}

void check_rows(const int64_t* rows, int64_t count, int64_t height) {
  for (int64_t i = 0; i < count; ++i) {
    OPK_CHECK(rows[i] >= 0 && rows[i] < height, "rows[", i, "] is ", rows[i], ", expected 0 to ", height - 1);
  }
}

// Dequantizes `count` elements, from `source` on, into the output from `target` on.
void dequantize_range(const Dequantize& work, int64_t source, int64_t target, int64_t count) {
  with_format(work.bits, work.mantissa_bits, [&](auto format) {
    dequantize<decltype(format)>(work, source, target, count);
  });
}

void run(const Dequantize& work) {
  if (work.rows == nullptr) {
    opk::parallel_for(0, work.numel, kGrainElements, [&](int64_t low, int64_t high) {
      dequantize_range(work, low, low, high - low);
    });
    return;
  }
  const int64_t grain = kGrainElements / work.width;
  opk::parallel_for(0, work.numel / work.width, grain < 1 ? 1 : grain, [&](int64_t low, int64_t high) {
    for (int64_t i = low; i < high; ++i) {
      dequantize_range(work, work.rows[i] * work.width, i * work.width, work.width);
    }
  });
}

OPKILN_OP(fp_quantize, cpu);
OPKILN_OP(fp_dequantize, cpu);
OPKILN_OP(fp_dequantize_rows, cpu);

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln

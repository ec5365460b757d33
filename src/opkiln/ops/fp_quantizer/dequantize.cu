// Dequantizes in one pass over memory. A thread writes 16 bytes at a time and reads the codes of these
// elements; neighbouring threads share cache lines. hipify turns this file into HIP unchanged.

#include <opkiln/op.h>

#include <opkiln/device_element.h>

#include "dequantize.h"

namespace opkiln {
namespace fp_quantizer {
namespace {

constexpr int kThreads = 128;
constexpr int kUnits = 2;  // accesses that a thread has in flight; 1, 4 and 8 were slower

struct Layout {
  int64_t whole;     // full 16-byte units in the output
  int group_log2;    // -1: the group size is not a power of two
  bool vectors;      // the codes of a full unit can be read at once
  bool small;        // indices of units fit into 32 bits
};

// The codes of the elements that fill 16 bytes of output.
template <class T, class F>
struct Unit {
  static constexpr int kElements = 16 / static_cast<int>(sizeof(T));
  static constexpr int kBytes = kElements * F::kBits / 8;
  static constexpr int kAccess = kBytes & -kBytes;  // the largest power of two that divides it
  uint32_t words[(kBytes + 3) / 4];

  __device__ uint32_t code(int i) const {
    const int bit = i * F::kBits, word = bit / 32, shift = bit % 32;
    uint32_t out = words[word] >> shift;
    if (shift + F::kBits > 32) {
      out |= words[word + 1] << (32 - shift);
    }
    return out;  // the bits above the code are undefined
  }
};

template <int kBytes>
struct Access;
template <>
struct Access<8> {
  using type = uint2;
};
template <>
struct Access<4> {
  using type = uint32_t;
};
template <>
struct Access<2> {
  using type = uint16_t;
};
template <>
struct Access<1> {
  using type = uint8_t;
};

template <class T, class F>
__device__ void load(Unit<T, F>& unit, const uint8_t* from) {
  using U = Unit<T, F>;
  using Part = typename Access<U::kAccess>::type;
  if constexpr (U::kAccess == 8) {
    const Part part = *reinterpret_cast<const Part*>(from);
    unit.words[0] = part.x;
    unit.words[1] = part.y;
  } else {
#pragma unroll
    for (uint32_t& word : unit.words) {
      word = 0;
    }
#pragma unroll
    for (int i = 0; i < U::kBytes / U::kAccess; ++i) {
      const int byte = i * U::kAccess;
      unit.words[byte / 4] |= static_cast<uint32_t>(reinterpret_cast<const Part*>(from)[i])
          << (8 * (byte % 4));
    }
  }
}

// The code of one element, at any address. Reads no byte after the code's last one.
template <class F>
__device__ uint32_t code_at(const uint8_t* codes, int64_t index) {
  const int64_t bit = index * F::kBits;
  const int shift = static_cast<int>(bit & 7);
  uint32_t out = codes[bit >> 3] >> shift;
  if (shift + F::kBits > 8) {
    out |= static_cast<uint32_t>(codes[(bit >> 3) + 1]) << (8 - shift);
  }
  return out;
}

template <class F>
__device__ float decode(uint32_t code) {
  if (F::kBits == 8 && F::kMantissa == 2) {  // it is the upper byte of a half
    return opk::bits::half_to_float(static_cast<uint16_t>(code << 8));
  }
  return number_of<F>(code);
}

// Decodes a full unit.
template <class T, class F>
__device__ void decode(const Unit<T, F>& unit, float (&out)[Unit<T, F>::kElements]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (F::kBits == 8 && F::kMantissa == 3) {
#pragma unroll
    for (int i = 0; i < Unit<T, F>::kElements; i += 2) {
      uint32_t pair;
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(unit.code(i))));
      out[i] = opk::bits::half_to_float(static_cast<uint16_t>(pair));
      out[i + 1] = opk::bits::half_to_float(static_cast<uint16_t>(pair >> 16));
    }
  } else
#endif
  {
#pragma unroll
    for (int i = 0; i < Unit<T, F>::kElements; ++i) {
      out[i] = decode<F>(unit.code(i));
    }
  }
}

template <bool kOnce, class Pack>
__device__ void store(const Pack& pack, void* to) {
  if (kOnce) {
    device::store_once(pack, to);
  } else {
    *static_cast<Pack*>(to) = pack;
  }
}

template <bool kOnce>
__device__ void store(const float (&values)[4], float* to, ElementType) {
  device::Pack<float, 4> out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.at[i] = values[i];
  }
  store<kOnce>(out, to);
}

template <bool kOnce>
__device__ void store(const float (&values)[8], uint16_t* to, ElementType type) {
  device::Pack<uint32_t, 4> out;
#if defined(__CUDA_ARCH__)
  if (type == ElementType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
          : "=r"(out.at[i])
          : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;"
          : "=r"(out.at[i])
          : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    }
  }
#else
  for (int i = 0; i < 4; ++i) {
    out.at[i] = device::narrow<device::Bits16>(values[2 * i], type).bits |
        static_cast<uint32_t>(device::narrow<device::Bits16>(values[2 * i + 1], type).bits) << 16;
  }
#endif
  store<kOnce>(out, to);
}

__device__ void store(float value, float* to, ElementType) {
  *to = value;
}
__device__ void store(float value, uint16_t* to, ElementType type) {
  *to = device::narrow<device::Bits16>(value, type).bits;
}

// The index from which the output's element `index` is read; -1 if the row does not exist.
__device__ int64_t source_of(const Dequantize& work, bool small, int64_t index) {
  if (work.rows == nullptr) {
    return index;
  }
  const int64_t line = small ? static_cast<int64_t>(static_cast<uint32_t>(index) /
                                                    static_cast<uint32_t>(work.width))
                             : index / work.width;
  const int64_t row = work.rows[line];
  return row < 0 || row >= work.height ? -1 : row * work.width + (index - line * work.width);
}

__device__ float scale_at(const Dequantize& work, const Layout& layout, int64_t index) {
  int64_t group;
  if (layout.group_log2 >= 0) {
    group = index >> layout.group_log2;
  } else if (index <= 0xffffffff) {
    group = static_cast<uint32_t>(index) / static_cast<uint32_t>(work.group_size);
  } else {
    group = index / work.group_size;
  }
  return work.scales[group];
}

// Handles the elements of a unit one by one: at the end, and for unaligned codes or rows.
template <class T, class F>
__device__ __noinline__ void dequantize_elements(const Dequantize& work, const Layout& layout,
                                        int64_t start) {
  for (int i = 0; i < Unit<T, F>::kElements && start + i < work.numel; ++i) {
    const int64_t source = source_of(work, layout.small, start + i);
    float value = float_of(kNan);
    if (source >= 0) {
      value = decode<F>(code_at<F>(work.codes, source)) * scale_at(work, layout, source);
    }
    store(value, static_cast<T*>(work.output) + start + i, work.type);
  }
}

template <class T, class F>
__device__ void finish(const Unit<T, F>& unit, float scale, const Dequantize& work, int64_t start) {
  float values[Unit<T, F>::kElements];
  decode(unit, values);
#pragma unroll
  for (float& value : values) {
    value *= scale;
  }
  store<(Unit<T, F>::kBytes < 8)>(values, static_cast<T*>(work.output) + start, work.type);
}

template <class T, class F>
__global__ void __launch_bounds__(kThreads)
dequantize_kernel(const OPK_GRID_CONSTANT Dequantize work,
                  const OPK_GRID_CONSTANT Layout layout) {
  using U = Unit<T, F>;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (kThreads * kUnits);
  const int64_t first = block + threadIdx.x;
  if (layout.vectors && work.rows == nullptr && block + kThreads * kUnits <= layout.whole) {
    U units[kUnits];
    float scales[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int64_t unit = first + j * kThreads;
      load(units[j], work.codes + unit * U::kBytes);
      scales[j] = scale_at(work, layout, unit * U::kElements);
    }
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      finish(units[j], scales[j], work, (first + j * kThreads) * U::kElements);
    }
    return;
  }
#pragma unroll 1
  for (int j = 0; j < kUnits; ++j) {
    const int64_t unit = first + j * kThreads, start = unit * U::kElements;
    const int64_t source = unit < layout.whole ? source_of(work, layout.small, start) : -1;
    if (layout.vectors && source >= 0) {
      U codes;
      load(codes, work.codes + source / U::kElements * U::kBytes);
      finish(codes, scale_at(work, layout, source), work, start);
    } else {
      dequantize_elements<T, F>(work, layout, start);
    }
  }
}

template <class T, class F>
void launch_for(const Dequantize& work) {
  using U = Unit<T, F>;
  Layout layout;
  layout.whole = work.numel / U::kElements;
  const int64_t units = (work.numel + U::kElements - 1) / U::kElements;
  layout.group_log2 = -1;
  for (int i = 4; i <= 16; ++i) {
    if (work.group_size == int64_t{1} << i) {
      layout.group_log2 = i;
    }
  }
  layout.vectors = reinterpret_cast<size_t>(work.codes) % U::kAccess == 0 &&
      (work.rows == nullptr || work.width % U::kElements == 0);
  layout.small = work.numel <= 0xffffffff && work.width <= 0xffffffff;
  opk::launch(dequantize_kernel<T, F>, (units + kThreads * kUnits - 1) / (kThreads * kUnits), kThreads, 0, work,
              layout);
}

// The host does not wait for the indices. A row that does not exist becomes NaN.
void check_rows(const int64_t*, int64_t, int64_t) {}

void run(const Dequantize& work) {
  with_format(work.bits, work.mantissa_bits, [&](auto format) {
    using F = decltype(format);
    work.type == ElementType::kFloat ? launch_for<float, F>(work) : launch_for<uint16_t, F>(work);
  });
}

OPKILN_OP(fp_dequantize, cuda);
OPKILN_OP(fp_dequantize_rows, cuda);

}  // namespace
}  // namespace fp_quantizer
}  // namespace opkiln

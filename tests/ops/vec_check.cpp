// Compares Vec of the target's instruction set with scalar arithmetic, and the flat index space
// with a plain loop. Exits with 0, or prints what differs. Needs no torch.

#include <opkiln/optimizing/host_sweep.h>
#include <opkiln/vec_exp.h>
#include <opkiln/vec_wide.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

using namespace opkiln;

namespace {

int failures = 0;

void expect(bool ok, const char* what, double input, double got, double wanted) {
  if (!ok && ++failures <= 20) {
    std::printf("%s(%a): got %a, expected %a\n", what, input, got, wanted);
  }
}

bool same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (a != a && b != b);
}

template <class T>
void check_narrow(float value, T wanted, const char* what) {
  float in[Vec::kLanes];
  T out[Vec::kLanes];
  std::fill(std::begin(in), std::end(in), value);
  Vec::load(in).store(out);
  for (const T got : out) {
    expect(got.bits == wanted.bits, what, value, widen(got), widen(wanted));
  }
  T pair[2 * Vec::kLanes];
  if (value != value) return;  // a pair keeps the bits of a NaN
  Registers<2>::all(value).store(pair);
  for (const T got : pair) {
    expect(got.bits == wanted.bits, what, value, widen(got), widen(wanted));
  }
}

template <class T>
void check_widen(T value, const char* what) {
  T in[Vec::kLanes];
  float out[Vec::kLanes];
  std::fill(std::begin(in), std::end(in), value);
  Vec::load(in).store(out);
  for (const float got : out) {
    expect(same(got, widen(value)), what, value.bits, got, widen(value));
  }
}

void check_conversions() {
  std::mt19937 random(7);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    check_widen(BFloat16{static_cast<uint16_t>(bits)}, "widen bfloat16");
    check_widen(Float16{static_cast<uint16_t>(bits)}, "widen float16");
    // Around every bfloat16, the ties included, and around every float16.
    const float half = widen(Float16{static_cast<uint16_t>(bits)});
    for (const uint32_t around : {bits << 16, std::bit_cast<uint32_t>(half)}) {
      for (const uint32_t off : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u,
                                 static_cast<uint32_t>(random() & 0xffffu)}) {
        const float value = std::bit_cast<float>(around + off);
        check_narrow(value, narrow_bfloat16(value), "narrow bfloat16");
        check_narrow(value, narrow_float16(value), "narrow float16");
      }
    }
  }
}

// Stores around the caches give what plain ones give, at addresses that are aligned and not.
template <class T>
void check_around(const char* what) {
  alignas(64) T plain[3 * Vec::kLanes + 1] = {}, around[3 * Vec::kLanes + 1] = {};
  float in[3 * Vec::kLanes];
  for (int i = 0; i < 3 * Vec::kLanes; ++i) {
    in[i] = 1.0f / static_cast<float>(i + 1);
  }
  for (const int offset : {0, 1}) {
    narrow(in, plain + offset, 3 * Vec::kLanes - 1);
    narrow_around(in, around + offset, 3 * Vec::kLanes - 1);
    settle_stores();
    expect(std::memcmp(plain, around, sizeof(plain)) == 0, what, offset, 0, 0);
  }
}

// A wide register gives what registers give, one by one, whatever order its lanes have.
template <class T>
void check_wide(const char* what) {
  alignas(64) T in[Wide::kLanes], other[Wide::kLanes], plain[Wide::kLanes], wide[Wide::kLanes];
  float values[Wide::kLanes];
  for (int i = 0; i < Wide::kLanes; ++i) {
    values[i] = i == 3 ? NAN : 1.7f / static_cast<float>(i - 20);
  }
  narrow(values, in, Wide::kLanes);
  for (float& value : values) {
    value = -3 * value;
  }
  narrow(values, other, Wide::kLanes);
  for (int i = 0; i < Wide::kLanes; i += Vec::kLanes) {
    multiply_add(magnitude(Vec::load(in + i)), Vec::load(other + i), Vec::all(0.3f)).store(plain + i);
  }
  const Wide result = multiply_add(magnitude(Wide::load(in)), Wide::load(other), Wide::all(0.3f));
  result.store(wide);
  expect(std::memcmp(plain, wide, sizeof(plain)) == 0, what, 0, 0, 0);
  std::memset(wide, 0, sizeof(wide));
  result.store_around(wide);
  settle_stores();
  expect(std::memcmp(plain, wide, sizeof(plain)) == 0, what, 1, 0, 0);
}

void check_known_values() {
  const float infinity = std::numeric_limits<float>::infinity();
  const struct {
    float value;
    uint16_t bfloat16, float16;
  } known[] = {
      {0.0f, 0x0000, 0x0000},         {-0.0f, 0x8000, 0x8000},
      {1.0f, 0x3f80, 0x3c00},         {-2.0f, 0xc000, 0xc000},
      {65504.0f, 0x4780, 0x7bff},     {65519.99f, 0x4780, 0x7bff},
      {65520.0f, 0x4780, 0x7c00},     {infinity, 0x7f80, 0x7c00},
      {-infinity, 0xff80, 0xfc00},    {0x1p-24f, 0x3380, 0x0001},
      {0x1p-25f, 0x3300, 0x0000},     {0x1.8p-24f, 0x33c0, 0x0002},
      {0x1p-133f, 0x0001, 0x0000},    {0x1.01p0f, 0x3f80, 0x3c04},
      {0x1.03p0f, 0x3f82, 0x3c0c},    {0x1.fffffep127f, 0x7f80, 0x7c00},
      {0x1.ff8p-15f, 0x3880, 0x03ff}, {0x1.ffcp-15f, 0x3880, 0x0400},
  };
  for (const auto& [value, bfloat16, float16] : known) {
    check_narrow(value, BFloat16{bfloat16}, "known bfloat16");
    check_narrow(value, Float16{float16}, "known float16");
  }
}

void check_arithmetic() {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> any(-4.0f, 4.0f);
  for (int round = 0; round < 1000; ++round) {
    float a[Vec::kLanes], b[Vec::kLanes], c[Vec::kLanes], out[Vec::kLanes];
    for (int i = 0; i < Vec::kLanes; ++i) {
      a[i] = any(random), b[i] = any(random), c[i] = any(random);
    }
    const Vec x = Vec::load(a), y = Vec::load(b), z = Vec::load(c);
    const auto compare = [&](Vec got, const char* what, auto&& wanted, double slack) {
      got.store(out);
      for (int i = 0; i < Vec::kLanes; ++i) {
        expect(std::abs(out[i] - wanted(i)) <= slack, what, a[i], out[i], wanted(i));
      }
    };
    compare(x + y, "add", [&](int i) { return a[i] + b[i]; }, 0);
    compare(x - y, "subtract", [&](int i) { return a[i] - b[i]; }, 0);
    compare(x * y, "multiply", [&](int i) { return a[i] * b[i]; }, 0);
    compare(x / y, "divide", [&](int i) { return a[i] / b[i]; }, 0);
    compare(sqrt(x * x), "sqrt", [&](int i) { return std::sqrt(a[i] * a[i]); }, 0);
    compare(multiply_add(x, y, z), "multiply_add", [&](int i) { return double(a[i]) * b[i] + c[i]; },
            4e-6);
    compare(subtract_product(z, x, y), "subtract_product",
            [&](int i) { return c[i] - double(a[i]) * b[i]; }, 4e-6);
    compare(at_least(Vec::all(0), x), "at_least", [&](int i) { return std::max(a[i], 0.0f); }, 0);
    compare(at_most(Vec::all(0), x), "at_most", [&](int i) { return std::min(a[i], 0.0f); }, 0);
    compare(sign(x), "sign", [&](int i) { return a[i] < 0 ? -1 : 1; }, 0);
  }
  float out[Vec::kLanes];
  at_least(Vec::all(0), Vec::all(std::numeric_limits<float>::quiet_NaN())).store(out);
  expect(out[0] != out[0], "at_least", NAN, out[0], NAN);
  at_most(Vec::all(0), Vec::all(std::numeric_limits<float>::quiet_NaN())).store(out);
  expect(out[0] != out[0], "at_most", NAN, out[0], NAN);
  sign(Vec::all(std::numeric_limits<float>::quiet_NaN())).store(out);
  expect(out[0] != out[0], "sign", NAN, out[0], NAN);
  sign(Vec::all(0)).store(out);
  expect(out[0] == 0, "sign", 0, out[0], 0);
}

void check_exponentials() {
  const float infinity = std::numeric_limits<float>::infinity();
  float out[Vec::kLanes];
  const auto first = [&](Vec value) {
    value.store(out);
    return out[0];
  };
  for (int power = -126; power <= 127; ++power) {
    const float got = first(times_power_of_two(Vec::all(1), whole_power(Vec::all(static_cast<float>(power)))));
    expect(got == std::ldexp(1.0f, power), "times_power_of_two", power, got, std::ldexp(1.0f, power));
  }
  const auto near = [&](Vec value, double slack, const char* what, float x, double wanted) {
    const double got = first(value);
    expect(std::abs(got - wanted) <= slack * wanted, what, x, got, wanted);
  };
  for (int i = -12600; i <= 12700; ++i) {
    const float x = static_cast<float>(i) * 0.01f;
    const double wanted = std::exp2(double{x});
    near(exp2<24>(Vec::all(x)), 3e-7, "exp2", x, wanted);
    near(exp2<11>(Vec::all(x)), 3e-6, "exp2 of 11 digits", x, wanted);
    near(exp2<8>(Vec::all(x)), 8e-5, "exp2 of 8 digits", x, wanted);
  }
  for (float x = 1; x < 1e38f; x *= 1.37f) {
    near(reciprocal(Vec::all(x)), 0x1p-22, "reciprocal", x, 1 / double{x});
    near(rough_reciprocal(Vec::all(x)), 0x1p-11, "rough_reciprocal", x, 1 / double{x});
  }
  expect(first(reciprocal(Vec::all(infinity))) == 0, "reciprocal", infinity, out[0], 0);
  expect(first(rough_reciprocal(Vec::all(infinity))) == 0, "rough_reciprocal", infinity, out[0], 0);
  expect(std::isnan(first(reciprocal(Vec::all(NAN)))), "reciprocal", NAN, out[0], NAN);
  for (const auto& [x, wanted] : {std::pair{infinity, infinity}, {-infinity, 0.0f}, {200.0f, infinity},
                                  {-200.0f, 0.0f}, {0.0f, 1.0f}}) {
    const float got = first(exp2<24>(Vec::all(x)));
    expect(got == wanted, "exp2", x, got, wanted);
  }
  expect(std::isnan(first(exp2<24>(Vec::all(NAN)))), "exp2", NAN, out[0], NAN);
  for (int i = 0; i <= 1270; ++i) {
    const float x = static_cast<float>(i) * 0.01f;
    const double wanted = std::erfc(double{x} / std::sqrt(2.0)) / 2;
    near(normal_tail<24>(Vec::all(x)), 1e-5, "tail", x, wanted);
    near(normal_tail<8>(Vec::all(x)), 2.2e-4, "tail of 8 digits", x, wanted);
    if (x <= kTailEnd<11>) near(normal_tail<11>(Vec::all(x)), x < 6.2f ? 2e-5 : 1e-2, "tail of 11 digits", x, wanted);
  }
  for (const auto& end : {normal_tail<24>(Vec::all(kTailEnd<24>)), normal_tail<8>(Vec::all(kTailEnd<8>))}) {
    expect(first(end) < 0x1p-140f, "tail", kTailEnd<24>, out[0], 0);
  }
}

// Doubles the first stream and adds the second, to it and to the third, over tensors of all sizes and
// types, with guard elements after each; in one range and cut into many; with a body that takes bf16 and
// fp16 straight from memory, and one that does not.
void check_flat(int64_t ranges, bool straight) {
  constexpr Type types[] = {Type::kFloat, Type::kBFloat16, Type::kFloat16};
  constexpr int64_t sizes[] = {0, 1, 7, 15, 16, 17, 63, 511, 512, 513, 1023, 4095, 10001};
  std::vector<Item<3>> items;
  std::vector<std::vector<std::byte>> memory;
  const auto make = [&](Type type, int64_t count, float value, bool output) {
    memory.emplace_back((count + 1) * size_of(type) + 2);
    // Misaligned by an element's half where the type allows it to be seen.
    const Stream stream{memory.back().data() + 2, type, output};
    std::vector<float> filled(count + Vec::kLanes, value);
    narrow(filled.data(), stream, 0, count);
    return stream;
  };
  for (const int64_t size : sizes) {
    for (const Type a : types) {
      for (const Type b : types) {
        const Type c = size % 2 == 0 ? a : Type::kFloat;
        Item<3> item;
        item.streams[0] = make(a, size, 1.5f, true);
        item.streams[1] = make(b, size, 0.25f, false);
        item.streams[2] = make(c, size, 0.5f, true);
        item.copy = b == Type::kFloat || a == b ? Stream{} : make(b, size, 0, true);
        item.numel = size;
        item.traffic = traffic(item);
        items.push_back(item);
      }
    }
  }
  const auto body = [](const auto& at, int64_t count) {
    const auto [to, from, sums] = at;
    for (int64_t i = 0; i < count; i += Vec::kLanes) {
      multiply_add(Vec::all(2), Vec::load(to + i), Vec::load(from + i)).store(to + i);
      (Vec::load(sums + i) + Vec::load(from + i)).store(sums + i);
    }
  };
  opk::List<Item<3>> list(static_cast<int64_t>(items.size()));
  std::copy(items.begin(), items.end(), list.begin());
  const Flat<3> flat(list);
  for (int64_t r = 0; r < ranges; ++r) {
    const int64_t low = flat.size() * r / ranges, high = flat.size() * (r + 1) / ranges;
    if (straight) {
      flat.sweep(low, high, [&](int64_t) { return body; });
    } else {
      const auto floats = [&](float* const (&at)[3], int64_t count) { body(at, count); };
      flat.sweep(low, high, [&](int64_t) { return floats; });
    }
  }
  const auto check = [&](const Stream& stream, int64_t count, float wanted, const char* what) {
    std::vector<float> got(count + Vec::kLanes);
    widen(stream, 0, count, got.data());
    for (int64_t i = 0; i < count; ++i) {
      expect(got[i] == wanted, what, static_cast<double>(i), got[i], wanted);
    }
    for (int64_t i = 0; i < size_of(stream.type); ++i) {
      const auto guard = stream.data[count * size_of(stream.type) + i];
      expect(guard == std::byte{0}, "guard", static_cast<double>(count), double(guard), 0);
    }
  };
  for (const Item<3>& item : items) {
    check(item.streams[0], item.numel, 3.25f, "stream");
    check(item.streams[1], item.numel, 0.25f, "input");
    check(item.streams[2], item.numel, 0.75f, "state");
    if (item.copy.data != nullptr) {
      check(item.copy, item.numel, 3.25f, "copy");
    }
  }
}

}  // namespace

int main() {
  check_known_values();
  check_conversions();
  check_arithmetic();
  check_exponentials();
  check_around<float>("around float");
  check_around<BFloat16>("around bfloat16");
  check_around<Float16>("around float16");
  check_wide<float>("wide float");
  check_wide<BFloat16>("wide bfloat16");
  check_wide<Float16>("wide float16");
  for (const int64_t ranges : {1, 2, 3, 7, 64}) {
    check_flat(ranges, true);
    check_flat(ranges, false);
  }
  std::printf("%d lanes, %d failures\n", Vec::kLanes, failures);
  return failures == 0 ? 0 : 1;
}

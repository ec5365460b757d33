// Errors and their messages. An op raises a std::exception; Python gets a RuntimeError with its text.
#pragma once

#include <initializer_list>
#include <new>  // also defines std::exception, and compiles ten times as fast as <stdexcept>

#include "shim.h"
#include "types.h"

struct opkiln_op;

#define OPK_COLD [[gnu::cold, gnu::noinline]]

OPK_NAMESPACE_BEGIN

class Tensor;
template <class T>
class List;

constexpr uint64_t kTorch = (2ull << 56) | (10ull << 48);  // the ABI version declared here: torch 2.10

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = -1;
  bool operator==(Device other) const { return type == other.type && index == other.index; }
  bool operator!=(Device other) const { return !(*this == other); }
};

OPK_COLD inline const char* name_of(DType dtype) {
  static constexpr const char* kNames[] = {
      "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64",
      "complex128", "bool", nullptr, nullptr, nullptr, "bfloat16", nullptr, nullptr, nullptr, nullptr,
      nullptr, nullptr, nullptr, "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz",
      "uint16", "uint32", "uint64"};
  const auto number = static_cast<uint32_t>(dtype);
  if (number < sizeof kNames / sizeof *kNames && kNames[number]) return kNames[number];
  if (dtype == DType::float8_e8m0fnu) return "float8_e8m0fnu";
  return dtype == DType::float4_e2m1fn_x2 ? "float4_e2m1fn_x2" : "another dtype";
}

constexpr const char* name_of(DeviceType type) {
  return type == DeviceType::cpu ? "cpu"
      : type == DeviceType::cuda ? "cuda"
      : type == DeviceType::xpu  ? "xpu"
      : type == DeviceType::mps  ? "mps"
      : type == DeviceType::meta ? "meta"
                                 : "another device";
}

// A view of integers that the caller keeps alive: a tensor's sizes, a list argument, `{2, 3}` in a call.
struct Ints {
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Winit-list-lifetime"  // a view: `{2, 3}` lives as long as the call
#endif
  Ints(const int64_t* data, int64_t size) : data_(data), size_(size) {}
  Ints(std::initializer_list<int64_t> values)
      : data_(values.begin()), size_(static_cast<int64_t>(values.size())) {}
  Ints(const List<int64_t>& list);
#pragma GCC diagnostic pop

  const int64_t* data() const { return data_; }
  int64_t size() const { return size_; }
  const int64_t* begin() const { return data_; }
  const int64_t* end() const { return data_ + size_; }
  int64_t operator[](int64_t i) const { return data_[i]; }
  bool operator==(Ints other) const {
    if (size_ != other.size_) return false;
    for (int64_t i = 0; i < size_; ++i) {
      if (data_[i] != other.data_[i]) return false;
    }
    return true;
  }
  bool operator!=(Ints other) const { return !(*this == other); }

 private:
  const int64_t* data_;
  int64_t size_;
};

// The source of a tensor, for messages: an argument of the op, or an item of a list argument.
struct Origin {
  const opkiln_op* op = nullptr;
  int32_t argument = -1;
  int32_t item = -1;
};

OPK_RARE_BEGIN

struct Error : std::exception {
  char text[2000];
  bool begun = false;
  Error() { text[0] = 0; }
  const char* what() const noexcept override { return text; }
  void add(const char* form, ...);  // like printf
  void begin_with(const char* op);  // called where the error leaves the op; has an effect once
};

// Raised for calls that a kernel does not serve, such as an unsupported dtype or
// alignment. If the op has a reference, it runs instead, and Python tells the user why.
// Otherwise this is an error. Nothing may be written before it is raised.
struct Unserved : Error {};

// Raises an error with a message formatted like printf's. op.h's own messages use this form because it
// compiles to the least code, and error paths are most of what a small op compiles.
[[noreturn]] void raise_form(const char* form, ...);

// Texts for messages.
struct NameOf {
  char text[120];
  explicit NameOf(const Origin& origin);  // `x` or `xs[3]`
  explicit NameOf(const Tensor& tensor);
};
struct ListOf {
  char text[280];
  explicit ListOf(Ints values);  // [2, 3]
};
struct DeviceOf {
  char text[40];
  explicit DeviceOf(Device device);  // cuda:1
};

struct End {};  // the last argument of a macro, so that the others may be omitted

// A part of a message in an op's source.
struct Part {
  enum { kText, kWhole, kReal, kInts, kDevice, kOrigin } kind;
  union {
    const char* text;
    long long whole;
    double real;
    Ints ints;
    Device device;
    Origin origin;
  };
  Part(const char* value) : kind(kText), text(value) {}
  Part(bool value) : kind(kText), text(value ? "true" : "false") {}
  Part(int value) : kind(kWhole), whole(value) {}
  Part(unsigned value) : kind(kWhole), whole(value) {}
  Part(long value) : kind(kWhole), whole(value) {}
  Part(long long value) : kind(kWhole), whole(value) {}
  Part(unsigned long value) : kind(kWhole), whole(static_cast<long long>(value)) {}
  Part(unsigned long long value) : kind(kWhole), whole(static_cast<long long>(value)) {}
  Part(double value) : kind(kReal), real(value) {}
  Part(DType value) : kind(kText), text(name_of(value)) {}
  Part(DeviceType value) : kind(kText), text(name_of(value)) {}
  Part(Device value) : kind(kDevice), device(value) {}
  Part(Ints value) : kind(kInts), ints(value) {}
  Part(const Tensor& value);  // its name
  Part(End) : kind(kText), text("") {}
};

template <class E = Error>
[[noreturn]] OPK_COLD inline void raise_parts(std::initializer_list<Part> parts) {
  E error;
  for (const Part& part : parts) {
    switch (part.kind) {
      case Part::kText: error.add("%s", part.text); break;
      case Part::kWhole: error.add("%lld", part.whole); break;
      case Part::kReal: error.add("%g", part.real); break;
      case Part::kInts: error.add("%s", ListOf(part.ints).text); break;
      case Part::kDevice: error.add("%s", DeviceOf(part.device).text); break;
      case Part::kOrigin: error.add("%s", NameOf(part.origin).text); break;
    }
  }
  throw error;
}

// Raises an error. The message is the parts, joined: texts, numbers,
// dtypes, devices, Ints, and tensors (by name).
template <class... Parts>
[[noreturn, gnu::cold]] inline void raise(const Parts&... parts) {
  raise_parts({Part(parts)...});
}

template <class... Parts>
[[noreturn, gnu::cold]] inline void raise_unmet(const char*, const Part& first, const Parts&... parts) {
  raise_parts({first, Part(parts)...});
}
[[noreturn, gnu::cold]] inline void raise_unmet(const char* condition, End) {
  raise_form("expected %s", condition);
}

// OPK_CHECK(k > 0, "k is ", k, ", expected a positive number");
#define OPK_CHECK(...) OPK_CHECK_(__VA_ARGS__, ::opk::End{})
#define OPK_CHECK_(condition, ...)                                                              \
  do {                                                                                          \
    if (__builtin_expect(!(condition), 0)) ::opk::raise_unmet(#condition, __VA_ARGS__);         \
  } while (0)

// OPK_SERVED(rows <= 1024, "x has ", rows, " rows, and the kernel takes 1024"): if the condition is false,
// the reference runs instead.
#define OPK_SERVED(condition, ...)                                                                        \
  do {                                                                                                    \
    if (__builtin_expect(!(condition), 0)) ::opk::raise_unserved(__VA_ARGS__);                            \
  } while (0)
template <class... Parts>
[[noreturn, gnu::cold]] inline void raise_unserved(const Parts&... parts) {
  raise_parts<Unserved>({Part(parts)...});
}

// Raises torch's error after a failed call. `function` is null if the
// tensor was undefined, so there was no call.
[[noreturn]] OPK_COLD inline void raise_torch_error(const char* function) {
  if (!function) raise_form("a tensor is not defined");
  const char* why = nullptr;
  if (torch_exception_get_what_without_backtrace) why = torch_exception_get_what_without_backtrace();
  raise_form("%s failed: %s", function, why && *why ? why : "torch has printed the reason to stderr");
}

// Wraps every call into torch, because torch's functions return an error code.
#define OPK_TORCH(function, ...)                                                               \
  do {                                                                                         \
    if (__builtin_expect(function(__VA_ARGS__) != 0, 0)) ::opk::raise_torch_error(#function);     \
  } while (0)

OPK_RARE_END
OPK_NAMESPACE_END

// Errors and their messages. An op raises a std::exception; Python gets a RuntimeError with its text.
#pragma once

#include <initializer_list>
#include <new>  // also defines all of std::exception, in a tenth of <stdexcept>'s time

#include "shim.h"
#include "types.h"

struct opkiln_op;

OPK_NAMESPACE_BEGIN

class Tensor;
template <class T>
class List;

constexpr uint64_t kTorch = (2ull << 56) | (10ull << 48);  // the ABI that is declared here: torch 2.10's

struct Device {
  DeviceType type = DeviceType::cpu;
  int32_t index = -1;
  bool operator==(Device other) const { return type == other.type && index == other.index; }
  bool operator!=(Device other) const { return !(*this == other); }
};

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::uint8: return "uint8";
    case DType::int8: return "int8";
    case DType::int16: return "int16";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::float16: return "float16";
    case DType::float32: return "float32";
    case DType::float64: return "float64";
    case DType::complex32: return "complex32";
    case DType::complex64: return "complex64";
    case DType::complex128: return "complex128";
    case DType::bool_: return "bool";
    case DType::bfloat16: return "bfloat16";
    case DType::float8_e5m2: return "float8_e5m2";
    case DType::float8_e4m3fn: return "float8_e4m3fn";
    case DType::float8_e5m2fnuz: return "float8_e5m2fnuz";
    case DType::float8_e4m3fnuz: return "float8_e4m3fnuz";
    case DType::uint16: return "uint16";
    case DType::uint32: return "uint32";
    case DType::uint64: return "uint64";
    case DType::float8_e8m0fnu: return "float8_e8m0fnu";
    case DType::float4_e2m1fn_x2: return "float4_e2m1fn_x2";
  }
  return "another dtype";
}

inline const char* name_of(DeviceType type) {
  switch (type) {
    case DeviceType::cpu: return "cpu";
    case DeviceType::cuda: return "cuda";
    case DeviceType::xpu: return "xpu";
    case DeviceType::mps: return "mps";
    case DeviceType::meta: return "meta";
    case DeviceType::privateuse1: return "privateuse1";
  }
  return "another device";
}

// Integers that somebody else keeps: the sizes of a tensor, a list argument, `{2, 3}` in a call.
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

// Where a tensor came from, for messages: an argument of the op, or an item of one.
struct Origin {
  const opkiln_op* op = nullptr;
  int32_t argument = -1;
  int32_t item = -1;
};

struct End {};  // the last argument of a macro, so that the others may be absent

// A part of a message.
struct Part {
  enum Kind { kText, kWhole, kReal, kInts, kDevice, kOrigin } kind;
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
  Part(Origin value) : kind(kOrigin), origin(value) {}
  Part(End) : kind(kText), text(nullptr) {}
  Part(const Tensor& value);  // its name: `x`, or `xs[3]`
};

class Error : public std::exception {
 public:
  const char* what() const noexcept override { return text_; }
  void add(const Part& part);
  void begin_with(const char* op);  // once: where the error leaves the op

 private:
  void write(const char* text, size_t size);

  char text_[2000] = {};
  size_t size_ = 0;
  bool begun_ = false;
};

[[gnu::cold]] inline void Error::write(const char* text, size_t size) {
  const size_t room = sizeof text_ - 4 - size_;  // for "..." and the end
  const bool fits = size <= room;
  __builtin_memcpy(text_ + size_, text, fits ? size : room);
  size_ += fits ? size : room;
  if (!fits) __builtin_memcpy(text_ + size_, "...", 4);
}

[[gnu::cold]] inline void write_name(Error& error, const Origin& origin);

[[gnu::cold, gnu::noinline]] inline void Error::add(const Part& part) {
  char number[48];
  switch (part.kind) {
    case Part::kText: {
      const char* text = part.text ? part.text : "";
      write(text, __builtin_strlen(text));
      break;
    }
    case Part::kWhole:
      write(number, static_cast<size_t>(__builtin_snprintf(number, sizeof number, "%lld", part.whole)));
      break;
    case Part::kReal:
      write(number, static_cast<size_t>(__builtin_snprintf(number, sizeof number, "%g", part.real)));
      break;
    case Part::kInts:
      add("[");
      for (int64_t i = 0; i < part.ints.size(); ++i) {
        if (i) add(", ");
        add(static_cast<long long>(part.ints[i]));
      }
      add("]");
      break;
    case Part::kDevice:
      add(part.device.type);
      if (part.device.index >= 0) {
        add(":");
        add(part.device.index);
      }
      break;
    case Part::kOrigin:
      write_name(*this, part.origin);
      break;
  }
}

[[gnu::cold, gnu::noinline]] inline void Error::begin_with(const char* op) {
  if (begun_) return;
  Error whole;
  whole.add(op);
  whole.add(": ");
  whole.add(text_);
  whole.begun_ = true;
  *this = whole;
}

[[noreturn, gnu::cold, gnu::noinline]] inline void raise_parts(std::initializer_list<Part> parts) {
  Error error;
  for (const Part& part : parts) error.add(part);
  throw error;
}

// Raises an error whose message is the parts, one after the other: texts, numbers, dtypes, devices,
// Ints, and tensors (by their names).
template <class... Parts>
[[noreturn, gnu::cold]] inline void raise(const Parts&... parts) {
  raise_parts({Part(parts)...});
}

template <class... Parts>
[[noreturn, gnu::cold]] inline void raise_unmet(const char*, const Part& first, const Parts&... parts) {
  raise_parts({first, Part(parts)...});
}
[[noreturn, gnu::cold]] inline void raise_unmet(const char* condition, End) {
  raise_parts({Part("expected "), Part(condition)});
}

// OPK_CHECK(k > 0, "k is ", k, ", expected a positive number");
#define OPK_CHECK(...) OPK_CHECK_(__VA_ARGS__, ::opk::End{})
#define OPK_CHECK_(condition, ...)                                                              \
  do {                                                                                          \
    if (__builtin_expect(!(condition), 0)) ::opk::raise_unmet(#condition, __VA_ARGS__);         \
  } while (0)

[[noreturn, gnu::cold, gnu::noinline]] inline void raise_of_torch(const char* function) {
  const char* why = nullptr;
  if (torch_exception_get_what_without_backtrace) why = torch_exception_get_what_without_backtrace();
  raise(function, " failed: ", why && *why ? why : "torch has printed the reason to stderr");
}

// Every call into torch goes through this: torch's functions return an error code.
#define OPK_TORCH(function, ...)                                                               \
  do {                                                                                         \
    if (__builtin_expect(function(__VA_ARGS__) != 0, 0)) ::opk::raise_of_torch(#function);     \
  } while (0)

OPK_NAMESPACE_END

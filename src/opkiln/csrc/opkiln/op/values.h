// The other types that an op may take or return: optional, List, String, tuple.
#pragma once

#include "tensor.h"

OPK_NAMESPACE_BEGIN

struct None {};
inline constexpr None none{};

// A value, or None.
template <class T>
class optional {
 public:
  optional() = default;
  optional(None) {}
  optional(T value) : value_(static_cast<T&&>(value)), has_(true) {}

  bool has_value() const { return has_; }
  explicit operator bool() const { return has_; }
  const T& value() const { return check_value(*this).value_; }
  T& value() { return const_cast<T&>(check_value(*this).value_); }
  const T& operator*() const { return value(); }
  T& operator*() { return value(); }
  const T* operator->() const { return &value(); }
  T* operator->() { return &value(); }
  T value_or(T other) const { return has_ ? value_ : other; }

 private:
  static const optional& check_value(const optional& self) {
    if (__builtin_expect(!self.has_, 0)) raise_form("an optional has no value: it is None");
    return self;
  }
  T value_{};
  bool has_ = false;
};

// A list that owns its items.
template <class T>
class List {
 public:
  List() = default;
  explicit List(int64_t size) : items_(size ? new T[static_cast<size_t>(size)]() : nullptr), size_(size) {}
  List(std::initializer_list<T> items) : List(static_cast<int64_t>(items.size())) {
    for (int64_t i = 0; i < size_; ++i) items_[i] = items.begin()[i];
  }
  List(List&& other) noexcept : items_(other.items_), size_(other.size_) {
    other.items_ = nullptr;
    other.size_ = 0;
  }
  List(const List& other) : List(other.size_) {
    for (int64_t i = 0; i < size_; ++i) items_[i] = other.items_[i];
  }
  List& operator=(List other) noexcept {
    T* const mine = items_;
    const int64_t size = size_;
    items_ = other.items_, size_ = other.size_;
    other.items_ = mine, other.size_ = size;
    return *this;
  }
  ~List() { delete[] items_; }

  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const T& operator[](int64_t i) const { return items_[check_index(i)]; }
  T& operator[](int64_t i) { return items_[check_index(i)]; }
  const T* data() const { return items_; }
  const T* begin() const { return items_; }
  const T* end() const { return items_ + size_; }
  T* begin() { return items_; }
  T* end() { return items_ + size_; }

 private:
  int64_t check_index(int64_t i) const {
    if (__builtin_expect(i < 0 || i >= size_, 0)) {
      raise_form("a list has %lld items, so it has no item %lld", static_cast<long long>(size_),
                 static_cast<long long>(i));
    }
    return i;
  }
  T* items_ = nullptr;
  int64_t size_ = 0;
};
using TensorList = List<Tensor>;

inline Ints::Ints(const List<int64_t>& list) : data_(list.data()), size_(list.size()) {}

// Text. It may contain any bytes: c_str() ends at the first zero byte, size() counts all of them.
class String {
 public:
  String() : String("") {}
  String(const char* text) : String(text, __builtin_strlen(text)) {}
  String(const char* text, size_t size) { OPK_TORCH(torch_new_string_handle, text, size, &handle_); }
  explicit String(StringHandle owned) : handle_(owned) {}
  String(String&& other) noexcept : handle_(other.release()) {}
  String(const String& other) : String(other.c_str(), static_cast<size_t>(other.size())) {}
  String& operator=(String other) noexcept {
    const StringHandle mine = handle_;
    handle_ = other.handle_;
    other.handle_ = mine;
    return *this;
  }
  ~String() {
    if (handle_) torch_delete_string(handle_);
  }

  const char* c_str() const {
    const char* out = nullptr;
    OPK_TORCH(torch_string_c_str, handle_, &out);
    return out;
  }
  int64_t size() const {
    size_t out = 0;
    OPK_TORCH(torch_string_length, handle_, &out);
    return static_cast<int64_t>(out);
  }
  bool operator==(const char* other) const {
    return static_cast<size_t>(size()) == __builtin_strlen(other) &&
        __builtin_memcmp(c_str(), other, static_cast<size_t>(size())) == 0;
  }
  bool operator!=(const char* other) const { return !(*this == other); }
  StringHandle release() {
    const StringHandle mine = handle_;
    handle_ = nullptr;
    return mine;
  }

 private:
  StringHandle handle_ = nullptr;
};

// Several results: `opk::tuple<Tensor, int64_t> f(…) { return {out, 3}; }`.
template <class... T>
struct tuple {};
template <class First, class... Rest>
struct tuple<First, Rest...> {
  First first;
  tuple<Rest...> rest;
  tuple(First one, Rest... others)
      : first(static_cast<First&&>(one)), rest(static_cast<Rest&&>(others)...) {}
};

// The I-th value of a tuple.
template <size_t I, class First, class... Rest>
auto& get(tuple<First, Rest...>& values) {
  if constexpr (I == 0) {
    return values.first;
  } else {
    return get<I - 1>(values.rest);
  }
}

OPK_NAMESPACE_END

// How each C++ type crosses torch's boxed calls as 64 bits, and its name in schemas.
#pragma once

#include "values.h"

OPK_NAMESPACE_BEGIN

template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct Counting : Counting<N - 1, N - 1, I...> {};
template <size_t... I>
struct Counting<0, I...> {
  using type = Indices<I...>;
};
template <size_t N>
using Count = typename Counting<N>::type;  // Indices<0, …, N - 1>

template <class T>
struct Box {
  static_assert(sizeof(T) == 0,
                "not a type that an op can take or return: use opk::Tensor, int64_t, double, bool, "
                "opk::String, opk::DType, opk::Device, or opk::optional or opk::List of these");
};

// take() takes ownership of the value, and give() gives it away.
template <>
struct Box<Tensor> {
  static constexpr bool has_tensor = true;
  template <class Text>
  static constexpr void name(Text& text, bool written) {
    text.add(written ? "Tensor(!)" : "Tensor");
  }
  static Tensor take(StableIValue value, Origin origin) {
    return Tensor(reinterpret_cast<AtenTensorHandle>(value), origin);
  }
  static StableIValue give(Tensor&& value) {
    if (__builtin_expect(!value.get(), 0)) raise_form("a tensor that is given to torch is not defined");
    return reinterpret_cast<StableIValue>(value.release());
  }
  static const Tensor* first(const Tensor& value) { return &value; }
};

template <class T>
struct PlainBox {
  static constexpr bool has_tensor = false;
  static const Tensor* first(const T&) { return nullptr; }
};
#define OPK_BOX(T, schema, taken, given)                                \
  template <>                                                           \
  struct Box<T> : PlainBox<T> {                                         \
    template <class Text>                                               \
    static constexpr void name(Text& text, bool) {                      \
      text.add(schema);                                                 \
    }                                                                   \
    static T take(StableIValue value, Origin) { return taken; }         \
    static StableIValue give(T value) { return given; }                 \
  };
OPK_BOX(int64_t, "int", static_cast<int64_t>(value), static_cast<StableIValue>(value))
OPK_BOX(bool, "bool", (value & 0xff) != 0, static_cast<StableIValue>(value))
OPK_BOX(DType, "ScalarType", static_cast<DType>(static_cast<int32_t>(value)),
        static_cast<StableIValue>(static_cast<uint32_t>(value)))
OPK_BOX(Device, "Device",
        (Device{static_cast<DeviceType>(static_cast<int32_t>(value >> 32)), static_cast<int32_t>(value)}),
        static_cast<StableIValue>(static_cast<uint32_t>(value.type)) << 32 |
            static_cast<uint32_t>(value.index))
OPK_BOX(String, "str", String(reinterpret_cast<StringHandle>(value)),
        reinterpret_cast<StableIValue>(value.release()))
#undef OPK_BOX

template <>
struct Box<double> : PlainBox<double> {
  template <class Text>
  static constexpr void name(Text& text, bool) {
    text.add("float");
  }
  static double take(StableIValue value, Origin) {
    double out;
    __builtin_memcpy(&out, &value, sizeof out);
    return out;
  }
  static StableIValue give(double value) {
    StableIValue out;
    __builtin_memcpy(&out, &value, sizeof out);
    return out;
  }
};

template <class T>
struct Box<optional<T>> {
  static constexpr bool has_tensor = Box<T>::has_tensor;
  template <class Text>
  static constexpr void name(Text& text, bool written) {
    Box<T>::name(text, written);
    text.add("?");
  }
  static optional<T> take(StableIValue value, Origin origin) {
    auto* const inner = reinterpret_cast<StableIValue*>(value);
    if (!inner) return {};
    const StableIValue taken = *inner;
    delete inner;  // torch made it with new, because the extension declares torch 2.10
    return optional<T>(Box<T>::take(taken, origin));
  }
  static StableIValue give(optional<T>&& value) {
    if (!value) return 0;
    return reinterpret_cast<StableIValue>(new StableIValue(Box<T>::give(static_cast<T&&>(*value))));
  }
  static const Tensor* first(const optional<T>& value) {
    return value ? Box<T>::first(*value) : nullptr;
  }
};

template <class T>
struct Box<List<T>> {
  static constexpr bool has_tensor = Box<T>::has_tensor;
  template <class Text>
  static constexpr void name(Text& text, bool written) {
    Box<T>::name(text, written);
    text.add("[]");
  }
  static List<T> take(StableIValue value, Origin origin) {
    struct Handle {
      StableListHandle list;
      ~Handle() { torch_delete_list(list); }
    } const owned{reinterpret_cast<StableListHandle>(value)};
    size_t size = 0;
    OPK_TORCH(torch_list_size, owned.list, &size);
    List<T> out(static_cast<int64_t>(size));
    for (size_t i = 0; i < size; ++i) {
      StableIValue item = 0;
      OPK_TORCH(torch_list_get_item, owned.list, i, &item);
      origin.item = static_cast<int32_t>(i);
      out.begin()[i] = Box<T>::take(item, origin);
    }
    return out;
  }
  static StableIValue give(List<T>&& value) {
    StableListHandle list = nullptr;
    OPK_TORCH(torch_new_list_reserve_size, static_cast<size_t>(value.size()), &list);
    for (T& item : value) OPK_TORCH(torch_list_push_back, list, Box<T>::give(static_cast<T&&>(item)));
    return reinterpret_cast<StableIValue>(list);
  }
  static const Tensor* first(const List<T>& value) {
    for (const T& item : value) {
      if (const Tensor* const found = Box<T>::first(item)) return found;
    }
    return nullptr;
  }
};

template <class R>
struct Results {
  static constexpr uint64_t count = 1;
  template <class Text>
  static constexpr void name(Text& text) {
    Box<R>::name(text, false);
  }
  static void give(R&& result, StableIValue* stack) { *stack = Box<R>::give(static_cast<R&&>(result)); }
  static R take(const StableIValue* stack) { return Box<R>::take(*stack, {}); }
};
template <>
struct Results<void> {
  static constexpr uint64_t count = 0;
  template <class Text>
  static constexpr void name(Text& text) {
    text.add("()");
  }
  static void take(const StableIValue*) {}
};
template <>
struct Results<tuple<>> {
  template <class Text>
  static constexpr void names(Text&, const char*) {}
  static void give(tuple<>&&, StableIValue*) {}
  static tuple<> take(const StableIValue*) { return {}; }
};
template <class First, class... Rest>
struct Results<tuple<First, Rest...>> {
  static constexpr uint64_t count = 1 + sizeof...(Rest);
  template <class Text>
  static constexpr void names(Text& text, const char* before) {
    text.add(before);
    Box<First>::name(text, false);
    Results<tuple<Rest...>>::names(text, ", ");
  }
  template <class Text>
  static constexpr void name(Text& text) {
    names(text, "(");
    text.add(")");
  }
  static void give(tuple<First, Rest...>&& results, StableIValue* stack) {
    *stack = Box<First>::give(static_cast<First&&>(results.first));
    Results<tuple<Rest...>>::give(static_cast<tuple<Rest...>&&>(results.rest), stack + 1);
  }
  static tuple<First, Rest...> take(const StableIValue* stack) { return take(stack, Count<1 + sizeof...(Rest)>{}); }

 private:
  template <size_t... I>
  static tuple<First, Rest...> take(const StableIValue* stack, Indices<0, I...>) {
    return {Box<First>::take(stack[0], {}), Box<Rest>::take(stack[I], {})...};
  }
};

// ---- calls of torch's ops by name ------------------------------------------------------------------

inline StableIValue box(const Tensor& value) { return Box<Tensor>::give(Tensor(value)); }
inline StableIValue box(bool value) { return Box<bool>::give(value); }
inline StableIValue box(int value) { return Box<int64_t>::give(value); }
inline StableIValue box(int64_t value) { return Box<int64_t>::give(value); }
inline StableIValue box(double value) { return Box<double>::give(value); }
inline StableIValue box(DType value) { return Box<DType>::give(value); }
inline StableIValue box(Device value) { return Box<Device>::give(value); }
inline StableIValue box(const char* value) { return Box<String>::give(String(value)); }
inline StableIValue box(const String& value) { return Box<String>::give(value); }
inline StableIValue box(None) { return 0; }
template <class T>
StableIValue box(const optional<T>& value) {
  return Box<optional<T>>::give(optional<T>(value));
}
template <class T>
StableIValue box(const List<T>& value) {
  return Box<List<T>>::give(List<T>(value));
}

// Calls a torch op by name: opk::call("aten::relu", "", x), opk::call<int64_t>(…), opk::call<void>(…). Pass
// every argument of the schema with exactly the schema's type: opk::none for None, and
// opk::optional<int64_t>(3) for 3 if the schema says `int?`. torch cannot check the types.
template <class R = Tensor, class... Arguments>
R call(const char* name, const char* overload, const Arguments&... arguments) {
  constexpr size_t kSize = sizeof...(Arguments) > Results<R>::count ? sizeof...(Arguments) : Results<R>::count;
  StableIValue stack[kSize + 1] = {box(arguments)...};
  if (__builtin_expect(torch_call_dispatcher(name, overload, stack, kTorch) != 0, 0)) raise_torch_error(name);
  return Results<R>::take(stack);
}

OPK_NAMESPACE_END

// OPKILN_OP: shows an op to the loader.
//
// Opening a library registers nothing. The loader reads the library's list of ops,
// compares each signature with the schema that Python declares, and only then registers
// the op in the namespace of the package. So an int in place of a Tensor is an error
// before the first call, and a new version of an op can replace an old one.
#pragma once

#include "boxing.h"
#include "record.h"
#include "running.h"

#pragma GCC visibility push(default)

extern "C" {
const opkiln_op* opkiln_ops();  // the first of the library's ops; `next` leads to the others
// Stores copies of the argument names, joined by commas, and of the reference, "ns::name", or null: its
// overload `unserved` takes the calls that the kernel does not serve.
void opkiln_describe(const opkiln_op* op, const char* argument_names, const char* reference);
// Returns null, or what went wrong.
const char* opkiln_register(const opkiln_op* op, const char* ns, const char* name);
void opkiln_unregister(const opkiln_op* op);
// Sends calls with another dtype to this op of another library, which
// passes them on likewise; null ends the chain.
void opkiln_link(const opkiln_op* op, const opkiln_op* other);
}

#pragma GCC visibility pop

OPK_PLAIN_BEGIN
OPK_NAMESPACE_BEGIN

inline opkiln_op* first_op = nullptr;

constexpr uint32_t kRecordABI = 3;

template <size_t N>
struct Text {
  char text[N] = {};
  size_t size = 0;
  constexpr void add(const char* more) {
    while (*more) text[size++] = *more++;
  }
};

// The declaration of an argument decides whether the op writes to it.
template <class A>
struct Argument {
  using type = A;
  static constexpr bool written = false;
  static_assert(!Box<A>::has_tensor,
                "tensors are taken by reference: const Tensor& for one that is only read, Tensor& for "
                "one that the op writes (so for opk::optional and opk::List of them)");
};
template <class T>
struct Argument<const T&> {
  using type = T;
  static constexpr bool written = false;
};
template <class T>
struct Argument<T&> {
  using type = T;
  static constexpr bool written = true;
  static_assert(Box<T>::has_tensor, "only tensors can be written: take the value, or a const reference");
};

// How an argument is passed. Values are passed by const reference and kept: if the kernel does not serve the
// call, the reference gets the arguments unchanged.
template <class A>
struct Passed {
  using type = const A&;
};
template <class A>
struct Passed<A&> {
  using type = A&;
};

template <class T>
constexpr bool is_tensor = false;
template <>
inline constexpr bool is_tensor<Tensor> = true;
template <class T>
constexpr bool is_dtype = false;
template <>
inline constexpr bool is_dtype<DType> = true;

// The dtype of a tensor on the stack, or -1 if it is not a floating-point dtype.
inline int32_t floating_dtype(StableIValue tensor) {
  int32_t dtype = 0;
  OPK_TORCH(aoti_torch_get_dtype, reinterpret_cast<AtenTensorHandle>(tensor), &dtype);
  return is_floating(static_cast<DType>(dtype)) ? dtype : -1;
}

// Runs the reference with the arguments on the stack, and leaves its results there.
OPK_COLD inline void call_reference(const opkiln_op* op, StableIValue* stack, uint64_t arguments,
                                    uint64_t results, const char* why) {
  const uint64_t size = (arguments > results ? arguments : results) + 1;
  auto* const given = static_cast<StableIValue*>(__builtin_alloca(size * sizeof(StableIValue)));
  __builtin_memcpy(given, stack, arguments * sizeof *given);
  given[arguments] = box(why);
  if (torch_call_dispatcher(op->reference, "unserved", given, kTorch) != 0) {
    const char* said = nullptr;
    if (torch_exception_get_what_without_backtrace) said = torch_exception_get_what_without_backtrace();
    if (!said || !*said) raise_form("the reference failed, and torch has printed why to stderr");
    // The text of a Python error is "Type: message", followed by an empty line and the traceback.
    const char* const end = __builtin_strstr(said, "\n\nAt:");
    const char* const type = end ? __builtin_strstr(said, ": ") : nullptr;
    const char* const begin = type && type < end ? type + 2 : said;
    raise_form("%.*s", static_cast<int>(end ? end - begin : 1900), begin);
  }
  __builtin_memcpy(stack, given, results * sizeof *given);
}

// Passes a call on to the library for another dtype, or else to Python.
OPK_COLD inline void call_other(const opkiln_op* op, int32_t dtype, StableIValue* stack, uint64_t arguments,
                                uint64_t results) {
  for (const opkiln_op* each = __atomic_load_n(&op->other, __ATOMIC_ACQUIRE); each;
       each = __atomic_load_n(&each->other, __ATOMIC_ACQUIRE)) {
    if (each->dtype == dtype) return each->run(stack, arguments, results);
  }
  call_reference(op, stack, arguments, results, "");
}

template <auto F, class Type, opkiln_op* Record, DeviceType On>
struct Boxed;
template <auto F, class R, class... A, opkiln_op* Record, DeviceType On>
struct Boxed<F, R (*)(A...) noexcept, Record, On> : Boxed<F, R (*)(A...), Record, On> {};
template <auto F, class R, class... A, opkiln_op* Record, DeviceType On>
struct Boxed<F, R (*)(A...), Record, On> {
  // The function that torch calls. It owns the arguments on the stack, and leaves the results there.
  static void run(StableIValue* stack, uint64_t arguments, uint64_t results) {
#if defined(OPKILN_EMULATED)
    const emulator::OpCall its_tensors;
#endif
    try {
      if (arguments != sizeof...(A) || results != Results<R>::count) {
        raise_form("the schema has %d arguments and %d results, the C++ function has %d and %d",
                   static_cast<int>(arguments), static_cast<int>(results), static_cast<int>(sizeof...(A)),
                   static_cast<int>(Results<R>::count));
      }
      if constexpr (kOnlyDType >= 0) {
        const int32_t dtype = dtype_of_call(stack, Count<sizeof...(A)>{});
        if (dtype != kOnlyDType && Record->reference) {
          return call_other(Record, dtype, stack, arguments, results);
        }
      }
      call(stack, Count<sizeof...(A)>{});
    } catch (Error& error) {
      error.begin_with(Record->name);
      throw;
    }
  }

  static constexpr auto describe() {
    Text<16 + 40 * (1 + sizeof...(A) + Results<R>::count)> text;
    [[maybe_unused]] const char* before = "";
    text.add("(");
    ((text.add(before), before = ", ", Box<typename Argument<A>::type>::name(text, Argument<A>::written)),
     ...);
    text.add(") -> ");
    Results<R>::name(text);
    return text;
  }
  static constexpr auto signature = describe();

 private:
  // The dtype of a call is its ScalarType argument, or else the dtype of the first floating-point tensor.
  template <size_t... I>
  static int32_t dtype_of_call(const StableIValue* stack, Indices<I...>) {
    int32_t dtype = -1;
    if constexpr ((is_dtype<typename Argument<A>::type> || ...)) {
      (void)((is_dtype<typename Argument<A>::type> && (dtype = static_cast<int32_t>(stack[I]), true)) || ...);
    } else {
      (void)((is_tensor<typename Argument<A>::type> && (dtype = floating_dtype(stack[I])) >= 0) || ...);
    }
    return dtype;
  }
  template <size_t... I>
  static void call([[maybe_unused]] StableIValue* stack, Indices<I...>) {
    run_on_device(stack, Box<typename Argument<A>::type>::take(stack[I], Origin{Record, static_cast<int32_t>(I)})...);
  }
  static void run_on_device(StableIValue* stack, typename Argument<A>::type&&... values) {
    if constexpr (On == DeviceType::cpu) {
      finish(stack, values...);
    } else {
      // As in torch's own ops, the device of the first tensor is current while the op runs.
      const Tensor* device = nullptr;
      (void)((device = Box<typename Argument<A>::type>::first(values)) || ...);
      const DeviceGuard guard(device);
      finish(stack, values...);
    }
  }
  static void finish([[maybe_unused]] StableIValue* stack, typename Argument<A>::type&... values) {
    try {
      if constexpr (Results<R>::count == 0) {
        F(static_cast<typename Passed<A>::type>(values)...);
      } else {
        Results<R>::give(F(static_cast<typename Passed<A>::type>(values)...), stack);
      }
    } catch (const Unserved& why) {
      if (!Record->reference) throw;
      StableIValue* to = stack;
      ((*to++ = Box<typename Argument<A>::type>::give(static_cast<typename Argument<A>::type&&>(values))), ...);
      call_reference(Record, stack, sizeof...(A), Results<R>::count, why.text);
    }
  }
};

// Returns `a` of `x::y::a`.
constexpr const char* last_part(const char* name) {
  const char* last = name;
  for (; *name; ++name) {
    if (name[0] == ':' || name[0] == ' ') last = name + 1;
  }
  return last;
}

constexpr const char* key_of(DeviceType type) {
  return type == DeviceType::cpu ? "CPU" : type == DeviceType::cuda ? "CUDA" : type == DeviceType::xpu ? "XPU" : "";
}

// Adds the op to the library's list. This constructor is all that runs when a library is opened.
struct ListEntry {
  explicit ListEntry(opkiln_op& op) {
    op.next = first_op;
    first_op = &op;
  }
};

#if defined(OPKILN_EMULATED)  // emulated kernels run on the CPU, on CPU tensors
constexpr DeviceType device_to_run(DeviceType) { return DeviceType::cpu; }
#else
constexpr DeviceType device_to_run(DeviceType type) { return type; }
#endif

// Makes an op of a function. `device` is the device of its tensors: cpu, cuda (also for ROCm), or xpu.
#define OPKILN_OP(function, device) OPKILN_OP_(function, device, __COUNTER__)
#define OPKILN_OP_(function, device, number) OPKILN_OP__(function, device, number)
#define OPKILN_OP__(function, device, number)                                                          \
  static_assert(*::opk::key_of(::opk::DeviceType::device), "an op is for cpu, cuda or xpu");           \
  static opkiln_op opkiln_op_##number = {                                                              \
      ::opk::kRecordABI,                                                                               \
      ::opk::kOnlyDType,                                                                               \
      ::opk::last_part(#function),                                                                     \
      ::opk::name_of(::opk::device_to_run(::opk::DeviceType::device)),                                      \
      ::opk::Boxed<&function, decltype(&function), &opkiln_op_##number,                                \
                   ::opk::device_to_run(::opk::DeviceType::device)>::signature.text,                        \
      nullptr,                                                                                         \
      &::opk::Boxed<&function, decltype(&function), &opkiln_op_##number,                               \
                    ::opk::device_to_run(::opk::DeviceType::device)>::run,                                  \
      ::opk::key_of(::opk::device_to_run(::opk::DeviceType::device)),                                       \
      __FILE__,                                                                                        \
      __LINE__,                                                                                        \
      nullptr,                                                                                         \
      nullptr,                                                                                         \
      nullptr,                                                                                         \
      nullptr,                                                                                         \
      &opkiln_ops,                                                                                     \
      &opkiln_describe,                                                                                \
      &opkiln_register,                                                                                \
      &opkiln_unregister,                                                                              \
      &opkiln_link};                                                                                   \
  static const ::opk::ListEntry opkiln_listed_##number(opkiln_op_##number)

OPK_NAMESPACE_END
OPK_PLAIN_END

OPK_RARE_BEGIN
extern "C" inline const opkiln_op* opkiln_ops() { return opk::first_op; }

extern "C" inline void opkiln_describe(const opkiln_op* op, const char* argument_names,
                                                              const char* reference) {
  opkiln_op* const mine = const_cast<opkiln_op*>(op);  // the record belongs to this library
  const auto keep = [](const char*& kept, const char* text) {
    if (!text || (kept && __builtin_strcmp(kept, text) == 0)) return;
    // The old copy is never freed: a call in another thread may be reading it.
    if (char* const copy = static_cast<char*>(__builtin_malloc(__builtin_strlen(text) + 1))) {
      kept = __builtin_strcpy(copy, text);
    }
  };
  keep(mine->argument_names, argument_names);
  keep(mine->reference, reference);
}

extern "C" inline const char* opkiln_register(const opkiln_op* op, const char* ns,
                                                                    const char* name) {
  using opk::DeviceType;
  using opk::DType;
  if (aoti_torch_dtype_float32() != static_cast<int32_t>(DType::float32) ||
      aoti_torch_dtype_bfloat16() != static_cast<int32_t>(DType::bfloat16) ||
      aoti_torch_dtype_float8_e4m3fnuz() != static_cast<int32_t>(DType::float8_e4m3fnuz) ||
      aoti_torch_dtype_uint64() != static_cast<int32_t>(DType::uint64) ||
      aoti_torch_device_type_cuda() != static_cast<int32_t>(DeviceType::cuda) ||
      aoti_torch_device_type_xpu() != static_cast<int32_t>(DeviceType::xpu) ||
      aoti_torch_device_type_meta() != static_cast<int32_t>(DeviceType::meta)) {
    return "this torch numbers dtypes or devices differently than op.h";
  }
  opkiln_op* const mine = const_cast<opkiln_op*>(op);
  // An op may be registered under several names: overloads share one function.
  TorchLibraryHandle library = mine->library;
  if (library || aoti_torch_library_init_impl(ns, op->key, op->file, op->line, &library) == 0) {
    if (torch_library_impl(library, name, op->run, opk::kTorch) == 0) {
      mine->library = library;
      return nullptr;
    }
    if (!mine->library) aoti_torch_delete_library_object(library);
  }
  const char* why = nullptr;
  if (torch_exception_get_what_without_backtrace) why = torch_exception_get_what_without_backtrace();
  return why && *why ? why : "torch did not accept the registration, and has printed why to stderr";
}

extern "C" inline void opkiln_unregister(const opkiln_op* op) {
  opkiln_op* const mine = const_cast<opkiln_op*>(op);
  if (mine->library) aoti_torch_delete_library_object(mine->library);
  mine->library = nullptr;
}

extern "C" inline void opkiln_link(const opkiln_op* op, const opkiln_op* other) {
  __atomic_store_n(&const_cast<opkiln_op*>(op)->other, other, __ATOMIC_RELEASE);
}

OPK_RARE_END

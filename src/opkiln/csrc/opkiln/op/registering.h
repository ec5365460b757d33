// OPKILN_OP: an op as a library shows it to the loader.
//
// Opening a library registers nothing. The loader reads the list of its ops, compares each signature
// with the schema that is declared in Python, and only then registers the op under the namespace of
// the package. So an int in place of a Tensor is an error before the first call, and a new version of
// an op can take the place of an old one.
#pragma once

#include "boxing.h"
#include "record.h"
#include "running.h"

#pragma GCC visibility push(default)

extern "C" {
const opkiln_op* opkiln_ops();  // the first of the library's ops
// NULL, or what is wrong. The texts are copied.
const char* opkiln_register(const opkiln_op* op, const char* ns, const char* name,
                            const char* argument_names);
void opkiln_unregister(const opkiln_op* op);
}

#pragma GCC visibility pop

OPK_PLAIN_BEGIN
OPK_NAMESPACE_BEGIN

inline opkiln_op* first_op = nullptr;

constexpr uint32_t kRecordABI = 1;

template <size_t N>
struct Text {
  char text[N] = {};
  size_t size = 0;
  constexpr void add(const char* more) {
    while (*more) text[size++] = *more++;
  }
};

// How an argument is declared, and so whether the op writes to it.
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

template <auto F, class Type, opkiln_op* Record, DeviceType On>
struct Boxed;
template <auto F, class R, class... A, opkiln_op* Record, DeviceType On>
struct Boxed<F, R (*)(A...) noexcept, Record, On> : Boxed<F, R (*)(A...), Record, On> {};
template <auto F, class R, class... A, opkiln_op* Record, DeviceType On>
struct Boxed<F, R (*)(A...), Record, On> {
  // What torch calls. It owns the arguments on the stack, and leaves the results there.
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
  template <size_t... I>
  static void call([[maybe_unused]] StableIValue* stack, Indices<I...>) {
    with(stack, Box<typename Argument<A>::type>::take(stack[I], Origin{Record, static_cast<int32_t>(I)})...);
  }
  static void with(StableIValue* stack, typename Argument<A>::type&&... values) {
    if constexpr (On == DeviceType::cpu) {
      finish(stack, values...);
    } else {
      // As torch's own ops do: the device of the first tensor is current while the op runs.
      const Tensor* device = nullptr;
      (void)((device = Box<typename Argument<A>::type>::first(values)) || ...);
      const DeviceGuard guard(device);
      finish(stack, values...);
    }
  }
  static void finish([[maybe_unused]] StableIValue* stack, typename Argument<A>::type&... values) {
    if constexpr (Results<R>::count == 0) {
      F(static_cast<A&&>(values)...);
    } else {
      Results<R>::give(F(static_cast<A&&>(values)...), stack);
    }
  }
};

// `a` of `x::y::a`.
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

// Its constructor is all that happens when a library is opened.
struct Listed {
  explicit Listed(opkiln_op& op) {
    op.next = first_op;
    first_op = &op;
  }
};

#if defined(OPKILN_EMULATED)  // kernels run on the CPU, on tensors that are there
constexpr DeviceType emulated(DeviceType) { return DeviceType::cpu; }
#else
constexpr DeviceType emulated(DeviceType type) { return type; }
#endif

// Makes an op of a function; the word is the device whose tensors it is for: cpu, cuda (also ROCm), xpu.
#define OPKILN_OP(function, device) OPKILN_OP_(function, device, __COUNTER__)
#define OPKILN_OP_(function, device, number) OPKILN_OP__(function, device, number)
#define OPKILN_OP__(function, device, number)                                                          \
  static_assert(*::opk::key_of(::opk::DeviceType::device), "an op is for cpu, cuda or xpu");           \
  static opkiln_op opkiln_op_##number = {                                                              \
      ::opk::kRecordABI,                                                                               \
      ::opk::last_part(#function),                                                                     \
      ::opk::name_of(::opk::emulated(::opk::DeviceType::device)),                                      \
      ::opk::Boxed<&function, decltype(&function), &opkiln_op_##number,                                \
                   ::opk::emulated(::opk::DeviceType::device)>::signature.text,                        \
      nullptr,                                                                                         \
      &::opk::Boxed<&function, decltype(&function), &opkiln_op_##number,                               \
                    ::opk::emulated(::opk::DeviceType::device)>::run,                                  \
      ::opk::key_of(::opk::emulated(::opk::DeviceType::device)),                                       \
      __FILE__,                                                                                        \
      __LINE__,                                                                                        \
      nullptr,                                                                                         \
      nullptr,                                                                                         \
      &opkiln_ops,                                                                                     \
      &opkiln_register,                                                                                \
      &opkiln_unregister};                                                                                        \
  static const ::opk::Listed opkiln_listed_##number(opkiln_op_##number)

OPK_NAMESPACE_END
OPK_PLAIN_END

OPK_RARE_BEGIN
extern "C" inline const opkiln_op* opkiln_ops() { return opk::first_op; }

extern "C" inline const char* opkiln_register(const opkiln_op* op, const char* ns,
                                                                    const char* name,
                                                                    const char* argument_names) {
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
  opkiln_op* const mine = const_cast<opkiln_op*>(op);  // one of this library's records
  if (!mine->argument_names) {
    // Never freed: a call in another thread may be about to name an argument.
    if (char* const copy = static_cast<char*>(__builtin_malloc(__builtin_strlen(argument_names) + 1))) {
      mine->argument_names = __builtin_strcpy(copy, argument_names);
    }
  }
  // An op may have several names: overloads of one function.
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

OPK_RARE_END

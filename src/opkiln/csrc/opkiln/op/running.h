// What an op runs on: torch's threads, the current device and its stream, and code for each dtype.
#pragma once

#include <dlfcn.h>

#include "tensor.h"

OPK_NAMESPACE_BEGIN

// ---- threads ---------------------------------------------------------------------------------------

struct ParallelCall {
  void (*body)(const void* function, int64_t begin, int64_t end);
  const void* function;
  Error* error;  // from the first part that failed
  OPK_COLD void fail(const char* what) {
    Error* const mine = new Error;
    mine->add("%s", what);
    Error* expected = nullptr;
    if (!__atomic_compare_exchange_n(&error, &expected, mine, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
      delete mine;
    }
  }
};

[[gnu::noinline]] inline void run_parallel(int64_t begin, int64_t end, int64_t grain, ParallelCall& call) {
  // torch would replace an exception of a part by an error code without its message, so none may reach torch.
  constexpr ParallelFunc kPart = [](int64_t low, int64_t high, void* context) {
    auto* const shared = static_cast<ParallelCall*>(context);
    try {
      shared->body(shared->function, low, high);
    } catch (const std::exception& error) {
      shared->fail(error.what());
    } catch (...) {
      shared->fail("parallel_for: a part threw something other than a std::exception");
    }
  };
  OPK_TORCH(torch_parallel_for, begin, end, grain, kPart, &call);
  if (__builtin_expect(call.error != nullptr, 0)) {
    const Error error = *call.error;
    delete call.error;
    throw error;
  }
}

// Calls f(begin, end) for parts of the range, each at least `grain` long, in torch's thread pool, and waits
// for all. If a part raises, parallel_for raises an opk::Error with its message.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& f) {
  if (begin >= end) return;
  ParallelCall call{[](const void* function, int64_t low, int64_t high) {
                      (*static_cast<const F*>(function))(low, high);
                    },
                    &f, nullptr};
  run_parallel(begin, end, grain, call);
}

// The most threads that parallel_for uses.
inline int64_t num_threads() {
  uint32_t out = 0;
  OPK_TORCH(torch_get_num_threads, &out);
  return out;
}

// The index of the calling thread among them; 0 outside of parallel_for.
inline int64_t thread_index() {
  uint32_t out = 0;
  OPK_TORCH(torch_get_thread_idx, &out);
  return out;
}

// ---- dtypes ----------------------------------------------------------------------------------------

template <class T>
struct Type {
  using type = T;
};

struct Subject {  // what has the dtype: a tensor, or a dtype alone
  DType dtype;
  Origin origin;
  bool named;
  Subject(DType found) : dtype(found), named(false) {}
  Subject(const Tensor& tensor) : dtype(tensor.dtype()), origin(tensor.origin()), named(true) {}
};

[[noreturn]] OPK_COLD inline void raise_undispatched(
    const Subject& subject, std::initializer_list<DType> expected) {
  Unserved error;
  if (subject.named) {
    error.add("%s", NameOf(subject.origin).text);
  } else {
    error.add("a tensor");
  }
  error.add(" has dtype %s, expected ", name_of(subject.dtype));
  const char* before = "";
  for (const DType& each : expected) {
    error.add("%s%s", before, name_of(each));
    before = &each + 2 == expected.end() ? " or " : ", ";
  }
  throw error;
}

// The only dtype that the library is built for (`dtypes=`), or -1.
#if defined(OPKILN_DTYPE)
constexpr int32_t kOnlyDType = static_cast<int32_t>(DType::OPKILN_DTYPE);
#else
constexpr int32_t kOnlyDType = -1;
#endif

// Whether the library is compiled for this dtype. Integers, such as indices, are always included.
constexpr bool compiles(DType dtype) {
  return kOnlyDType < 0 || !is_floating(dtype) || static_cast<int32_t>(dtype) == kOnlyDType;
}

// Calls f if the dtype is T's. Returns whether it did.
template <class T, class F>
bool dispatch_one(DType dtype, const F& f) {
  if constexpr (compiles(dtype_of<T>)) {
    if (dtype_of<T> == dtype) {
      f(Type<T>{});
      return true;
    }
  }
  return false;
}

// Calls f with Type<T>{} for the T among Ts that has this dtype. If there is none, the op's reference runs.
template <class... Ts, class F>
void dispatch(const Subject& subject, const F& f) {
  if (!(dispatch_one<Ts>(subject.dtype, f) || ...)) raise_undispatched(subject, {dtype_of<Ts>...});
}

// OPK_DISPATCH(x, T, (float, double, opk::bfloat16), { fill(out.data<T>()); });
// The first argument is a tensor, which the message then names, or a dtype.
// The block is a lambda: `return` leaves the block, not the op.
#define OPK_DISPATCH(subject, T, types, ...)                           \
  ::opk::dispatch<OPK_UNPACK_ types>(subject, [&](auto opk_type_) {    \
    using T = typename decltype(opk_type_)::type;                      \
    __VA_ARGS__;                                                       \
  })
#define OPK_UNPACK_(...) __VA_ARGS__

// ---- devices ---------------------------------------------------------------------------------------

// Makes a tensor's device current during its lifetime. Does nothing for the CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device) { enter(device); }
  explicit DeviceGuard(const Tensor& tensor) { enter(tensor.device()); }
  explicit DeviceGuard(const Tensor* tensor) {
    if (tensor) enter(tensor->device());
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }

 private:
  void enter(Device device) {
    if (device.type == DeviceType::cpu || device.type == DeviceType::meta || device.index < 0) return;
    int32_t current = -1;
    OPK_TORCH(aoti_torch_get_current_device_index, &current);
    if (current != device.index) OPK_TORCH(aoti_torch_create_device_guard, device.index, &guard_);
  }
  DeviceGuardHandle guard_ = nullptr;
};

// torch's current stream of a GPU: a cudaStream_t, a hipStream_t, or a
// sycl::queue* on an XPU. The function is looked up at run time instead of linked,
// because ops are also built on CPU builds of torch, which lack it.
[[gnu::noinline]] inline void* current_stream(int32_t device) {
  using Getter = AOTITorchError(int32_t, void**);
  static Getter* const getter = [] {
    struct {
      const char *library, *function;
    } const places[] = {{"libtorch_cuda.so", "aoti_torch_get_current_cuda_stream"},
                        {"libtorch_hip.so", "aoti_torch_get_current_cuda_stream"},
                        {"libtorch_xpu.so", "aoti_torch_get_current_xpu_stream"}};
    for (const auto& place : places) {
      if (void* const library = dlopen(place.library, RTLD_NOLOAD | RTLD_LAZY)) {
        if (void* const found = dlsym(library, place.function)) return reinterpret_cast<Getter*>(found);
      }
    }
    return static_cast<Getter*>(nullptr);
  }();
  if (!getter) raise_form("there is no current stream: this torch was built for the CPU only");
  void* stream = nullptr;
  if (getter(device, &stream) != 0) raise_torch_error("asking for the current stream");
  return stream;
}

OPK_NAMESPACE_END

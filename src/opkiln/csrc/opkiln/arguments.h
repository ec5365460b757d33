// Argument checks that several ops share. Their messages equal those of the Python references.
#pragma once

#include "element_type.h"
#include "op.h"

#if !defined(__CUDACC_RTC__)

OPK_PLAIN_BEGIN
OPK_NAMESPACE_BEGIN

// A device's name in messages.
struct PlaceOf {
  char text[40];
  OPK_COLD explicit PlaceOf(Device device) {
    __builtin_snprintf(text, sizeof text, "%s",
                       device.type == DeviceType::cpu ? "the CPU" : DeviceOf(device).text);
  }
};

// The device on which the op runs: that of this argument. An op for a GPU can also get a CPU tensor here,
// when another argument is on the GPU.
[[gnu::noinline]] inline Device device_of(const Tensor& tensor) {
  const Device device = tensor.device();
#if defined(__CUDACC__) || defined(__HIPCC__) || defined(OPKILN_NVRTC_HOST)
  if (device.type != DeviceType::cuda) raise_form("%s is not on a GPU", NameOf(tensor).text);
#else
  if (device.type != DeviceType::cpu) raise_form("%s is not on the CPU", NameOf(tensor).text);
#endif
  return device;
}

[[gnu::noinline]] inline void check_on(const Tensor& tensor, Device device) {
  if (__builtin_expect(tensor.device() != device, 0)) {
    raise_form("%s is not on %s", NameOf(tensor).text, PlaceOf(device).text);
  }
}

[[gnu::noinline]] inline void check_numel(const Tensor& tensor, int64_t numel) {
  if (__builtin_expect(tensor.numel() != numel, 0)) {
    raise_form("%s has %lld elements, expected %lld", NameOf(tensor).text,
               static_cast<long long>(tensor.numel()), static_cast<long long>(numel));
  }
}

// The element type for a dtype. Messages name the tensor, or else the argument `dtype`.
[[gnu::noinline]] inline opkiln::ElementType element_of(DType dtype, const Tensor* of = nullptr) {
  switch (dtype) {
    case DType::float32: return opkiln::ElementType::kFloat;
    case DType::bfloat16: return opkiln::ElementType::kBFloat16;
    case DType::float16: return opkiln::ElementType::kFloat16;
    default:
      raise_unserved(of ? NameOf(*of).text : "dtype", of ? " has dtype " : " is ", name_of(dtype),
                     ", expected float32, bfloat16 or float16");
  }
}
inline opkiln::ElementType element_of(const Tensor& tensor) { return element_of(tensor.dtype(), &tensor); }

// Calls body(Type<T>{}) with the C++ type of these elements: the first, second or third. A library that is
// built for one dtype (`dtypes=`) contains code only for that one.
template <class Float, class BFloat16, class Float16, class Body>
void with_element(opkiln::ElementType type, const Body& body) {
  if constexpr (compiles(DType::float32)) {
    if (type == opkiln::ElementType::kFloat) return body(Type<Float>{});
  }
  if constexpr (compiles(DType::bfloat16)) {
    if (type == opkiln::ElementType::kBFloat16) return body(Type<BFloat16>{});
  }
  if constexpr (compiles(DType::float16)) {
    if (type == opkiln::ElementType::kFloat16) return body(Type<Float16>{});
  }
  raise_unserved("this library is for another dtype");
}

// Like OPK_DISPATCH: OPK_ELEMENT(work.type, T, (float, opk::bfloat16, opk::half), launch<T>(work));
#define OPK_ELEMENT(element, T, types, ...)                                     \
  ::opk::with_element<OPK_UNPACK_ types>(element, [&](auto opk_type_) {         \
    using T = typename decltype(opk_type_)::type;                               \
    __VA_ARGS__;                                                                \
  })

// Below this much memory traffic, waking another thread does not pay.
constexpr int64_t kGrainBytes = 512 * 1024;

OPK_NAMESPACE_END
OPK_PLAIN_END

#endif

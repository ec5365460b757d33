// The binding of tvm-ffi: a file of its own, or the second half of what nvcc compiles.

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

const char* axpb_enqueue(const float* x, float* y, int64_t n, float a, float b, void* stream);

void axpb(tvm::ffi::TensorView x, tvm::ffi::TensorView y, double a, double b) {
  const DLDataType type = x.dtype();
  TVM_FFI_ICHECK(type.code == kDLFloat && type.bits == 32) << "x is not float32";
  TVM_FFI_ICHECK(x.IsContiguous() && y.IsContiguous()) << "x or y is not contiguous";
  const DLDevice device = x.device();
  void* const stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  const char* const error =
      axpb_enqueue(static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()),
                   x.numel(), static_cast<float>(a), static_cast<float>(b), stream);
  TVM_FFI_ICHECK(error == nullptr) << error;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(axpb, axpb);

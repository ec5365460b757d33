// The C functions of torch's stable ABI that op.h uses. They are declared by hand because torch's own headers
// take a second to compile. libtorch_cpu.so has all of them since torch 2.10; later ones are weak. A test
// compiles these declarations together with torch's, so the two cannot drift apart.
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)  // they are torch's symbols, even with -fvisibility=hidden

extern "C" {

struct AtenTensorOpaque;
struct StableListOpaque;
struct StringOpaque;
struct DeviceGuardOpaque;
class TorchLibraryOpaque;

using AOTITorchError = int32_t;
using StableIValue = uint64_t;  // any argument or result of an op
using AtenTensorHandle = AtenTensorOpaque*;
using StableListHandle = StableListOpaque*;
using StringHandle = StringOpaque*;
using DeviceGuardHandle = DeviceGuardOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
typedef void (*ParallelFunc)(int64_t begin, int64_t end, void* ctx);

int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float8_e4m3fnuz();
int32_t aoti_torch_dtype_uint64();
int32_t aoti_torch_device_type_cuda();
int32_t aoti_torch_device_type_xpu();
int32_t aoti_torch_device_type_meta();
size_t aoti_torch_dtype_element_size(int32_t dtype);

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* out);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* out);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t* out);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** out);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** out);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* out);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t* out);
AOTITorchError aoti_torch_get_device_index(AtenTensorHandle tensor, int32_t* out);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle tensor, int64_t* out);
AOTITorchError aoti_torch_is_contiguous(AtenTensorHandle tensor, bool* out);
AOTITorchError aoti_torch_is_defined(AtenTensorHandle tensor, bool* out);
AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** out);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** out);
AOTITorchError aoti_torch_empty_strided(int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t device_type, int32_t device_index,
                                        AtenTensorHandle* out);
AOTITorchError aoti_torch_zero_(AtenTensorHandle tensor);

AOTITorchError torch_new_list_reserve_size(size_t size, StableListHandle* out);
AOTITorchError torch_list_size(StableListHandle list, size_t* out);
AOTITorchError torch_list_get_item(StableListHandle list, size_t index, StableIValue* out);
AOTITorchError torch_list_push_back(StableListHandle list, StableIValue item);
AOTITorchError torch_delete_list(StableListHandle list);
AOTITorchError torch_new_string_handle(const char* data, size_t length, StringHandle* out);
AOTITorchError torch_delete_string(StringHandle string);
AOTITorchError torch_string_length(StringHandle string, size_t* out);
AOTITorchError torch_string_c_str(StringHandle string, const char** out);

AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack,
                                     uint64_t extension_build_version);
AOTITorchError aoti_torch_library_init_impl(const char* ns, const char* key, const char* file,
                                            uint32_t line, TorchLibraryHandle* out);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* name,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t),
                                  uint64_t extension_build_version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle library);

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc func,
                                  void* ctx);
AOTITorchError torch_get_num_threads(uint32_t* out);
AOTITorchError torch_get_thread_idx(uint32_t* out);
AOTITorchError aoti_torch_create_device_guard(int32_t device_index, DeviceGuardHandle* out);
AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle guard);
AOTITorchError aoti_torch_get_current_device_index(int32_t* out);

// Since torch 2.13. Without it, torch prints its errors to stderr and returns only a code.
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

}  // extern "C"

#pragma GCC visibility pop

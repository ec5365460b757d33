// CUDA's driver and cuFile. Both are opened at run time, so neither is needed to
// compile this, and a machine without them reports what is missing.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <string>

namespace gds {

// The driver's functions, as in cuda.h. Each returns 0 or an error number.
struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDevicePrimaryCtxRetain)(void** context, int device);
  int (*cuCtxSetCurrent)(void* context);
  int (*cuMemHostAlloc)(void** memory, size_t size, unsigned flags);
  int (*cuMemFreeHost)(void* memory);
  int (*cuStreamCreate)(void** stream, unsigned flags);
  int (*cuStreamDestroy)(void* stream);
  int (*cuStreamSynchronize)(void* stream);
  int (*cuMemcpyHtoDAsync)(uint64_t to, const void* from, size_t size, void* stream);
  int (*cuMemcpyDtoHAsync)(void* to, uint64_t from, size_t size, void* stream);
  int (*cuGetErrorString)(int error, const char** text);

  // One instance per process. Returns null and sets `why` if the driver cannot be used.
  static const Driver* open(std::string& why);
  // Makes torch's context of a device current in this thread. Returns false and sets `why` on failure.
  bool enter(int device, std::string& why) const;
  std::string describe(const char* call, int error) const;
};

// CUfileError_t. `cuda` is the driver's error if `code` is kCudaError.
struct Status {
  int code;
  int cuda;
};
constexpr int kCudaError = 5011;

// CUfileDescr_t
struct Descriptor {
  int type;  // 1: a Linux file descriptor
  union {
    int descriptor;
    void* handle;
  };
  const void* operations;
};

// cuFile's functions, as in cufile.h. Reads and writes return the number of
// bytes; -1 with errno set; or a lower number for cuFile's own errors.
struct CuFile {
  Status (*cuFileDriverOpen)();
  Status (*cuFileDriverGetProperties)(void* properties);
  Status (*cuFileHandleRegister)(void** handle, Descriptor* descriptor);
  void (*cuFileHandleDeregister)(void* handle);
  Status (*cuFileBufRegister)(const void* memory, size_t size, int flags);
  Status (*cuFileBufDeregister)(const void* memory);
  ssize_t (*cuFileRead)(void* handle, void* base, size_t size, off_t offset, off_t offset_in_memory);
  ssize_t (*cuFileWrite)(void* handle, const void* base, size_t size, off_t offset, off_t offset_in_memory);

  bool direct;        // whether GPUDirect Storage works here; otherwise cuFile copies through the host
  std::string about;  // the library's path, and the driver that it uses

  // Opens the library that is loaded, or that the dynamic linker finds, or else the first of `paths`,
  // separated by colons. One instance per process. Returns null and sets `why` if none can be used.
  static const CuFile* open(const char* paths, std::string& why);
};

std::string describe(const Driver& driver, const char* call, Status status);
std::string describe(const char* call, ssize_t result, int error);  // for a read or a write

}  // namespace gds

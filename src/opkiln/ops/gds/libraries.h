// CUDA's driver and cuFile. Both are opened while the program runs, so neither has to be installed to compile
// this, and a machine without them says what is missing.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include <string>

namespace gds {

// The driver's functions, as cuda.h declares them. Each gives 0, or an error's number.
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

  // The same for all callers. Null if it cannot be used, and then why.
  static const Driver* open(std::string& why);
  // The context that torch uses on a device, made current in this thread. False, and why, if it cannot be.
  bool enter(int device, std::string& why) const;
  std::string words(const char* call, int error) const;
};

// CUfileError_t. `cuda` is the driver's error if `code` is kCudaError.
struct Status {
  int code;
  int cuda;
};
constexpr int kCudaError = 5011;

// CUfileDescr_t
struct Descriptor {
  int type;  // 1: a descriptor of Linux
  union {
    int descriptor;
    void* handle;
  };
  const void* operations;
};

// cuFile's functions, as cufile.h declares them. Reads and writes give bytes; -1, and then errno is set; or an
// error of cuFile below that.
struct CuFile {
  Status (*cuFileDriverOpen)();
  Status (*cuFileDriverGetProperties)(void* properties);
  Status (*cuFileHandleRegister)(void** handle, Descriptor* descriptor);
  void (*cuFileHandleDeregister)(void* handle);
  Status (*cuFileBufRegister)(const void* memory, size_t size, int flags);
  Status (*cuFileBufDeregister)(const void* memory);
  ssize_t (*cuFileRead)(void* handle, void* base, size_t size, off_t offset, off_t offset_in_memory);
  ssize_t (*cuFileWrite)(void* handle, const void* base, size_t size, off_t offset, off_t offset_in_memory);

  bool direct;        // whether it has GPUDirect Storage here; else it copies through the host itself
  std::string about;  // which library it is, and which driver serves it

  // The first library that there is: the one that is loaded, or that the dynamic linker finds; then `paths`, which
  // are separated by colons. The same for all callers. Null if it cannot be used, and then why.
  static const CuFile* open(const char* paths, std::string& why);
};

std::string words_of(const Driver& driver, const char* call, Status status);
std::string words_of(const char* call, ssize_t result, int error);  // of a read or a write

}  // namespace gds

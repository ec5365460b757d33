#include "libraries.h"

#include <dlfcn.h>
#include <string.h>

#include <map>
#include <mutex>

namespace gds {
namespace {

template <class F>
bool find(void* library, const char* name, F*& to, std::string& why) {
  to = reinterpret_cast<F*>(dlsym(library, name));
  if (to == nullptr) why = std::string("it has no ") + name;
  return to != nullptr;
}

bool fill(void* library, Driver& to, std::string& why) {
  return find(library, "cuInit", to.cuInit, why) && find(library, "cuDeviceGet", to.cuDeviceGet, why) &&
      find(library, "cuDevicePrimaryCtxRetain", to.cuDevicePrimaryCtxRetain, why) &&
      find(library, "cuCtxSetCurrent", to.cuCtxSetCurrent, why) &&
      find(library, "cuMemHostAlloc", to.cuMemHostAlloc, why) &&
      find(library, "cuMemFreeHost", to.cuMemFreeHost, why) &&
      find(library, "cuStreamCreate", to.cuStreamCreate, why) &&
      find(library, "cuStreamDestroy_v2", to.cuStreamDestroy, why) &&
      find(library, "cuStreamSynchronize", to.cuStreamSynchronize, why) &&
      find(library, "cuMemcpyHtoDAsync_v2", to.cuMemcpyHtoDAsync, why) &&
      find(library, "cuMemcpyDtoHAsync_v2", to.cuMemcpyDtoHAsync, why) &&
      find(library, "cuGetErrorString", to.cuGetErrorString, why);
}

bool fill(void* library, CuFile& to, std::string& why) {
  return find(library, "cuFileDriverOpen", to.cuFileDriverOpen, why) &&
      find(library, "cuFileDriverGetProperties", to.cuFileDriverGetProperties, why) &&
      find(library, "cuFileHandleRegister", to.cuFileHandleRegister, why) &&
      find(library, "cuFileHandleDeregister", to.cuFileHandleDeregister, why) &&
      find(library, "cuFileBufRegister", to.cuFileBufRegister, why) &&
      find(library, "cuFileBufDeregister", to.cuFileBufDeregister, why) &&
      find(library, "cuFileRead", to.cuFileRead, why) && find(library, "cuFileWrite", to.cuFileWrite, why);
}

// CUfileDrvProps_t. The later fields differ among releases, so they are only reserved space here.
struct Properties {
  unsigned major, minor;  // version of nvidia-fs; 0 if it is not loaded
  size_t poll_size, direct_size;
  unsigned file_systems, control, features;
  char more[256];
};
constexpr unsigned kP2P = 1u << 4;  // a feature flag: disks reach the GPU without nvidia-fs

const char* error_meaning(int code) {
  switch (code) {
    case 5001: return "its driver cannot be opened";
    case 5004: return "nvidia-fs has another version than cuFile needs";
    case 5005: return "the version of nvidia-fs cannot be read";
    case 5007: return "this platform is not supported";
    case 5008: return "this file system is not supported";
    case 5009: return "this GPU is not supported";
    case 5010: return "nvidia-fs has failed";
    case 5012: return "the memory is not the GPU's";
    case 5018: return "this kind of file is not supported";
    case 5020: return "the file is not open for direct I/O";
    case 5023: return "the memory is registered already";
    case 5024: return "the memory is not registered";
    case 5025: return "permission denied";
    case 5027: return "the file is not registered";
    case 5030: return "internal error";
    case 5036: return "the GPU's memory cannot be pinned";
    default: return "";
  }
}

std::string describe_cufile(const char* call, int code) {
  const char* const text = error_meaning(code);
  return std::string(call) + ": cuFile's error " + std::to_string(code) + (*text ? ", " : "") + text;
}

void* open_first(const char* paths, std::string& why) {
  void* found = dlopen("libcufile.so.0", RTLD_NOW);
  if (found == nullptr) why = dlerror();
  std::string left = paths;
  while (found == nullptr && !left.empty()) {
    const size_t end = left.find(':');
    const std::string path = left.substr(0, end);
    left = end == std::string::npos ? "" : left.substr(end + 1);
    found = dlopen(path.c_str(), RTLD_NOW);
    if (found == nullptr) why = dlerror();
  }
  return found;
}

// Opens cuFile. Returns null and sets `why` on failure.
CuFile* open_cufile(const char* paths, const Driver& driver, std::string& why) {
  void* const library = open_first(paths, why);
  if (library == nullptr) return nullptr;
  CuFile made{};
  Dl_info place{};
  if (!fill(library, made, why)) return nullptr;
  if (dladdr(reinterpret_cast<void*>(made.cuFileRead), &place) != 0) made.about = place.dli_fname;
  const Status status = made.cuFileDriverOpen();
  if (status.code != 0 && status.code != 5026) {  // 5026: already opened by other code in the process
    why = describe(driver, "cuFileDriverOpen", status);
    return nullptr;
  }
  Properties found{};
  const Status asked = made.cuFileDriverGetProperties(&found);
  if (asked.code != 0) {
    why = describe(driver, "cuFileDriverGetProperties", asked);
    return nullptr;
  }
  made.direct = found.major != 0 || (found.features & kP2P) != 0;
  if (found.major != 0) {
    made.about += ", nvidia-fs " + std::to_string(found.major) + "." + std::to_string(found.minor);
  } else {
    made.about += made.direct ? ", PCI peer-to-peer" : ", compatibility mode: nvidia-fs is not loaded";
  }
  return new CuFile(made);  // never closed: other code in the process may use it
}

}  // namespace

const Driver* Driver::open(std::string& why) {
  static std::string& reason = *new std::string;
  static const Driver* const found = []() -> const Driver* {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      reason = std::string("CUDA's driver cannot be opened: ") + dlerror();
      return nullptr;
    }
    Driver made{};
    if (!fill(library, made, reason)) {
      reason = "CUDA's driver cannot be used: " + reason;
      return nullptr;
    }
    if (const int error = made.cuInit(0); error != 0) {
      reason = made.describe("cuInit", error);
      return nullptr;
    }
    return new Driver(made);
  }();
  if (found == nullptr) why = reason;
  return found;
}

std::string Driver::describe(const char* call, int error) const {
  const char* text = nullptr;
  if (cuGetErrorString(error, &text) != 0 || text == nullptr) text = "unknown error";
  return std::string(call) + ": CUDA's error " + std::to_string(error) + ", " + text;
}

bool Driver::enter(int device, std::string& why) const {
  static std::mutex& lock = *new std::mutex;
  static auto& contexts = *new std::map<int, void*>;  // never released, as in torch
  const std::lock_guard<std::mutex> guard(lock);
  void*& context = contexts[device];
  int handle = 0;
  if (context == nullptr) {
    int error = cuDeviceGet(&handle, device);
    if (error == 0) error = cuDevicePrimaryCtxRetain(&context, handle);
    if (error != 0) {
      context = nullptr;
      why = describe("cuDevicePrimaryCtxRetain", error);
      return false;
    }
  }
  const int error = cuCtxSetCurrent(context);
  if (error != 0) why = describe("cuCtxSetCurrent", error);
  return error == 0;
}

const CuFile* CuFile::open(const char* paths, std::string& why) {
  static std::mutex& lock = *new std::mutex;
  static const CuFile* found = nullptr;
  const Driver* const driver = Driver::open(why);
  if (driver == nullptr) return nullptr;
  const std::lock_guard<std::mutex> guard(lock);
  if (found == nullptr) found = open_cufile(paths, *driver, why);
  return found;
}

std::string describe(const Driver& driver, const char* call, Status status) {
  return status.code == kCudaError ? driver.describe(call, status.cuda) : describe_cufile(call, status.code);
}

std::string describe(const char* call, ssize_t result, int error) {
  if (result == -1) return std::string(call) + ": " + strerror(error);
  return describe_cufile(call, static_cast<int>(-result));
}

}  // namespace gds

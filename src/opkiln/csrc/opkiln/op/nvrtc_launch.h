// opk::launch through CUDA's driver, for device code that NVRTC compiled. Such a library holds a fat binary
// and no CUDA runtime. The address of a kernel is the address of its record, which
// opkiln/machine/nvrtc/program.py writes.
#pragma once

OPK_NAMESPACE_BEGIN

namespace driver {

struct Binary {
  const void* image;
  void* library;  // a CUlibrary; null until it is loaded
};

struct Kernel {
  uint64_t mark;
  const char* name;
  Binary* binary;
  void* handle;  // a CUkernel for all devices; null until it is looked up
};
constexpr uint64_t kMark = 0x316c6e6b696b706f;

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
struct Attribute {
  enum : int32_t { kCooperative = 2, kClusterDimension = 4, kProgrammaticSerialization = 6 };
  int32_t id;
  int32_t unused;
  union {
    uint32_t words[16];
    uint64_t aligned;
  };
};
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "as in cuda.h");

// Of CUfunction_attribute, and of CUdevice_attribute.
enum : int { kMaxThreads = 0, kStaticShared = 1, kPtxVersion = 5, kBinaryVersion = 6, kMaxDynamicShared = 8, kNonPortableClusters = 14 };
enum : int { kMostSharedOfBlock = 97 };

struct Functions {
  int (*cuGetErrorString)(int, const char**);
  int (*cuCtxGetCurrent)(void**);
  int (*cuCtxSetCurrent)(void*);
  int (*cuDeviceGetAttribute)(int*, int, int);
  int (*cuDevicePrimaryCtxRetain)(void**, int);
  int (*cuLibraryLoadData)(void**, const void*, int*, void**, unsigned, int*, void**, unsigned);
  int (*cuLibraryUnload)(void*);
  int (*cuLibraryGetKernel)(void**, void*, const char*);
  int (*cuKernelGetAttribute)(int*, int, void*, int);
  int (*cuKernelSetAttribute)(int, int, void*, int);
  int (*cuLaunchKernelEx)(const Config*, void*, void**, void**);
};

template <class F>
void look_up(void* library, const char* name, F*& function) {
  void* const found = dlsym(library, name);
  OPK_CHECK(found, "launch: CUDA's driver has no ", name, ": it is older than CUDA 12");
  function = reinterpret_cast<F*>(found);
}

[[gnu::noinline]] inline const Functions& functions() {
  static const Functions found = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    OPK_CHECK(library, "launch: CUDA's driver cannot be opened: ", dlerror());
    Functions table;
#define OPK_LOOK_UP(name) look_up(library, #name, table.name)
    OPK_LOOK_UP(cuGetErrorString);
    OPK_LOOK_UP(cuCtxGetCurrent);
    OPK_LOOK_UP(cuCtxSetCurrent);
    OPK_LOOK_UP(cuDeviceGetAttribute);
    OPK_LOOK_UP(cuDevicePrimaryCtxRetain);
    OPK_LOOK_UP(cuLibraryLoadData);
    OPK_LOOK_UP(cuLibraryUnload);
    OPK_LOOK_UP(cuLibraryGetKernel);
    OPK_LOOK_UP(cuKernelGetAttribute);
    OPK_LOOK_UP(cuKernelSetAttribute);
    OPK_LOOK_UP(cuLaunchKernelEx);
#undef OPK_LOOK_UP
    return table;
  }();
  return found;
}

inline const char* error_text(int error) {
  const char* words = nullptr;
  functions().cuGetErrorString(error, &words);
  return words ? words : "unknown error";
}

// The driver launches in the thread's current context. CUDA's runtime sets the device's primary context in
// each thread that calls it, but a thread of torch's may not have called it yet.
inline int enter_context(int32_t device) {
  const Functions& cuda = functions();
  void* context = nullptr;
  int error = cuda.cuCtxGetCurrent(&context);
  if (error != 0 || context) return error;
  // never released: torch holds it until the process ends, too
  error = cuda.cuDevicePrimaryCtxRetain(&context, device);
  return error != 0 ? error : cuda.cuCtxSetCurrent(context);
}

// The kernel's handle on the current device. Threads may race here: all of them find the same handle.
[[gnu::noinline]] inline int find_kernel(Kernel& kernel, int32_t* device, void** handle) {
  OPK_CHECK(kernel.mark == kMark, "launch: this is not the address of a kernel of the op's sources");
  OPK_TORCH(aoti_torch_get_current_device_index, device);
  if (const int error = enter_context(*device)) return error;
  *handle = __atomic_load_n(&kernel.handle, __ATOMIC_ACQUIRE);
  if (*handle) return 0;
  const Functions& cuda = functions();
  void* library = __atomic_load_n(&kernel.binary->library, __ATOMIC_ACQUIRE);
  if (!library) {
    const int error =
        cuda.cuLibraryLoadData(&library, kernel.binary->image, nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (error != 0) return error;
    void* first = nullptr;
    if (!__atomic_compare_exchange_n(&kernel.binary->library, &first, library, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
      cuda.cuLibraryUnload(library);
      library = first;
    }
  }
  const int error = cuda.cuLibraryGetKernel(handle, library, kernel.name);
  if (error == 0) __atomic_store_n(&kernel.handle, *handle, __ATOMIC_RELEASE);
  return error;
}

// As in cuda_launch.h.
[[gnu::noinline]] inline int capability_of(void* handle, int32_t device) {
  static NumberCache known;
  int answer = known.find(handle, device);
  if (answer < 0) {
    const Functions& cuda = functions();
    int threads = 0, ptx = 0, binary = 0;
    const bool found = cuda.cuKernelGetAttribute(&threads, kMaxThreads, handle, device) == 0 && threads > 1 &&
        cuda.cuKernelGetAttribute(&ptx, kPtxVersion, handle, device) == 0 &&
        cuda.cuKernelGetAttribute(&binary, kBinaryVersion, handle, device) == 0;
    answer = !found ? 0 : ptx < binary ? ptx : binary;
    known.add(handle, device, answer);
  }
  return answer;
}

// As in cuda_launch.h.
[[gnu::noinline]] inline size_t most_shared_of(void* handle, int32_t device) {
  static NumberCache known;
  int kib = known.find(handle, device);
  if (kib < 0) {
    const Functions& cuda = functions();
    int fixed = 0, most = 0;
    if (cuda.cuKernelGetAttribute(&fixed, kStaticShared, handle, device) != 0 ||
        cuda.cuDeviceGetAttribute(&most, kMostSharedOfBlock, device) != 0 ||
        cuda.cuKernelSetAttribute(kMaxDynamicShared, most - fixed, handle, device) != 0) {
      return 0;
    }
    kib = most - fixed < (256 << 10) ? (most - fixed) >> 10 : 255;
    known.add(handle, device, kib);
  }
  return static_cast<size_t>(kib) << 10;
}

inline void add_extent(Attribute& attribute, const Extent& extent) {
  attribute.words[0] = extent.x;
  attribute.words[1] = extent.y;
  attribute.words[2] = extent.z;
}

}  // namespace driver

[[gnu::noinline]] inline void launch_record(driver::Kernel& kernel, const Launch& how, void** arguments) {
  using namespace driver;
  const Functions& cuda = functions();
  int32_t device = 0;
  void* handle = nullptr;
  int error = find_kernel(kernel, &device, &handle);
  if (error == 0 && how.shared > 0) most_shared_of(handle, device);  // if it fails, the launch says why
  // above this limit a kernel has to opt in: not every device has such clusters
  if (error == 0 && how.cluster.count() > 8) {
    error = cuda.cuKernelSetAttribute(kNonPortableClusters, 1, handle, device);
  }
  if (error == 0) {
    Attribute attributes[3] = {};
    Config config = {{how.grid.x, how.grid.y, how.grid.z},
                     {how.block.x, how.block.y, how.block.z},
                     static_cast<uint32_t>(how.shared),
                     current_stream(device),
                     attributes,
                     0};
    if (how.cluster.count() > 1) {
      Attribute& each = attributes[config.count++];
      each.id = Attribute::kClusterDimension;
      add_extent(each, how.cluster);
    }
    if (how.cooperative) {
      Attribute& each = attributes[config.count++];
      each.id = Attribute::kCooperative;
      each.words[0] = 1;
    }
    if (how.overlap && capability_of(handle, device) >= 90) {
      Attribute& each = attributes[config.count++];
      each.id = Attribute::kProgrammaticSerialization;
      each.words[0] = 1;
    }
    error = cuda.cuLaunchKernelEx(&config, handle, arguments, nullptr);
  }
  if (error != 0) raise_launch(how, error_text(error));
}

[[gnu::noinline]] inline bool record_runs_as(driver::Kernel& kernel, int capability) {
  using namespace driver;
  int32_t device = 0;
  void* handle = nullptr;
  return find_kernel(kernel, &device, &handle) == 0 && capability_of(handle, device) >= capability;
}

template <class... P>
bool runs_as(void (*kernel)(P...), int capability) {
  return record_runs_as(*reinterpret_cast<driver::Kernel*>(kernel), capability);
}

[[gnu::noinline]] inline size_t most_shared_of_record(driver::Kernel& kernel) {
  int32_t device = 0;
  void* handle = nullptr;
  return driver::find_kernel(kernel, &device, &handle) == 0 ? driver::most_shared_of(handle, device) : 0;
}

template <class... P>
size_t most_shared(void (*kernel)(P...)) {
  return most_shared_of_record(*reinterpret_cast<driver::Kernel*>(kernel));
}

template <class... P>
void launch_kernel(void (*kernel)(P...), const Launch& how, void** arguments) {
  launch_record(*reinterpret_cast<driver::Kernel*>(kernel), how, arguments);
}

OPK_NAMESPACE_END

// Built as libcuda.so.1: CUDA's driver for test_gds.py, on a machine without a GPU. Memory of the "device" is that of
// the host. A copy is made when its stream is waited for, and a call in a thread without a context is refused.
//
// CUDA_STAND_IN_INIT is what cuInit answers. CUDA_STAND_IN_COPIES: so many copies succeed, and the others fail.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kInvalidContext = 201, kIllegalAddress = 700 };

struct stream {
  void* to;
  const void* from;
  size_t size;
};

static __thread void* current;
static int context;

int stand_in_copies;  // for tests to read
int stand_in_memory;  // page-locked buffers that are not freed
int stand_in_streams;

int cuInit(unsigned flags) {
  const char* const answer = getenv("CUDA_STAND_IN_INIT");
  return flags == 0 && answer != NULL ? atoi(answer) : 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void** to, int device) {
  *to = &context;
  return device == 0 ? 0 : 101;
}

int cuCtxSetCurrent(void* to) {
  current = to;
  return 0;
}

int cuMemHostAlloc(void** memory, size_t size, unsigned flags) {
  if (current == NULL) return kInvalidContext;
  if (flags != 1 || posix_memalign(memory, 4096, size) != 0) return 2;
  __atomic_add_fetch(&stand_in_memory, 1, __ATOMIC_SEQ_CST);
  return 0;
}

int cuMemFreeHost(void* memory) {
  if (current == NULL) return kInvalidContext;
  free(memory);
  __atomic_sub_fetch(&stand_in_memory, 1, __ATOMIC_SEQ_CST);
  return 0;
}

int cuStreamCreate(void** stream, unsigned flags) {
  if (current == NULL) return kInvalidContext;
  *stream = calloc(1, sizeof(struct stream));
  __atomic_add_fetch(&stand_in_streams, 1, __ATOMIC_SEQ_CST);
  return flags == 1 && *stream != NULL ? 0 : 1;
}

int cuStreamDestroy_v2(void* stream) {
  free(stream);
  __atomic_sub_fetch(&stand_in_streams, 1, __ATOMIC_SEQ_CST);
  return 0;
}

static int copy(void* to, const void* from, size_t size, struct stream* on) {
  const char* const most = getenv("CUDA_STAND_IN_COPIES");
  if (current == NULL) return kInvalidContext;
  const int count = __atomic_add_fetch(&stand_in_copies, 1, __ATOMIC_SEQ_CST);
  if (most != NULL && count > atoi(most)) return kIllegalAddress;
  const struct stream given = {to, from, size};
  *on = given;
  return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t size, void* stream) {
  return copy((void*)to, from, size, stream);
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t size, void* stream) {
  return copy(to, (const void*)from, size, stream);
}

int cuStreamSynchronize(void* stream) {
  struct stream* const on = stream;
  if (current == NULL) return kInvalidContext;
  if (on->size != 0) memcpy(on->to, on->from, on->size);
  on->size = 0;
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == kIllegalAddress ? "an illegal memory access was encountered"
      : error == kInvalidContext   ? "invalid device context"
      : error == 100               ? "no CUDA-capable device is detected"
                                   : "another error";
  return 0;
}

// Built as libcufile.so.0: cuFile for test_gds.py, on memory of the host.
//
// CUFILE_STAND_IN_OPEN is what cuFileDriverOpen answers, CUFILE_STAND_IN_FILE what cuFileHandleRegister does, both 0 if
// left out. CUFILE_STAND_IN_NVFS is the version of nvidia-fs, 0 for the compatibility mode. CUFILE_STAND_IN_P2P=1 has
// the feature of PCI peer-to-peer. CUFILE_STAND_IN lists what happens to reads and writes, in turn: "all", "part" (half
// of it), "none" (no byte is moved, and cuFile's error 5030), "mess" (other bytes are moved, and EIO). The last stays.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct {
  int code, cuda;
} status;

typedef struct {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* operations;
} descriptor;

typedef struct {
  unsigned major, minor;
  size_t poll_size, direct_size;
  unsigned file_systems, control;
  unsigned features, device_cache, buffer_cache, pinned, batch, timeout;
} properties;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char* next_word;
static const char* memory[8];
static size_t sizes[8];

int stand_in_opened;  // for tests to read: handles that are registered
int stand_in_calls;   // reads and writes
int stand_in_based;   // those of registered memory

void stand_in_begin_anew(void) {  // with the first word of CUFILE_STAND_IN
  next_word = NULL;
  stand_in_calls = stand_in_based = 0;
}

static int number(const char* name) {
  const char* const value = getenv(name);
  return value == NULL ? 0 : atoi(value);
}

static status answer(const char* name) {
  const status made = {number(name), 0};
  return made;
}

status cuFileDriverOpen(void) { return answer("CUFILE_STAND_IN_OPEN"); }

status cuFileDriverGetProperties(properties* to) {
  memset(to, 0, sizeof *to);
  to->major = (unsigned)number("CUFILE_STAND_IN_NVFS");
  to->minor = 24;
  to->features = number("CUFILE_STAND_IN_P2P") ? 1u << 4 : 0;
  return answer("");
}

status cuFileHandleRegister(void** handle, const descriptor* given) {
  const status made = answer("CUFILE_STAND_IN_FILE");
  if (made.code != 0) return made;
  const int flags = fcntl(given->handle.fd, F_GETFL);
  if (given->type != 1 || (flags & O_DIRECT) == 0) {
    const status wrong = {5020, 0};
    return wrong;
  }
  // cuFile moves bytes at any place. So does the page cache.
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", given->handle.fd);
  int* const fd = malloc(sizeof *fd);
  *fd = open(path, (flags & O_ACCMODE) | O_CLOEXEC);
  *handle = fd;
  __atomic_add_fetch(&stand_in_opened, 1, __ATOMIC_SEQ_CST);
  return made;
}

void cuFileHandleDeregister(void* handle) {
  close(*(int*)handle);
  free(handle);
  __atomic_sub_fetch(&stand_in_opened, 1, __ATOMIC_SEQ_CST);
}

status cuFileBufRegister(const void* begin, size_t size, int flags) {
  const status done = {flags, 0}, full = {5023, 0};
  for (int i = 0; i < 8; ++i) {
    if (memory[i] != NULL) continue;
    memory[i] = begin;
    sizes[i] = size;
    return done;
  }
  return full;
}

status cuFileBufDeregister(const void* begin) {
  const status done = {0, 0}, unknown = {5024, 0};
  for (int i = 0; i < 8; ++i) {
    if (memory[i] != begin) continue;
    memory[i] = NULL;
    return done;
  }
  return unknown;
}

// Registered memory is named by where it begins.
static int base_is_wrong(const char* base) {
  for (int i = 0; i < 8; ++i) {
    if (memory[i] == NULL || base < memory[i] || base >= memory[i] + sizes[i]) continue;
    __atomic_add_fetch(&stand_in_based, 1, __ATOMIC_SEQ_CST);
    return base != memory[i];
  }
  return 0;
}

static char fault(void) {
  pthread_mutex_lock(&lock);
  if (next_word == NULL) {
    next_word = getenv("CUFILE_STAND_IN");
    if (next_word == NULL) next_word = "all";
  }
  const char word = next_word[0];
  const char* const comma = strchr(next_word, ',');
  if (comma != NULL) next_word = comma + 1;
  pthread_mutex_unlock(&lock);
  return word;
}

static ssize_t move(int fd, char* base, size_t size, off_t at, off_t in_memory, int writes) {
  __atomic_add_fetch(&stand_in_calls, 1, __ATOMIC_SEQ_CST);
  if (base_is_wrong(base)) return -5012;
  char* const place = base + in_memory;
  switch (fault()) {
    case 'n': return -5030;
    case 'p': size = size / 2 + size % 2; break;
    case 'm':
      if (writes) {
        (void)!pwrite(fd, "mess", size < 4 ? size : 4, at);
      } else {
        memset(place, 'm', size);
      }
      errno = EIO;
      return -1;
    default: break;
  }
  return writes ? pwrite(fd, place, size, at) : pread(fd, place, size, at);
}

ssize_t cuFileRead(void* handle, void* base, size_t size, off_t at, off_t in_memory) {
  return move(*(int*)handle, base, size, at, in_memory, 0);
}

ssize_t cuFileWrite(void* handle, const void* base, size_t size, off_t at, off_t in_memory) {
  return move(*(int*)handle, (char*)base, size, at, in_memory, 1);
}

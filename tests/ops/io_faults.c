// Preloaded: reads and writes that the system does in part, interrupts, or refuses.
//
// IO_FAULTS lists what happens to the calls, in turn: "all", "part" (half of it, at least a byte),
// "intr" (EINTR), "again" (EAGAIN), "full" (ENOSPC). The last word stays.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char* next_word;

static char fault(void) {
  pthread_mutex_lock(&lock);
  if (next_word == NULL) {
    next_word = getenv("IO_FAULTS");
    if (next_word == NULL) next_word = "all";
  }
  const char word = next_word[1] == 'u' ? 'f' : next_word[0] == 'a' ? next_word[1] : next_word[0];
  const char* const comma = strchr(next_word, ',');
  if (comma != NULL) next_word = comma + 1;
  pthread_mutex_unlock(&lock);
  return word;
}

static int refused(size_t* size) {
  switch (fault()) {
    case 'p': *size = *size / 2 + *size % 2; return 0;
    case 'i': errno = EINTR; return 1;
    case 'g': errno = EAGAIN; return 1;
    case 'f': errno = ENOSPC; return 1;
    default: return 0;
  }
}

ssize_t pread(int fd, void* to, size_t size, off_t at) {
  static ssize_t (*real)(int, void*, size_t, off_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pread");
  return refused(&size) ? -1 : real(fd, to, size, at);
}

ssize_t pwrite(int fd, const void* from, size_t size, off_t at) {
  static ssize_t (*real)(int, const void*, size_t, off_t);
  if (real == NULL) real = dlsym(RTLD_NEXT, "pwrite");
  return refused(&size) ? -1 : real(fd, from, size, at);
}

// Preloaded: reads and writes that the system does in part, interrupts, or refuses.
//
// io_faults(words) lists what happens to the calls from now on, in turn: "all", "part" (half of it,
// at least a byte), "intr" (EINTR), "again" (EAGAIN), "full" (ENOSPC). The last word stays. It
// returns how many calls there were since it was called last.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/types.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char words[65536] = "all";
static const char* next_word = words;
static long calls;

long io_faults(const char* list) {
  pthread_mutex_lock(&lock);
  strncpy(words, list, sizeof words - 1);
  next_word = words;
  const long counted = calls;
  calls = 0;
  pthread_mutex_unlock(&lock);
  return counted;
}

static char fault(void) {
  pthread_mutex_lock(&lock);
  calls++;
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

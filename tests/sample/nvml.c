/* A stand-in for the driver's management library, as strict as the real one or stricter.
 *
 * STANDIN_GPUS   uuid|name|capability|bytes|part,part;...   (no parts: no MIG)
 * STANDIN_LOG    a file to which each start and end is appended, with the process's number
 * STANDIN_INIT   what nvmlInit answers instead of success
 * STANDIN_LOST   the index of a GPU that has fallen off the bus
 *
 * Every question outside of init and shutdown fails, and so does every one in a child of the
 * process that made the init: whoever leaves it initialised cannot be asked again after a fork.
 * OLD leaves out what a driver of 2018 has not got.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID, UNSUPPORTED, NOT_FOUND = 6, SMALL, GPU_IS_LOST = 15 };

typedef struct {
  char uuid[96], name[96];
  int major, minor, parts;
  unsigned long long bytes;
} Gpu;
typedef struct {
  unsigned long long total, free, used;
} Memory;

static Gpu gpus[80]; /* a GPU, then its parts */
static int first[8], count, depth, owner;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void note(const char *what) {
  const char *path = getenv("STANDIN_LOG");
  FILE *file = path ? fopen(path, "a") : NULL;
  if (file) {
    fprintf(file, "%s %d\n", what, (int)getpid());
    fclose(file);
  }
}

static void describe(void) {
  char text[4096], *rest = text, *one;
  const char *given = getenv("STANDIN_GPUS");
  int place = 0;
  count = 0;
  snprintf(text, sizeof text, "%s", given ? given : "");
  while ((one = strsep(&rest, ";")) && *one) {
    char *uuid = strsep(&one, "|"), *name = strsep(&one, "|"), *version = strsep(&one, "|");
    char *bytes = strsep(&one, "|"), *parts = strsep(&one, "|"), *part;
    Gpu *gpu = &gpus[first[count++] = place++];
    memset(gpu, 0, sizeof *gpu);
    snprintf(gpu->uuid, sizeof gpu->uuid, "%s", uuid);
    snprintf(gpu->name, sizeof gpu->name, "%s", name);
    sscanf(version, "%d.%d", &gpu->major, &gpu->minor);
    gpu->bytes = strtoull(bytes, NULL, 10);
    while (parts && *parts && (part = strsep(&parts, ","))) {
      memset(&gpus[place], 0, sizeof *gpus);
      snprintf(gpus[place++].uuid, sizeof gpus->uuid, "%s", part);
      gpu->parts++;
    }
  }
}

static int ready(void) { return depth > 0 && owner == getpid() ? SUCCESS : UNINITIALIZED; }

static int copy(char *to, unsigned size, const char *from) {
  if (ready()) return UNINITIALIZED;
  if (size <= strlen(from)) return SMALL;
  strcpy(to, from);
  return SUCCESS;
}

int nvmlInit_v2(void) {
  const char *refusal = getenv("STANDIN_INIT");
  if (refusal) return atoi(refusal);
  pthread_mutex_lock(&lock);
  if (depth++ == 0) {
    owner = getpid();
    describe();
  }
  note("init");
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

int nvmlShutdown(void) {
  if (ready()) return UNINITIALIZED;
  pthread_mutex_lock(&lock);
  depth--;
  note("shutdown");
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

const char *nvmlErrorString(int code) {
  switch (code) {
    case 4: return "Insufficient Permissions";
    case GPU_IS_LOST: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}

int nvmlSystemGetDriverVersion(char *to, unsigned size) { return copy(to, size, "580.65.06"); }

int nvmlDeviceGetCount_v2(unsigned *to) {
  *to = count;
  return ready();
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **to) {
  const char *lost = getenv("STANDIN_LOST");
  if (index >= (unsigned)count) return INVALID;
  if (lost && (unsigned)atoi(lost) == index) return GPU_IS_LOST;
  *to = &gpus[first[index]];
  return ready();
}

int nvmlDeviceGetUUID(Gpu *gpu, char *to, unsigned size) { return copy(to, size, gpu->uuid); }
int nvmlDeviceGetName(Gpu *gpu, char *to, unsigned size) { return copy(to, size, gpu->name); }

int nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor) {
  *major = gpu->major;
  *minor = gpu->minor;
  return ready();
}

int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *to) {
  if (!gpu->bytes) return UNSUPPORTED;
  to->total = gpu->bytes;
  to->used = gpu->bytes / 2;
  to->free = gpu->bytes - to->used;
  return ready();
}

#ifndef OLD
int nvmlSystemGetCudaDriverVersion_v2(int *to) {
  *to = 13020;
  return ready();
}

int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *to) {
  *to = gpu->parts ? 7 : 0;
  return ready();
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **to) {
  if (index >= (unsigned)gpu->parts) return NOT_FOUND;
  *to = gpu + 1 + index;
  return ready();
}
#endif

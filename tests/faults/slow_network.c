/* Preloaded: the directory $NETWORK_ROOT behaves as a network file system at its worst.
 *
 * - An entry that was renamed into place cannot be seen for $NETWORK_HIDE_MS, not even by the one
 *   who renamed it: to open or stat anything in it is ENOENT. A rename onto it fails all the same.
 * - The first time a process opens, creates, lists, renames or links one of some paths, chosen by a
 *   hash, the answer is ESTALE; the next time it works.
 *
 * An entry is a directory with a manifest.json; its change time is the time of the rename. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static int below_root(const char *path) {
    const char *root = getenv("NETWORK_ROOT");
    size_t length = root ? strlen(root) : 0;
    return length && path && strncmp(path, root, length) == 0 && path[length] == '/';
}

static int raw_stat(const char *path, struct statx *out) {
    return (int)syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, out);
}

/* Whether a path is, or is in, an entry that was published a moment ago. */
static int hidden(const char *path) {
    const char *text = getenv("NETWORK_HIDE_MS");
    long limit = text ? atol(text) : 0;
    if (!limit || !below_root(path) || strlen(path) > PATH_MAX - 32) return 0;
    char directory[PATH_MAX], manifest[PATH_MAX];
    strcpy(directory, path);
    for (int level = 0; level < 2; ++level) {
        struct statx found;
        snprintf(manifest, sizeof manifest, "%.4000s/manifest.json", directory);
        if (!strstr(directory, "/staging/") && raw_stat(manifest, &found) == 0 &&
            raw_stat(directory, &found) == 0) {
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            long age = (now.tv_sec - found.stx_ctime.tv_sec) * 1000L +
                       (now.tv_nsec - (long)found.stx_ctime.tv_nsec) / 1000000L;
            if (age < limit) return 1;
        }
        char *slash = strrchr(directory, '/');
        if (!slash || slash == directory) break;
        *slash = 0;
    }
    return 0;
}

/* Whether this process gets ESTALE for this path, now and never again. */
static int stale(const char *path) {
    static uint64_t seen[4096];
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (!getenv("NETWORK_STALE") || !below_root(path)) return 0;
    uint64_t hash = 1469598103934665603ULL ^ (uint64_t)getpid();
    for (const char *at = path; *at; ++at) hash = (hash ^ (unsigned char)*at) * 1099511628211ULL;
    hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdULL;  /* similar paths fall apart */
    hash ^= hash >> 33;
    if (hash % 16 != 0) return 0;
    pthread_mutex_lock(&lock);
    size_t slot = (hash >> 4) % 4096;
    while (seen[slot] != 0 && seen[slot] != hash) slot = (slot + 1) % 4096;  /* another path's */
    int first = seen[slot] != hash;
    seen[slot] = hash;
    pthread_mutex_unlock(&lock);
    return first;
}

static int refused(const char *path) {
    if (hidden(path)) {
        errno = ENOENT;
        return 1;
    }
    if (stale(path)) {
        errno = ESTALE;
        return 1;
    }
    return 0;
}

#define OPEN(name)                                                   \
    int name(const char *path, int flags, ...) {                     \
        va_list list;                                                \
        va_start(list, flags);                                       \
        int mode = va_arg(list, int);                                \
        va_end(list);                                                \
        if (refused(path)) return -1;                                \
        return REAL(name)(path, flags, mode);                        \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                 \
    int name(int at, const char *path, int flags, ...) {             \
        va_list list;                                                \
        va_start(list, flags);                                       \
        int mode = va_arg(list, int);                                \
        va_end(list);                                                \
        if (refused(path)) return -1;                                \
        return REAL(name)(at, path, flags, mode);                    \
    }
OPENAT(openat)
OPENAT(openat64)

#define STAT(name, type)                                             \
    int name(const char *path, struct type *out) {                   \
        if (hidden(path)) {                                          \
            errno = ENOENT;                                          \
            return -1;                                               \
        }                                                            \
        return REAL(name)(path, out);                                \
    }
STAT(stat, stat)
STAT(lstat, stat)
STAT(stat64, stat64)
STAT(lstat64, stat64)

DIR *opendir(const char *path) { return refused(path) ? NULL : REAL(opendir)(path); }

int rename(const char *from, const char *to) {
    if (stale(to)) {
        errno = ESTALE;
        return -1;
    }
    return REAL(rename)(from, to);
}

int link(const char *from, const char *to) {
    if (stale(to)) {
        errno = ESTALE;
        return -1;
    }
    return REAL(link)(from, to);
}

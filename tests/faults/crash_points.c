/* Preloaded: ends the process, as SIGKILL does, at the n-th call that changes something below one of
 * the directories in CRASH_BELOW (separated by colons). `crash_arm(n, log)` sets n, counted from 1,
 * and begins the count; 0 counts alone. A write counts twice: before it, and when half of it is
 * done. With a log (a file descriptor) each call is noted there: its name, a blank, the path or
 * paths. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_int armed, calls;
static int stop_at, log_fd = -1;

void crash_arm(int n, int log) {
    stop_at = n;
    log_fd = log;
    atomic_store(&calls, 0);
    atomic_store(&armed, 1);
}

int crash_calls(void) { return atomic_load(&calls); }

static void *real_of(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) abort();
    return found;
}

/* Where a path leads, as far as names tell. */
static void resolve(int directory, const char *path, char *out) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char link[64], base[PATH_MAX / 2];
    if (directory == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, base, sizeof base - 1);
    base[length > 0 ? length : 0] = 0;
    if (path[0])
        snprintf(out, PATH_MAX, "%s/%.2000s", base, path);
    else
        snprintf(out, PATH_MAX, "%s", base);
}

static int below(const char *path) {
    const char *each = getenv("CRASH_BELOW");
    while (each && *each) {
        const char *end = strchrnul(each, ':');
        size_t length = (size_t)(end - each);
        if (strncmp(path, each, length) == 0 && (path[length] == '/' || path[length] == 0)) return 1;
        each = *end ? end + 1 : end;
    }
    return 0;
}

static void point(const char *name, const char *path, const char *other) {
    if (log_fd >= 0) {
        char line[2 * PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%s %s%s%s\n", name, path, *other ? " " : "", other);
        if (syscall(SYS_write, log_fd, line, (size_t)length) != length) abort();
    }
    if (atomic_fetch_add(&calls, 1) + 1 == stop_at) syscall(SYS_kill, getpid(), SIGKILL);
}

static void at(const char *name, int directory, const char *path) {
    char full[PATH_MAX];
    if (!atomic_load(&armed) || !path) return;
    resolve(directory, path, full);
    if (below(full)) point(name, full, "");
}

static void between(const char *name, int from, const char *path, int to, const char *other) {
    char first[PATH_MAX], second[PATH_MAX];
    if (!atomic_load(&armed) || !path || !other) return;
    resolve(from, path, first);
    resolve(to, other, second);
    if (below(first) || below(second)) point(name, first, second);
}

/* The calls. */

#define CREATES(flags) ((flags) & (O_CREAT | O_TRUNC))

static mode_t mode_of(int flags, va_list list) {
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(list, mode_t) : 0;
}

#define OPEN(NAME)                                                        \
    int NAME(const char *path, int flags, ...) {                          \
        static int (*real)(const char *, int, ...);                       \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        mode_t mode = mode_of(flags, list);                               \
        va_end(list);                                                     \
        if (!real) real = (int (*)(const char *, int, ...))real_of(#NAME); \
        if (CREATES(flags)) at("open", AT_FDCWD, path);                   \
        return real(path, flags, mode);                                   \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(NAME)                                                           \
    int NAME(int directory, const char *path, int flags, ...) {                \
        static int (*real)(int, const char *, int, ...);                       \
        va_list list;                                                          \
        va_start(list, flags);                                                 \
        mode_t mode = mode_of(flags, list);                                    \
        va_end(list);                                                          \
        if (!real) real = (int (*)(int, const char *, int, ...))real_of(#NAME); \
        if (CREATES(flags)) at("open", directory, path);                       \
        return real(directory, path, flags, mode);                             \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t))real_of("write");
    at("write", fd, "");
    if (size > 1 && atomic_load(&armed) && atomic_load(&calls) + 1 == stop_at) {
        char path[PATH_MAX];
        resolve(fd, "", path);
        if (below(path) && real(fd, data, size / 2) < 0) abort();
    }
    at("half-written", fd, "");
    return real(fd, data, size);
}

#define WRAP(RESULT, NAME, PARAMETERS, ARGUMENTS, POINT) \
    RESULT NAME PARAMETERS {                             \
        static RESULT(*real) PARAMETERS;                 \
        if (!real) real = (RESULT(*) PARAMETERS)real_of(#NAME); \
        POINT;                                           \
        return real ARGUMENTS;                           \
    }

WRAP(ssize_t, pwrite64, (int fd, const void *d, size_t n, off64_t o), (fd, d, n, o), at("pwrite", fd, ""))
WRAP(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), at("writev", fd, ""))
WRAP(ssize_t, sendfile64, (int to, int from, off64_t *o, size_t n), (to, from, o, n), at("sendfile", to, ""))
WRAP(ssize_t, copy_file_range, (int a, off64_t *b, int to, off64_t *d, size_t n, unsigned f), (a, b, to, d, n, f),
     at("copy_file_range", to, ""))
WRAP(int, fsync, (int fd), (fd), at("fsync", fd, ""))
WRAP(int, fdatasync, (int fd), (fd), at("fsync", fd, ""))
WRAP(int, ftruncate64, (int fd, off64_t n), (fd, n), at("ftruncate", fd, ""))
WRAP(int, truncate64, (const char *p, off64_t n), (p, n), at("truncate", AT_FDCWD, p))
WRAP(int, fchmod, (int fd, mode_t m), (fd, m), at("chmod", fd, ""))
WRAP(int, chmod, (const char *p, mode_t m), (p, m), at("chmod", AT_FDCWD, p))
WRAP(int, fchmodat, (int d, const char *p, mode_t m, int f), (d, p, m, f), at("chmod", d, p))
WRAP(int, futimens, (int fd, const struct timespec t[2]), (fd, t), at("utime", fd, ""))
WRAP(int, utimensat, (int d, const char *p, const struct timespec t[2], int f), (d, p, t, f), at("utime", d, p))
WRAP(int, mkdir, (const char *p, mode_t m), (p, m), at("mkdir", AT_FDCWD, p))
WRAP(int, mkdirat, (int d, const char *p, mode_t m), (d, p, m), at("mkdir", d, p))
WRAP(int, rmdir, (const char *p), (p), at("rmdir", AT_FDCWD, p))
WRAP(int, unlink, (const char *p), (p), at("unlink", AT_FDCWD, p))
WRAP(int, unlinkat, (int d, const char *p, int f), (d, p, f), at(f & AT_REMOVEDIR ? "rmdir" : "unlink", d, p))
WRAP(int, rename, (const char *p, const char *q), (p, q), between("rename", AT_FDCWD, p, AT_FDCWD, q))
WRAP(int, renameat, (int d, const char *p, int e, const char *q), (d, p, e, q), between("rename", d, p, e, q))
WRAP(int, renameat2, (int d, const char *p, int e, const char *q, unsigned f), (d, p, e, q, f),
     between("rename", d, p, e, q))
WRAP(int, link, (const char *p, const char *q), (p, q), between("link", AT_FDCWD, p, AT_FDCWD, q))
WRAP(int, linkat, (int d, const char *p, int e, const char *q, int f), (d, p, e, q, f), between("link", d, p, e, q))
WRAP(int, symlink, (const char *p, const char *q), (p, q), at("symlink", AT_FDCWD, q))
WRAP(int, symlinkat, (const char *p, int d, const char *q), (p, d, q), at("symlink", d, q))

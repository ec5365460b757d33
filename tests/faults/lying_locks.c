/* Preloaded: file locks fail with ENOLCK (LOCKS=missing) or always succeed (LOCKS=lying), as on
 * network file systems without a lock manager, or mounted with `nolock`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

static int pretend(void) {
    const char *mode = getenv("LOCKS");
    if (mode && strcmp(mode, "missing") == 0) {
        errno = ENOLCK;
        return -1;
    }
    return 0;
}

static int is_lock(int command) {
    return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK ||
           command == F_OFD_SETLKW;
}

int fcntl64(int fd, int command, ...) {
    static int (*real)(int, int, ...);
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (is_lock(command)) return pretend();
    if (!real) real = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64");
    return real(fd, command, argument);
}

int fcntl(int fd, int command, ...) {
    static int (*real)(int, int, ...);
    va_list list;
    va_start(list, command);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (is_lock(command)) return pretend();
    if (!real) real = (int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl");
    return real(fd, command, argument);
}

int flock(int fd, int operation) {
    (void)fd;
    (void)operation;
    return pretend();
}

int lockf(int fd, int command, off_t length) {
    (void)fd;
    (void)command;
    (void)length;
    return pretend();
}

int lockf64(int fd, int command, off64_t length) {
    (void)fd;
    (void)command;
    (void)length;
    return pretend();
}

// Looks at each path in one of the ways that the C library has: "ways NUMBER PATH...". Several paths have a process each.
// Ends with 3 after the last way.
// What it finds does not matter; that it was looked for does.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <fts.h>
#include <ftw.h>
#include <glob.h>
#include <libgen.h>
#include <limits.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <wordexp.h>

extern char** environ;

static int each(const char* path, const struct stat* found, int kind) { (void)path, (void)found, (void)kind; return 0; }
static int each_too(const char* path, const struct stat* found, int kind, struct FTW* place) { (void)place; return each(path, found, kind); }

static int look(int way, const char* path) {
  char text[PATH_MAX], *words[] = {(char*)path, NULL};
  char *directory = strdup(path), *name = strdup(path);
  directory = dirname(directory), name = basename(name);
  struct stat s;
  struct statx x;
  struct statfs f;
  struct statvfs v;
  struct dirent** list;
  glob_t g = {0};
  wordexp_t w = {0};
  pid_t child;
  union { struct file_handle h; char room[200]; } handle = {.h.handle_bytes = 128};
  int mount, at = open(directory, O_PATH | O_DIRECTORY);
  switch (way) {
    case 0: open(path, O_RDONLY); break;
    case 1: openat(at, name, O_RDONLY); break;
    case 2: fopen(path, "r"); break;
    case 3: freopen(path, "r", stdin); break;
    case 4: open(path, O_RDWR); break;
    case 5: open(path, O_WRONLY | O_APPEND); break;
    case 6: fopen(path, "r+"); break;
    case 7: stat(path, &s); break;
    case 8: lstat(path, &s); break;
    case 9: fstatat(at, name, &s, 0); break;
    case 10: statx(at, name, 0, STATX_ALL, &x); break;
    case 11: access(path, R_OK); break;
    case 12: faccessat(at, name, X_OK, AT_EACCESS); break;
    case 13: euidaccess(path, R_OK); break;
    case 14: readlink(path, text, sizeof text); break;
    case 15: readlinkat(at, name, text, sizeof text); break;
    case 16: realpath(path, text); break;
    case 17: canonicalize_file_name(path); break;
    case 18: opendir(path); break;
    case 19: { DIR* d = opendir(path); if (d) readdir(d); break; }
    case 20: scandir(path, &list, NULL, alphasort); break;
    case 21: { const int fd = open(path, O_RDONLY | O_DIRECTORY); DIR* d = fd < 0 ? NULL : fdopendir(fd); if (d) readdir(d); break; }
    case 22: { const int fd = open(path, O_RDONLY | O_DIRECTORY); if (fd >= 0) getdents64(fd, text, sizeof text); break; }
    case 23: glob(path, 0, NULL, &g); break;
    case 24: snprintf(text, sizeof text, "%s/*", path); glob(text, 0, NULL, &g); break;
    case 25: ftw(path, each, 4); break;
    case 26: nftw(path, each_too, 4, FTW_PHYS); break;
    case 27: { char* roots[] = {(char*)path, NULL}; FTS* t = fts_open(roots, FTS_PHYSICAL, NULL); while (t && fts_read(t)) {} break; }
    case 28: wordexp(path, &w, WRDE_NOCMD); break;
    case 29: if (chdir(path) == 0) open("something", O_RDONLY); break;
    case 30: { const int fd = open(path, O_RDONLY | O_DIRECTORY); if (fd >= 0 && fchdir(fd) == 0) stat("something", &s); break; }
    case 31: statfs(path, &f); break;
    case 32: statvfs(path, &v); break;
    case 33: pathconf(path, _PC_NAME_MAX); break;
    case 34: getxattr(path, "user.some", text, sizeof text); break;
    case 35: lgetxattr(path, "user.some", text, sizeof text); break;
    case 36: name_to_handle_at(at, name, &handle.h, &mount, 0); break;
    case 37: inotify_add_watch(inotify_init(), path, IN_MODIFY); break;
    case 38: execv(path, words); break;
    case 39: execve(path, words, environ); break;
    case 40: execvp(path, words); break;
    case 41: execl(path, path, NULL); break;
    case 42: if (posix_spawn(&child, path, NULL, NULL, words, environ) == 0) waitpid(child, NULL, 0); break;
    case 43: if (posix_spawnp(&child, path, NULL, NULL, words, environ) == 0) waitpid(child, NULL, 0); break;
    case 44: if ((child = vfork()) == 0) { execv(path, words); _exit(1); } waitpid(child, NULL, 0); break;
    case 45: snprintf(text, sizeof text, "test -e '%s'", path); if (system(text)) {} break;
    case 46: { snprintf(text, sizeof text, "cat '%s' 2>&1", path); FILE* p = popen(text, "r"); if (p && pclose(p)) {} break; }
    case 47: dlopen(path, RTLD_LAZY); break;
    case 48: open(path, O_RDONLY | O_NOFOLLOW); break;
    case 49: syscall(SYS_openat, AT_FDCWD, path, O_RDONLY); break;
    case 50: eaccess(path, F_OK); break;
    case 51: fopen(path, "a+"); break;
    case 52: open64(path, O_RDONLY); break;
    case 53: { const int fd = open(path, O_PATH); snprintf(text, sizeof text, "/proc/self/fd/%d", fd); open(text, O_RDONLY); break; }
    // By the numbers of system calls.
    case 54: syscall(SYS_faccessat, AT_FDCWD, path, F_OK, 0); break;
#ifdef SYS_newfstatat
    case 55: syscall(SYS_newfstatat, AT_FDCWD, path, &s, 0); break;
    case 56: syscall(SYS_newfstatat, AT_FDCWD, path, &s, AT_SYMLINK_NOFOLLOW); break;
#else
    case 55: case 56: break;
#endif
    case 57: syscall(SYS_statx, AT_FDCWD, path, 0, STATX_BASIC_STATS, &x); break;
    case 58: syscall(SYS_readlinkat, AT_FDCWD, path, text, sizeof text); break;
    case 59: syscall(SYS_getdents64, open(path, O_RDONLY), text, sizeof text); break;
    case 60: if (syscall(SYS_chdir, path)) {} break;
    case 61: syscall(SYS_statfs, path, text); break;
    case 62: syscall(SYS_getxattr, path, "user.a", text, sizeof text); break;
#ifdef SYS_open
    case 63: syscall(SYS_open, path, O_RDONLY); break;
    case 64: syscall(SYS_stat, path, &s); break;
    case 65: syscall(SYS_lstat, path, &s); break;
    case 66: syscall(SYS_access, path, F_OK); break;
    case 67: syscall(SYS_readlink, path, text, sizeof text); break;
#else
    case 63: case 64: case 65: case 66: case 67: break;
#endif
    default: return 3;
  }
  return 0;
}

int main(int count, char** given) {
  if (count < 3) return 2;
  if (count == 3) return look(atoi(given[1]), given[2]);
  int status, ended = 0;
  for (int each = 2; each < count; each++) {
    const pid_t child = fork();
    if (child == 0) return look(atoi(given[1]), given[each]);
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 4;
    if (WEXITSTATUS(status)) ended = WEXITSTATUS(status);
  }
  return ended;
}

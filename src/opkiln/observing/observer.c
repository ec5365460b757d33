// Preloaded into the compilers and linkers that opkiln starts. Logs what they read, what they look
// for in vain, what they write and which programs they start. observing/log.py reads the log.
//
// A record is "KIND PID A B SIZE CTIME PATH\0".
// B is the parent of process PID, but for R and N. KIND is one of:
//   B  a program began. PATH is its file; A is its parent's process.
//   S  process A is about to run another program; F: it could not, and goes on as it was.
//   R  PATH was opened for reading; A:B is its device and inode, then its size and change time, of
//      the descriptor itself: the name may lead elsewhere by the time the log is read. Or a program
//      asked where PATH leads, which is a file.
//   W  PATH was opened for writing, made, renamed to or removed.
//   N  PATH was looked for and does not exist.
//   X  a record was lost: the log is not complete.
//
// Each record is one write to a file opened for appending, so those of parallel processes do not mix.
// Nothing is allocated: some of this runs between vfork and exec.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RECORD = 3 * PATH_MAX };

static char log_path[PATH_MAX];
static int log_fd = -1;
static dev_t log_device;
static ino_t log_inode;

// The program may have closed our descriptor and got its number for a file of its own.
static int still_ours(void) {
  struct stat found;
  return log_fd >= 0 && fstat(log_fd, &found) == 0 && found.st_dev == log_device &&
         found.st_ino == log_inode;
}

static void open_log(void) {
  const int fd = syscall(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return;
  // A high number: shells and build tools use the low ones by number.
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, 200);
  log_fd = high >= 0 ? high : fd;
  if (high >= 0) close(fd);
  struct stat found;
  if (fstat(log_fd, &found) == 0) {
    log_device = found.st_dev;
    log_inode = found.st_ino;
  }
}

static void put(const char* text, int length) {
  const int kept = errno;
  if (!still_ours()) open_log();
  if (log_fd >= 0) syscall(SYS_write, log_fd, text, length);
  errno = kept;
}

static void record(char kind, long a, const struct stat* found, const char* directory, const char* path) {
  if (!log_path[0] || !path) return;
  const int kept = errno;
  char text[RECORD];
  const int length = snprintf(text, sizeof text, "%c %d %ld %lu %lld %lld.%09ld %s%s%s", kind, (int)getpid(),
                              found ? (long)found->st_dev : a,
                              found ? (unsigned long)found->st_ino : kind == 'N' ? 0UL : (unsigned long)getppid(),
                              found ? (long long)found->st_size : 0, found ? (long long)found->st_ctim.tv_sec : 0,
                              found ? found->st_ctim.tv_nsec : 0, directory ? directory : "", directory ? "/" : "", path);
  if (length < 0 || length >= (int)sizeof text)
    put("X 0 0 0 0 0.0 too long", sizeof "X 0 0 0 0 0.0 too long");
  else
    put(text, length + 1);
  errno = kept;
}

// Record a path that is relative to a directory: as an absolute one.
static void record_at(char kind, const struct stat* found, int directory, const char* path) {
  if (!log_path[0] || !path) return;
  const int kept = errno;
  char place[PATH_MAX];
  if (path[0] == '/') {
    record(kind, getpid(), found, NULL, path);
  } else {
    char link[64];
    snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
    const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, place, sizeof place - 1);
    place[length > 0 ? length : 0] = 0;
    record(length > 0 ? kind : 'X', getpid(), found, place, path);
  }
  errno = kept;
}

static void opened(int fd, int flags, int directory, const char* path) {
  struct stat found;
  if (fd < 0) {
    if (errno == ENOENT || errno == ENOTDIR) record_at('N', NULL, directory, path);
  } else if ((flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC)) {
    record_at('W', NULL, directory, path);
  } else if (fstat(fd, &found) == 0) {
    record_at('R', &found, directory, path);
  }
}

static void looked(int result, int directory, const char* path) {
  if (result < 0 && (errno == ENOENT || errno == ENOTDIR)) record_at('N', NULL, directory, path);
}

// Ends with the program that started it, so that no compiler outlives a killed build. opkiln kills
// them itself; this is for when opkiln and its watchdog are killed together. The signal is sent when
// the thread that started this process ends; threads that start compilers wait for them.
static void end_with_parent(void) {
  const char* builder = getenv("OPKILN_OBSERVER_PARENT");
  const pid_t parent = getppid();
  // It has left the build's session: a server that is meant to stay.
  if (!builder || (getsid(0) == getpid() && parent != atoi(builder))) return;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  // Was it too late? Then it has another parent now, or nobody reads what it would say.
  struct pollfd out = {.fd = 2};
  if (getppid() != parent || (poll(&out, 1, 0) == 1 && out.revents & POLLERR)) raise(SIGKILL);
}

__attribute__((constructor)) static void begin(void) {
  const char* named = getenv("OPKILN_OBSERVER_LOG");
  if (!named || strlen(named) >= sizeof log_path) return;
  end_with_parent();
  strcpy(log_path, named);
  char program[PATH_MAX];
  const ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, "/proc/self/exe", program, sizeof program - 1);
  program[length > 0 ? length : 0] = 0;
  record('B', getppid(), NULL, NULL, program);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// Opening

static int open_as(int directory, const char* path, int flags, mode_t mode) {
  const int fd = syscall(SYS_openat, directory, path, flags, mode);
  opened(fd, flags, directory, path);
  return fd;
}

#define MODE_OF(flags)                         \
  mode_t mode = 0;                             \
  if ((flags) & O_CREAT || ((flags) & O_TMPFILE) == O_TMPFILE) { \
    va_list rest;                              \
    va_start(rest, flags);                     \
    mode = va_arg(rest, mode_t);               \
    va_end(rest);                              \
  }

int open(const char* path, int flags, ...) { MODE_OF(flags) return open_as(AT_FDCWD, path, flags, mode); }
int open64(const char* path, int flags, ...) { MODE_OF(flags) return open_as(AT_FDCWD, path, flags, mode); }
int openat(int at, const char* path, int flags, ...) { MODE_OF(flags) return open_as(at, path, flags, mode); }
int openat64(int at, const char* path, int flags, ...) { MODE_OF(flags) return open_as(at, path, flags, mode); }
int __open_2(const char* path, int flags) { return open_as(AT_FDCWD, path, flags, 0); }
int __open64_2(const char* path, int flags) { return open_as(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char* path, int flags) { return open_as(at, path, flags, 0); }
int __openat64_2(int at, const char* path, int flags) { return open_as(at, path, flags, 0); }
int creat(const char* path, mode_t mode) { return open_as(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char* path, mode_t mode) { return open_as(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static FILE* stream(FILE* file, const char* path, const char* mode) {
  const int reads = mode[0] == 'r' && !strchr(mode, '+');
  opened(file ? fileno(file) : -1, reads ? O_RDONLY : O_WRONLY, AT_FDCWD, path);
  return file;
}

FILE* fopen(const char* path, const char* mode) { return stream(REAL(fopen)(path, mode), path, mode); }
FILE* fopen64(const char* path, const char* mode) { return stream(REAL(fopen64)(path, mode), path, mode); }
FILE* freopen(const char* path, const char* mode, FILE* file) { return stream(REAL(freopen)(path, mode, file), path, mode); }
FILE* freopen64(const char* path, const char* mode, FILE* file) { return stream(REAL(freopen64)(path, mode, file), path, mode); }

// Looking

static int status_at(int at, const char* path, struct stat* found, int flags) {
#ifdef SYS_newfstatat
  return syscall(SYS_newfstatat, at, path, found, flags);
#else
  return syscall(SYS_fstatat64, at, path, found, flags);
#endif
}

#define LOOK(result, at, path) \
  const int got = result;      \
  looked(got, at, path);       \
  return got;

int access(const char* path, int mode) { LOOK(syscall(SYS_faccessat, AT_FDCWD, path, mode), AT_FDCWD, path) }
int faccessat(int at, const char* path, int mode, int flags) { LOOK(REAL(faccessat)(at, path, mode, flags), at, path) }
int euidaccess(const char* path, int mode) { LOOK(REAL(euidaccess)(path, mode), AT_FDCWD, path) }
int eaccess(const char* path, int mode) { LOOK(REAL(eaccess)(path, mode), AT_FDCWD, path) }

// A program that asks where a path leads may then open the file by another name: this one counts.
static void followed(int result, int at, const char* path) {
  const int kept = errno;
  struct stat found;
  if (result >= 0 && status_at(at, path, &found, 0) == 0 && S_ISREG(found.st_mode)) record_at('R', &found, at, path);
  errno = kept;
  looked(result, at, path);
}

ssize_t readlinkat(int at, const char* path, char* text, size_t size) {
  const ssize_t got = syscall(SYS_readlinkat, at, path, text, size);
  followed(got, at, path);
  return got;
}
ssize_t readlink(const char* path, char* text, size_t size) { return readlinkat(AT_FDCWD, path, text, size); }
ssize_t __readlink_chk(const char* path, char* text, size_t size, size_t room) { (void)room; return readlink(path, text, size); }
char* realpath(const char* path, char* text) {
  char* found = REAL(realpath)(path, text);
  followed(found ? 0 : -1, AT_FDCWD, path);
  return found;
}
char* __realpath_chk(const char* path, char* text, size_t room) { (void)room; return realpath(path, text); }
char* canonicalize_file_name(const char* path) { return realpath(path, NULL); }

DIR* opendir(const char* path) {
  DIR* found = REAL(opendir)(path);
  looked(found ? 0 : -1, AT_FDCWD, path);
  return found;
}

// Programs built with a glibc before 2.33 call __xstat and its relatives; newer ones call stat.
static int status_of(int at, const char* path, struct stat* found, int flags) {
  LOOK(status_at(at, path, found, flags), at, path)
}

int stat(const char* path, struct stat* found) { return status_of(AT_FDCWD, path, found, 0); }
int lstat(const char* path, struct stat* found) { return status_of(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int fstatat(int at, const char* path, struct stat* found, int flags) { return status_of(at, path, found, flags); }
int stat64(const char* path, struct stat64* found) { return status_of(AT_FDCWD, path, (struct stat*)found, 0); }
int lstat64(const char* path, struct stat64* found) { return status_of(AT_FDCWD, path, (struct stat*)found, AT_SYMLINK_NOFOLLOW); }
int fstatat64(int at, const char* path, struct stat64* found, int flags) { return status_of(at, path, (struct stat*)found, flags); }
int __xstat(int version, const char* path, struct stat* found) { (void)version; return status_of(AT_FDCWD, path, found, 0); }
int __xstat64(int version, const char* path, struct stat64* found) { (void)version; return status_of(AT_FDCWD, path, (struct stat*)found, 0); }
int __lxstat(int version, const char* path, struct stat* found) { (void)version; return status_of(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int __lxstat64(int version, const char* path, struct stat64* found) { (void)version; return status_of(AT_FDCWD, path, (struct stat*)found, AT_SYMLINK_NOFOLLOW); }
int statx(int at, const char* path, int flags, unsigned mask, struct statx* found) { LOOK(syscall(SYS_statx, at, path, flags, mask, found), at, path) }

// Changing names

#define CHANGE(result, at, path)                \
  const int got = result;                       \
  if (got == 0) record_at('W', NULL, at, path); \
  return got;

int rename(const char* from, const char* to) { CHANGE(REAL(rename)(from, to), AT_FDCWD, to) }
int renameat(int at, const char* from, int to_at, const char* to) { CHANGE(REAL(renameat)(at, from, to_at, to), to_at, to) }
int link(const char* from, const char* to) { CHANGE(REAL(link)(from, to), AT_FDCWD, to) }
int symlink(const char* from, const char* to) { CHANGE(REAL(symlink)(from, to), AT_FDCWD, to) }
int unlink(const char* path) { CHANGE(REAL(unlink)(path), AT_FDCWD, path) }
int unlinkat(int at, const char* path, int flags) { CHANGE(REAL(unlinkat)(at, path, flags), at, path) }
int remove(const char* path) { CHANGE(REAL(remove)(path), AT_FDCWD, path) }
int mkdir(const char* path, mode_t mode) { CHANGE(REAL(mkdir)(path, mode), AT_FDCWD, path) }
int truncate(const char* path, off_t size) { CHANGE(REAL(truncate)(path, size), AT_FDCWD, path) }

// Starting programs. The program that starts announces itself, by begin() above; a static one cannot.

// A program that could not be started is looked for in vain, unless something else is wrong with it.
static void missed(const char* path) {
  const int kept = errno;
  struct stat found;
  if (path[0] == '/') looked(status_at(AT_FDCWD, path, &found, 0), AT_FDCWD, path);
  errno = kept;
}

// A name without a slash is looked up on PATH.
static void starts(const char* path) {
  if (path && path[0] != '/' && strchr(path, '/'))
    record_at('S', NULL, AT_FDCWD, path);
  else
    record('S', getpid(), NULL, NULL, path);
}

#define EXECUTE(call)                          \
  starts(path);                                \
  const int got = call;                        \
  record('F', getpid(), NULL, NULL, path);     \
  missed(path);                                \
  return got;

int execve(const char* path, char* const argv[], char* const envp[]) { EXECUTE(syscall(SYS_execve, path, argv, envp)) }
int execv(const char* path, char* const argv[]) { EXECUTE(REAL(execv)(path, argv)) }
int execvp(const char* path, char* const argv[]) { EXECUTE(REAL(execvp)(path, argv)) }
int execvpe(const char* path, char* const argv[], char* const envp[]) { EXECUTE(REAL(execvpe)(path, argv, envp)) }

#define SPAWN(name)                                                                                   \
  int name(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,                   \
           const posix_spawnattr_t* attributes, char* const argv[], char* const envp[]) {             \
    pid_t child = 0;                                                                                  \
    const int got = REAL(name)(&child, path, actions, attributes, argv, envp);                        \
    if (got == 0) record('S', child, NULL, NULL, path);                                               \
    if (got != 0) missed(path);                                                                       \
    if (got == 0 && pid) *pid = child;                                                                \
    return got;                                                                                       \
  }
SPAWN(posix_spawn)
SPAWN(posix_spawnp)

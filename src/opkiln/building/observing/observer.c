// Preloaded into the compilers and linkers that opkiln starts. Logs what they read, look up,
// write, load and start. building/observing/log.py reads the log.
//
// A record is "KIND PID A B SIZE CTIME PATH\0". KIND is one of:
//   B  a program began. PATH is its file; A is its parent's process.
//   L  PATH was loaded into the process: its program, or a shared library.
//   S  process A is about to run another program. F: it could not, and continues as before.
//   C  the C library is about to start a shell, which will announce itself.
//   R  PATH was opened for reading.
//   E  PATH was looked up, and is a file.
//   I  PATH was looked up or opened, and is a directory.
//   D  the directory PATH was listed.
//   P  a program asked whether PATH is a link, or where it points.
//   W  PATH was created, truncated or removed, or is either name of a rename.
//   A  PATH was opened for writing and keeps its contents.
//   N  PATH was looked up and does not exist.
//   Q  shared libraries are searched in PATH, a list of directories (LD_LIBRARY_PATH).
//   O  a shared library was requested by the name PATH.
//   X  a record was lost: the log is incomplete.
// In L, R, E, D and P records, A:B is the file's device and inode, followed by its size and
// change time (for P: of the link itself, or zeros if it is not a link). They are read from
// the open descriptor where there is one, because the name may point elsewhere by the time the
// log is read. In all other records, B is the parent of process PID.
//
// Each record is one write to a file opened for appending, so records of parallel processes do not
// interleave. If a record cannot be written, the file next to the log ("LOG.whole") is removed, which works
// even on a full disk. Nothing is allocated: some of this runs between vfork and exec.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <fts.h>
#include <glob.h>
#include <limits.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum { RECORD = 3 * PATH_MAX };

// The C library's function: syscall() below is a wrapper for the programs.
typedef long (*Syscall)(long, ...);
static Syscall real_syscall(void) {
  static Syscall known;
  if (!known) known = (Syscall)REAL(syscall);
  return known;
}
#define kernel real_syscall()

static char log_path[PATH_MAX];
static char whole_path[PATH_MAX + 8];
static int log_fd = -1;
static dev_t log_device;
static ino_t log_inode;

// A program may have closed our descriptor and reused its number for a file of its own.
static int owns_log_fd(void) {
  struct stat found;
  return log_fd >= 0 && fstat(log_fd, &found) == 0 && found.st_dev == log_device &&
         found.st_ino == log_inode;
}

static void open_log(void) {
  const int fd = kernel(SYS_openat, AT_FDCWD, log_path, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) return;
  // A high number: shells and build tools use low descriptors by number.
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
  if (!owns_log_fd()) {
    log_fd = -1;
    open_log();
  }
  if (log_fd < 0 || kernel(SYS_write, log_fd, text, length) != length) kernel(SYS_unlinkat, AT_FDCWD, whole_path, 0);
  errno = kept;
}

static int ready(void);

static void record_gap(const char* why) {
  char text[64];
  if (ready()) put(text, snprintf(text, sizeof text, "X 0 0 0 0 0.0 %s", why) + 1);
}

static void note_loaded(void);

// FOUND is given for L, R, E, D and P records only.
static void record(char kind, long a, const struct stat* found, const char* directory, const char* path) {
  if (!ready() || !path) return;
  const int kept = errno;
  if (kind != 'L') note_loaded();
  char text[RECORD];
  const int length = snprintf(text, sizeof text, "%c %d %ld %lu %lld %lld.%09ld %s%s%s", kind, (int)getpid(),
                              found ? (long)found->st_dev : a,
                              found ? (unsigned long)found->st_ino : (unsigned long)getppid(),
                              found ? (long long)found->st_size : 0, found ? (long long)found->st_ctim.tv_sec : 0,
                              found ? found->st_ctim.tv_nsec : 0, directory ? directory : "", directory ? "/" : "", path);
  if (length < 0 || length >= (int)sizeof text)
    record_gap("too long");
  else
    put(text, length + 1);
  errno = kept;
}

// Records a path relative to a directory as an absolute path. An empty path is the directory itself.
static void record_at(char kind, const struct stat* found, int directory, const char* path) {
  if (!ready() || !path) return;
  const int kept = errno;
  char place[PATH_MAX];
  if (path[0] == '/') {
    record(kind, getpid(), found, NULL, path);
  } else {
    char link[64];
    snprintf(link, sizeof link, directory == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", directory);
    const ssize_t length = kernel(SYS_readlinkat, AT_FDCWD, link, place, sizeof place - 1);
    place[length > 0 ? length : 0] = 0;
    if (length <= 0)
      record_gap("no /proc");
    else if (path[0])
      record(kind, getpid(), found, place, path);
    else
      record(kind, getpid(), found, NULL, place);
  }
  errno = kept;
}

// Only files and directories are recorded. Devices, pipes and sockets have no contents to track.
static void record_found(char kind, const struct stat* found, int directory, const char* path) {
  if (S_ISREG(found->st_mode)) record_at(kind, found, directory, path);
  if (S_ISDIR(found->st_mode)) record_at('I', NULL, directory, path);
}

static int status_at(int at, const char* path, struct stat* found, int flags) {
#ifdef SYS_newfstatat
  return kernel(SYS_newfstatat, at, path, found, flags);
#else
  return kernel(SYS_fstatat64, at, path, found, flags);
#endif
}

// Programs also pass no path: to query a descriptor, or to probe the kernel. (Volatile: the C library
// declares these arguments nonnull, and the compiler would drop the check.)
static int has_name(const char* volatile path) { return path && path[0]; }

static int exists(int directory, const char* path) {
  const int kept = errno;
  struct stat found;
  const int got = status_at(directory, path, &found, 0) == 0;
  errno = kept;
  return got;
}

static void record_listing(int directory, const char* path) {
  struct stat found;
  const int kept = errno;
  if (status_at(directory, path, &found, path[0] ? 0 : AT_EMPTY_PATH) == 0) record_at('D', &found, directory, path);
  errno = kept;
}

static void record_link(int directory, const char* path) {
  struct stat found;
  const int kept = errno;
  if (status_at(directory, path, &found, AT_SYMLINK_NOFOLLOW) == 0) {
    if (!S_ISLNK(found.st_mode)) memset(&found, 0, sizeof found);
    record_at('P', &found, directory, path);
  }
  errno = kept;
}

// Records the lookup of a path. A refused path counts, too: permissions may change before the next run.
static void record_lookup(int result, int directory, const char* path) {
  struct stat found;
  const int kept = errno;
  if (result < 0 && errno == ENOENT)
    record_at('N', NULL, directory, path);
  else if (status_at(directory, path, &found, 0) == 0)
    record_found('E', &found, directory, path);
  else if (result >= 0)
    record_gap("gone");
  else if (errno == ENOENT || errno == ENOTDIR)
    record_at('N', NULL, directory, path);
  errno = kept;
}

// KEEPS: the file existed, and opening it did not truncate it.
static void record_open(int fd, int flags, int keeps, int directory, const char* path) {
  struct stat found;
  if (fd < 0) {
    record_lookup(-1, directory, path);
    return;
  }
  const int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
  if (writes) record_at(keeps ? 'A' : 'W', NULL, directory, path);
  if ((!writes || (keeps && (flags & O_ACCMODE) != O_WRONLY)) && fstat(fd, &found) == 0)
    record_found('R', &found, directory, path);
}

// Makes this program end with the one that started it, so that no compiler outlives a killed build. opkiln
// kills compilers itself; this covers the case that opkiln and its watchdog are killed together. The signal
// is sent when the parent's thread ends, so threads that start compilers wait for them.
static void end_with_parent(void) {
  const char* builder = getenv("OPKILN_OBSERVER_PARENT");
  const pid_t parent = getppid();
  // A process that has left the build's session is a server that should stay.
  if (!builder || (getsid(0) == getpid() && parent != atoi(builder))) return;
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return;
  // The parent may have ended before prctl(). Then getppid() differs, or nobody reads our stderr any more.
  struct pollfd out = {.fd = 2};
  if (getppid() != parent || (poll(&out, 1, 0) == 1 && out.revents & POLLERR)) raise(SIGKILL);
}

static unsigned long long loads;  // the number of loads at the last check
static int noted;                 // how many objects the log has

static int add_loaded(struct dl_phdr_info* info, size_t size, void* place) {
  (void)size;
  int* index = place;
  if (*index == 0 && info->dlpi_adds == loads) return 1;
  if (*index == 0) loads = info->dlpi_adds;
  if (++*index <= noted && info->dlpi_subs == 0) return 0;
  struct stat found;
  if (info->dlpi_name && info->dlpi_name[0] == '/' && status_at(AT_FDCWD, info->dlpi_name, &found, 0) == 0)
    record('L', getpid(), &found, NULL, info->dlpi_name);
  if (*index > noted) noted = *index;
  return 0;
}

static void note_loaded(void) {
  int index = 0;
  dl_iterate_phdr(add_loaded, &index);
}

static void begin(void) {
  const char* named = getenv("OPKILN_OBSERVER_LOG");
  if (!named || strlen(named) >= sizeof log_path) return;
  end_with_parent();
  strcpy(log_path, named);
  snprintf(whole_path, sizeof whole_path, "%s.whole", named);
  char program[PATH_MAX];
  const ssize_t length = kernel(SYS_readlinkat, AT_FDCWD, "/proc/self/exe", program, sizeof program - 1);
  struct stat found;
  if (length <= 0 || status_at(AT_FDCWD, "/proc/self/exe", &found, 0) != 0) {
    record_gap("no /proc");
    return;
  }
  program[length] = 0;
  // The kernel appends " (deleted)" if the program was removed or replaced after it began.
  char* gone = strstr(program, " (deleted)");
  if (gone && !gone[sizeof " (deleted)" - 1]) *gone = 0;
  record('B', getppid(), NULL, NULL, program);
  record('L', getpid(), &found, NULL, program);
  const char* search = getenv("LD_LIBRARY_PATH");
  if (search && search[0]) record('Q', getpid(), NULL, NULL, search);
}

// Initializes on first use: constructors of other libraries may run before ours, and read files.
static int ready(void) {
  static int begun;
  if (!begun) {
    begun = 1;
    begin();
  }
  return log_path[0] != 0;
}

__attribute__((constructor)) static void first(void) { ready(); }
__attribute__((destructor)) static void end(void) {
  if (ready()) note_loaded();
}

// Opening

static int open_as(int directory, const char* path, int flags, mode_t mode) {
  const int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
  const int keeps = writes && !(flags & O_TRUNC) && exists(directory, path);
  const int fd = kernel(SYS_openat, directory, path, flags, mode);
  record_open(fd, flags, keeps, directory, path);
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

#define STREAM(call)                                                                       \
  const int both = strchr(mode, '+') != NULL, reads = mode[0] == 'r' && !both;             \
  const int keeps = !reads && mode[0] != 'w' && exists(AT_FDCWD, path);                    \
  const int flags = reads ? O_RDONLY : both ? O_RDWR : O_WRONLY;                           \
  FILE* file = call;                                                                       \
  record_open(file ? fileno(file) : -1, flags, keeps, AT_FDCWD, path);                          \
  return file;

FILE* fopen(const char* path, const char* mode) { STREAM(REAL(fopen)(path, mode)) }
FILE* fopen64(const char* path, const char* mode) { STREAM(REAL(fopen64)(path, mode)) }
FILE* freopen(const char* path, const char* mode, FILE* old) {
  if (!path) return REAL(freopen)(path, mode, old);
  STREAM(REAL(freopen)(path, mode, old))
}
FILE* freopen64(const char* path, const char* mode, FILE* old) {
  if (!path) return REAL(freopen64)(path, mode, old);
  STREAM(REAL(freopen64)(path, mode, old))
}

static int record_temporary(int fd, const char* path) {
  if (fd >= 0) record_at('W', NULL, AT_FDCWD, path);
  return fd;
}

int mkstemp(char* path) { return record_temporary(REAL(mkstemp)(path), path); }
int mkstemp64(char* path) { return record_temporary(REAL(mkstemp64)(path), path); }
int mkstemps(char* path, int suffix) { return record_temporary(REAL(mkstemps)(path, suffix), path); }
int mkstemps64(char* path, int suffix) { return record_temporary(REAL(mkstemps64)(path, suffix), path); }
int mkostemp(char* path, int flags) { return record_temporary(REAL(mkostemp)(path, flags), path); }
int mkostemp64(char* path, int flags) { return record_temporary(REAL(mkostemp64)(path, flags), path); }
int mkostemps(char* path, int suffix, int flags) { return record_temporary(REAL(mkostemps)(path, suffix, flags), path); }
int mkostemps64(char* path, int suffix, int flags) { return record_temporary(REAL(mkostemps64)(path, suffix, flags), path); }

// Looking

#define LOOK(call, at, path)   \
  const long got = call;       \
  record_lookup(got, at, path);    \
  return got;

int access(const char* path, int mode) { LOOK(kernel(SYS_faccessat, AT_FDCWD, path, mode), AT_FDCWD, path) }
int faccessat(int at, const char* path, int mode, int flags) { LOOK(REAL(faccessat)(at, path, mode, flags), at, path) }
int euidaccess(const char* path, int mode) { LOOK(REAL(euidaccess)(path, mode), AT_FDCWD, path) }
int eaccess(const char* path, int mode) { LOOK(REAL(eaccess)(path, mode), AT_FDCWD, path) }
int statx(int at, const char* path, int flags, unsigned mask, struct statx* found) {
  if (!has_name(path)) return kernel(SYS_statx, at, path, flags, mask, found);
  LOOK(kernel(SYS_statx, at, path, flags, mask, found), at, path)
}

ssize_t getxattr(const char* path, const char* name, void* value, size_t size) { LOOK(REAL(getxattr)(path, name, value, size), AT_FDCWD, path) }
ssize_t lgetxattr(const char* path, const char* name, void* value, size_t size) { LOOK(REAL(lgetxattr)(path, name, value, size), AT_FDCWD, path) }
int name_to_handle_at(int at, const char* path, struct file_handle* handle, int* mount, int flags) { LOOK(REAL(name_to_handle_at)(at, path, handle, mount, flags), at, path) }
int inotify_add_watch(int fd, const char* path, uint32_t mask) { LOOK(REAL(inotify_add_watch)(fd, path, mask), AT_FDCWD, path) }
int chdir(const char* path) { LOOK(REAL(chdir)(path), AT_FDCWD, path) }
int statfs(const char* path, struct statfs* found) { LOOK(REAL(statfs)(path, found), AT_FDCWD, path) }
int statfs64(const char* path, struct statfs64* found) { LOOK(REAL(statfs64)(path, found), AT_FDCWD, path) }
int statvfs(const char* path, struct statvfs* found) { LOOK(REAL(statvfs)(path, found), AT_FDCWD, path) }
int statvfs64(const char* path, struct statvfs64* found) { LOOK(REAL(statvfs64)(path, found), AT_FDCWD, path) }
long pathconf(const char* path, int name) { LOOK(REAL(pathconf)(path, name), AT_FDCWD, path) }

// Programs built with glibc before 2.33 call __xstat and its relatives instead of stat.
static int status_of(int at, const char* path, struct stat* found, int flags) {
  const int got = status_at(at, path, found, flags);
  if (has_name(path)) {
    if (got == 0 && flags & AT_SYMLINK_NOFOLLOW) record_link(at, path);
    if (got == 0) record_found('E', found, at, path);
    if (got != 0) record_lookup(got, at, path);
  }
  return got;
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

// A program that resolves a path may then open the file under its other name, so the target counts as read.
static void record_resolution(int result, int at, const char* path, int is_link) {
  struct stat found;
  const int kept = errno;
  if ((result >= 0 || errno == EINVAL) && is_link) record_link(at, path);
  if (result >= 0 && status_at(at, path, &found, 0) == 0) {
    record_found('R', &found, at, path);
  } else {
    errno = result < 0 ? kept : ENOENT;
    record_lookup(-1, at, path);
  }
  errno = kept;
}

ssize_t readlinkat(int at, const char* path, char* text, size_t size) {
  const ssize_t got = kernel(SYS_readlinkat, at, path, text, size);
  if (has_name(path)) record_resolution(got, at, path, 1);
  return got;
}
ssize_t readlink(const char* path, char* text, size_t size) { return readlinkat(AT_FDCWD, path, text, size); }
ssize_t __readlink_chk(const char* path, char* text, size_t size, size_t room) { (void)room; return readlink(path, text, size); }
char* realpath(const char* path, char* text) {
  char* found = REAL(realpath)(path, text);
  record_resolution(found ? 0 : -1, AT_FDCWD, path, found && strcmp(found, path) != 0);
  return found;
}
char* __realpath_chk(const char* path, char* text, size_t room) { (void)room; return realpath(path, text); }
char* canonicalize_file_name(const char* path) { return realpath(path, NULL); }

// Listing

DIR* opendir(const char* path) {
  DIR* found = REAL(opendir)(path);
  if (found) record_listing(AT_FDCWD, path);
  record_lookup(found ? 0 : -1, AT_FDCWD, path);
  return found;
}
DIR* fdopendir(int fd) {
  record_listing(fd, "");
  return REAL(fdopendir)(fd);
}

ssize_t getdents64(int fd, void* names, size_t size) {
  record_listing(fd, "");
  return REAL(getdents64)(fd, names, size);
}

#define SCAN(name, entry)                                                                             \
  int name(const char* path, struct entry*** found, int (*wanted)(const struct entry*),               \
           int (*order)(const struct entry**, const struct entry**)) {                                \
    record_listing(AT_FDCWD, path);                                                                           \
    const int got = REAL(name)(path, found, wanted, order);                                           \
    record_lookup(got, AT_FDCWD, path);                                                                   \
    return got;                                                                                       \
  }
SCAN(scandir, dirent)
SCAN(scandir64, dirent64)

// glob lists directories by internal functions of the C library,
// which cannot be intercepted. So it is given those above instead.
#define GLOB(name, type, entry, status)                                                               \
  int name(const char* pattern, int flags, int (*failed)(const char*, int), type* found) {            \
    if (!(flags & GLOB_ALTDIRFUNC)) {                                                                 \
      found->gl_opendir = (void* (*)(const char*))opendir;                                            \
      found->gl_readdir = (struct entry * (*)(void*)) read##entry;                                    \
      found->gl_closedir = (void (*)(void*))(void (*)(void))closedir;                                 \
      found->gl_lstat = l##status;                                                                    \
      found->gl_stat = status;                                                                        \
    }                                                                                                 \
    return REAL(name)(pattern, flags | GLOB_ALTDIRFUNC, failed, found);                               \
  }
#define readdirent readdir
#define readdirent64 readdir64
GLOB(glob, glob_t, dirent, stat)
GLOB(glob64, glob64_t, dirent64, stat64)

// System calls

// Programs that bypass the functions above: malloc libraries open files this way. Calls that take a path or
// start a program, and are not handled here, are recorded as gaps.
long syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  long arguments[6];
  for (int each = 0; each < 6; each++) arguments[each] = va_arg(rest, long);
  va_end(rest);
  const int at = arguments[0];
  const char *const first = (const char*)arguments[0], *const second = (const char*)arguments[1];
  switch (number) {
#ifdef SYS_open
    case SYS_open: return open_as(AT_FDCWD, first, arguments[1], arguments[2]);
    case SYS_creat: return creat(first, arguments[1]);
    case SYS_access: return access(first, arguments[1]);
    case SYS_stat: return status_of(AT_FDCWD, first, (struct stat*)arguments[1], 0);
    case SYS_lstat: return status_of(AT_FDCWD, first, (struct stat*)arguments[1], AT_SYMLINK_NOFOLLOW);
    case SYS_readlink: return readlink(first, (char*)arguments[1], arguments[2]);
    case SYS_rename: case SYS_fork: case SYS_vfork: case SYS_getdents:
#endif
    case SYS_openat2: case SYS_execve: case SYS_execveat: case SYS_renameat2: case SYS_clone: case SYS_clone3:
    case SYS_io_uring_setup: case SYS_open_by_handle_at: case SYS_name_to_handle_at: case SYS_inotify_add_watch:
      record_gap("system call by its number");
      break;
    case SYS_openat: return open_as(at, second, arguments[2], arguments[3]);
#ifdef SYS_newfstatat
    case SYS_newfstatat: return status_of(at, second, (struct stat*)arguments[2], arguments[3]);
#endif
    case SYS_statx: return statx(at, second, arguments[2], arguments[3], (struct statx*)arguments[4]);
    case SYS_readlinkat: return readlinkat(at, second, (char*)arguments[2], arguments[3]);
    case SYS_getdents64: return getdents64(at, (void*)arguments[1], arguments[2]);
    case SYS_faccessat: case SYS_faccessat2: {
      LOOK(kernel(number, at, second, arguments[2], arguments[3]), at, second)
    }
    case SYS_chdir: case SYS_statfs: case SYS_getxattr: case SYS_lgetxattr: {
      LOOK(kernel(number, first, arguments[1], arguments[2], arguments[3]), AT_FDCWD, first)
    }
  }
  return kernel(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

// Tree walks are not tracked. No compiler uses them.
FTS* fts_open(char* const* paths, int flags, int (*order)(const FTSENT**, const FTSENT**)) { record_gap("fts"); return REAL(fts_open)(paths, flags, order); }
int ftw(const char* path, __ftw_func_t each, int most) { record_gap("ftw"); return REAL(ftw)(path, each, most); }
int ftw64(const char* path, __ftw64_func_t each, int most) { record_gap("ftw"); return REAL(ftw64)(path, each, most); }
int nftw(const char* path, __nftw_func_t each, int most, int flags) { record_gap("ftw"); return REAL(nftw)(path, each, most, flags); }
int nftw64(const char* path, __nftw64_func_t each, int most, int flags) { record_gap("ftw"); return REAL(nftw64)(path, each, most, flags); }

// Loading. What was loaded is recorded by note_loaded(); a missing library is not. The call of
// the real dlopen must come last in the function, so that it compiles to a jump: the C library
// looks at its caller, and searches where the caller's library says.

static void record_request(const char* path) {
  const int kept = errno;
  errno = 0;
  if (strchr(path, '/'))
    record_lookup(-1, AT_FDCWD, path);
  else
    record('O', getpid(), NULL, NULL, path);
  errno = kept;
}
void* dlopen(const char* path, int mode) {
  if (has_name(path)) record_request(path);
  return REAL(dlopen)(path, mode);
}

// Changing names

#define CHANGE(result, at, path)                \
  const int got = result;                       \
  if (got == 0) record_at('W', NULL, at, path); \
  return got;

static int record_rename(int got, int at, const char* from, int to_at, const char* to) {
  if (got == 0) record_at('W', NULL, at, from);
  if (got == 0) record_at('W', NULL, to_at, to);
  return got;
}

int rename(const char* from, const char* to) { return record_rename(REAL(rename)(from, to), AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int at, const char* from, int to_at, const char* to) { return record_rename(REAL(renameat)(at, from, to_at, to), at, from, to_at, to); }
int renameat2(int at, const char* from, int to_at, const char* to, unsigned flags) { return record_rename(REAL(renameat2)(at, from, to_at, to, flags), at, from, to_at, to); }
int link(const char* from, const char* to) { CHANGE(REAL(link)(from, to), AT_FDCWD, to) }
int linkat(int at, const char* from, int to_at, const char* to, int flags) { CHANGE(REAL(linkat)(at, from, to_at, to, flags), to_at, to) }
int symlink(const char* from, const char* to) { CHANGE(REAL(symlink)(from, to), AT_FDCWD, to) }
int symlinkat(const char* from, int at, const char* to) { CHANGE(REAL(symlinkat)(from, at, to), at, to) }
int mkdirat(int at, const char* path, mode_t mode) { CHANGE(REAL(mkdirat)(at, path, mode), at, path) }
int rmdir(const char* path) { CHANGE(REAL(rmdir)(path), AT_FDCWD, path) }
int unlink(const char* path) { CHANGE(REAL(unlink)(path), AT_FDCWD, path) }
int unlinkat(int at, const char* path, int flags) { CHANGE(REAL(unlinkat)(at, path, flags), at, path) }
int remove(const char* path) { CHANGE(REAL(remove)(path), AT_FDCWD, path) }
int mkdir(const char* path, mode_t mode) { CHANGE(REAL(mkdir)(path, mode), AT_FDCWD, path) }
int truncate(const char* path, off_t size) { CHANGE(REAL(truncate)(path, size), AT_FDCWD, path) }

// Starting programs. A program announces itself through begin() above; a statically linked one cannot.

// Records a program that could not be started. A name without a slash was searched on PATH.
static void record_failed_start(const char* path) {
  if (path && strchr(path, '/')) record_lookup(-1, AT_FDCWD, path);
}

// Records a start. A name without a slash is searched on PATH.
static void record_start(const char* path) {
  if (path && path[0] != '/' && strchr(path, '/'))
    record_at('S', NULL, AT_FDCWD, path);
  else
    record('S', getpid(), NULL, NULL, path);
}

#define EXECUTE(call)                          \
  record_start(path);                                \
  const int got = call;                        \
  record('F', getpid(), NULL, NULL, path);     \
  record_failed_start(path);                                \
  return got;

int execve(const char* path, char* const argv[], char* const envp[]) { EXECUTE(kernel(SYS_execve, path, argv, envp)) }
int execv(const char* path, char* const argv[]) { EXECUTE(REAL(execv)(path, argv)) }
int execvp(const char* path, char* const argv[]) { EXECUTE(REAL(execvp)(path, argv)) }
int execvpe(const char* path, char* const argv[], char* const envp[]) { EXECUTE(REAL(execvpe)(path, argv, envp)) }

int fexecve(int fd, char* const argv[], char* const envp[]) {
  record_at('S', NULL, fd, "");
  const int got = REAL(fexecve)(fd, argv, envp);
  record('F', getpid(), NULL, NULL, "");
  return got;
}
int execveat(int at, const char* path, char* const argv[], char* const envp[], int flags) {
  record_at('S', NULL, at, path);
  const int got = REAL(execveat)(at, path, argv, envp, flags);
  record('F', getpid(), NULL, NULL, "");
  return got;
}

// The variants that take a list of words.
#define WITH_WORDS(call)                                                         \
  va_list rest;                                                              \
  int count = 1;                                                             \
  va_start(rest, word);                                                      \
  while (va_arg(rest, char*)) count++;                                       \
  va_end(rest);                                                              \
  char* argv[count + 1];                                                     \
  argv[0] = (char*)word;                                                     \
  va_start(rest, word);                                                      \
  for (int each = 1; each <= count; each++) argv[each] = va_arg(rest, char*); \
  char** envp __attribute__((unused)) = va_arg(rest, char**);                \
  va_end(rest);                                                              \
  return call;

int execl(const char* path, const char* word, ...) { WITH_WORDS(execv(path, argv)) }
int execlp(const char* path, const char* word, ...) { WITH_WORDS(execvp(path, argv)) }
int execle(const char* path, const char* word, ...) { WITH_WORDS(execve(path, argv, envp)) }

#define SPAWN(name)                                                                                   \
  int name(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,                   \
           const posix_spawnattr_t* attributes, char* const argv[], char* const envp[]) {             \
    pid_t child = 0;                                                                                  \
    const int got = REAL(name)(&child, path, actions, attributes, argv, envp);                        \
    if (got == 0) record('S', child, NULL, NULL, path);                                               \
    if (got != 0) { errno = got; record_failed_start(path); }                                                      \
    if (got == 0 && pid) *pid = child;                                                                \
    return got;                                                                                       \
  }
SPAWN(posix_spawn)
SPAWN(posix_spawnp)

// The C library starts the shell itself.
int system(const char* command) {
  if (command) record('C', getpid(), NULL, NULL, "/bin/sh");
  return REAL(system)(command);
}
FILE* popen(const char* command, const char* mode) {
  record('C', getpid(), NULL, NULL, "/bin/sh");
  return REAL(popen)(command, mode);
}

// The process ends without running destructors.
void _exit(int status) {
  if (ready()) note_loaded();
  kernel(SYS_exit_group, status);
  __builtin_unreachable();
}
void _Exit(int status) { _exit(status); }

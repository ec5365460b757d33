// Preloaded into ninja by `opkiln ninja`. Takes the place of the start of "/bin/sh -c COMMAND": it
// asks a server first (compat/ninja/server.py), over a socket pair that nobody else has. The server
// starts with the first command; a build with nothing to do has none.
//
//   to the server       'q' MILLISECONDS TEXT  a command, and how long ago one ended that it did not see
//                       'f' NUMBER             with a descriptor: ninja's end of the command's pipe
//                       'w' NUMBER             what is its exit status?
//                       'm'                    with a descriptor: the other end of a step's socket
//   from the server     'P'                    not for the cache: run it as it is
//                       'H' STATUS MESSAGES    it was put in place
//                       'A' NUMBER             it will be; whoever has the pipe says when ('f')
//                       'M'                    it has to be run, by a step (step.c)
//                       'S' STATUS
//
// A hit starts no process: the pipe gets what the command had printed, and waitpid answers for a
// process that never was. Whatever fails ends in the plain command.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
enum { FAKE = 1 << 30, LATER = 1 << 29, MESSAGES = 4000, STEPS = 4096 };  // fake process numbers are above any pid_max

extern char** environ;
static int active, server = -1, out_fd = -1;
static pid_t next_fake;
static uint64_t seen_end;  // when a command ended that the server knows nothing of
static char step_path[4096];
static pid_t steps[STEPS];  // those that run: what they made the server knows
static int step_count;

// The same file is preloaded into a script that stands for ninja; only ninja itself is served. A
// build that is observed as a whole is not served: the outer log would lack what the inner one has.
__attribute__((constructor)) static void begin(void) {
  char program[4096];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  program[length > 0 ? length : 0] = 0;
  const char* name = strrchr(program, '/');
  const char* ready = getenv("_OPKILN_NINJA");
  if (!name || strncmp(name + 1, "ninja", 5) || !ready) return;
  const char* users = getenv("_OPKILN_NINJA_PRELOAD");
  if (users && users[0]) setenv("LD_PRELOAD", users, 1); else unsetenv("LD_PRELOAD");
  unsetenv("_OPKILN_NINJA_PRELOAD");
  active = !getenv("OPKILN_OBSERVER_LOG") &&
           snprintf(step_path, sizeof step_path, "%s/step", ready) < (int)sizeof step_path;
}

// What the server has to write (a trace) is there when ninja ends.
__attribute__((destructor)) static void end(void) {
  const struct timeval longest = {.tv_sec = 1};
  char byte;
  if (server < 0) return;
  shutdown(server, SHUT_WR);
  setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &longest, sizeof longest);
  recv(server, &byte, 1, 0);
}

static uint64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

static void give_up(void) {
  if (server >= 0) close(server);
  server = -1;
  active = 0;
}

static int tell(char kind, uint32_t number, const char* text, size_t length, int fd) {
  char head[5] = {kind}, room[CMSG_SPACE(sizeof fd)] = {0};
  memcpy(head + 1, &number, 4);
  struct iovec parts[] = {{head, 5}, {(char*)text, length}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
  if (fd >= 0) {
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    struct cmsghdr* with = CMSG_FIRSTHDR(&message);
    with->cmsg_level = SOL_SOCKET;
    with->cmsg_type = SCM_RIGHTS;
    with->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(with), &fd, sizeof fd);
  }
  if (sendmsg(server, &message, MSG_NOSIGNAL) == (ssize_t)(5 + length)) return 0;
  if (errno != EMSGSIZE) give_up();
  return -1;
}

static ssize_t hear(char* to, size_t room) {
  ssize_t got;
  do got = recv(server, to, room, 0); while (got < 0 && errno == EINTR);
  if (got <= 0) give_up();
  return got;
}

static int start_server(void) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return -1;
  char fd[16];
  snprintf(fd, sizeof fd, "%d", ends[1]);
  fcntl(ends[1], F_SETFD, 0);
  char* argv[] = {getenv("_OPKILN_NINJA_PYTHON"), "-P", "-S", getenv("_OPKILN_NINJA_MAIN"), "serve", fd, NULL};
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  posix_spawn_file_actions_addopen(&quiet, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&quiet, 1, "/dev/null", O_WRONLY, 0);
  if (!getenv("_OPKILN_NINJA_DEBUG")) posix_spawn_file_actions_addopen(&quiet, 2, "/dev/null", O_WRONLY, 0);
  pid_t child;
  const int failed = !argv[0] || !argv[4] || REAL(posix_spawn)(&child, argv[0], &quiet, NULL, argv, environ);
  posix_spawn_file_actions_destroy(&quiet);
  close(ends[1]);
  server = ends[0];
  char byte;
  if (failed || hear(&byte, 1) != 1) return give_up(), -1;
  return 0;
}

int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t* actions, int from, int to) {
  if (to == 1) out_fd = from;
  return REAL(posix_spawn_file_actions_adddup2)(actions, from, to);
}

// 1: it was answered, and *pid is set. 2: it has to be run by a step.
static int ask(const char* command, int fd, pid_t* pid) {
  static char answer[5 + MESSAGES];
  int32_t number = 0;
  const uint64_t ago = seen_end ? milliseconds() - seen_end : 1000;
  if (tell('q', ago < 1000 ? ago : 1000, command, strlen(command), -1)) return 0;
  const ssize_t got = hear(answer, sizeof answer);
  if (got < 1) return 0;
  if (got >= 5) memcpy(&number, answer + 1, 4);
  if (answer[0] == 'H' && write(fd, answer + 5, got - 5) == got - 5) {
    *pid = FAKE + (next_fake++ & (LATER - 1));
    return 1;
  }
  if (answer[0] == 'A' && tell('f', number, "", 0, fd) == 0) {
    *pid = FAKE + LATER + number;
    return 1;
  }
  return answer[0] == 'M' ? 2 : 0;
}

int posix_spawn(pid_t* pid, const char* path, const posix_spawn_file_actions_t* actions,
                const posix_spawnattr_t* attributes, char* const argv[], char* const envp[]) {
  const int fd = out_fd;
  out_fd = -1;
  // -1: the console pool, which runs as it is.
  if (!active || fd < 0 || strcmp(path, "/bin/sh") || !argv[0] || !argv[1] || strcmp(argv[1], "-c") || !argv[2] ||
      argv[3] || (server < 0 && start_server()))
    return REAL(posix_spawn)(pid, path, actions, attributes, argv, envp);
  const int answered = ask(argv[2], fd, pid);
  if (answered == 1) return 0;
  int ends[2];
  if (answered == 2 && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0) {
    char end[16];
    snprintf(end, sizeof end, "%d", ends[0]);
    fcntl(ends[0], F_SETFD, 0);  // ninja has one thread: only this child gets it
    char* step[] = {step_path, end, argv[2], NULL};
    int failed = tell('m', 0, "", 0, ends[1]);
    close(ends[1]);
    if (!failed) failed = REAL(posix_spawn)(pid, step_path, actions, attributes, step, envp);
    close(ends[0]);
    if (!failed && step_count < STEPS) steps[step_count++] = *pid;
    if (!failed) return 0;
  }
  return REAL(posix_spawn)(pid, path, actions, attributes, argv, envp);
}

pid_t waitpid(pid_t pid, int* status, int options) {
  if (pid < FAKE) {
    const pid_t ended = REAL(waitpid)(pid, status, options);
    for (int each = 0; ended > 0 && each < step_count; each++) {
      if (steps[each] != ended) continue;
      steps[each] = steps[--step_count];
      return ended;
    }
    if (ended > 0) seen_end = milliseconds();
    return ended;
  }
  if (status) *status = 0;
  if (pid >= FAKE + LATER) {
    char answer[5];
    int32_t code = 1;
    if (server >= 0 && tell('w', pid - FAKE - LATER, "", 0, -1) == 0 && hear(answer, 5) == 5) memcpy(&code, answer + 1, 4);
    if (status) *status = code << 8;
  }
  return pid;
}

int kill(pid_t pid, int sig) { return pid <= -FAKE || pid >= FAKE ? 0 : REAL(kill)(pid, sig); }

// Runs one command of a build that `opkiln ninja` has nothing for: step SOCKET COMMAND
//
// ninja starts it in the place of the shell. It waits for the server's word, runs the command under
// the observer, passes on what that prints, and reports. If there is no server (any more), it is the
// plain command.
//
//   from the server   'N' LENGTH NOTE               print this, and go on
//                     'P'                           run it as it is
//                     'H' LENGTH MESSAGES           another build has made it meanwhile: it is in place
//                     'R' LENGTH OBSERVER\0STAGE\0COMMAND   run this under the observer
//   to the server     'D' LENGTH STATUS MICROSECONDS MESSAGES
//   from the server   'N' LENGTH NOTE, 'k'          it is kept, or will not be
//
// STAGE is a directory of this command alone, which the step removes.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int receive(int fd, void* to, size_t length) {
  for (char* place = to; length;) {
    const ssize_t got = recv(fd, place, length, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    place += got;
    length -= got;
  }
  return 0;
}

static int give(int fd, const void* from, size_t length) {
  for (const char* place = from; length;) {
    const ssize_t got = send(fd, place, length, MSG_NOSIGNAL);  // a server that died must not end us
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return -1;
    place += got;
    length -= got;
  }
  return 0;
}

static void print(const char* text, size_t length) {
  while (length) {
    const ssize_t got = write(1, text, length);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    text += got;
    length -= got;
  }
}

// The next word of the server, with its body; NULL without one. Notes are printed and skipped.
static char* hear(int server, char* kind) {
  for (;;) {
    uint32_t length = 0;
    *kind = 'P';
    if (receive(server, kind, 1) || *kind == 'P' || *kind == 'k' || receive(server, &length, 4)) return NULL;
    char* body = malloc(length + 1);
    if (!body || receive(server, body, length)) return NULL;
    body[length] = 0;
    if (*kind == 'R') return body;
    print(body, length);
    if (*kind == 'H') return body;
    free(body);
  }
}

static int gone(const char* path, const struct stat* found, int kind, struct FTW* where) {
  (void)found, (void)kind, (void)where;
  return remove(path), 0;
}

static void plain(const char* command) {
  execl("/bin/sh", "/bin/sh", "-c", command, NULL);
  _exit(127);
}

static void observed(const char* observer, const char* stage, const char* command) {
  char both[8192], log[4096];
  const char* others = getenv("LD_PRELOAD");
  if (snprintf(both, sizeof both, "%s%s%s", observer, others ? ":" : "", others ? others : "") < (int)sizeof both &&
      snprintf(log, sizeof log, "%s/observed", stage) < (int)sizeof log) {
    setenv("LD_PRELOAD", both, 1);
    setenv("OPKILN_OBSERVER_LOG", log, 1);
  }
  setenv("TMPDIR", stage, 1);
  setenv("CCACHE_DISABLE", "1", 1);
  plain(command);
}

int main(int argc, char** argv) {
  if (argc != 3) return 127;
  const int server = atoi(argv[1]);
  const char* command = argv[2];
  char kind;
  char* body = hear(server, &kind);
  if (!body) close(server), plain(command);
  if (kind == 'H') return 0;
  const char* stage = body + strlen(body) + 1;
  const char* text = stage + strlen(stage) + 1;

  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) close(server), plain(command);
  // ninja signals the whole group and waits for this process alone: it must outlive the command.
  const int kinds[] = {SIGINT, SIGTERM, SIGHUP};
  struct sigaction ignored = {.sa_handler = SIG_IGN}, before[3];
  for (int each = 0; each < 3; each++) sigaction(kinds[each], &ignored, &before[each]);
  signal(SIGPIPE, SIG_IGN);
  struct timespec began, ended;
  clock_gettime(CLOCK_MONOTONIC, &began);
  const pid_t child = fork();
  if (child == 0) {
    for (int each = 0; each < 3; each++) sigaction(kinds[each], &before[each], NULL);
    signal(SIGPIPE, SIG_DFL);
    dup2(ends[1], 1);
    dup2(ends[1], 2);
    close(server);
    observed(body, stage, text);
  }
  close(ends[1]);
  char* said = NULL;
  size_t have = 0, room = 0;
  for (;;) {
    if (have + 65536 > room) {
      char* more = realloc(said, room = have * 2 + 65536);
      if (!more) break;
      said = more;
    }
    const ssize_t got = read(ends[0], said + have, 65536);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    print(said + have, got);
    have += got;
  }
  close(ends[0]);
  int status = 127 << 8;
  if (child > 0) while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
  clock_gettime(CLOCK_MONOTONIC, &ended);
  const int64_t took = (ended.tv_sec - began.tv_sec) * 1000000ll + (ended.tv_nsec - began.tv_nsec) / 1000;
  int32_t code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  const uint32_t total = have + 12;
  if (!give(server, "D", 1) && !give(server, &total, 4) && !give(server, &code, 4) && !give(server, &took, 8) &&
      !give(server, said, have))
    hear(server, &kind);
  nftw(stage, gone, 16, FTW_DEPTH | FTW_PHYS);
  if (WIFSIGNALED(status)) {
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
  }
  return code;
}

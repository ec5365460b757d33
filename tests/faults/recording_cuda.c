/* Stands in for the CUDA driver: notes each call, with the process's number, in $CUDA_LOG. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int note(const char *name) {
    const char *path = getenv("CUDA_LOG");
    char line[128];
    int length = snprintf(line, sizeof line, "%s %d\n", name, (int)getpid());
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd < 0) return 999;
    int failed = write(fd, line, length) != length;
    close(fd);
    return failed ? 999 : 0;
}

#define CALL(name) \
    int name(void) { return note(#name); }

CALL(cuInit)
CALL(cuDeviceGet)
CALL(cuDeviceGetCount)
CALL(cuDeviceGetAttribute)
CALL(cuCtxCreate)
CALL(cuCtxCreate_v2)
CALL(cuCtxCreate_v3)
CALL(cuCtxCreate_v4)
CALL(cuCtxGetCurrent)
CALL(cuDevicePrimaryCtxRetain)
CALL(cuDevicePrimaryCtxSetFlags_v2)
CALL(cuGetProcAddress)
CALL(cuGetProcAddress_v2)
CALL(cuMemAlloc_v2)
CALL(cuModuleLoadData)

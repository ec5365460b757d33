// <cassert> in emulated code: an assertion stops the kernel with its text. Like C's header it may be included
// again and again.
#include "../runtime.h"

#undef assert
#define assert(...) ((__VA_ARGS__) ? void() : ::opk::emulator::stop("the kernel's assertion failed: " #__VA_ARGS__))

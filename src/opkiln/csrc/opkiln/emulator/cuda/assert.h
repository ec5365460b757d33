// <cassert> in emulated code: a failed assertion stops the kernel and
// reports its text. Like C's header it may be included repeatedly.
#include "../runtime.h"

#undef assert
#define assert(...) ((__VA_ARGS__) ? void() : ::opk::emulator::stop("the kernel's assertion failed: " #__VA_ARGS__))

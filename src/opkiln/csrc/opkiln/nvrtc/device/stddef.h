// NVRTC has no C library. size_t is built in.
#pragma once

using ptrdiff_t = long;
#ifndef NULL
#define NULL 0
#endif
#ifndef offsetof
#define offsetof(type, member) __builtin_offsetof(type, member)
#endif

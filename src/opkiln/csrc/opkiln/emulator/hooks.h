// The functions that the compiler's instrumentation calls: before each load and store (-fsanitize=thread),
// and for wrong indices and addresses (-fsanitize=bounds,alignment). Defined here, so that no sanitizer
// library is linked. They do nothing unless this thread runs a kernel.
#pragma once

#include <cstdio>

#pragma GCC visibility push(hidden)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {
    launch->enter_function(__builtin_return_address(0));
  }
}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

#define OPKILN_AT(address) reinterpret_cast<uintptr_t>(address)
#define OPKILN_HOOK(name, bytes, writes)                                                        \
  void name(void* address) {                                                                    \
    if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {                          \
      launch->access(OPKILN_AT(address), bytes, writes, false, __builtin_return_address(0));    \
    }                                                                                           \
  }
#define OPKILN_VOLATILE(name, bytes, writes)                                                    \
  void name(void* address) {                                                                    \
    if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {                          \
      launch->volatile_access(OPKILN_AT(address), bytes, writes, __builtin_return_address(0));  \
    }                                                                                           \
  }
#define OPKILN_HOOKS(bytes)                                                                     \
  OPKILN_HOOK(__tsan_read##bytes, bytes, false)                                                 \
  OPKILN_HOOK(__tsan_write##bytes, bytes, true)                                                 \
  OPKILN_HOOK(__tsan_unaligned_read##bytes, bytes, false)                                       \
  OPKILN_HOOK(__tsan_unaligned_write##bytes, bytes, true)                                       \
  OPKILN_VOLATILE(__tsan_volatile_read##bytes, bytes, false)                                           \
  OPKILN_VOLATILE(__tsan_volatile_write##bytes, bytes, true)                                        \
  OPKILN_VOLATILE(__tsan_unaligned_volatile_read##bytes, bytes, false)                                 \
  OPKILN_VOLATILE(__tsan_unaligned_volatile_write##bytes, bytes, true)
OPKILN_HOOKS(1)
OPKILN_HOOKS(2)
OPKILN_HOOKS(4)
OPKILN_HOOKS(8)
OPKILN_HOOKS(16)
#undef OPKILN_HOOKS
#undef OPKILN_VOLATILE
#undef OPKILN_HOOK

void __tsan_read_range(void* address, unsigned long bytes) {
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {
    launch->access(OPKILN_AT(address), bytes, false, false, __builtin_return_address(0));
  }
}
void __tsan_write_range(void* address, unsigned long bytes) {
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {
    launch->access(OPKILN_AT(address), bytes, true, false, __builtin_return_address(0));
  }
}

// The compiler's own atomics. Host code in the same file calls them, too, for example for a static's guard.
#define OPKILN_BEFORE(address)                                                                  \
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {                            \
    launch->atomic(OPKILN_AT(address), sizeof *address, __builtin_return_address(0));           \
  }
#define OPKILN_FETCH(bits, T, name)                                                             \
  T __tsan_atomic##bits##_fetch_##name(volatile T* address, T value, int) {                     \
    OPKILN_BEFORE(address)                                                                      \
    return __atomic_fetch_##name(address, value, __ATOMIC_SEQ_CST);                             \
  }
#define OPKILN_ATOMICS(bits, T)                                                                 \
  T __tsan_atomic##bits##_load(const volatile T* address, int) {                                \
    OPKILN_BEFORE(address)                                                                      \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                          \
  }                                                                                             \
  void __tsan_atomic##bits##_store(volatile T* address, T value, int) {                         \
    OPKILN_BEFORE(address)                                                                      \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                         \
  }                                                                                             \
  T __tsan_atomic##bits##_exchange(volatile T* address, T value, int) {                         \
    OPKILN_BEFORE(address)                                                                      \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                               \
  }                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* address, T* expected, T value,  \
                                                    int, int) {                                 \
    OPKILN_BEFORE(address)                                                                      \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,       \
                                       __ATOMIC_SEQ_CST);                                       \
  }                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* address, T* expected, T value,    \
                                                  int, int) {                                   \
    OPKILN_BEFORE(address)                                                                      \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_SEQ_CST,       \
                                       __ATOMIC_SEQ_CST);                                       \
  }                                                                                             \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* address, T expected, T value, int,   \
                                               int) {                                           \
    OPKILN_BEFORE(address)                                                                      \
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST,             \
                                __ATOMIC_SEQ_CST);                                              \
    return expected;                                                                            \
  }                                                                                             \
  OPKILN_FETCH(bits, T, add)                                                                    \
  OPKILN_FETCH(bits, T, sub)                                                                    \
  OPKILN_FETCH(bits, T, and)                                                                    \
  OPKILN_FETCH(bits, T, or)                                                                     \
  OPKILN_FETCH(bits, T, xor)                                                                    \
  OPKILN_FETCH(bits, T, nand)
OPKILN_ATOMICS(8, uint8_t)
OPKILN_ATOMICS(16, uint16_t)
OPKILN_ATOMICS(32, uint32_t)
OPKILN_ATOMICS(64, uint64_t)
#undef OPKILN_ATOMICS
#undef OPKILN_FETCH
#undef OPKILN_BEFORE
#undef OPKILN_AT

void __tsan_atomic_thread_fence(int) {
  opk::emulator::fence();
}
void __tsan_atomic_signal_fence(int) {}

// The records that the compiler passes for -fsanitize=bounds and -fsanitize=alignment.
struct OpkilnSourceLocation {
  const char* file;
  uint32_t line, column;
};
struct OpkilnType {
  uint16_t kind, info;  // info: log2 of an integer's bits, times 2, plus 1 if it is signed
  char name[1];
};
struct OpkilnOutOfBounds {
  OpkilnSourceLocation location;
  const OpkilnType *array, *index;
};
struct OpkilnTypeMismatch {
  OpkilnSourceLocation location;
  const OpkilnType* type;
  unsigned char log_alignment, kind;
};

static const char* opkiln_file(const char* path) {
  const char* const slash = __builtin_strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

void __ubsan_handle_out_of_bounds(OpkilnOutOfBounds* data, uintptr_t index) {
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {
    const unsigned bits = 1u << (data->index->info >> 1);
    const bool is_signed = (data->index->info & 1) != 0;
    const auto value = static_cast<int64_t>(index << (64 - bits)) >> (64 - bits);
    char text[32];
    if (is_signed) {
      std::snprintf(text, sizeof text, "%lld", static_cast<long long>(value));
    } else {
      std::snprintf(text, sizeof text, "%llu", static_cast<unsigned long long>(index));
    }
    launch->fail_out_of_array(text, data->array->name, opkiln_file(data->location.file),
                         data->location.line);
  }
}

void __ubsan_handle_type_mismatch_v1(OpkilnTypeMismatch* data, uintptr_t address) {
  if (opk::emulator::Launch* const launch = opkiln_emulator_launch) {
    launch->fail_misaligned(address, std::size_t{1} << data->log_alignment, data->type->name,
                       opkiln_file(data->location.file), data->location.line);
  }
}
}

#pragma GCC visibility pop

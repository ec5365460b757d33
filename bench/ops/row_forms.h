// What the forms of row_forms.cu share: accesses with hints, memory to work on, times.
#pragma once

#include <opkiln/op/types.h>
#include <opkiln/sixteen_bytes.h>

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

namespace forms {

using Pack = opkiln::device::Sixteen<opk::bfloat16>;

// 0: plain. 1: reads go around the first cache. 2: so they do, and what is written is evicted first.
template <int kHint>
__device__ inline Pack load(const Pack* from) {
  if (kHint == 0) return *from;
  Pack out;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.words[0]), "=r"(out.words[1]), "=r"(out.words[2]), "=r"(out.words[3])
               : "l"(from));
  return out;
}

template <int kHint>
__device__ inline void store(Pack* to, const Pack& value) {
  if (kHint < 2) {
    *to = value;
  } else {
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.words[0]), "r"(value.words[1]),
                 "r"(value.words[2]), "r"(value.words[3])
                 : "memory");
  }
}

// Division by a number that the host knows, of numbers below 2^31.
struct Divisor {
  uint32_t factor, shift, by;
  explicit Divisor(uint32_t of) : factor(0), shift(0), by(of) {
    while ((uint64_t{1} << shift) < of) ++shift;
    factor = uint32_t(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - of)) / of + 1);
  }
  __device__ uint32_t divide(uint32_t value) const { return (__umulhi(value, factor) + value) >> shift; }
};

struct Shape {
  int64_t rows, columns;
};

inline void check(cudaError_t error) {
  if (error != cudaSuccess) {
    printf("CUDA: %s\n", cudaGetErrorString(error));
    exit(1);
  }
}

constexpr int64_t kPool = int64_t{4} << 30;
inline char *pool_in, *pool_out, *small;
inline const char* word = "";
inline double copy_rate;

inline bool asked(const char* family) { return strstr(family, word) != nullptr; }

// Memory of a turn: no two of some turns in a row share any.
inline int64_t place(int64_t turn, int64_t size) {
  const int64_t count = std::max<int64_t>(1, kPool / size);
  return turn % count * size;
}
inline const Pack* in(int64_t turn, int64_t size) { return reinterpret_cast<const Pack*>(pool_in + place(turn, size)); }
inline Pack* out(int64_t turn, int64_t size) { return reinterpret_cast<Pack*>(pool_out + place(turn, size)); }
inline const Pack* weights(int which) { return reinterpret_cast<const Pack*>(small + (which << 20)); }
inline const int* kept() { return reinterpret_cast<const int*>(small + (8 << 20)); }       // each second row or its neighbour
inline const int* places() { return reinterpret_cast<const int*>(small + (9 << 20)); }     // of a row in `part`, or -1
// The numbers below 2^log2 in any order.
inline const int* shuffled(int log2) { return reinterpret_cast<const int*>(small + (10 << 20)) + (1 << log2); }
inline void* spare() { return small + (12 << 20); }

inline void start(const char* only) {
  word = only;
  check(cudaMalloc(&pool_in, kPool));
  check(cudaMalloc(&pool_out, kPool));
  check(cudaMalloc(&small, 16 << 20));
  check(cudaMemset(pool_in, 0x3c, kPool));
  check(cudaMemset(pool_out, 0, kPool));
  check(cudaMemset(small, 0x3c, 16 << 20));
  std::mt19937 random(1);
  std::vector<int> kept(32768), places(65536, -1), rows(1 << 18);
  for (int i = 0; i < 32768; ++i) kept[i] = 2 * i + int(random() & 1), places[kept[i]] = i;
  for (int size = 1; size < 1 << 18; size *= 2) {
    std::iota(rows.begin() + size, rows.begin() + 2 * size, 0);
    std::shuffle(rows.begin() + size, rows.begin() + 2 * size, random);
  }
  const auto send = [](int at, const std::vector<int>& from) {
    check(cudaMemcpy(small + (at << 20), from.data(), from.size() * 4, cudaMemcpyHostToDevice));
  };
  send(8, kept), send(9, places), send(10, rows);
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  float best = 1e9f;
  for (int i = 0; i < 8; ++i) {
    float ms;
    check(cudaEventRecord(begin));
    check(cudaMemcpyAsync(pool_out, pool_in, kPool, cudaMemcpyDeviceToDevice));
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    best = std::min(best, ms);
  }
  copy_rate = 2.0 * kPool / best * 1e3;
  printf("copy of 4 GiB: %.0f GB/s\n", copy_rate * 1e-9);
}

__global__ void busy(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

// Prints the family, the form, and the median time of a launch. launch(turn) enqueues one.
template <class Launch>
void timed(const char* family, double bytes, const Launch& launch, const char* form, ...) {
  static cudaEvent_t begin = nullptr, end = nullptr;
  if (begin == nullptr) {
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
  }
  const int launches = bytes < 16e6 ? 32 : 4;
  static int64_t turn = 0;
  std::vector<float> times;
  for (int i = 0; i < 3 + 15; ++i) {
    float ms;
    busy<<<1, 1>>>(600000);  // until all launches are enqueued
    check(cudaEventRecord(begin));
    for (int k = 0; k < launches; ++k) launch(turn++);
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    check(cudaGetLastError());
    check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) times.push_back(ms / launches);
  }
  std::sort(times.begin(), times.end());
  const double us = times[times.size() / 2] * 1e3;
  char text[160];
  va_list rest;
  va_start(rest, form);
  vsnprintf(text, sizeof text, form, rest);
  va_end(rest);
  printf("%-28s %8.2f us  %.3f  %s\n", family, us, bytes / us * 1e6 / copy_rate, text);
  fflush(stdout);
}

}  // namespace forms

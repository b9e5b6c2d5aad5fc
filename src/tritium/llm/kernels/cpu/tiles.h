// What attention.cpp is built of: buffers of a thread, the running softmax, and its two products.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "vector.h"

namespace tritium {
namespace {

constexpr int TILE = 64;  // keys

#if defined(__AVX512F__)
constexpr int MR = 6, NV = 4;  // accumulators: MR * NV registers
#else
constexpr int MR = 4, NV = 2;
#endif

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Float buffers of a thread, 64-byte aligned and kept between calls.
struct Buffer {
  std::unique_ptr<float, decltype(&std::free)> data{nullptr, &std::free};
  size_t size = 0;
  float* get(size_t n) {
    if (n > size) {
      data.reset((float*)std::aligned_alloc(64, size_t(up(int64_t(n * sizeof(float)), 64))));
      size = n;
    }
    return data.get();
  }
};

// Running softmax of some queries: maximum, sum and weighted values; [m], [m], [m, dims].
struct State {
  float *max, *sum, *acc;
  State(float* at, int64_t m) : max(at), sum(at + up(m, 16)), acc(at + 2 * up(m, 16)) {}
  static size_t floats(int64_t m, int64_t dims) { return size_t(2 * up(m, 16) + m * dims); }
  void clear(int64_t m, int64_t dims) {
    std::fill(max, max + m, -INF);
    std::fill(sum, sum + m, 0.0f);
    std::fill(acc, acc + m * dims, 0.0f);
  }
};

float exp1(float x) {
  alignas(64) float lanes[W];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

void merge(State& into, const State& from, int64_t m, int64_t dims) {
  for (int64_t i = 0; i < m; ++i) {
    if (from.sum[i] == 0.0f) continue;  // nothing seen in that split
    const float top = std::max(into.max[i], from.max[i]);
    const float a = exp1(into.max[i] - top), b = exp1(from.max[i] - top);
    into.max[i] = top;
    into.sum[i] = into.sum[i] * a + from.sum[i] * b;
    const Vec va = set1(a), vb = set1(b);
    for (int64_t d = 0; d < dims; d += W)
      store(into.acc + i * dims + d, fma(load(into.acc + i * dims + d), va, mul(load(from.acc + i * dims + d), vb)));
  }
}

#if defined(__AVX512BF16__)
inline Vec dot2(Vec acc, float q, Vec k) {
  return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_castps_si512(set1(q)), (__m512bh)_mm512_castps_si512(k));
}
#endif

// scores[R, N * W] = q[R, words] * keys[words, TILE]
template <bool PAIRS, int R, int N>
inline void score(const float* q, int64_t q_stride, const float* keys, int64_t words, float* scores) {
  Vec acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = set1(0.0f);
  for (int64_t d = 0; d < words; ++d) {
    Vec k[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) k[n] = load(keys + d * TILE + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
#if defined(__AVX512BF16__)
        if constexpr (PAIRS) {
          acc[r][n] = dot2(acc[r][n], q[r * q_stride + d], k[n]);
          continue;
        }
#endif
        acc[r][n] = fma(set1(q[r * q_stride + d]), k[n], acc[r][n]);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(scores + r * TILE + n * W, acc[r][n]);
}

// acc[R, N * W] = acc * decay[R] + weights[R, from..to] * values[from..to, dims]
template <int R, int N>
inline void gather(const float* weights, const float* decay, const float* values, int64_t dims, int from, int to,
                   float* out) {
  Vec acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = mul(load(out + r * dims + n * W), set1(decay[r]));
  for (int j = from; j < to; ++j) {
    Vec v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) v[n] = load(values + j * dims + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = fma(set1(weights[r * TILE + j]), v[n], acc[r][n]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(out + r * dims + n * W, acc[r][n]);
}

}  // namespace
}  // namespace tritium

// One float vector type for both builds (AVX-512: 16 lanes, AVX2: 8), with loads and stores of the three
// storage types. All arithmetic is float32; a value is rounded once, when it is stored.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace tritium {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
enum DType { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

constexpr float INF = std::numeric_limits<float>::infinity();

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int W = 16;

inline __mmask16 first(int n) { return n >= W ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float top(Vec a) { return _mm512_reduce_max_ps(a); }
inline Vec nearest(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
inline Vec zero_below(Vec value, Vec x, Vec low) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), value);
}
inline Vec negative_of(Vec x, Vec sign_of) {  // x with the sign of sign_of, for x >= 0
  const __m512i sign = _mm512_and_si512(_mm512_castps_si512(sign_of), _mm512_set1_epi32(int(0x80000000u)));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign));
}
inline Vec magnitude(Vec x) { return _mm512_abs_ps(x); }

inline Vec widen(__m256i h, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
inline Vec widen(__m256i h, f16) { return _mm512_cvtph_ps(h); }
inline __m256i narrow(Vec v, f16) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m256i narrow(Vec v, bf16) { return (__m256i)_mm512_cvtneps_pbh(v); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline void store(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
template <typename T> inline Vec load(const T* p) { return widen(_mm256_loadu_si256((const __m256i*)p), T()); }
template <typename T> inline Vec load(const T* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p), T()); }
template <typename T> inline void store(T* p, Vec v) { _mm256_storeu_si256((__m256i*)p, narrow(v, T())); }
template <typename T> inline void store(T* p, Vec v, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(v, T())); }

// 16 x 16 words.
inline void transpose(Vec* r) {
  __m512i t[16], u[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    const __m512i a = _mm512_castps_si512(r[i]), b = _mm512_castps_si512(r[i + 1]);
    t[i] = _mm512_unpacklo_epi32(a, b);
    t[i + 1] = _mm512_unpackhi_epi32(a, b);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(u[i + 8], u[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    r[i + 8] = _mm512_castsi512_ps(_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
  }
}

#else  // AVX2, FMA, F16C

using Vec = __m256;
constexpr int W = 8;

inline Vec set1(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
inline Vec fnma(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float sum(Vec a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float top(Vec a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec nearest(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec times_power(Vec a, Vec n) {  // |n| <= 127
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
}
inline Vec zero_below(Vec value, Vec x, Vec low) { return _mm256_and_ps(value, _mm256_cmp_ps(x, low, _CMP_NLT_UQ)); }
inline Vec negative_of(Vec x, Vec sign_of) {  // x with the sign of sign_of, for x >= 0
  return _mm256_or_ps(x, _mm256_and_ps(sign_of, _mm256_set1_ps(-0.0f)));
}
inline Vec magnitude(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

inline Vec widen(__m128i h, bf16) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline Vec widen(__m128i h, f16) { return _mm256_cvtph_ps(h); }
inline __m128i narrow(Vec v, f16) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline __m128i narrow(Vec v, bf16) {  // to nearest even; a NaN stays one
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
template <typename T> inline Vec load(const T* p) { return widen(_mm_loadu_si128((const __m128i*)p), T()); }
template <typename T> inline void store(T* p, Vec v) { _mm_storeu_si128((__m128i*)p, narrow(v, T())); }
template <typename T> inline Vec load(const T* p, int n) {
  if (n >= W) return load(p);
  alignas(32) T lanes[W] = {};
  std::memcpy(lanes, p, size_t(n) * sizeof(T));
  return load(lanes);
}
template <typename T> inline void store(T* p, Vec v, int n) {
  if (n >= W) return store(p, v);
  alignas(32) T lanes[W];
  store(lanes, v);
  std::memcpy(p, lanes, size_t(n) * sizeof(T));
}

// 8 x 8 words.
inline void transpose(Vec* r) {
  Vec t[8], u[8];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

#endif

// e^x, relative error below 2e-7; exactly 0 below -87, where a masked score is; NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec low = set1(-87.0f);
  const Vec y = min(set1(88.0f), max(low, x));
  const Vec n = nearest(mul(y, set1(1.44269504088896341f)));
  Vec r = fnma(n, set1(0.693359375f), y);
  r = fnma(n, set1(-2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);  // Cephes expf
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return zero_below(times_power(p, n), x, low);
}

}  // namespace tritium

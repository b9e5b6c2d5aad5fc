// Norms, gated activations and rotary embedding with the cache write: one pass over memory each.
// A row is computed by one thread in a fixed order, so that its result depends on nothing else.
#include <cmath>
#include <initializer_list>

#include "batch.h"
#include "vector.h"

namespace tritium {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t SERIAL = 1 << 14;

template <typename X> float inverse_rms(const X* x, int64_t n, float eps) {
  Vec squares = set1(0.0f);
  for (int64_t i = 0; i < n; i += W) {
    const Vec v = load(x + i, int(n - i < W ? n - i : W));
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / float(n) + eps);
}

template <typename X, typename T> void scale_row(const X* x, const T* weight, T* out, int64_t n, float factor) {
  const Vec f = set1(factor);
  for (int64_t i = 0; i < n; i += W) {
    const int lanes = int(n - i < W ? n - i : W);
    store(out + i, mul(mul(load(x + i, lanes), f), load(weight + i, lanes)), lanes);
  }
}

template <typename X, typename T>
void norm(const X* x, T* out, const T* weight, int64_t outer, int64_t stride, int64_t inner, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (outer * inner * n > SERIAL)
  for (int64_t r = 0; r < outer * inner; ++r) {
    const X* row = x + (r / inner) * stride + (r % inner) * n;
    scale_row(row, weight, out + r * n, n, inverse_rms(row, n, eps));
  }
}

template <typename X, typename T>
void add_norm(const T* x, X* residual, const T* weight, T* out, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for schedule(static) if (rows * n > SERIAL)
  for (int64_t r = 0; r < rows; ++r) {
    X* sums = residual + r * n;
    for (int64_t i = 0; i < n; i += W) {
      const int lanes = int(n - i < W ? n - i : W);
      store(sums + i, add(load(x + r * n + i, lanes), load(sums + i, lanes)), lanes);
    }
    scale_row(sums, weight, out + r * n, n, inverse_rms(sums, n, eps));
  }
}

inline Vec sigmoid(Vec x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

struct Silu {
  static Vec apply(Vec x) { return mul(x, sigmoid(x)); }
};

struct GeluTanh {  // 1 + tanh(z) = 2 sigmoid(2 z)
  static Vec apply(Vec x) {
    const Vec z = mul(mul(set1(0.7978845608028654f), x), fma(mul(x, x), set1(0.044715f), set1(1.0f)));
    return mul(x, sigmoid(add(z, z)));
  }
};

struct GeluErf {  // erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7
  static Vec apply(Vec x) {
    const Vec z = mul(magnitude(x), set1(0.70710678118654752f));
    const Vec t = div(set1(1.0f), fma(z, set1(0.3275911f), set1(1.0f)));
    Vec p = set1(1.061405429f);
    for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) p = fma(p, t, set1(c));
    const Vec erf = fnma(mul(p, t), exp(sub(set1(0.0f), mul(z, z))), set1(1.0f));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), negative_of(erf, x)));
  }
};

template <typename T, typename Gate> void gated(const T* x, T* out, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > SERIAL)
  for (int64_t r = 0; r < rows; ++r) {
    const T* gate = x + r * 2 * n;
    for (int64_t i = 0; i < n; i += W) {
      const int lanes = int(n - i < W ? n - i : W);
      store(out + r * n + i, mul(Gate::apply(load(gate + i, lanes)), load(gate + n + i, lanes)), lanes);
    }
  }
}

template <typename T> void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += W) {
    const int lanes = int(half - i < W ? half - i : W);
    const Vec a = load(x + i, lanes), b = load(x + half + i, lanes), c = load(cos + i, lanes), s = load(sin + i, lanes);
    store(x + i, fms(a, c, mul(b, s)), lanes);
    store(x + half + i, fma(b, c, mul(a, s)), lanes);
  }
}

template <typename T> void rotate_pairs(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    alignas(64) float lanes[W] = {};
    store(lanes, load(x + 2 * i, 2));
    const float a = lanes[0], b = lanes[1];
    lanes[0] = a * cos[i] - b * sin[i];
    lanes[1] = b * cos[i] + a * sin[i];
    store(x + 2 * i, load(lanes), 2);
  }
}

template <typename T> void rope_write(const Batch& b, T* q, T* k, const T* v, T* keys, T* values, const Rope& r) {
  const int64_t half = r.rotated / 2, dim = b.head_dim, size = b.block_size;
  const auto rotate = r.interleaved ? rotate_pairs<T> : rotate_halves<T>;
#pragma omp parallel for schedule(static) if (b.tokens * (b.heads + 2 * b.kv_heads) * dim > SERIAL)
  for (int64_t t = 0; t < b.tokens; ++t) {
    const float* cos = r.cos_sin + b.positions[t] * r.rotated;
    for (int64_t h = 0; h < b.heads; ++h) rotate(q + t * r.q_stride + h * dim, cos, cos + half, half);
    const int64_t block = b.slots[t] / size, offset = b.slots[t] % size;
    for (int64_t g = 0; g < b.kv_heads; ++g) {
      T* key = k + t * r.k_stride + g * dim;
      rotate(key, cos, cos + half, half);
      const int64_t place = ((block * b.kv_heads + g) * size + offset) * dim;
      std::memcpy(keys + place, key, size_t(dim) * sizeof(T));
      std::memcpy(values + place, v + t * r.v_stride + g * dim, size_t(dim) * sizeof(T));
    }
  }
}

template <typename T> void gated_by(int64_t kind, const void* x, void* out, int64_t rows, int64_t n) {
  if (kind == 0) gated<T, Silu>((const T*)x, (T*)out, rows, n);
  if (kind == 1) gated<T, GeluTanh>((const T*)x, (T*)out, rows, n);
  if (kind == 2) gated<T, GeluErf>((const T*)x, (T*)out, rows, n);
}

}  // namespace
}  // namespace tritium

using namespace tritium;

// x is [outer, inner, n] with `stride` elements between outer rows, float32 if `wide`, else of the type of the
// weight, as out, which is contiguous.
EXPORT void tritium_rms_norm(int64_t dtype, int64_t wide, const void* x, void* out, const void* weight, int64_t outer, int64_t stride,
                             int64_t inner, int64_t n, float eps) {
#define CALL(T)                                                                       \
  if (wide) norm((const float*)x, (T*)out, (const T*)weight, outer, stride, inner, n, eps); \
  else norm((const T*)x, (T*)out, (const T*)weight, outer, stride, inner, n, eps)
  DISPATCH(dtype, CALL)
#undef CALL
}

// The residual is float32 if `wide`, else of the type of x.
EXPORT void tritium_add_rms_norm(int64_t dtype, int64_t wide, const void* x, void* residual, const void* weight, void* out,
                                 int64_t rows, int64_t n, float eps) {
#define CALL(T)                                                                        \
  if (wide) add_norm((const T*)x, (float*)residual, (const T*)weight, (T*)out, rows, n, eps); \
  else add_norm((const T*)x, (T*)residual, (const T*)weight, (T*)out, rows, n, eps)
  DISPATCH(dtype, CALL)
#undef CALL
}

// kind: 0 silu, 1 gelu by tanh, 2 gelu by erf.
EXPORT void tritium_gated(int64_t dtype, int64_t kind, const void* x, void* out, int64_t rows, int64_t n) {
#define CALL(T) gated_by<T>(kind, x, out, rows, n)
  DISPATCH(dtype, CALL)
#undef CALL
}

EXPORT void tritium_rope_and_write(const Batch* batch, void* q, void* k, const void* v, void* keys, void* values,
                                   const float* cos_sin, int64_t rotated, int64_t interleaved, int64_t q_stride,
                                   int64_t k_stride, int64_t v_stride) {
  const Rope r{cos_sin, rotated, q_stride, k_stride, v_stride, interleaved != 0};
#define CALL(T) rope_write(*batch, (T*)q, (T*)k, (const T*)v, (T*)keys, (T*)values, r)
  DISPATCH(batch->dtype, CALL)
#undef CALL
}

#define TEXT(x) #x
#define TEXT_OF(x) TEXT(x)
// What build.py compiled, to compare with the sources that lie there now.
EXPORT const char* tritium_source_hash() { return TEXT_OF(SOURCE_HASH); }

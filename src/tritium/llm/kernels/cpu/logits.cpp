// The output head: scores[N, V] = x[N, K] * weight[V, K] in float32 from 16-bit operands, the weight as it is
// stored. A score is summed over K in an order that depends on nothing else, so company does not change it.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "batch.h"
#include "tiles.h"

namespace tritium {
namespace {

template <typename T> struct Widened {
  using Register = Vec;
  static constexpr int STEP = W;
  static Register get(const T* p, int n) { return n == STEP ? load(p) : load(p, n); }
  static Vec dot(Vec acc, Register a, Register b) { return fma(a, b, acc); }
};

#if defined(__AVX512BF16__)
struct Pairs {  // a lane sums two products at a time
  using Register = __m512bh;
  static constexpr int STEP = 2 * W;
  static Register get(const bf16* p, int n) {
    const __mmask32 lanes = n == STEP ? __mmask32(-1) : __mmask32((1u << n) - 1);
    return (__m512bh)_mm512_maskz_loadu_epi16(lanes, p);
  }
  static Vec dot(Vec acc, Register a, Register b) { return _mm512_dpbf16_ps(acc, a, b); }
};
#endif

// scores[N, R] (rows `stride` apart) of R rows of the weight and N rows of x.
template <typename Op, typename T, int R, int N>
inline void block(const T* weight, const T* x, int64_t k, float* scores, int64_t stride) {
  Vec acc[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r][n] = set1(0.0f);
  for (int64_t i = 0; i < k; i += Op::STEP) {
    const int lanes = int(std::min<int64_t>(k - i, Op::STEP));
    typename Op::Register a[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) a[n] = Op::get(x + n * k + i, lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const typename Op::Register w = Op::get(weight + r * k + i, lanes);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r][n] = Op::dot(acc[r][n], w, a[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) scores[n * stride + r] = sum(acc[r][n]);
}

template <typename Op, typename T, int R>
void rows(const T* weight, const T* x, int64_t count, int64_t k, float* scores, int64_t stride) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) block<Op, T, R, 4>(weight, x + n * k, k, scores + n * stride, stride);
  for (; n < count; ++n) block<Op, T, R, 1>(weight, x + n * k, k, scores + n * stride, stride);
}

template <typename Op, typename T>
void product(const T* x, const T* weight, float* scores, int64_t count, int64_t vocab, int64_t k) {
  constexpr int R = W == 16 ? 4 : 2;
#pragma omp parallel for schedule(static)
  for (int64_t v = 0; v < vocab; v += R) {
    if (v + R <= vocab) {
      rows<Op, T, R>(weight + v * k, x, count, k, scores + v, vocab);
      continue;
    }
    for (int64_t i = v; i < vocab; ++i) rows<Op, T, 1>(weight + i * k, x, count, k, scores + i, vocab);
  }
}

#if defined(__AVX512BF16__)

constexpr int SIDE = 16, DEPTH = 32;  // of a tile: rows, and bfloat16 values of a row
constexpr int GROUP = 2 * SIDE;       // rows of the weight that are multiplied at once

// Linux lets a process use the tiles once it has asked.
bool has_amx() {
  static const bool allowed = [] {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    unsigned a = 7, b, c = 0, d;
    __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    const bool present = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16 and AMX-TILE
    return present && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  }();
  return allowed;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
};
const TileConfig TILES;  // in memory: GCC's intrinsic claims to read 8 bytes of it only

__attribute__((target("amx-tile"))) void configure_tiles() { _tile_loadconfig(&TILES); }

__attribute__((target("amx-tile"))) void release_tiles() { _tile_release(); }

// Pairs of a token's values beside those of the next token, [tile of tokens][K / 2][16][2], as AMX takes them.
void pack(const bf16* x, int64_t count, int64_t k, bf16* packed) {
  std::fill(packed, packed + up(count, SIDE) * k, bf16{0});
  for (int64_t n = 0; n < count; ++n) {
    bf16* column = packed + (n / SIDE) * SIDE * k + (n % SIDE) * 2;
    for (int64_t i = 0; i < k; i += 2) std::memcpy(column + i * SIDE, x + n * k + i, 2 * sizeof(bf16));
  }
}

// A finished tile [16 rows of the weight, 16 tokens] goes to scores [tokens, V].
void put(const float* tile, float* scores, int64_t stride, int64_t tokens, int lanes) {
  Vec r[SIDE];
  for (int i = 0; i < SIDE; ++i) r[i] = load(tile + i * SIDE);
  transpose(r);
  // Rows of scores lie a multiple of 4 KiB apart where the vocabulary is round: they would evict each other.
  const bool stream = lanes == SIDE && stride % SIDE == 0 && uintptr_t(scores) % 64 == 0;
  for (int64_t n = 0; n < std::min<int64_t>(tokens, SIDE); ++n) {
    if (stream) _mm512_stream_ps(scores + n * stride, r[n]);
    else store(scores + n * stride, r[n], lanes);
  }
}

// Tiles 0..3 are sums (weight rows by tokens), 4 and 5 weights, 6 and 7 tokens.
template <bool WIDE>
__attribute__((target("amx-tile,amx-bf16"))) void tile_block(const bf16* weight, const bf16* x, int64_t k,
                                                             const bf16* next, float* sums) {
  const bf16 *lower = weight + SIDE * k, *beside = x + SIDE * k;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (WIDE) _tile_zero(2);
  if constexpr (WIDE) _tile_zero(3);
  for (int64_t i = 0; i < k; i += DEPTH) {
    if (next)
      for (int r = 0; r < GROUP; ++r) _mm_prefetch((const char*)(next + r * k + i), _MM_HINT_T1);
    _tile_loadd(4, weight + i, k * int64_t(sizeof(bf16)));
    _tile_loadd(5, lower + i, k * int64_t(sizeof(bf16)));
    _tile_loadd(6, x + i * SIDE, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (WIDE) {
      _tile_loadd(7, beside + i * SIDE, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + SIDE * SIDE, 64);
  if constexpr (WIDE) _tile_stored(2, sums + 2 * SIDE * SIDE, 64);
  if constexpr (WIDE) _tile_stored(3, sums + 3 * SIDE * SIDE, 64);
}

void tile_group(const bf16* weight, const bf16* packed, int64_t count, int64_t k, const bf16* next, float* scores,
                int64_t stride, int rows) {
  alignas(64) float sums[4 * SIDE * SIDE];
  for (int64_t n = 0; n < count; n += 2 * SIDE) {
    const bool wide = count - n > SIDE;
    (wide ? tile_block<true> : tile_block<false>)(weight, packed + n * k, k, n == 0 ? next : nullptr, sums);
    for (int t = 0; t < (wide ? 4 : 2); ++t) {
      const int lanes = std::min(rows - t % 2 * SIDE, SIDE);
      const int64_t token = n + t / 2 * SIDE;
      if (lanes > 0) put(sums + t * SIDE * SIDE, scores + token * stride + t % 2 * SIDE, stride, count - token, lanes);
    }
  }
}

void tile_product(const bf16* x, const bf16* weight, float* scores, int64_t count, int64_t vocab, int64_t k) {
  thread_local Buffer packed_x, last;
  bf16* packed = (bf16*)packed_x.get(size_t(up(count, SIDE) * k / 2));
  pack(x, count, k, packed);
  const int64_t whole = vocab / GROUP, rest = vocab % GROUP;
  bf16* tail = (bf16*)last.get(size_t(GROUP * k / 2));  // a tile reads 32 rows, also where fewer are left
  std::fill(std::copy(weight + whole * GROUP * k, weight + vocab * k, tail), tail + GROUP * k, bf16{0});
#pragma omp parallel
  {
    configure_tiles();
#pragma omp for schedule(static)
    for (int64_t g = 0; g < whole; ++g) {
      const bf16* rows = weight + g * GROUP * k;
      tile_group(rows, packed, count, k, g + 1 < whole ? rows + GROUP * k : nullptr, scores + g * GROUP, vocab, GROUP);
    }
#pragma omp single
    if (rest) tile_group(tail, packed, count, k, nullptr, scores + whole * GROUP, vocab, int(rest));
    release_tiles();
    _mm_sfence();  // streamed scores are in memory before the threads part
  }
}

void product_of(const bf16* x, const bf16* weight, float* scores, int64_t count, int64_t vocab, int64_t k) {
  if (k % DEPTH == 0 && has_amx()) return tile_product(x, weight, scores, count, vocab, k);
  product<Pairs>(x, weight, scores, count, vocab, k);
}

#endif

template <typename T>
void product_of(const T* x, const T* weight, float* scores, int64_t count, int64_t vocab, int64_t k) {
  product<Widened<T>>(x, weight, scores, count, vocab, k);
}

}  // namespace
}  // namespace tritium

using namespace tritium;

// x [count, k] and weight [vocab, k] contiguous, of one type; scores float32 [count, vocab].
EXPORT void tritium_logits(int64_t dtype, const void* x, const void* weight, float* scores, int64_t count,
                           int64_t vocab, int64_t k) {
  if (count == 0) return;
#define CALL(T) product_of((const T*)x, (const T*)weight, scores, count, vocab, k)
  DISPATCH(dtype, CALL)
#undef CALL
}

// Ragged paged attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A task is a tile of queries of one row times one key/value head; all query heads that share it are done
// together, so that keys and values are read once. Keys are walked in tiles of TILE positions and summed up
// per SPLIT of positions, both counted from position 0; the splits are then merged in order. So the
// result of a query is one fixed sequence of operations on its own keys: the same in a chunk of 512, alone,
// or when few rows make the splits run on several threads. What a mask hides adds exact zeros.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "batch.h"
#include "tiles.h"
#include "vector.h"

namespace tritium {
namespace {

constexpr int64_t SPLIT = 256;
constexpr int64_t TILE_ROWS = 64;  // queries times heads of a group that a task aims at
constexpr int64_t SERIAL = 1 << 18;  // multiply-adds below which threads cost more than they save

template <typename T> struct Pairs { static constexpr bool value = false; };
#if defined(__AVX512BF16__)
template <> struct Pairs<bf16> { static constexpr bool value = true; };  // two dims in a word, by vdpbf16ps
#endif

struct Problem {
  const Batch* batch;
  const void *q, *keys, *values;
  void* out;
  int64_t q_stride, window, group, tile_queries;
  float scale;
};

struct Task {
  int32_t row, kv_head, query, num_queries;
  int64_t first, last;  // splits
  int64_t partial;      // index of the first partial result, when splits run apart
};

// One tile of keys and values of one head, unpacked for the two products above.
struct KeyTile {
  float *keys, *values;  // [words up to W, TILE], [TILE, dims]
  int from, to, vectors;
};

template <typename T> class Worker {
  static constexpr bool PAIRS = Pairs<T>::value;
  const Problem& p_;
  const Batch& b_;
  int64_t dims_, words_, q_stride_;
  float *q_ = nullptr, *scores_ = nullptr, *decay_ = nullptr, *split_ = nullptr, *total_ = nullptr;
  KeyTile tile_{};

 public:
  explicit Worker(const Problem& p, int64_t most_rows) : p_(p), b_(*p.batch) {
    dims_ = up(b_.head_dim, W);
    words_ = PAIRS ? (b_.head_dim + 1) / 2 : b_.head_dim;
    q_stride_ = up(words_, 16);
    const size_t m = size_t(most_rows), state = size_t(up(int64_t(State::floats(most_rows, dims_)), 16));
    const size_t key_floats = size_t(q_stride_ * TILE), value_floats = size_t(TILE * dims_);
    static thread_local Buffer buffer;
    float* at = buffer.get(key_floats + value_floats + m * size_t(q_stride_ + TILE) + size_t(up(most_rows, 16)) + 2 * state);
    tile_.keys = at;
    tile_.values = at += key_floats;
    q_ = at += value_floats;
    scores_ = at += m * size_t(q_stride_);
    decay_ = at += m * TILE;
    split_ = at += up(most_rows, 16);
    total_ = at + state;
  }

  int64_t dims() const { return dims_; }

  // All splits of a task one after another, then the output.
  void run(const Task& t) {
    const int64_t m = t.num_queries * p_.group;
    load_queries(t);
    State total(total_, m), split(split_, m);
    run_split(t, t.first, total, m);
    for (int64_t s = t.first + 1; s < t.last; ++s) {
      run_split(t, s, split, m);
      merge(total, split, m, dims_);
    }
    write(t, total);
  }

  void run_part(const Task& t, int64_t s, float* partial) {
    const int64_t m = t.num_queries * p_.group;
    load_queries(t);
    State split(partial, m);
    run_split(t, s, split, m);
  }

  void write(const Task& t, const State& total) const {
    for (int64_t m = 0; m < t.num_queries * p_.group; ++m) {
      const int64_t token = b_.query_starts[t.row] + t.query + m / p_.group;
      T* out = (T*)p_.out + (token * b_.heads + t.kv_head * p_.group + m % p_.group) * b_.head_dim;
      const Vec factor = set1(1.0f / total.sum[m]);
      for (int64_t d = 0; d < b_.head_dim; d += W)
        store(out + d, mul(load(total.acc + m * dims_ + d), factor), int(std::min<int64_t>(W, b_.head_dim - d)));
    }
  }

 private:
  // A row of `words_` words, two dims each or one as float; zeros behind.
  static Vec load_words(const T* p, int64_t dims_left) {
    if (dims_left <= 0) return set1(0.0f);
    const int n = int(std::min<int64_t>(PAIRS ? 2 * W : W, dims_left));
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) {
      const __mmask32 lanes = n == 32 ? 0xffffffffu : (1u << n) - 1;
      return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lanes, p));
    }
#endif
    return load(p, n);
  }

  void load_queries(const Task& t) {
    for (int64_t m = 0; m < t.num_queries * p_.group; ++m) {
      const int64_t token = b_.query_starts[t.row] + t.query + m / p_.group;
      const T* q = (const T*)p_.q + token * p_.q_stride + (t.kv_head * p_.group + m % p_.group) * b_.head_dim;
      for (int64_t w = 0; w < words_; w += W) {
        const int64_t dim = w * (PAIRS ? 2 : 1);
        store(q_ + m * q_stride_ + w, load_words(q + dim, b_.head_dim - dim));
      }
    }
  }

  // Unpacks positions [base + from, base + to); what lies outside is never read, for it may be anything.
  void unpack(const Task& t, int64_t base, int from, int to) {
    tile_.from = from;
    tile_.to = to;
    tile_.vectors = (to + W - 1) / W;
    int64_t places[TILE];
    find_places(t, base, from, to, places);
    const T *keys = (const T*)p_.keys, *values = (const T*)p_.values;
    for (int j = from / W * W; j < to; j += W) {
      if (j >= from && j + W <= to && b_.head_dim % (PAIRS ? 2 * W : W) == 0)
        unpack_keys<true>(keys, places, j);
      else
        unpack_keys<false>(keys, places, j);
    }
    const int64_t dims = dims_, whole = b_.head_dim / W * W;
    float* out = tile_.values;
    for (int j = from; j < to; ++j) {
      for (int64_t d = 0; d < whole; d += W) store(out + j * dims + d, load(values + places[j] + d));
      if (whole < dims) store(out + j * dims + whole, load(values + places[j] + whole, int(b_.head_dim - whole)));
    }
  }

  // Where positions [base + from, base + to) lie in the cache, block by block.
  void find_places(const Task& t, int64_t base, int from, int to, int64_t* places) const {
    const int32_t* table = b_.table + t.row * b_.table_stride;
    const int64_t size = b_.block_size, dim = b_.head_dim;
    int64_t block = (base + from) / size, offset = (base + from) % size;
    for (int j = from; j < to; ++block, offset = 0) {
      int64_t place = ((table[block] * b_.kv_heads + t.kv_head) * size + offset) * dim;
      for (; offset < size && j < to; ++offset, place += dim) places[j++] = place;
    }
  }

  // The keys of W positions from j on, words by positions. WHOLE: all of them and all of their vectors are there.
  template <bool WHOLE> void unpack_keys(const T* keys, const int64_t* places, int j) {
    float* out = tile_.keys + j;
    const int from = tile_.from, to = tile_.to;
    const int64_t words = words_, head_dim = b_.head_dim;
    for (int64_t w = 0; w < words; w += W) {
      const int64_t dim = w * (PAIRS ? 2 : 1), left = WHOLE ? 2 * W : head_dim - dim;
      Vec r[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i)
        r[i] = WHOLE || (j + i >= from && j + i < to) ? load_words(keys + places[j + i] + dim, left) : set1(0.0f);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) store(out + (w + i) * TILE, r[i]);
    }
  }

  void run_split(const Task& t, int64_t s, State& state, int64_t m) {
    state.clear(m, dims_);
    const int64_t begin = position(t, 0), end = position(t, t.num_queries - 1) + 1;
    const int64_t low = std::max(s * SPLIT, first_key(begin)), high = std::min((s + 1) * SPLIT, end);
    for (int64_t base = low / TILE * TILE; base < high; base += TILE) {
      unpack(t, base, int(std::max<int64_t>(low - base, 0)), int(std::min<int64_t>(TILE, high - base)));
      score_rows(m);
      for (int64_t i = 0; i < m; ++i) {
        const int64_t at = position(t, i / p_.group);
        const int64_t a = std::max<int64_t>(first_key(at) - base, 0), b = std::min<int64_t>(at + 1 - base, tile_.to);
        decay_[i] = soften(scores_ + i * TILE, int(std::min<int64_t>(a, TILE)), int(b), state.max[i], state.sum[i]);
      }
      gather_rows(state, m);
    }
  }

  int64_t position(const Task& t, int64_t query) const {
    return b_.contexts[t.row] - (b_.query_starts[t.row + 1] - b_.query_starts[t.row]) + t.query + query;
  }
  int64_t first_key(int64_t position) const {
    return p_.window > 0 ? std::max<int64_t>(0, position - p_.window + 1) : 0;
  }

  // Scores to weights, in place; takes the tile into the running maximum and sum. Returns the decay of what was before.
  float soften(float* s, int a, int b, float& running_max, float& running_sum) const {
    const int n = tile_.vectors * W;
    if (a >= b) {
      std::fill(s, s + n, 0.0f);
      return 1.0f;
    }
    std::fill(s, s + a, -INF);
    std::fill(s + b, s + n, -INF);
    Vec highest = set1(-INF);
    for (int j = 0; j < n; j += W) highest = max(load(s + j), highest);
    const float now = std::max(running_max, top(highest) * p_.scale);
    const Vec vmax = set1(now), vscale = set1(p_.scale);
    Vec total = set1(0.0f);
    for (int j = 0; j < n; j += W) {
      const Vec e = exp(fms(load(s + j), vscale, vmax));
      store(s + j, e);
      total = add(total, e);
    }
    const float decay = exp1(running_max - now);
    running_sum = running_sum * decay + sum(total);
    running_max = now;
    return decay;
  }

  template <int R> void score_block(int64_t i) {
    const float* q = q_ + i * q_stride_;
    int n = tile_.from / W;
    for (; n + NV <= tile_.vectors; n += NV)
      score<PAIRS, R, NV>(q, q_stride_, tile_.keys + n * W, words_, scores_ + i * TILE + n * W);
    for (; n < tile_.vectors; ++n)
      score<PAIRS, R, 1>(q, q_stride_, tile_.keys + n * W, words_, scores_ + i * TILE + n * W);
  }

  template <int R> void gather_block(int64_t i, float* acc) {
    const float* weights = scores_ + i * TILE;
    int64_t d = 0;
    for (; d + NV * W <= dims_; d += NV * W)
      gather<R, NV>(weights, decay_ + i, tile_.values + d, dims_, tile_.from, tile_.to, acc + i * dims_ + d);
    for (; d < dims_; d += W)
      gather<R, 1>(weights, decay_ + i, tile_.values + d, dims_, tile_.from, tile_.to, acc + i * dims_ + d);
  }

  void score_rows(int64_t m) {
    int64_t i = 0;
    for (; i + MR <= m; i += MR) score_block<MR>(i);
    switch (m - i) {
      case 1: score_block<1>(i); break;
      case 2: score_block<2>(i); break;
      case 3: score_block<3>(i); break;
      case 4: score_block<MR == 4 ? 1 : 4>(i); break;
      case 5: score_block<MR == 4 ? 1 : 5>(i); break;
    }
  }

  void gather_rows(State& state, int64_t m) {
    int64_t i = 0;
    for (; i + MR <= m; i += MR) gather_block<MR>(i, state.acc);
    switch (m - i) {
      case 1: gather_block<1>(i, state.acc); break;
      case 2: gather_block<2>(i, state.acc); break;
      case 3: gather_block<3>(i, state.acc); break;
      case 4: gather_block<MR == 4 ? 1 : 4>(i, state.acc); break;
      case 5: gather_block<MR == 4 ? 1 : 5>(i, state.acc); break;
    }
  }
};

struct Plan {
  int64_t work = 0;     // multiply-adds
  int64_t queries = 0;  // most of a task
};

// Tasks of the batch, the long ones first for an even finish.
Plan list_tasks(const Problem& p, std::vector<Task>& tasks) {
  const Batch& b = *p.batch;
  Plan plan;
  for (int64_t row = b.rows - 1; row >= 0; --row) {
    const int64_t count = b.query_starts[row + 1] - b.query_starts[row], before = b.contexts[row] - count;
    for (int64_t query = (count - 1) / p.tile_queries * p.tile_queries; query >= 0; query -= p.tile_queries) {
      const int64_t n = std::min(p.tile_queries, count - query), end = before + query + n;
      const int64_t low = p.window > 0 ? std::max<int64_t>(0, before + query - p.window + 1) : 0;
      plan.queries = std::max(plan.queries, n);
      plan.work += (end - low) * n * b.heads * b.head_dim;
      for (int64_t g = 0; g < b.kv_heads; ++g)
        tasks.push_back({int32_t(row), int32_t(g), int32_t(query), int32_t(n), low / SPLIT, (end + SPLIT - 1) / SPLIT, 0});
    }
  }
  return plan;
}

template <typename T> void attend(const Problem& p) {
  static thread_local std::vector<Task> tasks;
  static thread_local std::vector<std::pair<int64_t, int64_t>> parts;  // task, split
  tasks.clear();
  parts.clear();
  const Plan plan = list_tasks(p, tasks);
  const bool threaded = plan.work > SERIAL;
  const int64_t rows = plan.queries * p.group, num_tasks = int64_t(tasks.size());
  const int64_t stride = up(int64_t(State::floats(rows, up(p.batch->head_dim, W))), 16);
  const bool split = threaded && num_tasks < 4 * omp_get_max_threads();
  for (int64_t i = 0; split && i < num_tasks; ++i) {
    tasks[size_t(i)].partial = int64_t(parts.size());
    for (int64_t s = tasks[size_t(i)].first; s < tasks[size_t(i)].last; ++s) parts.emplace_back(i, s);
  }
  static thread_local Buffer partials;
  float* partial = split ? partials.get(size_t(stride) * parts.size()) : nullptr;
  const Task* task = tasks.data();
  const auto* part = parts.data();
  const int64_t num_parts = int64_t(parts.size());
#pragma omp parallel if (threaded)
  {
    Worker<T> worker(p, rows);
    if (split) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_parts; ++i)
        worker.run_part(task[part[i].first], part[i].second, partial + i * stride);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_tasks; ++i) {
        const int64_t m = task[i].num_queries * p.group;
        State total(partial + task[i].partial * stride, m);
        for (int64_t s = 1; s < task[i].last - task[i].first; ++s)
          merge(total, State(partial + (task[i].partial + s) * stride, m), m, worker.dims());
        worker.write(task[i], total);
      }
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_tasks; ++i) worker.run(task[i]);
    }
  }
}

}  // namespace
}  // namespace tritium

using namespace tritium;

// q is [tokens, heads, head_dim] with q_stride elements between tokens, out the same, contiguous; keys and values
// are [blocks, kv_heads, block_size, head_dim]. window: keys that a query sees, itself included; 0 for all.
EXPORT void tritium_attention(const Batch* batch, const void* q, int64_t q_stride, void* out, const void* keys,
                              const void* values, float scale, int64_t window) {
  const int64_t group = batch->heads / batch->kv_heads;
  const int64_t queries = std::max<int64_t>(1, TILE_ROWS / group);
  const Problem p{batch, q, keys, values, out, q_stride, window, group, queries, scale};
#define CALL(T) attend<T>(p)
  DISPATCH(batch->dtype, CALL)
#undef CALL
}

// The draw of a token from logits: temperature, top-k, top-p, min-p, then the inverse CDF over the ids in order.
// No sort of the vocabulary: the filters are thresholds, bracketed by bisection and settled among the few
// values in the last bracket. One thread per row, every sum in a fixed order.
#include <algorithm>
#include <functional>
#include <vector>

#include "vector.h"

namespace tritium {
namespace {

constexpr int64_t BLOCK = 256;   // ids per partial sum of the CDF
constexpr int BISECTIONS = 12;
constexpr float LOWEST = -80.0f;  // a scaled logit below it weighs less than a float32 sum can tell
constexpr int64_t SERIAL = 1 << 15;

struct Row {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
  double uniform;
};

inline int lanes_left(int64_t n, int64_t i) { return int(n - i < W ? n - i : W); }

float highest(const float* x, int64_t n) {
  Vec top_lanes = set1(-INF);
  int64_t i = 0;
  for (; i + W <= n; i += W) top_lanes = max(load(x + i), top_lanes);
  float best = top(top_lanes);
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

int64_t first_equal(const float* x, int64_t n, float value) {
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(n, begin + BLOCK);
    int any = 0;
    for (int64_t i = begin; i < end; ++i) any |= x[i] == value;
    for (int64_t i = begin; any && i < end; ++i)
      if (x[i] == value) return i;
  }
  return 0;
}

int64_t count_from(const float* x, int64_t n, float least) {
  int64_t count = 0;
  for (int64_t begin = 0; begin < n; begin += 4096) {
    int32_t part = 0;
    const int64_t end = std::min(n, begin + 4096);
    for (int64_t i = begin; i < end; ++i) part += x[i] >= least;
    count += part;
  }
  return count;
}

// Sum of the weights from `least` on, of one block of ids or of all.
double sum_block(const float* w, int64_t n, float least) {
  Vec sums = set1(0.0f);
  for (int64_t i = 0; i < n; i += W) {
    const Vec v = load(w + i, lanes_left(n, i));
    sums = add(sums, zero_below(v, v, set1(least)));
  }
  return double(sum(sums));
}

double sum_from(const float* w, int64_t n, float least) {
  double total = 0;
  for (int64_t i = 0; i < n; i += BLOCK) total += sum_block(w + i, std::min(BLOCK, n - i), least);
  return total;
}

// What lies in [low, high), best first.
void collect(const float* x, int64_t n, float low, float high, std::vector<float>& out) {
  out.clear();
  for (int64_t begin = 0; begin < n; begin += W) {
    const int64_t end = std::min<int64_t>(n, begin + W);
    int any = 0;
    for (int64_t i = begin; i < end; ++i) any |= (x[i] >= low) & (x[i] < high);
    for (int64_t i = begin; any && i < end; ++i)
      if (x[i] >= low && x[i] < high) out.push_back(x[i]);
  }
  std::sort(out.begin(), out.end(), std::greater<float>());
}

// The k-th best scaled logit (all are at most 0).
float kth(const float* x, int64_t n, int64_t k, std::vector<float>& scratch) {
  float low = LOWEST, high = 0.0f;  // at least k from low on, fewer than k from high on
  if (count_from(x, n, low) < k) return -INF;
  if (count_from(x, n, high) >= k) return high;
  for (int i = 0; i < BISECTIONS; ++i) {
    const float middle = 0.5f * (low + high);
    (count_from(x, n, middle) >= k ? low : high) = middle;
  }
  collect(x, n, low, high, scratch);
  return scratch[size_t(k - count_from(x, n, high) - 1)];
}

// The least weight of the smallest set of best ids that makes up `share` of the sum (all are at most 1).
float nucleus(const float* w, int64_t n, double share, float least, std::vector<float>& scratch) {
  const double wanted = share * sum_from(w, n, least);
  float low = least, high = 1.0f;  // from low on it is enough, from high on it is not
  double before = sum_from(w, n, high);
  if (before >= wanted) return high;
  for (int i = 0; i < 2 * BISECTIONS && low < high * 0.95f; ++i) {
    const float middle = low > 0.0f ? 0.5f * (low + high) : high / 16.0f;
    const double mass = sum_from(w, n, middle);
    if (mass >= wanted) {
      low = middle;
    } else {
      high = middle;
      before = mass;
    }
  }
  collect(w, n, low, high, scratch);
  float last = high;
  for (const float value : scratch) {
    if (before >= wanted) break;
    before += double(value);
    last = value;
  }
  return last;
}

int64_t pick(const float* w, int64_t n, float least, double uniform, std::vector<double>& sums) {
  sums.clear();
  double total = 0;
  for (int64_t i = 0; i < n; i += BLOCK) {
    sums.push_back(sum_block(w + i, std::min(BLOCK, n - i), least));
    total += sums.back();
  }
  const double target = uniform * total;
  double running = 0;
  int64_t last = 0;  // rounding may leave a block without an answer: then its last id is it
  bool found = false;
  for (size_t b = 0; b < sums.size(); ++b) {
    if (sums[b] == 0) continue;
    if (running + sums[b] <= target) {
      running += sums[b];
      last = int64_t(b);
      continue;
    }
    last = int64_t(b);
    found = true;
    break;
  }
  const int64_t begin = last * BLOCK, end = std::min(n, begin + BLOCK);
  int64_t id = begin;
  for (int64_t i = begin; i < end; ++i) {
    if (!(w[i] >= least && w[i] > 0)) continue;
    id = i;
    running += double(w[i]);
    if (found && running > target) break;
  }
  return id;
}

int64_t draw(const float* x, int64_t n, const Row& r) {
  static thread_local std::vector<float> scaled, weights, scratch;
  static thread_local std::vector<double> sums;
  const float best = highest(x, n);
  if (r.temperature <= 0.0f) return first_equal(x, n, best);
  scaled.resize(size_t(n + W));
  weights.resize(size_t(n + W));
  const Vec top_lanes = set1(best), temperature = set1(r.temperature);
  for (int64_t i = 0; i < n; i += W) {
    const Vec v = div(sub(load(x + i, lanes_left(n, i)), top_lanes), temperature);
    store(scaled.data() + i, v);
    store(weights.data() + i, exp(v));
  }
  float least = std::numeric_limits<float>::min();
  if (r.top_k > 0 && r.top_k < n) {
    const float edge = kth(scaled.data(), n, r.top_k, scratch);
    alignas(64) float lanes[W];
    store(lanes, exp(set1(edge)));
    // Neighbouring logits may share a weight: compare the logits, and clear what is below.
    for (int64_t i = 0; i < n; i += W) {
      const Vec v = load(scaled.data() + i);
      store(weights.data() + i, zero_below(load(weights.data() + i), v, set1(edge)));
    }
    least = std::max(least, lanes[0]);
  }
  if (r.top_p < 1.0) least = std::max(least, nucleus(weights.data(), n, r.top_p, least, scratch));
  return pick(weights.data(), n, std::max(least, r.min_p), r.uniform, sums);
}

}  // namespace
}  // namespace tritium

using namespace tritium;

// One token per row of logits [rows, vocab]; temperature 0 takes the best one, the first of equals.
EXPORT void tritium_draw(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                         const int64_t* top_k, const double* top_p, const float* min_p, const double* uniform,
                         int64_t* tokens) {
#pragma omp parallel for schedule(dynamic, 1) if (rows > 1 && rows * vocab > SERIAL)
  for (int64_t r = 0; r < rows; ++r)
    tokens[r] = draw(logits + r * vocab, vocab, {temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]});
}

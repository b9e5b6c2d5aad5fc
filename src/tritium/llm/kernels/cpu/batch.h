// What the kernels see of ForwardInputs; the binding fills it once per pass.
#pragma once

#include <cstdint>

namespace tritium {

// Laid out as `binding.Batch` in Python: pointers and int64 only.
struct Batch {
  const int64_t* positions;      // [tokens]
  const int64_t* slots;          // [tokens], block * block_size + offset
  const int32_t* query_starts;   // [rows + 1]
  const int32_t* contexts;       // [rows]
  const int32_t* table;          // [rows, table_stride] block ids
  int64_t table_stride;
  int64_t rows;
  int64_t tokens;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t dtype;
};

struct Rope {
  const float* cos_sin;  // [positions, rotated]: cosines, then sines
  int64_t rotated, q_stride, k_stride, v_stride;
  bool interleaved;
};

#define DISPATCH(dtype, CALL)                \
  switch (dtype) {                           \
    case FLOAT32: CALL(float); break;        \
    case BFLOAT16: CALL(bf16); break;        \
    case FLOAT16: CALL(f16); break;          \
  }

}  // namespace tritium

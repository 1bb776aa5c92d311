#include "compute.h"

#include <math.h>
#include <stdlib.h>

#include "floats.h"

/* A tile of weights as floats: 32 KiB, which a first-level cache holds. */
enum { TILE_ROWS = 32, TILE_COLUMNS = 256 };

typedef struct {
  const void *data;
  size_t rows, columns;
  bool packed;
} Matrix;

/* --- dtypes ---------------------------------------------------------------------------------- */

static void widen(Dtype dtype, float *out, const void *in, size_t start, size_t count) {
  const uint16_t *halves = (const uint16_t *)in + start;
  if (dtype == FLOAT32)
    memcpy(out, (const float *)in + start, count * sizeof *out);
  else if (dtype == BFLOAT16)
    for (size_t i = 0; i < count; i++) out[i] = from_bfloat16(halves[i]);
  else
    for (size_t i = 0; i < count; i++) out[i] = from_float16(halves[i]);
}

static void narrow(Dtype dtype, void *out, const float *in, size_t count) {
  uint16_t *halves = out;
  if (dtype == FLOAT32)
    memcpy(out, in, count * sizeof *in);
  else if (dtype == BFLOAT16)
    for (size_t i = 0; i < count; i++) halves[i] = to_bfloat16(in[i]);
  else
    for (size_t i = 0; i < count; i++) halves[i] = to_float16(in[i]);
}

/* Rounds floats to the dtype's values. */
static void round_to(Dtype dtype, float *x, size_t count) {
  if (dtype == BFLOAT16)
    for (size_t i = 0; i < count; i++) x[i] = from_bfloat16(to_bfloat16(x[i]));
  else if (dtype == FLOAT16)
    for (size_t i = 0; i < count; i++) x[i] = from_float16(to_float16(x[i]));
}

/* --- matmuls --------------------------------------------------------------------------------- */

/* Where row k of a matrix is stored: packed order moves j * 128 + p to p * (rows / 128) + j. */
static size_t stored_row(const Matrix *w, size_t k) {
  return w->packed ? k % PACKED_TILE * (w->rows / PACKED_TILE) + k / PACKED_TILE : k;
}

/* Adds x @ tile to y, four rows of the tile at a time; the tile's last rows are zeros. */
static void add_tile(float *restrict y, const float *restrict x, const float *restrict tile,
                     size_t rows, size_t columns) {
  for (size_t k = 0; k < rows; k += 4) {
    const float *w = tile + k * TILE_COLUMNS;
    float x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
    for (size_t n = 0; n < columns; n++)
      y[n] += x0 * w[n] + x1 * w[n + TILE_COLUMNS] + x2 * w[n + 2 * TILE_COLUMNS] +
              x3 * w[n + 3 * TILE_COLUMNS];
  }
}

static void load_tile(float *tile, const Matrix *w, Dtype dtype, size_t k0, size_t rows, size_t n0,
                      size_t columns) {
  for (size_t k = 0; k < rows; k++)
    widen(dtype, tile + k * TILE_COLUMNS, w->data, stored_row(w, k0 + k) * w->columns + n0,
          columns);
  memset(tile + rows * TILE_COLUMNS, 0, (TILE_ROWS - rows) * TILE_COLUMNS * sizeof *tile);
}

/* y[M, N] = x[M, K] @ w[K, N], summed in float over all of K. */
static void matmul(float *y, const float *x, size_t M, const Matrix *w, Dtype dtype) {
  float tile[TILE_ROWS * TILE_COLUMNS], piece[TILE_ROWS];
  memset(y, 0, M * w->columns * sizeof *y);
  for (size_t n0 = 0; n0 < w->columns; n0 += TILE_COLUMNS) {
    size_t columns = w->columns - n0 < TILE_COLUMNS ? w->columns - n0 : TILE_COLUMNS;
    for (size_t k0 = 0; k0 < w->rows; k0 += TILE_ROWS) {
      size_t rows = w->rows - k0 < TILE_ROWS ? w->rows - k0 : TILE_ROWS;
      load_tile(tile, w, dtype, k0, rows, n0, columns);
      memset(piece, 0, sizeof piece);
      for (size_t m = 0; m < M; m++) {
        memcpy(piece, x + m * w->rows + k0, rows * sizeof *piece);
        add_tile(y + m * w->columns + n0, piece, tile, (rows + 3) / 4 * 4, columns);
      }
    }
  }
}

/* y = (x @ u) @ v, the intermediate (in `low`) rounded once. */
static void pair(float *y, float *low, const float *x, size_t M, const Matrix *u, const Matrix *v,
                 Dtype dtype) {
  matmul(low, x, M, u, dtype);
  round_to(dtype, low, M * u->columns);
  matmul(y, low, M, v, dtype);
}

/* y[M, N] += bias[N], a piece of the bias at a time. */
static void add_bias(float *y, const void *bias, size_t M, size_t N, Dtype dtype) {
  float piece[TILE_COLUMNS];
  for (size_t n0 = 0; n0 < N; n0 += TILE_COLUMNS) {
    size_t columns = N - n0 < TILE_COLUMNS ? N - n0 : TILE_COLUMNS;
    widen(dtype, piece, bias, n0, columns);
    for (size_t m = 0; m < M; m++)
      for (size_t n = 0; n < columns; n++) y[m * N + n0 + n] += piece[n];
  }
}

/* --- activations ----------------------------------------------------------------------------- */

static float activated(Activation activation, float x) {
  switch (activation) {
    case SILU: return x / (1 + expf(-x));
    case GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
    case GELU_TANH: return 0.5f * x * (1 + tanhf(0.79788456f * (x + 0.044715f * x * x * x)));
    case RELU: return x < 0 ? 0 : x;
  }
  return NAN;
}

/* gate = act(gate) * up, each step rounded. */
static void multiply_gated(float *gate, float *up, size_t count, const Config *config) {
  round_to(config->dtype, gate, count);
  round_to(config->dtype, up, count);
  for (size_t i = 0; i < count; i++) gate[i] = activated(config->activation, gate[i]);
  round_to(config->dtype, gate, count);
  for (size_t i = 0; i < count; i++) gate[i] *= up[i];
  round_to(config->dtype, gate, count);
}

/* --- ops ------------------------------------------------------------------------------------- */

/* Where an op's floats lie in its work space. */
typedef struct {
  float *x, *y, *low, *gate, *up;
} Work;

static size_t largest_rank(const Config *config) {
  size_t rank = config->ranks[0];
  for (int i = 1; i < 3; i++)
    if (config->ranks[i] > rank) rank = config->ranks[i];
  return rank;
}

static bool allocate(Work *work, const Config *config, Message *why) {
  size_t M = config->M, rank = largest_rank(config);
  size_t columns = config->K + config->N + rank + 2 * config->inner;
  bool fits = M <= PTRDIFF_MAX / sizeof *work->x / columns;
  work->x = fits ? malloc(M * columns * sizeof *work->x) : NULL;
  if (!work->x)
    return refuse(why, "no memory for %zu rows of %zu floats, got M=%zu K=%zu N=%zu; run fewer "
                       "tokens a call", M, columns, M, config->K, config->N);
  work->y = work->x + M * config->K;
  work->low = work->y + M * config->N;
  work->gate = work->low + M * rank;
  work->up = work->gate + M * config->inner;
  return true;
}

static void xw(const Config *c, const void *const *in, Work *work) {
  Matrix w = {in[1], c->K, c->N, false};
  matmul(work->y, work->x, c->M, &w, c->dtype);
  if (c->bias) add_bias(work->y, in[2], c->M, c->N, c->dtype);
}

static void xuv(const Config *c, const void *const *in, Work *work) {
  Matrix u = {in[1], c->K, c->ranks[0], c->packed}, v = {in[2], c->ranks[0], c->N, false};
  pair(work->y, work->low, work->x, c->M, &u, &v, c->dtype);
  if (c->bias) add_bias(work->y, in[3], c->M, c->N, c->dtype);
}

static void svd_mlp(const Config *c, const void *const *in, Work *work) {
  Matrix u_gate = {in[1], c->K, c->ranks[0], false}, v_gate = {in[2], c->ranks[0], c->inner, false};
  Matrix u_up = {in[3], c->K, c->ranks[1], false}, v_up = {in[4], c->ranks[1], c->inner, false};
  Matrix u_down = {in[5], c->inner, c->ranks[2], false}, v_down = {in[6], c->ranks[2], c->N, false};
  pair(work->gate, work->low, work->x, c->M, &u_gate, &v_gate, c->dtype);
  pair(work->up, work->low, work->x, c->M, &u_up, &v_up, c->dtype);
  multiply_gated(work->gate, work->up, c->M * c->inner, c);
  pair(work->y, work->low, work->gate, c->M, &u_down, &v_down, c->dtype);
}

bool compute(const Config *config, const void *const *in, void *out, Message *why) {
  Work work;
  if (!allocate(&work, config, why)) return false;
  widen(config->dtype, work.x, in[0], 0, config->M * config->K);
  switch (config->op) {
    case OP_XW: xw(config, in, &work); break;
    case OP_XUV: xuv(config, in, &work); break;
    case OP_SVD_MLP: svd_mlp(config, in, &work); break;
  }
  narrow(config->dtype, out, work.y, config->M * config->N);
  free(work.x);
  return true;
}

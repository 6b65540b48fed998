/* The parts of a Llama decoder between its products, in float32. `kernels.py` compiles it.
 *
 * DIM: size of a head. GROUP: query heads that share a key head. LANES: floats of a vector. */

#include <stdint.h>

#define TILE 32  /* keys and values that stay in the first cache while several tokens see them */
#define TOKENS 32 /* that see a tile together, at most */
#define WORTH 4  /* tokens for which a tile of keys is transposed */
#define PARTS (DIM / LANES)
#define FEW 16384 /* numbers that are not worth waking other threads */
#define PAIR 2   /* tokens that are computed together behind a transposed tile */
#define EACH(i, n) for (int i = 0; i < (n); i++)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4)));

static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define LANE (*(const ivec *)lanes)

static inline float exponential(float x) {
    x = x < -87.f ? -87.f : x > 88.f ? 88.f : x; /* NaN stays */
    float n = __builtin_rintf(x * 1.44269504f);  /* exp(x) = 2^n exp(f), by Cephes' expf */
    float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return (p * f * f + f + 1.f) * power.value;
}

/* y[rows, n] = RMSNorm(x) * weight[n] */
void rms_norm(const float *x, const float *weight, float *y, int64_t rows, int n, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * n;
        float sum = 0;
        EACH(i, n) sum += from[i] * from[i];
        float scale = 1.f / __builtin_sqrtf(sum / n + eps);
        EACH(i, n) y[row * n + i] = from[i] * scale * weight[i];
    }
}

/* y[rows, n] = silu(x[:, :n]) * x[:, n:] */
void silu_mul(const float *x, float *y, int64_t rows, int n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * n, *up = gate + n;
        EACH(i, n) y[row * n + i] = gate[i] / (1.f + exponential(-gate[i])) * up[i];
    }
}

typedef struct {
    int64_t tokens;
    const int64_t *rows, *places; /* of each token; those of a row follow each other */
    const float *cos, *sin;       /* [tokens, DIM], the first half of sin negative */
    int64_t key_heads, row_stride, head_stride; /* of keys and values [rows, key_heads, ., DIM] */
    int64_t stem, stem_stride;    /* tokens before all rows; of their [key_heads, ., DIM] */
    float scale, eps;
    int threads;
} Batch;

/* Running softmax of the query heads of a group (arXiv:1805.02867). */
typedef struct {
    float most[GROUP];
    vec mass[GROUP], sum[GROUP][PARTS];
} State;

static inline vec larger(vec a, vec b) {
    ivec first = a > b; /* by hand, because compilers keep the order of comparisons, for NaN */
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
}

static inline float largest(const vec *x) { /* of TILE numbers */
    vec most = x[0];
    for (int i = 1; i < TILE / LANES; i++) most = larger(most, x[i]);
#pragma GCC unroll 8
    for (int half = LANES / 2; half; half /= 2) {
        most = larger(most, __builtin_shuffle(most, (LANE + half) & (LANES - 1)));
    }
    return most[0];
}

/* Let the heads of `tokens` tokens see n more keys and values, and one more of each next token if it `grows`. */
static inline __attribute__((always_inline)) void see(const int tokens, State *states, const float *queries,
                                                      int64_t width, const vec (*turned)[TILE / LANES],
                                                      const float *keys, const float *values, int n, int grows) {
    float weights[PAIR * GROUP][TILE];
    if (turned) { /* sums of whole vectors */
        vec scores[PAIR * GROUP][TILE / LANES] = {0};
        EACH(d, DIM) {
            vec k[TILE / LANES];
            EACH(i, TILE / LANES) k[i] = turned[d][i];
            EACH(x, tokens) EACH(r, GROUP) EACH(i, TILE / LANES)
                scores[x * GROUP + r][i] += queries[x * width + r * DIM + d] * k[i];
        }
        __builtin_memcpy(weights, scores, tokens * GROUP * TILE * sizeof(float));
    } else {
        const vec *q = (const vec *)queries;
        EACH(t, n) {
            const vec *k = (const vec *)(keys + t * DIM);
            EACH(r, GROUP) {
                vec product = q[r * PARTS] * k[0];
                for (int i = 1; i < PARTS; i++) product += q[r * PARTS + i] * k[i];
                float dot = 0;
                EACH(i, LANES) dot += product[i];
                weights[r][t] = dot;
            }
        }
    }
    EACH(x, tokens) EACH(r, GROUP) {
        float *own = weights[x * GROUP + r];
        State *state = states + x;
        for (int t = n + x * grows; t < TILE; t++) own[t] = -__builtin_inff();
        const float found = largest((const vec *)own);
        if (found > state->most[r]) { /* NaN shows in the weights */
            float before = exponential(state->most[r] - found);
            state->most[r] = found;
            state->mass[r] *= before;
            EACH(i, PARTS) state->sum[r][i] *= before;
        }
        EACH(t, TILE) own[t] = exponential(own[t] - state->most[r]);
        EACH(i, TILE / LANES) state->mass[r] += ((const vec *)own)[i];
    }
    vec sum[PAIR * GROUP][PARTS];
    EACH(x, tokens) EACH(r, GROUP) EACH(i, PARTS) sum[x * GROUP + r][i] = states[x].sum[r][i];
    const int most = n + (tokens - 1) * grows;
    EACH(t, most < TILE ? most : TILE) {
        vec v[PARTS];
        EACH(i, PARTS) v[i] = ((const vec *)(values + t * DIM))[i];
        EACH(x, tokens * GROUP) EACH(i, PARTS) sum[x][i] += weights[x][t] * v[i];
    }
    EACH(x, tokens) EACH(r, GROUP) EACH(i, PARTS) states[x].sum[r][i] = sum[x * GROUP + r][i];
}

/* Let tokens see keys and values [., DIM]: the first one reach of them, each one `grows` more than the one before. */
static void see_all(State *states, const float *queries, int64_t width, int tokens, const float *keys,
                    const float *values, int64_t reach, int grows) {
    float turned[DIM][TILE];
    for (int64_t at = 0; at < reach + (tokens - 1) * grows; at += TILE) {
        const float *k = keys + at * DIM;
        const int64_t most = reach + (tokens - 1) * grows - at, rows = most < TILE ? most : TILE;
        if (tokens >= WORTH) EACH(d, DIM) EACH(t, TILE) turned[d][t] = t < rows ? k[t * DIM + d] : 0;
        for (int i = 0; i < tokens; i++) {
            const int64_t left = reach + i * grows - at;
            if (left <= 0) continue;
            const int n = left < TILE ? left : TILE;
            const float *q = queries + i * width, *v = values + at * DIM;
            if (tokens < WORTH) see(1, states + i, q, width, 0, k, v, n, 0);
            else if (i + 1 < tokens) see(2, states + i++, q, width, (const void *)turned, k, v, n, grows);
            else see(1, states + i, q, width, (const void *)turned, k, v, n, 0);
        }
    }
}

/* Normalize (if weight), rotate and scale a head in place. */
static void turn(float *x, const float *weight, const float *cos, const float *sin, float scale, float eps) {
    if (weight) {
        float sum = 0;
        EACH(i, DIM) sum += x[i] * x[i];
        float factor = 1.f / __builtin_sqrtf(sum / DIM + eps);
        EACH(i, DIM) x[i] *= factor * weight[i];
    }
    EACH(i, DIM / 2) {
        float a = x[i], b = x[i + DIM / 2];
        x[i] = (a * cos[i] + b * sin[i]) * scale;
        x[i + DIM / 2] = (b * cos[i + DIM / 2] + a * sin[i + DIM / 2]) * scale;
    }
}

/* Attention of new tokens to the stem, the tokens before them in their rows, and themselves.
 *
 * x [tokens, (GROUP + 2) * key_heads, DIM]: queries, keys and values, which it changes. Writes keys
 * and values to their rows, and y [tokens, GROUP * key_heads, DIM]. */
void attend(const Batch *b, float *x, const float *query_norm, const float *key_norm, float *keys, float *values,
            const float *stem_keys, const float *stem_values, float *y) {
    const int64_t heads = GROUP * b->key_heads, width = (heads + 2 * b->key_heads) * DIM;
    int64_t block = b->tokens * b->key_heads / (8 * b->threads);
    block = block < 1 ? 1 : block > TOKENS ? TOKENS : block;
    const int64_t blocks = (b->tokens + block - 1) / block;
#pragma omp parallel num_threads(b->threads) if (b->tokens * width > FEW / 4)
    {
#pragma omp for
        for (int64_t t = 0; t < b->tokens; t++) {
            float *own = x + t * width;
            const float *cos = b->cos + t * DIM, *sin = b->sin + t * DIM;
            EACH(h, heads) turn(own + h * DIM, query_norm, cos, sin, b->scale, b->eps);
            EACH(g, b->key_heads) {
                float *k = own + (heads + g) * DIM;
                turn(k, key_norm, cos, sin, 1.f, b->eps);
                int64_t to = b->rows[t] * b->row_stride + g * b->head_stride + b->places[t] * DIM;
                __builtin_memcpy(keys + to, k, DIM * sizeof(float));
                __builtin_memcpy(values + to, k + b->key_heads * DIM, DIM * sizeof(float));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = blocks * b->key_heads - 1; item >= 0; item--) { /* the longest rows are often last */
            const int64_t g = item % b->key_heads, first = item / b->key_heads * block;
            const int64_t end = first + block < b->tokens ? first + block : b->tokens;
            State states[TOKENS];
            EACH(i, end - first) {
                EACH(r, GROUP) states[i].most[r] = -__builtin_inff(), states[i].mass[r] = (vec){0};
                EACH(r, GROUP) EACH(p, PARTS) states[i].sum[r][p] = (vec){0};
            }
            const float *queries = x + first * width + g * GROUP * DIM;
            const int64_t stem = g * b->stem_stride;
            see_all(states, queries, width, end - first, stem_keys + stem, stem_values + stem, b->stem, 0);
            for (int64_t t = first, next; t < end; t = next) {
                for (next = t + 1; next < end && b->rows[next] == b->rows[t]; next++);
                const int64_t row = b->rows[t] * b->row_stride + g * b->head_stride;
                see_all(states + t - first, queries + (t - first) * width, width, next - t, keys + row, values + row,
                        b->places[t] + 1, 1);
            }
            for (int64_t t = first; t < end; t++)
                EACH(r, GROUP) {
                    vec *to = (vec *)(y + (t * heads + g * GROUP + r) * DIM);
                    float mass = 0;
                    EACH(i, LANES) mass += states[t - first].mass[r][i];
                    EACH(p, PARTS) to[p] = states[t - first].sum[r][p] / mass;
                }
        }
    }
}

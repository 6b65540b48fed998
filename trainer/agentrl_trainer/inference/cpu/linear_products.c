/* Products of rows and weights, in float32; the weights may be stored as bfloat16. `linear_products.py` compiles it.
 *
 * Weights come in panels [inputs, WIDTH] of so many outputs, so that they are read in one sweep. A tile of ROWS rows
 * and a panel's outputs stays in registers while it sums over the inputs. */

#include <stdint.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#elif defined(__AVX__)
#define LANES 8
#define ROWS 4
#else
#define LANES 4
#define ROWS 8
#endif
#define VECS 3
#define WIDTH (VECS * LANES)
#define RUN 288    /* inputs that are summed up by themselves, so that rounding errors stay small */
#define DEPTH 1152 /* inputs of a panel that stay in the second cache while all rows see them */
#define FEW 262144 /* multiplications that are not worth waking other threads */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

#ifdef BFLOAT16
typedef uint16_t weight; /* the upper half of a float */
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint32_t wholes __attribute__((vector_size(4 * LANES)));
static inline vec load(const weight *w) { return (vec)(__builtin_convertvector(*(const halves *)w, wholes) << 16); }
#else
typedef float weight;
static inline vec load(const weight *w) { return *(const vec *)w; }
#endif

static const float zeros[WIDTH];

int width(void) { return WIDTH; }

/* y[rows, WIDTH] = from[rows, WIDTH] + x[rows, inputs] w[inputs, WIDTH]; `rows` is a constant where it is inlined. */
static inline __attribute__((always_inline)) void tile(const int rows, const float *x, int64_t x_stride, const weight *w,
                                                       int64_t inputs, const float *from, int64_t from_stride, float *y,
                                                       int64_t y_stride) {
    for (int64_t at = 0; at < inputs; at += RUN) {
        const int64_t end = at + RUN < inputs ? at + RUN : inputs;
        vec sum[ROWS][VECS];
        EACH(r, rows) EACH(v, VECS) sum[r][v] = (vec){0};
        for (int64_t i = at; i < end; i++) {
            vec own[VECS];
            EACH(v, VECS) own[v] = load(w + i * WIDTH + v * LANES);
            EACH(r, rows) EACH(v, VECS) sum[r][v] += own[v] * x[r * x_stride + i];
        }
        EACH(r, rows) EACH(v, VECS) {
            vec before = *(const vec *)(from + r * from_stride + v * LANES);
            *(vec *)(y + r * y_stride + v * LANES) = before + sum[r][v];
        }
        from = y, from_stride = y_stride;
    }
}

static void some(int64_t rows, const float *x, int64_t x_stride, const weight *w, int64_t inputs, const float *from,
                 int64_t from_stride, float *y, int64_t y_stride) {
#define CASE(n) case n: tile(n, x, x_stride, w, inputs, from, from_stride, y, y_stride); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3)
#if ROWS > 4
        CASE(4) CASE(5) CASE(6) CASE(7)
#endif
        default: tile(ROWS, x, x_stride, w, inputs, from, from_stride, y, y_stride);
    }
}

/* y[rows, outputs] = from + x[rows, inputs] w[panels, inputs, WIDTH]. Rows of `from` are from_stride apart, 0 for one
 * row that is added to all; it may be NULL. */
void product(const float *x, const weight *w, const float *from, float *y, int64_t from_stride, int64_t rows,
             int64_t inputs, int64_t outputs, int threads) {
    const int64_t panels = (outputs + WIDTH - 1) / WIDTH, tiles = (rows + ROWS - 1) / ROWS;
    if (!rows) return;
    int64_t parts = (4 * threads + panels - 1) / panels; /* of the rows, so that there is work for all threads */
    parts = parts < tiles ? parts : tiles;
    const int64_t part = (tiles + parts - 1) / parts * ROWS;
#pragma omp parallel for num_threads(threads) if (rows * inputs * outputs > FEW)
    for (int64_t item = 0; item < panels * parts; item++) {
        const int64_t panel = item / parts, first = item % parts * part, column = panel * WIDTH;
        const int64_t end = first + part < rows ? first + part : rows;
        const int64_t columns = outputs - column < WIDTH ? outputs - column : WIDTH;
        for (int64_t at = 0; at < inputs; at += DEPTH) {
            const int64_t depth = inputs - at < DEPTH ? inputs - at : DEPTH;
            const weight *own = w + (panel * inputs + at) * WIDTH;
            for (int64_t row = first; row < end; row += ROWS) {
                const int64_t n = end - row < ROWS ? end - row : ROWS;
                float *to = y + row * outputs + column;
                const float *start = at ? to : from ? from + row * from_stride + column : zeros;
                const int64_t stride = at ? outputs : from ? from_stride : 0;
                if (columns == WIDTH) {
                    some(n, x + row * inputs + at, inputs, own, depth, start, stride, to, outputs);
                } else { /* the last panel is filled up */
                    float whole[ROWS][WIDTH] = {0};
                    EACH(r, n) __builtin_memcpy(whole[r], start + r * stride, columns * sizeof(float));
                    some(n, x + row * inputs + at, inputs, own, depth, *whole, WIDTH, *whole, WIDTH);
                    EACH(r, n) __builtin_memcpy(to + r * outputs, whole[r], columns * sizeof(float));
                }
            }
        }
    }
}

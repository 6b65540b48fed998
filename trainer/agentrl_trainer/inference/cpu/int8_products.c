/* Products of rows and 8-bit weights, for processors with AVX-512 VNNI. `linear_products.py` compiles it.
 *
 * A row's inputs are rounded to two 8-bit digits (first + second / SECOND) times a scale of the row. Weights w come as
 * w + 128, which the processor multiplies as unsigned numbers; what that adds is subtracted at the end. Panels
 * [inputs / 4, WIDTH, 4] hold so many outputs, so that they are read in one sweep. Sums are exact up to 65,536 inputs. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define LANES 16
#define VECS 3
#define WIDTH (VECS * LANES)
#define ROWS 4
#define DIGIT 127
#define SECOND 254 /* what a first digit's step is divided by: its rounding error is at most half of it */
#define FEW 262144 /* multiplications that are not worth waking other threads */
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)

#ifndef __AVX512VNNI__
#error "this processor has no AVX-512 VNNI"
#endif

/* What is subtracted from a row's sums, and its scale; NAN for rows that are not finite, whose digits say nothing. */
struct row {
    int32_t first, second;
    float scale;
};

int width(void) { return WIDTH; }

static __mmask16 first(int64_t lanes) { return lanes >= LANES ? 0xffff : lanes > 0 ? (1 << lanes) - 1 : 0; }

/* digits[2, inputs] of x[given]; the inputs beyond are zero. */
static struct row rounded(const float *x, int64_t given, int64_t inputs, int8_t *digits) {
    __m512 largest = _mm512_setzero_ps(), finite = largest;
    for (int64_t i = 0; i < given; i += LANES) {
        const __m512 some = _mm512_maskz_loadu_ps(first(given - i), x + i);
        largest = _mm512_max_ps(largest, _mm512_abs_ps(some));
        finite = _mm512_fmadd_ps(some, _mm512_setzero_ps(), finite);
    }
    const float scale = fmaxf(_mm512_reduce_max_ps(largest), 1e-30f) / DIGIT;
    const __m512 inverse = _mm512_set1_ps(1 / scale);
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < inputs; i += LANES) {
        const __m512 exact = _mm512_mul_ps(_mm512_maskz_loadu_ps(first(given - i), x + i), inverse);
        const __m512i one = _mm512_cvtps_epi32(exact);
        const __m512 rest = _mm512_sub_ps(exact, _mm512_cvtepi32_ps(one));
        const __m512i both[2] = {one, _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(SECOND)))};
        EACH(d, 2) {
            sums[d] = _mm512_add_epi32(sums[d], both[d]);
            _mm512_mask_cvtsepi32_storeu_epi8(digits + d * inputs + i, first(inputs - i), both[d]);
        }
    }
    return (struct row){128 * _mm512_reduce_add_epi32(sums[0]), 128 * _mm512_reduce_add_epi32(sums[1]),
                        _mm512_reduce_add_ps(finite) == 0 ? scale : NAN};
}

/* y[n, columns] = from + the product of n rows of digits and a panel; n is a constant where it is inlined. */
static inline __attribute__((always_inline)) void tile(const int n, const int8_t *digits, const struct row *rows,
                                                       const uint8_t *w, const float *scales, int64_t inputs,
                                                       int64_t columns, const float *from, int64_t from_stride, float *y,
                                                       int64_t y_stride) {
    __m512i sum[2 * ROWS][VECS];
    EACH(d, 2 * n) EACH(v, VECS) sum[d][v] = _mm512_setzero_si512();
    for (int64_t i = 0; i < inputs; i += 4) {
        __m512i own[VECS];
        EACH(v, VECS) own[v] = _mm512_loadu_si512(w + i * WIDTH + v * 4 * LANES);
        EACH(d, 2 * n) {
            const __m512i four = _mm512_set1_epi32(*(const int32_t *)(digits + d * inputs + i));
            EACH(v, VECS) __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[d][v]) : "v"(own[v]), "v"(four));
        }
    }
    EACH(r, n) EACH(v, VECS) {
        const __mmask16 some = first(columns - v * LANES);
        const __m512 high = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[2 * r][v], _mm512_set1_epi32(rows[r].first)));
        const __m512 low = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[2 * r + 1][v], _mm512_set1_epi32(rows[r].second)));
        const __m512 both = _mm512_fmadd_ps(low, _mm512_set1_ps(1.0f / SECOND), high);
        const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(rows[r].scale), _mm512_loadu_ps(scales + v * LANES));
        const __m512 before = from ? _mm512_maskz_loadu_ps(some, from + r * from_stride + v * LANES) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(y + r * y_stride + v * LANES, some, _mm512_fmadd_ps(both, scale, before));
    }
}

/* y[rows, outputs] = from + x[rows, given] w, with w[panels, inputs / 4, WIDTH, 4], scales[panels, WIDTH] and space for
 * digits[rows, 2, inputs] and about[rows]. Rows of `from` are from_stride apart, 0 for one row that is added to all; it
 * may be NULL. */
void product(const float *x, const uint8_t *w, const float *scales, const float *from, float *y, int8_t *digits,
             struct row *about, int64_t from_stride, int64_t rows, int64_t given, int64_t inputs, int64_t outputs,
             int threads) {
    const int64_t panels = (outputs + WIDTH - 1) / WIDTH, tiles = (rows + ROWS - 1) / ROWS;
    if (!rows) return;
    int64_t parts = (4 * threads + panels - 1) / panels; /* of the rows, so that there is work for all threads */
    parts = parts < tiles ? parts : tiles;
    const int64_t part = (tiles + parts - 1) / parts * ROWS;
#pragma omp parallel num_threads(threads) if (rows * inputs * outputs > FEW)
    {
#pragma omp for
        for (int64_t r = 0; r < rows; r++) about[r] = rounded(x + r * given, given, inputs, digits + r * 2 * inputs);
#pragma omp for
        for (int64_t item = 0; item < panels * parts; item++) {
            const int64_t panel = item / parts, column = panel * WIDTH, first = item % parts * part;
            const int64_t end = first + part < rows ? first + part : rows;
            for (int64_t row = first; row < end; row += ROWS) {
#define CASE(n) case n: tile(n, digits + row * 2 * inputs, about + row, w + panel * WIDTH * inputs, scales + column, inputs, \
                             outputs - column, from ? from + row * from_stride + column : NULL, from_stride,             \
                             y + row * outputs + column, outputs); break;
                switch (end - row) {
                    CASE(1) CASE(2) CASE(3)
                    default: CASE(ROWS)
                }
            }
        }
    }
}

/* What the loops share: vectors of numbers, half precision, and rows of a table.

A table (N, K) holds half precision (its bits), or float32; a loop widens a row into a scratch row of float32, and works
on that. Scratch rows are padded with zeros to whole lanes.
*/

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__F16C__)
#include <immintrin.h>
#endif

typedef int64_t integer;
typedef uint16_t half;

enum { LANES = 16, EIGHT = 8, AHEAD = 4096 };

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float eight __attribute__((vector_size(4 * EIGHT), aligned(4))); /* anywhere in memory, */
typedef double wide __attribute__((vector_size(8 * EIGHT), aligned(8))); /* and so are these */

static float add_lanes(lanes x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* In three steps, not one behind the other. */
static double add_eight(wide x) { return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7])); }

static integer padded(integer n) { return (n + LANES - 1) / LANES * LANES; }

/* n float32 zeros, padded, on a cache line; `free` takes them back. */
static float *scratch(integer n) {
    size_t size = (size_t)padded(n ? n : 1) * sizeof(float);
    float *out = aligned_alloc(64, size);
    if (out) memset(out, 0, size);
    return out;
}

/* The same of doubles. */
static double *scratch_wide(integer n) { return (double *)scratch(2 * n); }

/* Half precision */

static float widen(half bits) {
#if defined(__x86_64__) && defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, out;
    float number;
    if (rest >= 0x7c00) out = 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) out = (rest << 13) + 0x38000000;
    else { /* below 2^-14: a multiple of 2^-24 */
        number = (float)rest * 0x1p-24f;
        memcpy(&out, &number, 4);
    }
    out |= sign;
    memcpy(&number, &out, 4);
    return number;
#endif
}

/* Rounded to nearest, ties to even. */
static half narrow(float number) {
#if defined(__x86_64__) && defined(__F16C__)
    return _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x47800000) return (half)(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
    if (size < 0x38800000) { /* below 2^-14: float32 arithmetic rounds to a multiple of 2^-24 */
        float small, shifted;
        memcpy(&small, &size, 4);
        shifted = small + 0.5f;
        memcpy(&size, &shifted, 4);
        return (half)(sign | (size - 0x3f000000));
    }
    size += 0xfff + (size >> 13 & 1);
    return (half)(sign | (size - 0x38000000) >> 13);
#endif
}

static void widen_row(const half *bits, float *out, integer n) {
    integer k = 0;
#if defined(__AVX512F__)
    for (; k + 16 <= n; k += 16)
        _mm512_storeu_ps(out + k, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(bits + k))));
#elif defined(__x86_64__) && defined(__F16C__)
    for (; k + 8 <= n; k += 8) _mm256_storeu_ps(out + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(bits + k))));
#endif
    for (; k < n; k++) out[k] = widen(bits[k]);
}

static eight widen_eight(const half *bits) {
    eight out;
#if defined(__x86_64__) && defined(__F16C__)
    out = (eight)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bits));
#else
    for (int i = 0; i < EIGHT; i++) out[i] = widen(bits[i]);
#endif
    return out;
}

/* In double; GCC by itself takes four instructions for it. */
static wide as_double(eight x) {
#if defined(__AVX512F__)
    return (wide)_mm512_cvtps_pd((__m256)x);
#else
    return __builtin_convertvector(x, wide);
#endif
}

/* Rows of a table */

typedef struct {
    const void *rows; /* (N, stored) */
    integer dim;      /* stored + extra */
    integer stored;
    integer single;       /* rows are float32, else half precision */
    const float *weights; /* (N,) what each row is multiplied with; NULL: nothing */
    integer extra;        /* columns that follow, which depend on a row's stratum alone */
    const float *units;   /* (S, extra) */
    const integer *strata; /* (N,) */
} table;

static void fetch(const table *t, integer row) {
    integer bytes = t->stored * (t->single ? 4 : 2);
    if (row < 0) return;
    const char *start = (const char *)t->rows + row * bytes;
    for (integer at = 0; at < bytes; at += 64) __builtin_prefetch(start + at);
}

/* How many rows ahead to fetch: more than memory's latency, less than the first cache. */
static integer ahead_of(const table *t) {
    integer rows = AHEAD / (t->stored * (t->single ? 4 : 2));
    return rows < 2 ? 2 : rows > 32 ? 32 : rows;
}

/* Row × its weight, then its stratum's columns: (dim,) float32. */
static void read_row(const table *t, integer row, float *out) {
    integer n = t->stored;
    if (t->single) memcpy(out, (const float *)t->rows + row * n, n * sizeof(float));
    else widen_row((const half *)t->rows + row * n, out, n);
    if (t->weights) {
        float weight = t->weights[row];
        for (integer k = 0; k < n; k++) out[k] *= weight;
    }
    if (t->extra) memcpy(out + n, t->units + t->strata[row] * t->extra, t->extra * sizeof(float));
}

/* The same less a mean, given as the sum of two rows: a mean that is rounded once would add the same error to every
row, and they would add up. Zeros for a negative row: an example without a vector counts as the mean. */
static void read_centred(const table *t, integer row, const float *mean, float *out) {
    integer n = t->dim;
    const float *rest = mean + padded(n);
    if (row < 0) {
        memset(out, 0, n * sizeof(float));
        return;
    }
    read_row(t, row, out);
    for (integer k = 0; k < n; k++) out[k] = out[k] - mean[k] - rest[k];
}

/* Each worker's mean (K,) double as two float32 rows, (n, 2, padded K). */
static float *split_means(const double *means, integer workers, integer dim) {
    integer width = padded(dim);
    float *out = scratch(2 * workers * width);
    if (!out) return NULL;
    for (integer j = 0; j < workers; j++)
        for (integer k = 0; k < dim; k++) {
            float first = (float)means[j * dim + k];
            out[2 * j * width + k] = first;
            out[(2 * j + 1) * width + k] = (float)(means[j * dim + k] - first);
        }
    return out;
}

static float dot(const float *a, const float *b, integer width) {
    const lanes *x = (const lanes *)a, *y = (const lanes *)b;
    lanes s = {0}, t = {0}, u = {0}, v = {0};
    integer n = width / LANES, k = 0;
    for (; k + 4 <= n; k += 4) {
        s += x[k] * y[k];
        t += x[k + 1] * y[k + 1];
        u += x[k + 2] * y[k + 2];
        v += x[k + 3] * y[k + 3];
    }
    for (; k < n; k++) s += x[k] * y[k];
    return add_lanes((s + t) + (u + v));
}

/* out += factor · row */
static void add_row(float *out, const float *row, float factor, integer width) {
    for (integer k = 0; k < width; k++) out[k] += factor * row[k];
}

/* ⟨a, b⟩ of rows that may begin anywhere. Four sums at a time: one addition would have to wait for the other. */
static double dot_wide(const double *a, const double *b, integer n) {
    wide s = {0}, t = {0}, u = {0}, v = {0};
    integer k = 0;
    for (; k + 4 * EIGHT <= n; k += 4 * EIGHT) {
        s += *(const wide *)(a + k) * *(const wide *)(b + k);
        t += *(const wide *)(a + k + EIGHT) * *(const wide *)(b + k + EIGHT);
        u += *(const wide *)(a + k + 2 * EIGHT) * *(const wide *)(b + k + 2 * EIGHT);
        v += *(const wide *)(a + k + 3 * EIGHT) * *(const wide *)(b + k + 3 * EIGHT);
    }
    for (; k + EIGHT <= n; k += EIGHT) s += *(const wide *)(a + k) * *(const wide *)(b + k);
    double total = add_eight((s + t) + (u + v));
    for (; k < n; k++) total += a[k] * b[k];
    return total;
}

/* out += factor · row */
static void add_wide(double *out, const double *row, double factor, integer n) {
    for (integer k = 0; k < n; k++) out[k] += factor * row[k];
}

/* The loops of selection. Their plain twins are in the tests' `reference`. Nothing here checks its input.

Tables are (N, K) of numbers of 2, 4 or 8 bytes: half precision, float32 or double.
*/

#include "rows.h"

typedef struct {
    const void *rows;
    integer dim;
    integer size; /* bytes of a number */
} any_table;

static const char *row_at(const any_table *t, integer row) { return (const char *)t->rows + row * t->dim * t->size; }

static void fetch_any(const any_table *t, integer row) {
    const char *start = row_at(t, row);
    for (integer at = 0; at < t->dim * t->size; at += 64) __builtin_prefetch(start + at);
}

static integer any_ahead(const any_table *t) {
    integer rows = AHEAD / (t->dim * t->size);
    return rows < 2 ? 2 : rows > 32 ? 32 : rows;
}

/* Eight numbers of a row, or one. `size` is a constant where these are used: see `BY_SIZE`. */
static inline eight eight_at(const char *row, integer size, integer k) {
    return size == 2 ? widen_eight((const half *)row + k) : *(const eight *)((const float *)row + k);
}

static inline wide wide_at(const char *row, integer size, integer k) {
    return size == 8 ? *(const wide *)((const double *)row + k) : as_double(eight_at(row, size, k));
}

static inline double one_at(const char *row, integer size, integer k) {
    return size == 2 ? widen(((const half *)row)[k]) : size == 4 ? ((const float *)row)[k] : ((const double *)row)[k];
}

#define WITH_SIZE static inline __attribute__((always_inline)) int
/* A loop for each size of numbers. */
#define BY_SIZE(loop, ...) \
    (t->size == 2 ? loop(2, __VA_ARGS__) : t->size == 4 ? loop(4, __VA_ARGS__) : loop(8, __VA_ARGS__))

WITH_SIZE add_rows_of(integer size, const any_table *t, const integer *rows, integer count, double *total) {
    integer ahead = any_ahead(t), dim = t->dim;
    for (integer i = 0; i < count; i++) {
        if (i + ahead < count) fetch_any(t, rows[i + ahead]);
        const char *row = row_at(t, rows[i]);
        integer k = 0;
        for (; k + EIGHT <= dim; k += EIGHT) *(wide *)(total + k) += wide_at(row, size, k);
        for (; k < dim; k++) total[k] += one_at(row, size, k);
    }
    return 1;
}

/* total (K,) += Σ of the rows (n,). */
int add_rows(const any_table *t, const integer *rows, integer count, double *total) {
    return BY_SIZE(add_rows_of, t, rows, count, total);
}

WITH_SIZE project_of(integer size, const any_table *t, const integer *rows, integer count, const float *vector,
                     float *products) {
    integer ahead = any_ahead(t), dim = t->dim;
    for (integer i = 0; i < count; i++) {
        if (i + ahead < count) fetch_any(t, rows[i + ahead]);
        const char *row = row_at(t, rows[i]);
        eight s[4] = {{0}};
        integer k = 0;
        for (; k + 4 * EIGHT <= dim; k += 4 * EIGHT)
            for (int j = 0; j < 4; j++)
                s[j] += eight_at(row, size, k + j * EIGHT) * *(const eight *)(vector + k + j * EIGHT);
        for (; k + EIGHT <= dim; k += EIGHT) s[0] += eight_at(row, size, k) * *(const eight *)(vector + k);
        eight x = (s[0] + s[1]) + (s[2] + s[3]);
        products[i] = ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
        for (; k < dim; k++) products[i] += (float)one_at(row, size, k) * vector[k];
    }
    return 1;
}

/* products (n,) = ⟨row, vector⟩ of the rows (n,), in double for a table of doubles, else in float32, as is vector. */
int project(const any_table *t, const integer *rows, integer count, const void *vector, void *products) {
    integer ahead = any_ahead(t);
    if (t->size == 2) return project_of(2, t, rows, count, vector, products);
    if (t->size == 4) return project_of(4, t, rows, count, vector, products);
    for (integer i = 0; i < count; i++) {
        if (i + ahead < count) fetch_any(t, rows[i + ahead]);
        ((double *)products)[i] = dot_wide((const double *)row_at(t, rows[i]), vector, t->dim);
    }
    return 1;
}

WITH_SIZE halve_of(integer size, const any_table *t, integer *rows, double *weights, integer pairs, double *error) {
    integer dim = t->dim, ahead = any_ahead(t) / 2 ? any_ahead(t) / 2 : 1;
    for (integer p = 0; p < pairs; p++) {
        if (p + ahead < pairs) {
            fetch_any(t, rows[2 * (p + ahead)]);
            fetch_any(t, rows[2 * (p + ahead) + 1]);
        }
        integer pair[2] = {rows[2 * p], rows[2 * p + 1]}, k = 0;
        const char *a = row_at(t, pair[0]), *b = row_at(t, pair[1]);
        double wa = weights[2 * p], wb = weights[2 * p + 1], steps[2] = {wb, -wa};
        wide dots = {0}, squares = {0}, more_dots = {0}, more_squares = {0};
        for (; k + 2 * EIGHT <= dim; k += 2 * EIGHT) {
            wide d = wide_at(a, size, k) - wide_at(b, size, k);
            wide e = wide_at(a, size, k + EIGHT) - wide_at(b, size, k + EIGHT);
            dots += *(const wide *)(error + k) * d;
            squares += d * d;
            more_dots += *(const wide *)(error + k + EIGHT) * e;
            more_squares += e * e;
        }
        double dot = add_eight(dots + more_dots), square = add_eight(squares + more_squares);
        for (; k < dim; k++) {
            double d = one_at(a, size, k) - one_at(b, size, k);
            dot += error[k] * d;
            square += d * d;
        }
        int second = !(2 * dot <= (wa - wb) * square); /* a place in arrays: a branch would be mispredicted */
        double step = steps[second];
        for (k = 0; k + EIGHT <= dim; k += EIGHT)
            *(wide *)(error + k) += step * (wide_at(a, size, k) - wide_at(b, size, k));
        for (; k < dim; k++) error[k] += step * (one_at(a, size, k) - one_at(b, size, k));
        rows[p] = pair[second];
        weights[p] = wa + wb;
    }
    return 1;
}

/* Of rows 2p and 2p + 1, for p < pairs, one stays and takes both weights; the survivors move to the front.

rows (n,) and weights (n,) are rewritten: the first `pairs` are the winners, in order; what stood beyond the pairs is
the caller's to move. error (K,) is Σ w g − G and is kept up to date. With D = g_a − g_b, keeping a adds w_b D to it,
keeping b takes w_a D off: a stays where that leaves the shorter error, 2⟨error, D⟩ ≤ (w_a − w_b)‖D‖²; for equal weights
this is the balance rule ⟨S, D⟩ ≤ 0. */
int halve_pairs(const any_table *t, integer *rows, double *weights, integer pairs, double *error) {
    return BY_SIZE(halve_of, t, rows, weights, pairs, error);
}

/* KT-split's coin for a panel of pairs; gram (2p, 2p) is their kernel matrix, pair i in rows 2i and 2i + 1.

base (2p,) = Σ over earlier pairs of k(·, right) − k(·, left). left and right (p,) get numbers 0..2p − 1 + start. sigma:
σ² so far, and then the new one; length: 2 ln(2nm/(δ 2^j)). */
int kernel_halve(const double *gram, integer start, integer *left, integer *right, const double *uniforms,
                 integer pairs, const double *base, double *sigma, double length) {
    for (integer i = 0; i < pairs; i++) {
        const double *a = gram + 2 * i * 2 * pairs, *b = a + 2 * pairs;
        double square = a[2 * i] - 2 * a[2 * i + 1] + b[2 * i + 1], threshold = 0;
        if (square > 0) {
            threshold = sqrt(*sigma * square * length);
            if (threshold < square) threshold = square;
        }
        if (*sigma == 0) {
            *sigma = square > 0 ? square : 0;
        } else if (threshold > 0) {
            double more = 0.5 + (square / (2 * threshold) - 1) * *sigma / threshold;
            if (more > 0) *sigma += 2 * square * more;
        }
        double alpha = base[2 * i] - base[2 * i + 1];
        for (integer j = 0; j < i; j++) {
            integer on_right = right[j] - start, on_left = left[j] - start;
            alpha += a[on_right] - a[on_left] - b[on_right] + b[on_left];
        }
        int second = uniforms[i] <= 0.5 * (1 - alpha / (threshold > 0 ? threshold : 1));
        left[i] = start + 2 * i + second;
        right[i] = start + 2 * i + 1 - second;
    }
    return 1;
}

/* Facility location */

typedef int32_t eight_bits __attribute__((vector_size(4 * EIGHT)));
typedef int64_t wide_bits __attribute__((vector_size(8 * EIGHT)));

/* Σ counts · max(near − row, 0): what choosing this row's point would gain. */
static double gain_single(const float *row, const float *near, const double *counts, integer n) {
    wide sum = {0}, other = {0};
    integer i = 0;
    for (; i + 2 * EIGHT <= n; i += 2 * EIGHT) {
        eight x = *(const eight *)(near + i) - *(const eight *)(row + i);
        eight y = *(const eight *)(near + i + EIGHT) - *(const eight *)(row + i + EIGHT);
        sum += *(const wide *)(counts + i) * as_double((eight)((eight_bits)x & (x > 0)));
        other += *(const wide *)(counts + i + EIGHT) * as_double((eight)((eight_bits)y & (y > 0)));
    }
    double total = add_eight(sum + other);
    for (; i < n; i++) total += counts[i] * (near[i] > row[i] ? near[i] - row[i] : 0);
    return total;
}

static double gain_double(const double *row, const double *near, const double *counts, integer n) {
    wide sum = {0}, other = {0};
    integer i = 0;
    for (; i + 2 * EIGHT <= n; i += 2 * EIGHT) {
        wide x = *(const wide *)(near + i) - *(const wide *)(row + i);
        wide y = *(const wide *)(near + i + EIGHT) - *(const wide *)(row + i + EIGHT);
        sum += *(const wide *)(counts + i) * (wide)((wide_bits)x & (x > 0));
        other += *(const wide *)(counts + i + EIGHT) * (wide)((wide_bits)y & (y > 0));
    }
    double total = add_eight(sum + other);
    for (; i < n; i++) total += counts[i] * (near[i] > row[i] ? near[i] - row[i] : 0);
    return total;
}

static integer first_largest(const double *numbers, integer n) {
    double largest = numbers[0];
    integer i = 0;
    for (integer j = 1; j < n; j++) largest = numbers[j] > largest ? numbers[j] : largest;
    while (i < n - 1 && numbers[i] != largest) i++;
    return i;
}

/* chosen (k,) of n points, one by one, so that Σ counts · distance to the nearest falls fastest.

distance (n, n) symmetric, float32 or double by its `size`, counts (n,); owner (n,) gets the place in `chosen` that each
belongs to, every chosen point to itself. Gains only fall as points are chosen (submodularity), so one that was the
largest before, and still is when computed again, is the largest: most are never computed again. Of equals the first
counts. largest: of all distances, the constant c of c − ‖·‖: no choice but the first depends on it. */
int lazy_greedy(const void *distance, integer size, const double *counts, integer n, double largest, integer *chosen,
                integer k, integer *owner) {
    const float *single = distance;
    const double *full = distance;
    float *near = malloc(n * sizeof(float));
    double *near_full = malloc(n * sizeof(double)), *bounds = malloc(n * sizeof(double));
    integer *fresh = calloc(n, sizeof(integer));
    int done = near && near_full && bounds && fresh;
    for (integer i = 0; done && i < n; i++) {
        near[i] = (float)largest;
        near_full[i] = largest;
    }
#define GAIN_OF(j) \
    (size == 4 ? gain_single(single + (j) * n, near, counts, n) : gain_double(full + (j) * n, near_full, counts, n))
    for (integer j = 0; done && j < n; j++) bounds[j] = GAIN_OF(j);
    for (integer step = 0; done && step < k; step++) {
        integer best = first_largest(bounds, n);
        while (fresh[best] != step) {
            bounds[best] = GAIN_OF(best);
            fresh[best] = step;
            best = first_largest(bounds, n);
        }
        chosen[step] = best;
        bounds[best] = -1;
        for (integer i = 0; i < n; i++) {
            double there = size == 4 ? single[best * n + i] : full[best * n + i];
            if (there < near_full[i] || step == 0) {
                near_full[i] = there;
                near[i] = (float)there;
                owner[i] = step;
            }
        }
        owner[best] = step;
    }
    free(near);
    free(near_full);
    free(bounds);
    free(fresh);
    return done;
}

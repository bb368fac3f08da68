/* The loops of two levels; the tests' `reference_levels` has their plain twins. Nothing here checks its input. */

#include "rows.h"

/* An example without a sketch has NaN for its first number. Bits tell that: compilers may take all numbers to be finite. */
static int is_unseen(const half *row) { return (row[0] & 0x7fff) > 0x7c00; }

/* out (n, K) ← bits (n, K) × factors (n,) − mean (K,); zeros for a row without a sketch. */
int centre(const half *bits, integer count, integer dim, const float *factors, const float *mean, float *out) {
    for (integer i = 0; i < count; i++, bits += dim, out += dim) {
        if (is_unseen(bits)) {
            memset(out, 0, dim * sizeof(float));
            continue;
        }
        float factor = factors[i];
        integer k = 0;
        for (; k + EIGHT <= dim; k += EIGHT)
            *(eight *)(out + k) = widen_eight(bits + k) * factor - *(const eight *)(mean + k);
        for (; k < dim; k++) out[k] = widen(bits[k]) * factor - mean[k];
    }
    return 1;
}

/* Add bits (n, K) × factors (n,) to total (K,), but for rows without a sketch. */
int add_up(const half *bits, integer count, integer dim, const float *factors, double *total) {
    for (integer i = 0; i < count; i++, bits += dim) {
        if (is_unseen(bits)) continue;
        float factor = factors[i];
        integer k = 0;
        for (; k + EIGHT <= dim; k += EIGHT) *(wide *)(total + k) += as_double(widen_eight(bits + k) * factor);
        for (; k < dim; k++) total[k] += widen(bits[k]) * factor;
    }
    return 1;
}

/* Eight numbers of a pair's difference: a whole row of it is never written down. */
static wide apart(const float *a, const float *b) { return as_double(*(const eight *)a - *(const eight *)b); }

/* ⟨s, a − b⟩ of rows (K,); square gets ‖a − b‖². */
static double dot_apart(const double *s, const float *a, const float *b, integer dim, double *square) {
    wide dots = {0}, squares = {0}, more_dots = {0}, more_squares = {0};
    integer k = 0;
    for (; k + 2 * EIGHT <= dim; k += 2 * EIGHT) {
        wide d = apart(a + k, b + k), e = apart(a + k + EIGHT, b + k + EIGHT);
        dots += *(const wide *)(s + k) * d;
        squares += d * d;
        more_dots += *(const wide *)(s + k + EIGHT) * e;
        more_squares += e * e;
    }
    double dot = add_eight(dots + more_dots);
    *square = add_eight(squares + more_squares);
    for (; k < dim; k++) {
        double d = a[k] - b[k];
        dot += s[k] * d;
        *square += d * d;
    }
    return dot;
}

/* s += by · (a − b) of rows (K,). */
static void add_apart(double *s, double by, const float *a, const float *b, integer dim) {
    integer k = 0;
    for (; k + EIGHT <= dim; k += EIGHT) *(wide *)(s + k) += by * apart(a + k, b + k);
    for (; k < dim; k++) s[k] += by * (a[k] - b[k]);
}

static const double SIGNS[2] = {-1, 1}; /* no branch, which would often be mispredicted */

/* Of each pair, rows 2i and 2i + 1 of pairs (2p, K), one goes to the first half, so that the running sum stays short.

running (K,) is where the walk starts, and then where it ended; firsts (p,) is written: whether the pair's first goes to
the first half, and first − second is added, or subtracted. */
int walk_pairs(const float *pairs, integer count, integer dim, double *running, uint8_t *firsts) {
    double square;
    for (integer i = 0; i < count; i++) {
        const float *a = pairs + 2 * i * dim, *b = a + dim;
        firsts[i] = dot_apart(running, a, b, dim, &square) <= 0;
        add_apart(running, SIGNS[firsts[i]], a, b, dim);
    }
    return 1;
}

/* Add to running (K,) what the walk added, with the signs that it has found. */
int signed_sum(const float *pairs, integer count, integer dim, double *running, const uint8_t *firsts) {
    for (integer i = 0; i < count; i++) {
        const float *a = pairs + 2 * i * dim;
        add_apart(running, SIGNS[firsts[i]], a, a + dim, dim);
    }
    return 1;
}

/* Turn every pair over, in turn, that makes the running sum shorter; turned gets how many did. Turning a pair over
takes 2·sign·d off the sum: ‖s − 2 sign d‖² = ‖s‖² − 4 (sign ⟨s, d⟩ − ‖d‖²). */
int turn_pairs(const float *pairs, integer count, integer dim, double *running, uint8_t *firsts, integer *turned) {
    *turned = 0;
    for (integer i = 0; i < count; i++) {
        const float *a = pairs + 2 * i * dim, *b = a + dim;
        double square, sign = SIGNS[firsts[i]];
        if (sign * dot_apart(running, a, b, dim, &square) <= square) continue;
        add_apart(running, -2 * sign, a, b, dim);
        firsts[i] = !firsts[i];
        ++*turned;
    }
    return 1;
}

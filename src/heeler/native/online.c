/* The loops of the published online rules: one call per batch of vectors as they come.

Vectors are (b, K) float32, if `single`, or double; `worker` (b,) says whose each one is. Sums are double. Nothing here
checks its input: Python does.
*/

#include "rows.h"

/* Number `at` of vectors. `single` is the same all through a loop, so compilers make two loops of one. */
static double number(const void *vectors, integer single, integer at) {
    return single ? ((const float *)vectors)[at] : ((const double *)vectors)[at];
}

/* Recursive balance: each vector goes down a tree of running sums; leaves (b,) gets the leaf it falls into.

c = g − last epoch's mean; ⟨s, c⟩ ≤ 0 to the left, else to the right. running (n, 2^(depth+1) − 1, K), node v's children
at 2v + 1 and 2v + 2. Leaf numbers count from the left, twice as many as the lowest nodes: every node splits, the lowest
too. means and totals (n, K): totals gather the uncentred vectors for the next mean, as centred ones would make it
alternate between the mean and zero. */
int observe_tree(const void *vectors, integer single, const integer *worker, integer count, integer dim,
                 const double *means, double *totals, double *running, integer depth, int32_t *leaves) {
    integer nodes = ((integer)2 << depth) - 1;
    double *centred = scratch_wide(dim);
    for (integer i = 0; centred && i < count; i++) {
        integer j = worker[i], node = 0, leaf = 0;
        const double *mean = means + j * dim;
        double *total = totals + j * dim, *s = running + j * nodes * dim, product = 0;
        for (integer k = 0; k < dim; k++) {
            double g = number(vectors, single, i * dim + k);
            total[k] += g;
            centred[k] = g - mean[k];
            product += s[k] * centred[k];
        }
        for (integer level = 0; level <= depth; level++) {
            if (level) product = dot_wide(s, centred, dim);
            integer right = !(product <= 0);
            add_wide(s, centred, (double)(1 - 2 * right), dim);
            node = 2 * node + 1 + right;
            leaf = 2 * leaf + right;
            s = running + (j * nodes + node) * dim;
        }
        leaves[i] = (int32_t)leaf;
    }
    free(centred);
    return centred != NULL;
}

enum { DETERMINISTIC, WALK, KERNEL_HALVING };

/* Whether a pair is taken as it comes, by its difference D: dot = ⟨s, D⟩, square = ‖D‖². knobs (3,): walk: c or 0 for
the largest ‖D‖² so far, that largest; kernel halving: σ², pairs so far, the constant
(4/δ)·k(1 + ln T)·(1 + ln pairs). */
static integer takes(integer rule, double dot, double square, const double *uniform, double *knobs) {
    if (rule == DETERMINISTIC) return dot <= 0;
    if (rule == WALK) {
        if (square > knobs[1]) knobs[1] = square;
        double c = knobs[0] > 0 ? knobs[0] : knobs[1];
        return *uniform < (c > 0 ? 0.5 - dot / (2 * c) : 0.5);
    }
    knobs[1] += 1;
    if (!(square > 0)) return 1;
    double length = log(knobs[2] * knobs[1]), q = knobs[0] * length / square, threshold = square;
    if (q <= 1) {
        knobs[0] = 2 * square;
    } else {
        double more = length + 0.5 - sqrt(q);
        threshold = sqrt(q) * square;
        knobs[0] += 2 * square * (more > 0 ? more : 0) / length;
    }
    return dot <= (2 * *uniform - 1) * threshold;
}

/* Balance each worker's vectors in pairs as they come; a worker's unpaired vector waits, copied, for its partner.

group (n,) names the running sum, a row of running (g, K), that a worker shares; waiting (n, K), and waiting_row (n,),
-1 for none: then what is in `waiting` means nothing. uniforms: one number in [0, 1) for each pair completed here (not
read by the deterministic rule). A worker's places are its own stretch of a flat array: the front list grows from its
left end (`left`), the back list from its right end (`right`). */
int observe_pairs(const void *vectors, integer single, const integer *rows, const integer *worker, integer count,
                  integer dim, const integer *group, double *running, double *waiting, integer *waiting_row,
                  integer *places, integer *left, integer *right, integer rule, const double *uniforms, double *knobs) {
    integer pair = 0;
    for (integer i = 0; i < count; i++) {
        integer j = worker[i], first = waiting_row[j];
        double *a = waiting + j * dim, *s = running + group[j] * dim;
        if (first < 0) {
            for (integer k = 0; k < dim; k++) a[k] = number(vectors, single, i * dim + k);
            waiting_row[j] = rows[i];
            continue;
        }
        double dot = 0, square = 0;
        for (integer k = 0; k < dim; k++) {
            a[k] -= number(vectors, single, i * dim + k);
            dot += s[k] * a[k];
            square += a[k] * a[k];
        }
        integer plus = takes(rule, dot, square, uniforms + pair, knobs);
        add_wide(s, a, (double)(2 * plus - 1), dim);
        places[left[j]++] = plus ? first : rows[i];
        places[right[j]--] = plus ? rows[i] : first;
        waiting_row[j] = -1;
        pair++;
    }
    return 1;
}

/* The loops of the solver and of its table. Each has a plain twin in the tests. Nothing here checks its input: Python does.

Arrays are C-contiguous; int64 where they hold numbers of rows. Sums are float32 where a sign is all that comes of
them, else double.
*/

#include "rows.h"

/* The table that sketches are kept in */

/* Row where[i] of bits (N, K) becomes values[i] (K,) × scale, within ±largest. */
int store_halves(half *bits, const integer *where, const float *values, integer count, integer dim, double scale,
                  double largest) {
    float by = (float)scale, most = (float)largest;
    for (integer i = 0; i < count; i++) {
        half *row = bits + where[i] * dim;
        const float *value = values + i * dim;
        for (integer k = 0; k < dim; k++) row[k] = narrow(fminf(fmaxf(value[k] * by, -most), most));
    }
    return 1;
}

/* ⟨new, old⟩, ‖old‖² and ‖new‖² into out (3, count): old is row where[i] of bits, new what `store_halves` would put
there, but for the rounding. */
int compare_halves(const half *bits, const integer *where, const float *values, integer count, integer dim,
                   double scale, double largest, float *out) {
    float by = (float)scale, most = (float)largest, *old = scratch(dim), *new = scratch(dim);
    int done = old && new;
    for (integer i = 0; done && i < count; i++) {
        const float *value = values + i * dim;
        widen_row(bits + where[i] * dim, old, dim);
        for (integer k = 0; k < dim; k++) new[k] = fminf(fmaxf(value[k] * by, -most), most);
        out[i] = dot(new, old, padded(dim));
        out[count + i] = dot(old, old, padded(dim));
        out[2 * count + i] = dot(new, new, padded(dim));
    }
    free(old);
    free(new);
    return done;
}

/* Of row i of new (float32), own and other (half precision), all (count, dim): ⟨new, own⟩, ⟨new, other⟩, ‖new‖², ‖own‖²
and ‖other‖² into out (5, count), in double precision: new may be of any size. */
int compare_rows(const float *new, const half *own, const half *other, integer count, integer dim, double *out) {
    float *first = scratch(dim), *second = scratch(dim);
    int done = first && second;
    for (integer i = 0; done && i < count; i++) {
        const float *row = new + i * dim;
        double sums[5] = {0};
        widen_row(own + i * dim, first, dim);
        widen_row(other + i * dim, second, dim);
        for (integer k = 0; k < dim; k++) {
            double x = row[k], y = first[k], z = second[k];
            sums[0] += x * y;
            sums[1] += x * z;
            sums[2] += x * x;
            sums[3] += y * y;
            sums[4] += z * z;
        }
        for (int j = 0; j < 5; j++) out[j * count + i] = sums[j];
    }
    free(first);
    free(second);
    return done;
}

/* ⟨a_i, b_j⟩ into out (n, m), of a (n, c) and the columns of b (c, m). */
int products(const float *a, const float *b, integer n, integer m, integer c, float *out) {
    memset(out, 0, n * m * sizeof(float));
    for (integer i = 0; i < n; i++)
        for (integer k = 0; k < c; k++) add_row(out + i * m, b + k * m, a[i * c + k], m);
    return 1;
}

/* ‖row‖² of each row of a table (N, K) into out (N,). */
int squared_norms(const table *t, integer count, double *out) {
    float *row = scratch(t->dim);
    for (integer i = 0; row && i < count; i++) {
        read_row(t, i, row);
        out[i] = dot(row, row, padded(t->dim));
    }
    free(row);
    return row != NULL;
}

/* The mean of each shard's rows, order[offsets[j]:offsets[j + 1]], into means (n, K), zero for an empty shard; the sum
of its squares into squares (n,). */
int shard_means(const table *t, const integer *order, const integer *offsets, integer shards, double *means,
                double *squares) {
    integer ahead = ahead_of(t);
    float *row = scratch(t->dim);
    for (integer j = 0; row && j < shards; j++) {
        squares[j] = 0;
        double *mean = means + j * t->dim;
        memset(mean, 0, t->dim * sizeof(double));
        for (integer i = offsets[j]; i < offsets[j + 1]; i++) {
            if (i + ahead < offsets[shards]) fetch(t, order[i + ahead]);
            read_row(t, order[i], row);
            double square = 0;
            for (integer k = 0; k < t->dim; k++) {
                mean[k] += row[k];
                square += (double)row[k] * row[k];
            }
            squares[j] += square;
        }
        for (integer k = 0; k < t->dim && offsets[j + 1] > offsets[j]; k++) mean[k] /= offsets[j + 1] - offsets[j];
    }
    free(row);
    return row != NULL;
}

/* Sweeps, and what an order is worth */

/* One mean-centred balance sweep (GraB) over order (count,) into following (count,). mean: (K,). */
int balance_sweep(const table *t, const integer *order, integer count, const double *mean, integer *following) {
    integer width = padded(t->dim), ahead = ahead_of(t), front = 0, back = count - 1;
    float *means = split_means(mean, 1, t->dim), *running = scratch(width), *row = scratch(width);
    int done = means && running && row;
    for (integer i = 0; done && i < count; i++) {
        if (i + ahead < count) fetch(t, order[i + ahead]);
        read_centred(t, order[i], means, row);
        integer plus = dot(running, row, width) <= 0; /* arithmetic, not a branch: it would often be mispredicted */
        add_row(running, row, (float)(2 * plus - 1), width);
        following[plus * front + (1 - plus) * back] = order[i];
        front += plus;
        back -= 1 - plus;
    }
    free(means);
    free(running);
    free(row);
    return done;
}

/* One coordinated pair sweep (CD-GraB) over the shards order[offsets[j]:offsets[j + 1]] into following.

group (n,) names the running sum, of so many, that worker j shares. Pair i of every worker that still has one is
balanced in turn. A shard's odd last example keeps its place. */
int pair_sweep(const table *t, const integer *order, const integer *offsets, integer workers, const integer *group,
               integer groups, integer *following) {
    integer width = padded(t->dim), longest = 0, pairs_ahead = ahead_of(t) / (2 * workers);
    float *running = scratch(groups * width), *first = scratch(width), *second = scratch(width);
    int done = running && first && second;
    if (pairs_ahead < 1) pairs_ahead = 1;
    for (integer j = 0; j < workers; j++)
        if (offsets[j + 1] - offsets[j] > longest) longest = offsets[j + 1] - offsets[j];
    for (integer i = 0; done && i < (longest + 1) / 2; i++)
        for (integer j = 0; j < workers; j++) {
            integer start = offsets[j], size = offsets[j + 1] - start, coming = start + 2 * (i + pairs_ahead);
            if (2 * i >= size) continue;
            integer a = order[start + 2 * i];
            if (2 * i + 1 == size) {
                following[start + 2 * i] = a;
                continue;
            }
            if (coming + 1 < start + size) {
                fetch(t, order[coming]);
                fetch(t, order[coming + 1]);
            }
            integer b = order[start + 2 * i + 1];
            float *sum = running + group[j] * width;
            read_row(t, a, first);
            read_row(t, b, second);
            add_row(first, second, -1, width);
            integer plus = dot(sum, first, width) <= 0; /* else b goes to the front, and b − a is added */
            add_row(sum, first, (float)(2 * plus - 1), width);
            following[start + i] = plus ? a : b;
            following[start + size - (size & 1) - 1 - i] = plus ? b : a;
        }
    free(running);
    free(first);
    free(second);
    return done;
}

/* Norms of the workers' common prefix at batch boundaries into out (4,): the largest infinity norm, the largest
squared 2-norm, the sum of squared 2-norms, and how many there are. means: (n, K), of each worker. */
int prefix_norms(const table *t, const integer *order, const integer *offsets, integer workers, const double *means,
                 integer batch_size, double *out) {
    integer longest = 0, dim = t->dim;
    float *row = scratch(dim);
    double *prefix = calloc(dim, sizeof(double));
    int done = row && prefix;
    memset(out, 0, 4 * sizeof(double));
    for (integer j = 0; j < workers; j++)
        if (offsets[j + 1] - offsets[j] > longest) longest = offsets[j + 1] - offsets[j];
    for (integer i = 0; done && i < longest; i++) {
        for (integer j = 0; j < workers; j++) {
            integer at = offsets[j] + i;
            if (at >= offsets[j + 1]) continue;
            read_row(t, order[at], row);
            for (integer k = 0; k < dim; k++) prefix[k] += row[k] - means[j * dim + k];
        }
        if ((i + 1) % batch_size && i + 1 < longest) continue;
        double square = 0, largest = 0;
        for (integer k = 0; k < dim; k++) {
            square += prefix[k] * prefix[k];
            if (fabs(prefix[k]) > largest) largest = fabs(prefix[k]);
        }
        if (largest > out[0]) out[0] = largest;
        if (square > out[1]) out[1] = square;
        out[2] += square;
        out[3] += 1;
    }
    free(row);
    free(prefix);
    return done;
}

/* Of steps, rows[offsets[i]:offsets[i + 1]]: Σ_t ‖sum_t‖² and Σ_t ‖prefix_t‖² into out (2,), where sums are of each
row less its worker's mean. A negative row counts as the mean. */
int step_squares(const table *t, const double *means, integer count_means, const integer *rows, const integer *workers,
                 const integer *offsets, integer steps, double *out) {
    integer dim = t->dim, width = padded(dim), ahead = ahead_of(t);
    float *split = split_means(means, count_means, dim), *row = scratch(width), *total = scratch(width);
    double *prefix = calloc(dim, sizeof(double));
    int done = split && row && total && prefix;
    out[0] = out[1] = 0;
    for (integer s = 0; done && s < steps; s++) {
        memset(total, 0, width * sizeof(float));
        for (integer i = offsets[s]; i < offsets[s + 1]; i++) {
            if (i + ahead < offsets[steps]) fetch(t, rows[i + ahead]);
            read_centred(t, rows[i], split + 2 * workers[i] * width, row);
            add_row(total, row, 1, width);
        }
        out[0] += dot(total, total, width);
        double square = 0;
        for (integer k = 0; k < dim; k++) {
            prefix[k] += total[k];
            square += prefix[k] * prefix[k];
        }
        out[1] += square;
    }
    free(split);
    free(row);
    free(total);
    free(prefix);
    return done;
}

/* Σ (row − its worker's mean) of each group, rows[offsets[g]:offsets[g + 1]], into sums (G, K). workers: of each row,
NULL: all of the first. Negative rows count as the mean. */
int group_sums(const table *t, const integer *rows, const integer *workers, const integer *offsets, integer groups,
               const double *means, integer count_means, float *sums) {
    integer dim = t->dim, width = padded(dim), ahead = ahead_of(t);
    float *split = split_means(means, count_means, dim), *row = scratch(width), *total = scratch(width);
    int done = split && row && total;
    for (integer g = 0; done && g < groups; g++) {
        memset(total, 0, width * sizeof(float));
        for (integer i = offsets[g]; i < offsets[g + 1]; i++) {
            if (i + ahead < offsets[groups]) fetch(t, rows[i + ahead]);
            read_centred(t, rows[i], split + 2 * (workers ? workers[i] : 0) * width, row);
            add_row(total, row, 1, width);
        }
        memcpy(sums + g * dim, total, dim * sizeof(float));
    }
    free(split);
    free(row);
    free(total);
    return done;
}

/* (row − its worker's mean) · basis of each row of a table (N, K) into out (N, k), half precision; basis (K, k), k a
multiple of 16. shards (n + 1,): where each worker's rows begin. seen (N,): the others become zeros. Four rows at a
time: a broadcast number of each meets a row of the basis. */
int project_rows(const table *t, const integer *shards, integer count_means, const double *means, const uint8_t *seen,
                 const float *basis, integer k, half *out) {
    integer dim = t->dim, width = padded(dim), many = k / LANES, count = shards[count_means], worker = 0;
    float *split = split_means(means, count_means, dim), *rows = scratch(4 * width), *even = scratch(dim * k);
    int done = split && rows && even;
    if (done) memcpy(even, basis, dim * k * sizeof(float));
    for (integer i = 0; done && i < count; i += 4) {
        integer some = count - i < 4 ? count - i : 4;
        for (integer r = 0; r < some; r++) {
            while (i + r >= shards[worker + 1]) worker++;
            read_centred(t, seen && !seen[i + r] ? -1 : i + r, split + 2 * worker * width, rows + r * width);
        }
        for (integer j = 0; j < many; j++) {
            lanes s[4] = {{0}};
            const lanes *column = (const lanes *)even + j;
            for (integer d = 0; d < dim; d++)
                for (int r = 0; r < 4; r++) s[r] += rows[r * width + d] * column[d * many];
            for (integer r = 0; r < some; r++)
                for (int l = 0; l < LANES; l++) out[(i + r) * k + j * LANES + l] = narrow(s[r][l]);
        }
    }
    free(split);
    free(rows);
    free(even);
    return done;
}

/* About the k principal axes of x (m, K), m ≥ k: orthonormal rows into axes (k, K), zero where there are no more. Two
rounds of subspace iteration from the first k rows. */
int principal_axes(const float *x, integer m, integer dim, integer k, float *axes) {
    integer width = padded(dim);
    float *rows = scratch(m * width), *q = scratch(k * width), *next = scratch(k * width), *parts = scratch(k);
    int done = rows && q && next && parts;
    for (integer i = 0; done && i < m; i++) memcpy(rows + i * width, x + i * dim, dim * sizeof(float));
    if (done) memcpy(q, rows, k * width * sizeof(float));
    for (int round = 0; done && round < 3; round++) {
        if (round) { /* Q ← (Q Xᵀ) X */
            memset(next, 0, k * width * sizeof(float));
            for (integer i = 0; i < m; i++) {
                for (integer j = 0; j < k; j++) parts[j] = dot(q + j * width, rows + i * width, width);
                for (integer j = 0; j < k; j++) add_row(next + j * width, rows + i * width, parts[j], width);
            }
            memcpy(q, next, k * width * sizeof(float));
        }
        for (integer j = 0; j < k; j++) {
            float *own = q + j * width, before = dot(own, own, width);
            for (int twice = 0; twice < 2; twice++)
                for (integer i = 0; i < j; i++) add_row(own, q + i * width, -dot(own, q + i * width, width), width);
            float left = dot(own, own, width), by = left > 1e-8f * before ? 1 / sqrtf(left) : 0;
            for (integer d = 0; d < width; d++) own[d] *= by;
        }
    }
    for (integer j = 0; done && j < k; j++) memcpy(axes + j * dim, q + j * width, dim * sizeof(float));
    free(rows);
    free(q);
    free(next);
    free(parts);
    return done;
}

/* Exchanges between the two halves of a stretch of steps */

enum { WINDOW = 64, TURNS = 4, MOST = 2 * WINDOW, WINDOWS = 16 };
static const float NEVER = 1e30f;
static const float SUMS = 0.5f; /* how much two steps' sums count beside the prefix between them */

typedef struct {
    const table *t;
    const float *means; /* split */
    integer width;
    integer *rows;          /* (N,) places, step after step; a negative one is the mean */
    const integer *workers; /* (N,) of each place */
    const integer *offsets; /* (T + 1,) where each step begins */
    const integer *step_of; /* (N,) */
    float *sums;            /* (T, width) of each step */
    uint64_t random;
    float *x, *across, *products, *gap; /* scratch */
} tree;

/* splitmix64: a number from 0 to below `below`. */
static integer draw(tree *s, integer below) {
    uint64_t z = s->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (integer)((z ^ z >> 31) % (uint64_t)below);
}

/* out[i][j] = ⟨x_i, x_j⟩ of `count` rows (MOST, width), by way of their transpose (width, MOST). Blocks of 8 × 32 that
hold nothing of the upper triangle are left out, and filled from it. */
static void gram(const float *x, float *across, integer count, integer width, float *out) {
    for (integer k = 0; k < width; k += LANES)
        for (integer i = 0; i < count; i++)
            for (integer l = k; l < k + LANES; l++) across[l * MOST + i] = x[i * width + l];
    for (integer i = 0; i < count; i += 8)
        for (integer j = i / 32 * 32; j < count; j += 32) {
            lanes s[8] = {{0}}, u[8] = {{0}};
            for (integer k = 0; k < width; k++) {
                const lanes *column = (const lanes *)(across + k * MOST + j);
                for (int r = 0; r < 8; r++) {
                    float one = x[(i + r) * width + k];
                    s[r] += one * column[0];
                    u[r] += one * column[1];
                }
            }
            for (int r = 0; r < 8; r++) {
                memcpy(out + (i + r) * MOST + j, &s[r], sizeof(lanes));
                memcpy(out + (i + r) * MOST + j + LANES, &u[r], sizeof(lanes));
            }
        }
    for (integer i = 32; i < count; i++)
        for (integer j = 0; j < i / 32 * 32; j++) out[i * MOST + j] = out[j * MOST + i];
}

/* Exchange examples between `here` places from `first` and `there` places from `second` as long as the prefix between
them gets shorter: x of the first for y of the second makes ‖P‖² into ‖P − (x − y)‖², a change of ‖x − y‖² − ⟨D, x − y⟩
with D = 2P. Inner products of all examples are taken once; then an exchange costs a few numbers. */
static void exchange(tree *s, integer first, integer here, integer second, integer there) {
    integer width = s->width, n = here + there, place[MOST], row[MOST], worker[MOST];
    int later[MOST], mixed = 0; /* which example comes after the prefix now */
    float dots[MOST] = {0}, norms[MOST] = {0}, bar[MOST], change[MOST];
    for (integer i = 0; i < n; i++) {
        place[i] = i < here ? first + i : second + i - here;
        fetch(s->t, s->rows[place[i]]);
    }
    for (integer i = 0; i < n; i++) {
        row[i] = s->rows[place[i]];
        worker[i] = s->workers[place[i]];
        mixed |= worker[i] != worker[0];
        later[i] = i >= here;
        bar[i] = later[i] && row[i] >= 0 ? 0 : NEVER; /* an example without a vector stays where it is */
        float *x = s->x + i * width;
        read_centred(s->t, row[i], s->means + 2 * worker[i] * width, x);
        dots[i] = dot(s->gap, x, width);
    }
    for (integer i = n; i < MOST; i++) bar[i] = NEVER;
    gram(s->x, s->across, n, width, s->products);
    for (integer i = 0; i < n; i++) norms[i] = s->products[i * MOST + i];
    for (int turn = 0, moved = 1; moved && turn < TURNS; turn++) {
        moved = 0;
        for (integer a = 0; a < n; a++) {
            if (later[a] || row[a] < 0) continue;
            const float *mine = s->products + a * MOST;
            float base = norms[a] - dots[a], least = NEVER;
            for (integer b = 0; b < MOST; b++) {
                change[b] = base + norms[b] + dots[b] + bar[b] - 2 * mine[b];
                least = change[b] < least ? change[b] : least;
            }
            integer best = 0;
            if (mixed) {
                least = NEVER;
                for (integer b = 0; b < n; b++)
                    if (worker[b] == worker[a] && change[b] < least) {
                        least = change[b];
                        best = b;
                    }
            }
            if (!(least < -1e-5f * norms[a])) continue; /* a rounded gain is none */
            while (!mixed && change[best] != least) best++;
            const float *other = s->products + best * MOST;
            for (integer b = 0; b < MOST; b++) dots[b] -= 2 * (mine[b] - other[b]);
            later[a] = 1;
            later[best] = 0;
            bar[a] = 0;
            bar[best] = NEVER;
            moved = 1;
        }
    }
    /* Those that came go to the places of those that went, a worker's to the worker's. */
    for (integer i = 0; i < here; i++) {
        if (!later[i]) continue;
        integer j = here;
        while (later[j] || worker[j] != worker[i]) j++;
        later[j] = 1;
        s->rows[place[i]] = row[j];
        s->rows[place[j]] = row[i];
        const float *x = s->x + i * width, *y = s->x + j * width;
        float *from = s->sums + s->step_of[place[i]] * width, *to = s->sums + s->step_of[place[j]] * width;
        for (integer d = 0; d < width; d++) {
            float apart = x[d] - y[d];
            s->gap[d] -= 2 * apart;
            from[d] -= apart;
            to[d] += apart;
        }
    }
}

/* Steps a to below b, the prefix before which is `before`: shorten the prefix in their middle, then those of both
halves. At most WINDOWS windows of either half are looked at, from a random place on. */
static void halve(tree *s, integer a, integer b, const float *before) {
    if (b - a < 2) return;
    integer width = s->width, c = (a + b + draw(s, 2)) / 2;
    float *middle = scratch(width);
    if (!middle) return; /* an order as good as before */
    memcpy(middle, before, width * sizeof(float));
    for (integer i = a; i < c; i++) add_row(middle, s->sums + i * width, 1, width);
    for (integer d = 0; d < width; d++) s->gap[d] = 2 * middle[d];
    /* Of two steps the sums count too. ‖P‖² + SUMS (‖sum_a‖² + ‖sum_c‖²) changes by 1 + 2 SUMS times what `exchange` says,
    given D = 2 (P + SUMS (sum_a − sum_c)) / (1 + 2 SUMS). */
    if (b - a == 2)
        for (integer d = 0; d < width; d++)
            s->gap[d] = (s->gap[d] + 2 * SUMS * (s->sums[a * width + d] - s->sums[c * width + d])) / (1 + 2 * SUMS);
    integer first = s->offsets[a], second = s->offsets[c], here = second - first, there = s->offsets[b] - second;
    integer shared = here < there ? here : there, count = (shared + WINDOW - 1) / WINDOW;
    integer start = count ? draw(s, count) : 0;
    for (integer i = 0; i < count && i < WINDOWS; i++) {
        integer at = (start + i) % count * WINDOW;
        exchange(s, first + at, here - at < WINDOW ? here - at : WINDOW, second + at,
                 there - at < WINDOW ? there - at : WINDOW);
    }
    for (integer d = 0; d < width; d++) middle[d] = s->gap[d] / 2;
    halve(s, a, c, before);
    halve(s, c, b, middle);
    free(middle);
}

/* Exchange examples among steps, rows[offsets[i]:offsets[i + 1]] of workers (N,), to shorten every prefix of them, from
the middle one to the shortest stretch. Of a worker's examples only with the worker's. means (n, K). */
int exchange_tree(const table *t, const double *means, integer count_means, integer *rows, const integer *workers,
                  const integer *offsets, integer steps, uint64_t seed) {
    integer width = padded(t->dim), count = offsets[steps];
    float *split = split_means(means, count_means, t->dim), *before = scratch(width);
    integer *step_of = malloc((count ? count : 1) * sizeof(integer));
    tree s = {t, split, width, rows, workers, offsets, step_of, scratch(steps * width), seed,
              scratch(MOST * width), scratch(MOST * width), scratch(MOST * MOST), scratch(width)};
    int done = split && before && step_of && s.sums && s.x && s.across && s.products && s.gap;
    for (integer i = 0; done && i < steps; i++)
        for (integer at = offsets[i]; at < offsets[i + 1]; at++) {
            step_of[at] = i;
            read_centred(t, rows[at], split + 2 * workers[at] * width, s.x);
            add_row(s.sums + i * width, s.x, 1, width);
        }
    if (done) halve(&s, 0, steps, before);
    free(split);
    free(before);
    free(step_of);
    free(s.sums);
    free(s.x);
    free(s.across);
    free(s.products);
    free(s.gap);
    return done;
}

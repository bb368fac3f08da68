"""The compiled loops of sweeps, bounds and the table. The tests' `reference` has plain twins.

Every sweep reads a table of N rows in a given order, which is to say at random: reading memory takes the time. So each
row is read once (a sweep that balances an order also judges it), and fetched ahead: see `jit`.

Sums are float64, except in the mean-centred sweep over half and single precision: signs need no more than float32
there, which takes half the time, and `prefix_norms` has the last word on bounds. Nothing here checks its input:
`validate` does.
"""

from numba import njit, types

from heeler.herding.jit import _COMPILE, _ahead, _half_bits, _larger, _narrow, _prefetch, _value

_DRIFT_STEPS = 64


@njit(**_COMPILE)
def store_halves(bits, where, values, scale, largest):
    """Row where[i] of bits (N, K) uint16 becomes values[i] × scale, within ±largest, in half precision."""
    for i in range(where.size):
        row = bits[where[i]]
        for k in range(values.shape[1]):
            row[k] = _half_bits(min(max(values[i, k] * scale, -largest), largest))


@njit(**_COMPILE)
def compare_halves(bits, where, values, scale, largest, out):
    """⟨new, old⟩, ‖old‖² and ‖new‖² of each row into out (3, b).

    old is row where[i] of bits (N, K) uint16, new is values[i] × scale, within ±largest: what `store_halves` stores,
    but for the rounding.
    """
    for i in range(where.size):
        row = bits[where[i]]
        dot = new_square = old_square = types.float32(0.0)
        for k in range(values.shape[1]):
            old, new = _narrow(row[k]), min(max(values[i, k] * scale, -largest), largest)
            dot += new * old
            new_square += new * new
            old_square += old * old
        out[0, i], out[1, i], out[2, i] = dot, old_square, new_square


@njit(**_COMPILE)
def squared_norms(table, out):
    """‖row‖² of each row of table (N, K) into out (N,)."""
    for i in range(table.shape[0]):
        total = 0.0
        for k in range(table.shape[1]):
            x = _value(table[i, k])
            total += x * x
        out[i] = total


@njit(**_COMPILE)
def weigh_halves(bits, weights, out):
    """Row i of bits (N, K) uint16 times weights[i] into row i of out (N, K) uint16."""
    for i in range(bits.shape[0]):
        for k in range(bits.shape[1]):
            out[i, k] = _half_bits(_narrow(bits[i, k]) * weights[i])


@njit(**_COMPILE)
def shard_means(table, order, offsets, means):
    """Mean of each shard's rows into means (n, K) float64, zero for an empty shard; returns the sum of all squares."""
    ahead, squares = _ahead(table), 0.0
    for j in range(offsets.size - 1):
        mean = means[j]
        mean[:] = 0.0
        for t in range(offsets[j], offsets[j + 1]):
            if t + ahead < order.size:
                _prefetch(table, order[t + ahead])
            row = order[t]
            for k in range(table.shape[1]):
                x = _value(table[row, k])
                mean[k] += x
                squares += x * x
        size = offsets[j + 1] - offsets[j]
        if size > 0:
            for k in range(table.shape[1]):
                mean[k] /= size
    return squares


@njit(**_COMPILE)
def balance_sweep(table, order, mean, drift, following, running, prefix, batch_size):
    """One mean-centred balance sweep; returns the sum of ‖prefix‖² of `order` over batch boundaries and the end.

    table (N, K), order (N,), following (N,) is written; mean, drift, running and prefix (K,) all of the type that sums
    are to have. drift is what rounding to that type took off the mean; it is given back to the prefix now and
    then, as t rounding errors add up. running and prefix are scratch, zeroed here. With batch_size 0 nothing is judged.
    The loop over k adds row t-1 with its sign and takes row t's inner product at once.
    """
    size, dim, ahead = order.size, table.shape[1], _ahead(table)
    front, back, left = 0, size - 1, batch_size
    running[:] = 0
    prefix[:] = 0
    zero = running[0]
    one = zero + types.float32(1.0)
    total, sign, last = 0.0, zero, order[0]
    for t in range(size):
        if t + ahead < size:
            _prefetch(table, order[t + ahead])
        row = order[t]
        dot, norm = zero, zero
        if batch_size > 0:
            for k in range(dim):
                r = running[k] + sign * (_narrow(table[last, k]) - mean[k])
                running[k] = r
                c = _narrow(table[row, k]) - mean[k]
                dot += r * c
                p = prefix[k] + c
                prefix[k] = p
                norm += p * p
            left -= 1
            if left == 0 or t == size - 1:
                left = batch_size
                total += norm
            if t % _DRIFT_STEPS == _DRIFT_STEPS - 1:
                for k in range(dim):
                    prefix[k] -= types.float32(_DRIFT_STEPS) * drift[k]
        else:
            for k in range(dim):
                r = running[k] + sign * (_narrow(table[last, k]) - mean[k])
                running[k] = r
                dot += r * (_narrow(table[row, k]) - mean[k])
        plus = types.int64(dot <= zero)  # arithmetic, not a branch: it would be mispredicted every other time
        sign = one if plus == 1 else -one
        following[plus * front + (1 - plus) * back] = row
        front += plus
        back -= 1 - plus
        last = row
    return total


@njit(**_COMPILE)
def pair_sweep(table, order, offsets, means, group, following, running, first, second, prefix, batch_size):
    """One coordinated pair sweep over all shards; returns the sum of squared norms of the workers' common prefix.

    table (N, K); order (N,) flat with shard j at offsets[j]:offsets[j+1]; means (n, K); group (n,) names the running
    sum, a row of running (g, K), that worker j shares; following (N,) is written; running and first, second and prefix
    (K,) are scratch, zeroed here. Pair i of every worker that still has one is balanced in turn. A shard's odd last
    example keeps its place.
    """
    workers, dim, ahead = offsets.size - 1, table.shape[1], _ahead(table)
    longest = (offsets[1:] - offsets[:-1]).max()
    running[:] = 0.0
    prefix[:] = 0.0
    total = 0.0
    pairs_ahead = max(ahead // (2 * workers), 1)  # the workers' rows are spread over the table: look ahead by pairs
    for i in range((longest + 1) // 2):
        first[:] = 0.0  # Σ_j (z_j − mean_j) at position 2i, and at 2i + 1
        second[:] = 0.0
        for j in range(workers):
            start, size = offsets[j], offsets[j + 1] - offsets[j]
            if 2 * i >= size:
                continue
            t = start + 2 * (i + pairs_ahead)
            if t + 1 < start + size:
                _prefetch(table, order[t])
                _prefetch(table, order[t + 1])
            mean = means[j]
            a = order[start + 2 * i]
            if 2 * i + 1 == size:
                for k in range(dim):
                    first[k] += _value(table[a, k]) - mean[k]
                following[start + 2 * i] = a
                continue
            b = order[start + 2 * i + 1]
            s = running[group[j]]
            dot = 0.0
            for k in range(dim):
                x, y = _value(table[a, k]), _value(table[b, k])
                dot += s[k] * (x - y)
                first[k] += x - mean[k]
                second[k] += y - mean[k]
            if dot > 0.0:  # the sign is −1: b goes to the front, and −(a − b) = b − a is added
                a, b = b, a
            following[start + i] = a
            following[start + size - (size & 1) - 1 - i] = b
            for k in range(dim):
                s[k] += _value(table[a, k]) - _value(table[b, k])
        at_first, at_second = 0.0, 0.0
        for k in range(dim):
            p = prefix[k] + first[k]
            at_first += p * p
            p += second[k]
            at_second += p * p
            prefix[k] = p
        if (2 * i + 1) % batch_size == 0 or 2 * i + 1 == longest:
            total += at_first
        if (2 * i + 2) % batch_size == 0 or 2 * i + 2 == longest:
            total += at_second
    return total


@njit(**_COMPILE)
def prefix_norms(table, order, offsets, means, prefix, batch_size):
    """Norms of the common prefix at batch boundaries: (largest infinity norm, largest ‖·‖², sum of ‖·‖², boundaries).

    Arguments as in `pair_sweep`; position t of every worker that still has one makes one step.
    """
    workers, dim, ahead = offsets.size - 1, table.shape[1], _ahead(table)
    longest = (offsets[1:] - offsets[:-1]).max()
    steps_ahead = max(ahead // workers, 1)
    prefix[:] = 0.0
    worst_inf, worst_two, total, count = 0.0, 0.0, 0.0, 0
    for t in range(longest):
        for j in range(workers):
            at = offsets[j] + t
            if at >= offsets[j + 1]:
                continue
            if at + steps_ahead < offsets[j + 1]:
                _prefetch(table, order[at + steps_ahead])
            row = order[at]
            mean = means[j]
            for k in range(dim):
                prefix[k] += _value(table[row, k]) - mean[k]
        if (t + 1) % batch_size == 0 or t == longest - 1:
            norm, largest = 0.0, 0.0
            for k in range(dim):
                norm += prefix[k] * prefix[k]
                largest = _larger(largest, abs(prefix[k]))
            worst_inf = max(worst_inf, largest)
            worst_two = max(worst_two, norm)
            total += norm
            count += 1
    return worst_inf, worst_two, total, count

"""Plain NumPy twins of the compiled kernels: slow, obviously right, and read like the equations.

Tests drive both through the same steps. Vectors are (N, K) float64 here; `order` holds row numbers; a shard is a list
of row numbers in its worker's order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray

Floats = NDArray[np.float64]


def balance_sweep(vectors: Floats, order: IntArray) -> IntArray:
    """GraB's balance (arXiv 2205.10733, Alg. 3) with the true mean: ⟨s, c⟩ ≤ 0 goes to the front, else to the back."""
    mean = vectors[order].mean(axis=0)
    s = np.zeros_like(mean)
    front, back = [], []
    for i in order:
        c = vectors[i] - mean
        if s @ c <= 0:
            front.append(i)
            s = s + c
        else:
            back.append(i)
            s = s - c
    return np.array(front + back[::-1], np.int64)


def coordinated_pair_sweep(vectors: Floats, shards: Sequence[IntArray]) -> list[IntArray]:
    """One epoch of CD-GraB (arXiv 2302.00845): pair i of each worker in turn, one running sum S for all."""
    following = [np.array(shard, np.int64) for shard in shards]
    S = np.zeros(vectors.shape[1])
    for i in range(max(len(shard) for shard in shards) // 2):
        for j, shard in enumerate(shards):
            even = len(shard) // 2 * 2  # an odd last example keeps its place
            if 2 * i >= even:
                continue
            left, right = i, even - 1 - i
            a, b = shard[2 * i], shard[2 * i + 1]
            D = vectors[a] - vectors[b]
            if S @ D <= 0:
                following[j][left], following[j][right] = a, b
                S = S + D
            else:
                following[j][right], following[j][left] = a, b
                S = S - D
    return following


def prefixes(vectors: Floats, shards: Sequence[IntArray], batch_size: int = 1) -> Floats:
    """Σ_{τ≤t} Σ_j (z_{j,τ} − z̄_j) at every batch boundary t and at the end, shape (boundaries, K)."""
    longest = max(len(shard) for shard in shards)
    steps = np.zeros((longest, vectors.shape[1]))
    for shard in shards:
        if len(shard):
            steps[: len(shard)] += vectors[shard] - vectors[shard].mean(axis=0)
    sums = np.cumsum(steps, axis=0)
    return sums[[t for t in range(longest) if (t + 1) % batch_size == 0 or t == longest - 1]]


def bounds(vectors: Floats, shards: Sequence[IntArray], batch_size: int = 1) -> tuple[float, float, float]:
    """Largest infinity norm, largest 2-norm, root mean square of the 2-norm over the prefixes."""
    P = prefixes(vectors, shards, batch_size)
    two = np.linalg.norm(P, axis=1)
    return float(np.abs(P).max()), float(two.max()), float(np.sqrt(np.mean(two**2)))


def greedy(vectors: Floats, order: IntArray) -> IntArray:
    """Greedy herding: always the example that keeps the prefix shortest; of equals the earliest in `order`."""
    left = [vectors[i] - vectors[order].mean(axis=0) for i in order]
    rows, prefix, following = list(order), np.zeros(vectors.shape[1]), []
    while rows:
        best = int(np.argmin([np.sum((prefix + c) ** 2) for c in left]))
        prefix = prefix + left.pop(best)
        following.append(rows.pop(best))
    return np.array(following, np.int64)


def observe_mean(vectors: Floats, mean: Floats, s: Floats) -> tuple[NDArray[np.bool_], Floats]:
    """GraB online: which of the vectors go to the front, and the running sum after them. `mean` is last epoch's."""
    front = []
    for g in vectors:
        c = g - mean
        front.append(s @ c <= 0)
        s = s + c if front[-1] else s - c
    return np.array(front, np.bool_), s


def walk_sign(S: Floats, D: Floats, c: float, u: float) -> int:
    """Self-balancing walk (arXiv 2006.14009): +1 with probability ½ − ⟨S, D⟩/(2c)."""
    return 1 if u < 0.5 - S @ D / (2 * c) else -1


def kh_sign(S: Floats, D: Floats, sigma2: float, i: int, k: int, T: int, pairs: int, u: float) -> tuple[int, float]:
    """Kernel halving's sign (arXiv 2502.12063, KH-SGD) and the new σ²: i-th pair of `pairs` in epoch k of T, δ = ½."""
    b = float(D @ D)
    if b == 0:
        return 1, sigma2
    length = float(np.log((4 / 0.5) * k * (1 + np.log(T)) * i * (1 + np.log(pairs))))
    q = sigma2 * length / b
    if q <= 1:
        a, sigma2 = b, 2 * b
    else:
        a = float(np.sqrt(q)) * b
        sigma2 += 2 * b * max(0.0, length + 0.5 - float(np.sqrt(q))) / length
    U = 2 * u - 1
    return (1 if S @ D <= U * a else -1), sigma2  # noqa: SIM300


def tree_order(vectors: Floats, order: IntArray, mean: Floats, depth: int) -> list[int]:
    """Recursive balance: a node splits its examples by its own running sum; each half is balanced again."""
    front, _ = observe_mean(vectors[order], mean, np.zeros(vectors.shape[1]))
    plus, minus = order[front], order[~front]
    if depth == 0:
        return [*plus.tolist(), *minus[::-1].tolist()]
    return tree_order(vectors, plus, mean, depth - 1) + tree_order(vectors, minus, mean, depth - 1)


def exchange_tree(vectors: Floats, rows: list[int], workers: list[int], offsets: list[int], seed: int) -> list[int]:
    """Rows after exchanges between the halves of an epoch, of its halves, and so on. vectors: centred.

    rows and workers: of each place, a negative row without a vector; offsets: where each step begins.
    """
    rows, state = list(rows), seed

    def draw(below: int) -> int:  # splitmix64
        nonlocal state
        state = z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) % below

    def total(places: range) -> Floats:
        return sum((vectors[rows[i]] for i in places if rows[i] >= 0), np.zeros(vectors.shape[1]))

    def halve(a: int, b: int) -> None:
        if b - a < 2:
            return
        c = (a + b + draw(2)) // 2
        left, right = range(offsets[a], offsets[c]), range(offsets[c], offsets[b])
        windows = -(-min(len(left), len(right)) // 64)
        first = draw(windows) if windows else 0
        for i in range(min(windows, 16)):
            at = (first + i) % windows * 64
            D = 2 * total(range(offsets[c]))
            if b - a == 2:  # ‖P‖² + ½ (‖sum_a‖² + ‖sum_c‖²)
                D = (D + total(left) - total(right)) / 2
            exchange(vectors, rows, workers, [*left[at : at + 64]], [*right[at : at + 64]], D)
        halve(a, c)
        halve(c, b)

    halve(0, len(offsets) - 1)
    return rows


def exchange(vectors: Floats, rows: list[int], workers: list[int], u: list[int], v: list[int], D: Floats) -> None:
    """Exchange the rows at places u with those at places v: for each x in front in turn the best y behind.

    A change is ‖x − y‖² − ⟨D, x − y⟩, after which D is less by 2 (x − y). Who came to the front takes the places of
    those who went, a worker's its worker's.
    """
    places = u + v
    front = [i < len(u) for i in range(len(places))]
    x = [vectors[rows[i]] if rows[i] >= 0 else None for i in places]
    for _ in range(4):
        moved = False
        for a in range(len(places)):
            if not front[a] or x[a] is None:
                continue
            change = {
                b: (x[a] - x[b]) @ (x[a] - x[b]) - D @ (x[a] - x[b])
                for b in range(len(places))
                if not front[b] and x[b] is not None and workers[places[b]] == workers[places[a]]
            }
            best = min(change, key=lambda b: change[b], default=None)
            if best is not None and change[best] < -1e-5 * (x[a] @ x[a]):
                D = D - 2 * (x[a] - x[best])
                front[a], front[best], moved = False, True, True
        if not moved:
            break
    came = [i for i in range(len(u), len(places)) if front[i]]
    for i in range(len(u)):
        if not front[i]:
            j = next(j for j in came if workers[places[j]] == workers[places[i]])
            came.remove(j)
            rows[places[i]], rows[places[j]] = rows[places[j]], rows[places[i]]


def stratified(strata: IntArray, batch_size: int, rng: np.random.Generator, portions: int = 1) -> list[int]:
    """A stratified shuffle, card by card, with the random numbers in the order in which the fast one takes them."""
    shuffled = rng.permutation(len(strata)).tolist()
    rank = rng.permutation(max([-1, *strata.tolist()]) + 1)
    line = sorted(shuffled, key=lambda i: rank[strata[i]])  # stable
    hands = _deal(list(range(len(line))), batch_size, portions, rng)
    mixed = rng.permutation(len(strata)).tolist()
    return [line[card] for hand in hands for card in sorted(hand, key=mixed.index)]


def _deal(cards: list[int], batch_size: int, portions: int, rng: np.random.Generator) -> list[list[int]]:
    """The cards of every portion of every batch, in the epoch's order."""
    full, rest = divmod(len(cards), batch_size)
    u = rng.random()
    fractions = [(u + (5**0.5 - 1) / 2 * i) % 1.0 for i in range(full)]
    visits = [sorted(fractions).index(fraction) for fraction in fractions]
    turns = rng.integers(portions, size=full).tolist()  # whose turn it is in each batch
    apart = int(rng.integers(len(cards))) if rest else 0
    last = [cards[(k * len(cards) + apart) // rest] for k in range(rest)]
    hands: list[list[int]] = [[] for _ in range(full * portions)]
    for at, card in enumerate(card for card in cards if card not in last):
        batch = visits[at % full]
        hands[batch * portions + turns[batch]].append(card)
        turns[batch] = (turns[batch] + 1) % portions
    if rest and portions > 1:
        return hands + _deal(last, -(-rest // portions), 1, rng)
    return [*hands, last]

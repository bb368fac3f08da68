"""Two levels: scattering, halving, and orders that are expanded where they are read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import herding_bound, make_rule, solve_batches
from heeler.levels import BlockHerd
from heeler.levels import block_loops as kernels
from heeler.levels.block_order import BlockOrder
from heeler.levels.halves import TURNS, Blocks, Walk, halve, walk_blocks, whitening
from heeler.levels.scatter import Scatter
from tests.levels import reference_levels as reference


def fed(examples: int, vectors: np.ndarray, **options) -> BlockHerd:
    """A rule that has seen all vectors, at the beginning of its second epoch."""
    rule = BlockHerd(examples, vectors.shape[1], **options)
    rule.observe(np.arange(examples), vectors)
    rule.next_order()
    return rule


class TestScatter:
    @settings(deadline=None)
    @given(st.integers(1, 600), st.integers(0, 2**63))
    def test_is_a_permutation_and_its_inverse(self, size, seed):
        scatter = Scatter(size, seed)
        places = scatter.places(np.arange(size))
        assert np.array_equal(np.sort(places), np.arange(size))
        assert np.array_equal(scatter.examples(places), np.arange(size))

    @pytest.mark.parametrize("size", [10**9, 2**40, 10**12 + 39])
    def test_needs_no_memory(self, size):
        some = np.random.default_rng(0).integers(0, size, 1000)
        scatter = Scatter(size, 1)
        places = scatter.places(some)
        assert places.min() >= 0
        assert places.max() < size
        assert np.array_equal(scatter.examples(places), some)

    def test_seeds_differ(self):
        assert not np.array_equal(Scatter(1000, 0).places(np.arange(1000)), Scatter(1000, 1).places(np.arange(1000)))

    @pytest.mark.parametrize("step", [1, 10, 100, 1000, 317, 316])
    def test_any_regular_part_of_the_data_is_spread_like_a_random_one(self, step):
        """Every `step`-th example, and a run of neighbours: as many in each block as chance would have it."""
        size, blocks = 100_000, 50
        scatter = Scatter(size, 3)
        for part in (np.arange(0, size, step), np.arange(size // 7, size // 7 + size // step)):
            counts = np.bincount(scatter.places(part) * blocks // size, minlength=blocks)
            wanted = part.size / blocks
            chi = ((counts - wanted) ** 2 / wanted).sum() / (1 - part.size / size + 1e-9)
            assert chi < 49 + 5 * np.sqrt(2 * 49) or part.size == size

    def test_neighbours_are_no_neighbours(self):
        places = Scatter(100_000, 0).places(np.arange(100_000))
        gaps = np.abs(np.diff(places))
        assert np.unique(gaps).size > 40_000  # of a random permutation about 57,000
        assert abs(np.mean(gaps) - 100_000 / 3) < 500


class TestHalving:
    @settings(deadline=None, max_examples=60)
    @given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 2**32))
    def test_kernels_are_their_twins(self, rows, dim, seed):
        rng = np.random.default_rng(seed)
        vectors = rng.integers(-3, 4, (rows, dim)).astype(np.float32)
        early = int(rng.integers(0, rows // 2 + 1))
        order, start = rng.permutation(rows)[: 2 * early], rng.integers(-9, 10, dim).astype(np.float64)
        pairs = order.reshape(-1, 2).tolist()
        firsts, running = np.empty(early, np.bool_), start.copy()
        paired = vectors[order]
        kernels.walk_pairs(paired, running, firsts)
        expected, s = reference.walk_pairs(vectors, pairs, start)
        assert firsts.tolist() == expected
        assert np.array_equal(running, s)
        again = start.copy()
        kernels.signed_sum(paired, again, firsts)
        assert np.array_equal(again, s)
        turned = kernels.turn_pairs(paired, running, firsts)
        assert (turned, expected) == (reference.turn_pairs(vectors, pairs, s, expected)[0], firsts.tolist())

    def test_early_half_has_the_sum_it_is_to_have(self):
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((4000, 8)).astype(np.float32)
        for target in (np.zeros(8), 30 * rng.standard_normal(8), 60 * rng.standard_normal(8)):
            early, late = halve(vectors, 2000, target, rng, whitening(vectors))
            assert np.array_equal(np.sort(np.concatenate([early, late])), np.arange(4000))
            assert early.size == 2000
            assert np.linalg.norm(vectors[early].sum(axis=0, dtype=np.float64) - target) < 2.0  # a vector is 2.8 long

    def test_whitened_vectors_vary_alike(self):
        rng = np.random.default_rng(0)
        vectors = (rng.standard_normal((4000, 5)) * [9, 3, 1, 0.3, 0] @ rng.standard_normal((5, 5))).astype(np.float32)
        white = vectors @ whitening(vectors)
        values = np.linalg.eigvalsh(white.T @ white)
        assert values[1] == pytest.approx(values[-1], rel=1e-3)
        assert values[0] < 1e-3 * values[-1]  # nothing varies there, and nothing is made of it
        assert np.isfinite(whitening(np.zeros((7, 3), np.float32))).all()

    def test_small_directions_reach_their_targets(self):
        """They would not without whitening."""
        rng = np.random.default_rng(0)
        vectors = (rng.standard_normal((4000, 4)) * [10, 10, 10, 0.1]).astype(np.float32)
        target = np.array([0, 0, 0, 20.0])
        early, _ = halve(vectors, 2000, target, rng, whitening(vectors))
        assert abs(vectors[early, 3].sum() - 20) < 2
        early, _ = halve(vectors, 2000, target, rng)
        assert abs(vectors[early, 3].sum() - 20) > 5

    def test_what_does_not_pair_is_late(self):
        vectors = np.random.default_rng(0).standard_normal((11, 2)).astype(np.float32)
        early, late = halve(vectors, 4, np.zeros(2), np.random.default_rng(1))
        assert (early.size, late.size) == (4, 7)
        early, late = halve(vectors, 11, np.zeros(2), np.random.default_rng(1))
        assert (early.size, late.size) == (11, 0)

    @given(st.integers(1, 500), st.integers(1, 300), st.integers(1, 20))
    def test_blocks_hold_every_place_and_halves_full_batches(self, examples, wanted, batch):
        shape = Blocks.near(examples, wanted, batch)
        lengths = [shape.length(block) for block in range(shape.count)]
        assert sum(lengths) == examples
        assert min(lengths) >= 1
        assert set(lengths[:-1]) <= {shape.size}
        assert shape.size % (2 * batch) == 0
        assert shape.size < wanted + 2 * batch
        early = [shape.early(block, batch) for block in range(shape.count)]
        if shape.count > 1:
            assert all(each % batch == 0 for each in early)
            assert all(2 * each <= length for each, length in zip(early, lengths, strict=True))
        else:
            assert early == lengths

    @given(st.integers(1, 500), st.integers(1, 60))
    def test_dealing_mixes_blocks_evenly(self, examples, size):
        shape = Blocks(examples, size)
        places = np.arange(examples)
        dealt = shape.dealt(places)
        assert np.array_equal(np.sort(dealt), places)
        assert np.array_equal(shape.undealt(dealt), places)
        full = examples // size
        came_from = np.zeros((shape.count, shape.count), int)
        np.add.at(came_from, (dealt // size, places // size), 1)
        if full > 1:  # of every full block as many, but for one more or less
            shares = came_from[:, :full]
            assert (shares.max(axis=1) - shares.min(axis=1) <= 1).all()
        for block in range(shape.count):  # what goes to one block are neighbours
            own = dealt[block * size : (block + 1) * size]
            assert (np.diff(own) > 0).all()
            for start in range(0, examples + 1, max(examples // 7, 1)):
                expected = tuple(np.searchsorted(own, [start, start + size]).tolist())
                assert shape.rows_dealt(block, start, start + size) == expected

    def test_walk_says_what_is_missing(self):
        sums = np.random.default_rng(0).standard_normal((9, 3))
        walk = walk_blocks(sums, Blocks(9 * 4 - 1, 4), np.random.default_rng(0))
        assert walk.blocks[-1] == 8  # the short one
        assert np.array_equal(np.sort(walk.blocks), np.arange(9))
        for position, block in enumerate(walk.blocks):
            assert np.allclose(walk.targets[block], -sums[walk.blocks[:position]].sum(axis=0))


class TestOrder:
    @settings(deadline=None, max_examples=30)
    @given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 5), st.integers(0, 2**32), st.booleans())
    def test_expanded_is_the_materialised_reference(self, examples, block, batch, seed, known):
        rng = np.random.default_rng(seed)
        shape, scatter = Blocks.near(examples, block, batch), Scatter(examples, seed)
        vectors = rng.standard_normal((examples, 3)).astype(np.float32) * known
        starts = range(0, examples, shape.size)
        sums = np.stack([vectors[a : a + shape.size].sum(axis=0, dtype=np.float64) for a in starts])
        walk = walk_blocks(sums, shape, rng, whitening(vectors))

        def vectors_of(number: int) -> np.ndarray:
            return vectors[number * shape.size :][: shape.length(number)]

        order = BlockOrder(shape, scatter, walk, vectors_of, [seed, 1], batch)
        expected = reference.block_order(shape, scatter, walk, vectors, [seed, 1], batch, TURNS)
        assert np.array_equal(np.sort(expected), np.arange(examples))
        cuts = np.sort(rng.integers(0, examples + 1, (8, 2)), axis=1).tolist()
        for a, b in cuts:  # anywhere, again and again
            assert np.array_equal(order[a:b], expected[a:b])
        assert list(order) == expected.tolist()
        assert np.array_equal(np.asarray(order), expected)
        assert order[examples // 2] == expected[examples // 2]
        assert order[-1] == expected[-1]
        names = rng.permutation(examples) + 1000
        assert np.array_equal(order.renumbered(names)[: examples // 2], names[expected[: examples // 2]])

    def test_reads_like_an_array(self):
        shape = Blocks(40, 8)
        order = BlockOrder(
            shape, None, Walk(np.arange(5), np.zeros((5, 2))), lambda b: np.zeros((8, 2), np.float32), [0], 2
        )
        assert len(order) == 40
        assert order[30:90].size == 10
        assert order[9:3].size == 0
        assert order[:0].dtype == np.int64
        assert len(order[-4:]) == 4
        with pytest.raises(IndexError):
            order[40]
        with pytest.raises(ValueError, match=r"order\[a:b\]"):
            order[::2]

    def test_few_stretches_are_kept(self):
        read = []

        def vectors_of(block: int) -> np.ndarray:
            read.append(block)
            return np.ones((8, 2), np.float32)

        order = BlockOrder(Blocks(800, 8), None, Walk(np.arange(100), np.zeros((100, 2))), vectors_of, [0], 2)
        for start in range(0, 800, 4):
            order[start : start + 4]
        assert read == list(range(100))  # in sequence, each block once


class TestRule:
    @pytest.mark.parametrize(("kind", "worst"), [("alike", 2), ("decaying", 3), ("sorted", 2)])
    def test_prefixes_are_as_short_as_in_one_level(self, kind, worst):
        rng = np.random.default_rng(0)
        vectors = rng.standard_normal((20_000, 16))
        if kind == "decaying":
            vectors /= np.arange(1, 17)
        if kind == "sorted":  # ten classes, one behind the other on disk
            vectors = 0.3 * vectors + np.repeat(rng.standard_normal((10, 16)), 2000, axis=0)
        vectors = vectors.astype(np.float16)
        two = np.asarray(fed(20_000, vectors, batch_size=16, block_size=2000).order)
        one = solve_batches(vectors, batch_size=16).order
        bounds = [herding_bound(vectors, order, batch_size=16) for order in (one, two)]
        assert bounds[1].rms < 1.5 * bounds[0].rms
        assert bounds[1].two < worst * bounds[0].two

    def test_gradients_that_move_while_they_are_taken_do_no_more_harm_than_in_one_level(self):
        """Examples of a block are sketched at about the same time: its sum must not tell when."""
        rng = np.random.default_rng(0)
        vectors, drift, bounds = rng.standard_normal((8000, 8)), rng.standard_normal(8), []
        for rule in (BlockHerd(8000, 8, batch_size=8), BlockHerd(8000, 8, batch_size=8, block_size=800)):
            order = np.asarray(rule.order)
            moved = vectors.copy()
            moved[order] += np.linspace(0, 1, 8000)[:, None] * drift
            rule.observe(order, moved[order])
            bounds.append(herding_bound(vectors, np.asarray(rule.next_order()), batch_size=8).rms)
        assert bounds[1] < 1.5 * bounds[0]

    def test_batches_of_sorted_data_are_mixed(self):
        """Before there is any sketch, too: a batch of 32 of ten classes misses few of them."""
        order = np.asarray(BlockHerd(10_000, 4, batch_size=32, block_size=1000).order)
        classes = [np.unique(order[a : a + 32] // 1000).size for a in range(0, 9984, 32)]
        expected = 10 * (1 - 0.9**32)
        assert abs(np.mean(classes) - expected) < 0.15

    def test_orders_are_new_every_epoch_and_repeat_with_the_seed(self):
        vectors = np.random.default_rng(0).standard_normal((500, 4))
        rule, twin, other = (fed(500, vectors, block_size=100, batch_size=4, seed=s) for s in (1, 1, 2))
        first, same, different = (np.asarray(each.order) for each in (rule, twin, other))
        assert np.array_equal(first, same)
        assert not np.array_equal(first, different)
        assert not np.array_equal(first, np.asarray(rule.next_order()))
        assert rule.epoch == 2

    def test_an_example_without_a_vector_counts_as_the_mean(self):
        vectors = np.random.default_rng(0).standard_normal((600, 4)) + 5
        rule = BlockHerd(600, 4, block_size=100, batch_size=4)
        rule.observe(np.arange(300), vectors[:300])
        rule.observe(np.arange(20), np.full((20, 4), np.nan))
        assert rule.screened == 20
        order = np.asarray(rule.next_order())
        assert np.array_equal(np.sort(order), np.arange(600))
        known = order[order < 300]
        assert herding_bound(vectors, known, subset=True).rms < herding_bound(vectors, np.arange(300), subset=True).rms
        rule.forget(np.arange(300))
        assert rule.table.share_seen == 0
        assert np.array_equal(np.sort(np.asarray(rule.next_order())), np.arange(600))

    @pytest.mark.parametrize("stored", ["memory", "file"])
    @pytest.mark.parametrize("batch_size", [4, 6])
    def test_a_state_goes_on_exactly_with_any_batch_size(self, stored, batch_size, tmp_path):
        where = {"table": tmp_path / "table"} if stored == "file" else {}
        rng = np.random.default_rng(0)
        rule = fed(500, rng.standard_normal((500, 4)), batch_size=4, block_size=100, **where)
        new = rng.standard_normal((500, 4))
        some = rule.order[:230]
        rule.observe(some, new[some])
        state = rule.state_dict()
        expected = np.asarray(rule.order)
        rule.observe(rule.order[230:], new[rule.order[230:]])
        following = np.asarray(rule.next_order())

        resumed = BlockHerd(500, 4, batch_size=batch_size, seed=9, block_size=100, **where)
        resumed.load_state_dict(state)
        assert np.array_equal(np.asarray(resumed.order), expected)
        resumed.observe(expected[230:], new[expected[230:]])
        resumed.next_order()
        assert np.array_equal(np.sort(np.asarray(resumed.order)), np.arange(500))
        assert np.array_equal(np.asarray(resumed.order), following) == (batch_size == 4)

    def test_states_that_do_not_fit_change_nothing(self):
        vectors = np.random.default_rng(0).standard_normal((200, 4))
        rule = fed(200, vectors, block_size=50, batch_size=2)
        before, state = np.asarray(rule.order), rule.state_dict()
        damaged = [
            ({**state, "rule": "Herd"}, "not of an order in two levels"),
            ({**state, "walk": {**state["walk"], "blocks": np.zeros(4, np.int64)}}, "not a permutation"),
            ({**state, "walk": {**state["walk"], "targets": np.full((4, 4), np.nan)}}, "NaN"),
            ({**state, "table": {**state["table"], "block": 0}}, "blocks are of 0"),
            ({**state, "table": {**state["table"], "rows": state["table"]["rows"][:2]}}, "not there"),
            ({**state, "seed": -1}, "seed"),
            ({name: value for name, value in state.items() if name != "walk"}, "no 'walk'"),
        ]
        for bad, message in damaged:
            with pytest.raises(ValueError, match=message):
                rule.load_state_dict(bad)
            assert np.array_equal(np.asarray(rule.order), before)
        rule.load_state_dict(state)
        with pytest.raises(ValueError, match="rule 'BlockHerd'"):
            make_rule("herd", 200, 4).load_state_dict(state)

    def test_refusals(self):
        with pytest.raises(ValueError, match="each worker a rule of its own"):
            BlockHerd(10, 4, block_size=4, shard_sizes=[5, 5])
        with pytest.raises(FileNotFoundError, match="no folder"):
            BlockHerd(10, 4, table="/nowhere/at/all").observe([1], np.ones((1, 4)))

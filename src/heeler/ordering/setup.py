"""What a session is told: the sampler's arguments, checked and agreed on by all workers, and the planner for them."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from heeler.gpu.solver import gpu_seconds, is_worth
from heeler.herding import OrderingRule, RuleSpec, make_rule, rule_class
from heeler.herding.batches import solve_seconds
from heeler.herding.rules import check_uses_strata
from heeler.herding.rules.spec import as_rule
from heeler.herding.strata import Strata
from heeler.herding.subset import ALL, Subset
from heeler.herding.validate import IntArray
from heeler.ordering.distributed.follower import Follower
from heeler.ordering.distributed.leader import Leader
from heeler.ordering.distributed.member import Member
from heeler.ordering.distributed.ranks import Ranks, agree
from heeler.ordering.distributed.strata import digest, gather_codes
from heeler.ordering.distributed.transport import GlooTransport, Transport
from heeler.ordering.pace import START_SECONDS, Costs, affordable_dim
from heeler.ordering.partition import Partition
from heeler.ordering.planner import LocalPlanner, Planner
from heeler.sketch.prices import SHARE, Prices, StepPrice

DIM, MORE, FEWER = 1024, 4096, 256
"""Dimensions of a sketch, by default; more of few examples where all layers are sketched, and fewer of very many. On a
character GPT of 1,024 examples 4,096 keep 0.85 of what exact gradients gain, 1,024 three quarters
(docs/how-it-works.md). Where layers are chosen by their price more numbers would leave more of them out."""
FEW_BYTES, TABLE_BYTES = 1 << 25, 1 << 30
"""Of tables of MORE and of DIM dimensions, at most: 4,096 and half a million examples."""
EXACT = 2048
"""Parameters up to which gradients are kept exactly: taking them costs no more than a sketch, and what a sketch leaves
out cannot be balanced (RESULTS.md: GLUE on 385 and 1,537 parameters)."""
EXACT_BYTES = 1 << 26
"""And bytes of a table of them, which also travel between workers, up to which that holds."""
ONE_LEVEL = 10_000_000
"""Examples up to which an order over all of them at once is found in reasonable time (docs/scale.md)."""
CHECKS, FIRST_CHECKS = 2, 4
"""Sketched steps that the checks of an epoch with sketches take as long as, and more in the first one
(docs/overhead.md, `python -m benchmarks.checks`)."""
EMPTY = "the dataset, or the subset of it, is empty: there is nothing to order"


@dataclass(frozen=True)
class Setup:
    """A sampler's arguments. See `Sampler` for what they mean."""

    subset: Subset
    """Of this worker's dataset: all that is trained on."""
    batch_size: int
    order: str | OrderingRule | RuleSpec
    dim: int | None
    refresh: int
    budget: float | None
    seed: int
    workers: int
    rank: int
    shards: Literal["global", "local"]
    drop_last: bool
    strata: Strata | None = field(default=None, compare=False)
    """Of this worker's examples."""

    @property
    def examples(self) -> int:
        """Of this worker: those of its dataset, or of the subset."""
        return len(self.subset)

    def __post_init__(self) -> None:
        if self.examples < 1 and self.workers == 1:  # of several workers, all find out: see `Links`
            raise ValueError(EMPTY)
        dim = 1 if self.dim is None else self.dim
        counts = ("batch_size", self.batch_size), ("dim", dim), ("refresh", self.refresh)
        for name, value in counts:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        budget = 1.0 if self.budget is None else self.budget
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget < math.inf:
            raise ValueError(
                f"budget must be a share of the run's time such as 0.02, or None for no limit, got {self.budget!r}; "
                'order="random" and order="stratified" cost nothing'
            )
        if self.shards not in ("global", "local"):
            raise ValueError(f'shards must be "global" or "local", got {self.shards!r}')
        if not 0 <= self.rank < self.workers:
            raise ValueError(f"rank must lie in 0..{self.workers - 1}, got {self.rank}")
        if isinstance(self.order, str):
            rule_class(self.order)  # raises for a name that does not exist
            self._check_strata(self.order)
            return
        if isinstance(self.order, RuleSpec):
            if self.strata is not None:
                raise ValueError(
                    f"strata were given, of which {self.rule_name} makes no use: leave them out, or name another order"
                )
            self._check_own_examples()
            return
        object.__setattr__(self, "order", as_rule(self.order))
        if self.dim is not None and self.rule.dim not in (None, self.dim):
            raise ValueError(
                f"the rule takes vectors of {self.rule.dim} numbers, but the sampler was given dim={self.dim}: "
                "leave dim out, or make the rule with the same"
            )
        if self.strata is not None:
            raise ValueError(
                "strata were given beside a rule that is made already: give them to the rule itself, "
                "make_rule(..., strata=strata), or name the rule, order='herd'"
            )

    def _check_own_examples(self) -> None:
        if self.rule.own_examples_only and self.workers > 1 and self.shards == "global":
            raise ValueError(
                f"{self.rule_name} orders each worker's own examples: give every worker its part, "
                "Sampler(Subset(dataset, range(rank, len(dataset), workers)), shards='local', ...), or use order='herd'"
            )

    def _check_strata(self, order: str) -> None:
        if self.strata is not None:
            check_uses_strata(order)
        elif self.rule.needs_strata:
            raise ValueError(
                f"order={order!r} gives every batch its share of each stratum, and was given no strata: pass "
                "strata=labels, one class, source or length bucket per example (often dataset.targets), or use "
                "another order"
            )

    @property
    def rule(self) -> type[OrderingRule] | OrderingRule:
        """What declares the rule's capabilities: its class where the order is a name."""
        if isinstance(self.order, RuleSpec):
            return self.order.kind
        if not isinstance(self.order, str):
            return self.order
        return rule_class(self.order)

    @property
    def rule_name(self) -> str:
        """The rule's class, for messages."""
        return self.rule.__name__ if isinstance(self.rule, type) else type(self.rule).__name__

    @property
    def order_in_words(self) -> str:
        """What differs where workers were given different orders."""
        if isinstance(self.order, str):
            return self.order
        return self.order.digest if isinstance(self.order, RuleSpec) else type(self.order).__name__

    @property
    def is_coordinated(self) -> bool:
        """Whether workers must hear of what the others see."""
        return self.rule.needs_vectors and (self.shards == "global" or self.rule.coordinates_shards)

    @property
    def layer_share(self) -> float:
        """What sketches of the chosen layers may add to a step: more layers have not been seen to gain anything."""
        return SHARE if self.budget is None else min(SHARE, self.budget / 2)

    def sketch_length(self, covered: int, everything: int, examples: int, prices: Prices) -> int:
        """Dimensions for so many covered parameters and examples in all: what was asked for, else by size and cost.

        everything: the parameters that could be covered. prices: of a step of the model.
        """
        wanted = self.dim or self.rule.dim
        if wanted is not None:
            return wanted
        usual = MORE if covered == everything and 2 * MORE * examples <= FEW_BYTES else default_dim(examples)
        length = covered if covered <= max(usual, largest_exact(examples)) else usual
        if not self.rule.keeps_table:
            return length

        def costs_of(dim: int) -> Costs:
            price = StepPrice(prices.step, prices.sketches([], dim) or 0.0, on_gpu=prices.machine.overlaps)
            return epoch_costs(self, examples, price, dim)

        return affordable_dim(length, self.refresh, self.budget, costs_of)


class Links:
    """The way to other ranks, and what was agreed with them; without a process group, to nobody."""

    def __init__(self, setup: Setup, ranks: Ranks | None, timeout: float) -> None:
        self.workers: Transport | None = None
        """To the other workers; None on a rank that does not speak for its worker."""
        self.peers: Transport | None = None
        """To the ranks that hold other parts of this worker's copy of the model."""
        self.shard_sizes: tuple[int, ...] | None = None
        """Examples of each worker, where they have their own."""
        self.strata: IntArray | None = None if setup.strata is None else setup.strata.codes
        """(N,) codes of the examples' strata: of all workers' side by side where one rule orders them together."""
        self.subset = setup.subset.digest
        """Of the subset; of all workers' where they have their own."""
        self.mean_weight = setup.subset.total_weight / max(setup.examples, 1)
        """Of all workers' examples."""
        self.ranks, self.timeout = ranks, timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
            raise ValueError(f"exchange_timeout must be a positive, finite number of seconds, got {timeout!r}")
        if ranks is None:
            if setup.examples < 1:
                raise ValueError(EMPTY)
            return
        self.workers = GlooTransport(ranks.workers, timeout) if ranks.leads else None
        self.peers = GlooTransport(ranks.peers, timeout) if len(ranks.peers) > 1 else None
        self._agree(setup)

    @property
    def leads(self) -> bool:
        """Whether this rank saves the state of all."""
        return self.workers is None or self.workers.rank == 0

    @property
    def is_standalone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.workers is None and self.peers is None

    def open(self) -> None:
        """Connect again after `close`; all ranks do."""
        for transport in (self.workers, self.peers):
            if transport is not None:
                transport.open()

    def close(self) -> None:
        """Leave all connections."""
        for transport in (self.workers, self.peers):
            if transport is not None:
                transport.close()

    def _agree(self, setup: Setup) -> None:
        """Raise if the workers were given different arguments; gather their shards' sizes."""
        facts: dict[str, object] = {
            "order": setup.order_in_words if setup.shards == "global" else setup.order_in_words.split()[0],
            "seed": setup.seed,
            "batch_size": setup.batch_size,
            "shards": setup.shards,
            "drop_last": setup.drop_last,
            "refresh": setup.refresh,
            "budget": setup.budget,
        }
        if setup.shards == "global":
            facts |= {"the dataset's length": setup.subset.length, "strata": digest(setup.strata)}
            facts["subset"] = self.subset
        else:
            facts["strata"] = "none" if setup.strata is None else setup.strata.kind
        sizes = f"{setup.examples} {setup.subset.total_weight} {self.subset}"
        if self.workers is not None:
            agree(self.workers, facts)
            sizes = "\n".join(self.workers.all_texts(sizes))
        if setup.shards == "global":
            if setup.examples < 1:
                raise ValueError(EMPTY)
            return
        if self.peers is not None:
            sizes = self.peers.broadcast(sizes.encode()).decode()
        told = [line.split() for line in sizes.split("\n")]
        self.shard_sizes = tuple(int(size) for size, _, _ in told)
        if 0 in self.shard_sizes:
            raise ValueError(
                f"the dataset, or the subset, of rank {self.shard_sizes.index(0)} is empty: with shards='local' every "
                "worker needs examples of its own"
            )
        self.mean_weight = sum(float(weight) for _, weight, _ in told) / sum(self.shard_sizes)
        digests = [each for _, _, each in told]
        self.subset = ALL if set(digests) == {ALL} else hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
        if setup.strata is not None and setup.is_coordinated:
            self.strata = gather_codes(setup.strata, self.shard_sizes, self.workers, self.peers)


def make_planner(setup: Setup, links: Links, dim: int) -> Planner:
    """The planner for sketches of `dim` numbers, with a new rule unless the user gave one."""
    if setup.rule.own_examples_only and links.peers is not None:
        raise ValueError(
            f"{setup.rule_name} orders each rank's own examples, and ranks that hold parts of one copy of the model "
            "would each have another order: use order='herd'"
        )
    if setup.is_coordinated and not links.is_standalone:
        partition = Partition(setup.workers, setup.rank, setup.batch_size, setup.drop_last, links.shard_sizes)
        rule = _make_rule(setup, links, partition, dim, setup.seed)
        if links.workers is None:
            assert links.peers is not None
            return Follower(links.peers, rule, partition, seed=setup.seed)
        kind = Leader if links.workers.rank == 0 else Member
        return kind(links.workers, rule, partition, dim=dim, seed=setup.seed, peers=links.peers)
    if setup.shards == "global":
        partition = Partition(setup.workers, setup.rank, setup.batch_size, setup.drop_last)
        return LocalPlanner(_make_rule(setup, links, partition, dim, setup.seed), partition)
    partition, seed = Partition(batch_size=setup.batch_size), setup.seed
    if setup.workers > 1:  # nothing is shared, so nobody may shuffle alike
        seed = int(np.random.SeedSequence([seed, setup.rank]).generate_state(1)[0])
    return LocalPlanner(_make_rule(setup, links, partition, dim, seed), partition)


def _make_rule(setup: Setup, links: Links, partition: Partition, dim: int, seed: int) -> OrderingRule:
    examples = setup.examples if partition.shard_sizes is None else sum(partition.shard_sizes)
    if isinstance(setup.order, OrderingRule):
        if len(setup.order.order) != examples:
            what = "dataset has" if setup.subset.numbers is None else "subset has"
            raise ValueError(f"the rule orders {len(setup.order.order)} examples, the {what} {examples}")
        return setup.order
    portions = 1 if partition.shard_sizes else partition.workers
    options: dict[str, Any] = {} if links.strata is None else {"strata": links.strata, "portions": portions}
    common: dict[str, Any] = {
        "seed": seed,
        "batch_size": setup.batch_size * portions,
        "shard_sizes": partition.shard_sizes,
    }
    if isinstance(setup.order, RuleSpec):
        spec = setup.order.for_worker(setup.rank, setup.workers)
        return spec.make(examples, dim, **common, portions=portions)
    return make_rule(setup.order, examples, dim, **common, **options)


def epoch_costs(setup: Setup, examples: int, price: StepPrice, dim: int) -> Costs:
    """What epochs of so many examples, of all workers, cost with steps of this price.

    The order that sketches of `dim` dimensions are made into is waited for by all.
    """
    steps = math.ceil(examples / (setup.batch_size * setup.workers))
    own = examples if setup.is_coordinated else math.ceil(examples / setup.workers)
    solve = 0.0
    if price.on_gpu and solver_is_on_gpu(setup, own, dim):
        solve = gpu_seconds(own, dim, setup.batch_size)
    elif setup.rule.solves_in_background:
        solve = solve_seconds(own, dim)
    sketches = price.step if price.sketches is None else price.sketches
    checked = price.step + sketches
    return Costs(
        steps * price.step,
        steps * sketches + solve + CHECKS * checked,
        START_SECONDS + price.start + FIRST_CHECKS * checked,
    )


def solver_is_on_gpu(setup: Setup, examples: int, dim: int) -> bool:
    """Whether orders of so many examples are found on the GPU, where the model is on one."""
    alone = setup.workers == 1 or not setup.is_coordinated
    return setup.rule.solves_on_gpu and alone and is_worth(examples, dim)


def default_dim(examples: int) -> int:
    """Numbers per sketch for a table of so many examples, in half precision."""
    return DIM if 2 * DIM * examples <= TABLE_BYTES else FEWER


def largest_exact(examples: int) -> int:
    """The number of covered parameters up to which, by default, the gradients of so many examples are kept exactly."""
    return max(default_dim(examples), min(EXACT, EXACT_BYTES // (2 * examples)))  # half precision

"""Bytes through the interconnect and operations of a plan, per device and step.

Counted as in the text of a compiled step: result bytes of every collective, the
device's own part included; an all-reduce once. Operations are those of Newton-Schulz.
"""

import math
from dataclasses import dataclass

from dion2_jax._options import FLOAT32, Options
from dion2_jax._plan import Exchange, Plan


@dataclass(frozen=True)
class Cost:
    """Result bytes of collectives by kind, and operations, per device and step."""

    all_to_all: float = 0
    all_reduce: float = 0
    all_gather: float = 0
    operations: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.all_to_all + other.all_to_all,
            self.all_reduce + other.all_reduce,
            self.all_gather + other.all_gather,
            self.operations + other.operations,
        )

    def scaled(self, share: float) -> "Cost":
        """This cost times `share`."""
        return Cost(
            self.all_to_all * share,
            self.all_reduce * share,
            self.all_gather * share,
            self.operations * share,
        )

    @property
    def bytes(self) -> float:
        """Of all collectives."""
        return self.all_to_all + self.all_reduce + self.all_gather


def exchange_cost(exchange: Exchange, options: Options) -> Cost:
    """Of one exchange and of what is orthogonalized in it."""
    itemsize = options.dtype.itemsize
    buffer = exchange.buffer * itemsize
    cost = Cost(
        all_to_all=2 * buffer if exchange.devices > 1 else 0,
        all_gather=buffer * math.prod(exchange.replica_sizes)
        if exchange.owners > exchange.devices
        else 0,
    )
    for slot in exchange.slots:
        shape, team = exchange.shape, slot.team
        cost += Cost(
            all_reduce=options.reduced_bytes(shape, team) * slot.repeat,
            operations=options.operations(shape, team) * slot.repeat,
        )
    return cost


def group_cost(plan: Plan, index: int, options: Options, neurons: bool) -> Cost:
    """Of one group's scores and second moments: a few numbers a matrix."""
    group, numbers = plan.groups[index], 0
    if not group.takes_all and plan.ranking(index) == index:
        scores = 0
        if group.other_mesh and options.score != "random":
            scores += group.n_local * (1 if options.score == "l1" else 2)
        if group.compact is not None:
            scores += group.whole
        numbers += sum(m.count for m in group.ranked) * scores
    if neurons and group.other_mesh:
        numbers += group.size * group.k
    if neurons and group.compact is not None:
        numbers += group.size * 2 * group.sets
    return Cost(all_reduce=numbers * FLOAT32)


def plan_cost(plan: Plan, options: Options, neurons: bool) -> Cost:
    """Of the whole plan."""
    total = Cost()
    for exchange in plan.exchanges:
        total += exchange_cost(exchange, options)
    for index in range(len(plan.groups)):
        total += group_cost(plan, index, options, neurons)
    return total


def leaf_costs(plan: Plan, options: Options, neurons: bool) -> list[Cost]:
    """Of every leaf: its matrices' share of what is spent on their exchanges."""
    costs = [Cost() for _ in plan.layouts]
    per_group = [group_cost(plan, g, options, neurons) for g in range(len(plan.groups))]
    for exchange in plan.exchanges:
        segments = [s for slot in exchange.slots for s in slot.segments]
        total = sum(s.count for s in segments)
        cost = exchange_cost(exchange, options)
        for s in segments:
            per_group[s.group] += cost.scaled(s.count / total)
    for group, cost in zip(plan.groups, per_group, strict=True):
        for member in group.members:
            costs[member.leaf] += cost.scaled(member.count / group.size)
    return costs

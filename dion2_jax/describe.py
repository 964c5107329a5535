"""A table of what will happen to every leaf, before it happens. Nothing is computed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dion2_jax._cost import Cost, leaf_costs, plan_cost
from dion2_jax._layout import Layout
from dion2_jax._leaves import (
    check_floating,
    is_dimensions,
    resolve_layouts,
    shardings_of,
)
from dion2_jax._matrices import matrix_rule
from dion2_jax._plan import Plan
from dion2_jax._settings import plans_by_mesh, read_settings
from dion2_jax._trees import leaf_paths, name_of, resolve_entries

HEADER = ("parameter", "shape", "by", "why", "selects", "exchange", "MB", "GFLOP")
WIDTH = 120


@dataclass(frozen=True)
class Row:
    """One leaf: `cost` is per device and step; `selects` and `exchange` are "" where
    AdamW takes the leaf."""

    path: str
    shape: str
    taken_by: str
    why: str
    selects: str
    exchange: str
    cost: Cost


@dataclass(frozen=True)
class Description:
    """Rows, one a leaf, and totals per device and step; `str` is a table."""

    rows: tuple[Row, ...]
    total: Cost

    def __str__(self) -> str:
        lines = [HEADER] + [_cells(row) for row in self.rows]
        if all(row.path.endswith("/value") for row in self.rows):  # of nnx's Params
            lines[1:] = [(c[0].removesuffix("/value"), *c[1:]) for c in lines[1:]]
        lines.append(("total", *("",) * 5, *_costs(self.total)))
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        over = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        # Shorten words first, then paths and shapes; never the costs.
        limits = ((3, 8), (4, 26), (5, 14), (0, 30), (1, 22), (4, 16), (0, 8), (1, 12))
        for i, least in limits:
            cut = max(0, min(over, widths[i] - least))
            widths[i] -= cut
            over -= cut
        return "\n".join(
            "  ".join(
                _fit(cell, width, right=i >= 6, path=i == 0)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def __rich__(self):
        from rich.table import Table  # rich calls this, so it is there

        table = Table()
        for i, name in enumerate(HEADER):
            table.add_column(name, justify="right" if i >= 6 else "left")
        for row in self.rows:
            table.add_row(*_cells(row))
        table.add_section()
        table.add_row("total", *("",) * 5, *_costs(self.total))
        return table


def describe(params, fraction: float = 0.25, **arguments) -> Description:
    """What `dion2` with these arguments will do to every leaf.

    Args:
        params: tree of arrays, or of `jax.ShapeDtypeStruct`. Where `param_shardings` is
            not given, the shardings are read from them.
        fraction, arguments: of `dion2`, without the learning rate; for `dion3` with
            `neuron_beta2=0.95`.

    Returns:
        A `Description`: print it. Bytes are result bytes of the collectives per device
        and step, the device's own part included; operations those of Newton-Schulz.

    Raises:
        ValueError, TypeError: as `dion2` and its `init` would.

    Examples:
        >>> print(describe({"w": jnp.zeros((8, 16)), "b": jnp.zeros(16)}))
        parameter  shape      by     why     selects           exchange  MB     GFLOP
        b          f32[16]    adamw  rank 1                               0         0
        w          f32[8,16]  dion2  rank 2  2 of 8 reduction  #0 none    0  1.36e-06
        total                                                             0  1.36e-06
    """
    given, options = read_settings("describe", fraction, arguments)
    neurons = given["neuron_beta2"] is not None
    paths, leaves, treedef = leaf_paths(params)
    check_floating(paths, leaves)
    shapes = {path: x.shape for path, x in zip(paths, leaves, strict=True)}
    given_rule = given["weight_dimension_numbers"]
    if given_rule is None:
        ruled = [matrix_rule(p, x, shapes) for p, x in zip(paths, leaves, strict=True)]
    else:
        entries = resolve_entries(
            "weight_dimension_numbers", given_rule, params, is_dimensions
        )
        ruled = [(e, "given" if e else "given as None") for e in entries]
    shardings = given["param_shardings"]
    if shardings is None:
        shardings = shardings_of(params)
    # The rest is masked as optax.partition masks it: None is no leaf.
    matrices = treedef.unflatten(
        [x if e else None for x, (e, _) in zip(leaves, ruled, strict=True)]
    )
    dimensions = treedef.unflatten([e for e, _ in ruled])
    layouts = resolve_layouts(
        *(matrices, dimensions, given["weight_splits"], shardings),
        *(given["select_axis"],),
        neurons=neurons,
    )
    found: dict[int, tuple[Layout, str, str, Cost]] = {}
    taken = [i for i, (e, _) in enumerate(ruled) if e]
    total, groups = Cost(), 0
    dtypes = [given["mu_dtype"] or leaves[i].dtype for i in taken]
    for here, plan in plans_by_mesh(layouts, dtypes, given, options):
        costs = leaf_costs(plan, options, neurons)
        total += plan_cost(plan, options, neurons)
        for leaf, n in enumerate(here):
            words = _words(plan, leaf, groups)
            found[taken[n]] = (layouts[n][0], *words, costs[leaf])
        groups += len(plan.groups)
    rows = []
    for i, (path, x, (_, why)) in enumerate(zip(paths, leaves, ruled, strict=True)):
        layout, selects, exchange, cost = found.get(i, (None, "", "", Cost()))
        by = ("dion3" if neurons else "dion2") if layout else "adamw"
        shape = _shape(x, layout)
        rows.append(Row(name_of(path), shape, by, why, selects, exchange, cost))
    return Description(tuple(rows), total)


def _words(plan: Plan, leaf: int, before: int) -> tuple[str, str]:
    """What is selected of a leaf, and over which mesh axes it travels.

    Args:
        plan: of one mesh.
        leaf: position in the plan.
        before: number of groups on other meshes, which are counted first.
    """
    groups = [
        i for i, g in enumerate(plan.groups) if any(m.leaf == leaf for m in g.members)
    ]
    if not groups:
        return "nothing: empty", "none"
    selects = []
    for g in groups:
        group = plan.groups[g]
        members = [m for m in group.members if m.leaf == leaf]
        layout = plan.layout(members[0])
        axis = "output" if layout.select_is_output else "reduction"
        count, of, where = group.k, group.n_local, ""
        if group.compact is not None:
            count, of = group.compact, group.n
        elif group.n_local < group.n:
            where = " a shard"
        matrices = sum(m.count for m in members)
        times = f", {matrices}x" if matrices > 1 else ""
        selects.append(f"{count} of {of} {axis}{where}{times}")
    exchanges = [
        e
        for e in plan.exchanges
        if any(s.group in groups for slot in e.slots for s in slot.segments)
    ]
    teams = sorted(
        {
            slot.team
            for e in exchanges
            for slot in e.slots
            if slot.team > 1 and any(s.group in groups for s in slot.segments)
        }
    )
    words = ",".join(exchanges[0].axes) or "none"
    if exchanges[0].replicas:
        words += f" shared by {','.join(exchanges[0].replicas)}"
    if teams:
        words += f" teams of {teams[0]}"
    if len(exchanges) > len(groups):
        words += f" {len(exchanges)} rounds"
    return "; ".join(selects), f"#{','.join(str(before + g) for g in groups)} {words}"


def _shape(x, layout: Layout | None) -> str:
    """`f32[24,2048@fsdp,8192]`."""
    kind = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    sharding = getattr(x, "sharding", None)
    names: tuple = ((),) * len(x.shape)
    if layout is not None:
        names = layout.names
    elif isinstance(sharding, jax.sharding.NamedSharding):
        spec = tuple(sharding.spec) + (None,) * (len(x.shape) - len(sharding.spec))
        names = tuple((e,) if isinstance(e, str) else tuple(e or ()) for e in spec)
    sizes = [
        f"{size}@{'+'.join(axes)}" if axes else str(size)
        for size, axes in zip(x.shape, names, strict=True)
    ]
    return f"{kind.get(jnp.dtype(x.dtype).name, x.dtype)}[{','.join(sizes)}]"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        *(row.path, row.shape, row.taken_by, row.why, row.selects, row.exchange),
        *_costs(row.cost),
    )


def _costs(cost: Cost) -> tuple[str, str]:
    return f"{cost.bytes / 1e6:.3g}", f"{cost.operations / 1e9:.3g}"


def _fit(cell: str, width: int, *, right: bool, path: bool) -> str:
    if len(cell) > width:
        # A path tells layers apart at its front, and what they hold at its end.
        end = (width - 1) // 2 if path else 0
        cell = cell[: width - 1 - end] + "…" + cell[len(cell) - end :]
    return cell.rjust(width) if right else cell.ljust(width)

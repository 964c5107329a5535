"""The arguments of `dion2` as `describe` and `stats` take them: without the rate."""

import inspect
from collections.abc import Iterator

from dion2_jax import _arguments as check
from dion2_jax._alias import dion2
from dion2_jax._layout import Layout
from dion2_jax._options import Options, make_options
from dion2_jax._plan import Plan, make_plan


def read_settings(caller: str, fraction, arguments: dict) -> tuple[dict, Options]:
    """All arguments of `dion2` by name, defaults filled in, and the options of a step.

    Args:
        caller: the function they were given to, for messages.
        fraction, arguments: as given.

    Raises:
        ValueError, TypeError: as `dion2` would.
    """
    signature = inspect.signature(dion2).parameters
    unknown = [name for name in arguments if name not in signature]
    if unknown or "learning_rate" in arguments:
        raise TypeError(
            f"{caller}() got an unexpected argument "
            f"{(unknown or ['learning_rate'])[0]!r}: it takes those of dion2, without "
            f"the learning rate"
        )
    dion2(0.0, fraction, **arguments)  # raises for wrong arguments
    given = {name: p.default for name, p in signature.items()} | arguments
    given["fraction"] = check.check_fraction(fraction, "STATIC_ARGS")
    accepted = inspect.signature(make_options).parameters
    return given, make_options(**{name: given[name] for name in accepted})


def plans_by_mesh(
    layouts: list[tuple[Layout, ...]], dtypes: list, given: dict, options: Options
) -> Iterator[tuple[list[int], Plan]]:
    """For every mesh the positions of its leaves, and their plan."""
    for mesh in dict.fromkeys(x.mesh for x, *_ in layouts):
        here = [i for i, (x, *_) in enumerate(layouts) if x.mesh == mesh]
        yield (
            here,
            make_plan(
                [layouts[i] for i in here],
                [dtypes[i] for i in here],
                options,
                fraction=given["fraction"],
                selection=given["selection"],
                share_replicas=given["share_replicas"],
                max_exchange_bytes=given["max_exchange_bytes"],
            ),
        )

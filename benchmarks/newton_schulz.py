"""Newton-Schulz on one accelerator: direct and Gram, beside the rate of its products.

    python benchmarks/newton_schulz.py            # on a GPU or TPU: about a minute
    python benchmarks/newton_schulz.py --json

A batch of bfloat16 matrices a shape; median of repeated runs that wait for the device.
The rate is measured, not quoted: that of a bfloat16 product of two matrices --square
wide and high.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp

from dion2_jax._orthogonalize import (
    gram_restarts,
    newton_schulz_table,
    ns_flops,
    orthogonalize,
)

SHAPES = ((512, 2048), (512, 8192), (2048, 2048), (2048, 8192))


def median_seconds(run, x, *, repeats: int, at_least: float = 0.02) -> float:
    """Median seconds of `run(x)`; a sample repeats it until `at_least` has passed."""
    jax.block_until_ready(run(x))  # compiles
    begun = time.perf_counter()
    jax.block_until_ready(run(x))
    inner = max(1, int(at_least / max(1e-6, time.perf_counter() - begun)))
    samples = []
    for _ in range(repeats):
        begun = time.perf_counter()
        for _ in range(inner):
            out = run(x)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - begun) / inner)
    return statistics.median(samples)


def spread(out: jax.Array) -> tuple[float, float]:
    """Smallest and largest singular value of the first matrix of `[batch, r, c]`."""
    values = jnp.linalg.svd(out[0].astype(jnp.float32), compute_uv=False)
    return float(values[-1]), float(values[0])


def measure(shape, method: str, *, batch: int, repeats: int) -> dict:
    """One row: seconds, counted operations a second, singular values that come out."""
    rows, columns = shape
    table, norm_scale = newton_schulz_table("polar_express", 5)
    x = jax.random.normal(jax.random.key(0), (batch, *shape), jnp.bfloat16)

    @jax.jit
    def run(x):
        return orthogonalize(
            x, table=table, norm_scale=norm_scale, eps=1e-8, method=method
        )

    seconds = median_seconds(run, x, repeats=repeats)
    flops = batch * ns_flops(
        rows,
        columns,
        steps=len(table),
        method=method,
        dtype=jnp.dtype(jnp.bfloat16),
        team=1,
        restarts=gram_restarts(table),
    )
    smallest, largest = spread(run(x))
    return {
        "shape": list(shape),
        "method": method,
        "milliseconds": seconds * 1e3,
        "counted_flops": flops,
        "counted_flops_per_second": flops / seconds,
        "smallest_singular_value": smallest,
        "largest_singular_value": largest,
    }


def product_rate(square: int, repeats: int) -> float:
    """Operations a second of one square bfloat16 product."""
    x = jax.random.normal(jax.random.key(1), (square, square), jnp.bfloat16)
    seconds = median_seconds(jax.jit(lambda x: x @ x), x, repeats=repeats)
    return 2 * square**3 / seconds


def shape(text: str) -> tuple[int, int]:
    """(rows, columns) of "512x2048"."""
    parts = text.split("x")
    sizes = tuple(map(int, parts)) if all(p.isdigit() for p in parts) else ()
    if len(sizes) != 2 or not 0 < sizes[0] <= sizes[1]:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected ROWSxCOLUMNS, such as 512x2048, rows the fewer"
        )
    return sizes


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8, help="matrices a call")
    parser.add_argument("--repeats", type=int, default=20, help="samples of the median")
    parser.add_argument("--square", type=int, default=8192, help="product for the rate")
    parser.add_argument(
        "--shapes",
        nargs="*",
        type=shape,
        default=SHAPES,
        metavar="RxC",
        help="rows and columns, such as 512x2048, rows the fewer",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    device = jax.devices()[0].device_kind
    rate = product_rate(args.square, args.repeats)
    rows = [
        measure(shape, method, batch=args.batch, repeats=args.repeats)
        for shape in args.shapes
        for method in ("direct", "gram")
    ]
    if args.json:
        header = {"device": device, "jax": jax.__version__, "product_rate": rate}
        print(json.dumps({**header, **vars(args), "rows": rows}))
        return
    print(f"{device}, jax {jax.__version__}, batch {args.batch}, bfloat16")
    print(f"product of {args.square}: {rate:.3g} operations a second")
    print(f"{'shape':>12} {'method':8}{'ms':>10}{'op/s':>12}{'of rate':>12}  values")
    for row in rows:
        per_second = row["counted_flops_per_second"]
        print(
            f"{'x'.join(map(str, row['shape'])):>12} {row['method']:8}"
            f"{row['milliseconds']:10.3f}{per_second:12.3g}"
            f"{per_second / rate:12.2f}  {row['smallest_singular_value']:.2f} to "
            f"{row['largest_singular_value']:.2f}"
        )


if __name__ == "__main__":
    main()

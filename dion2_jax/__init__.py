"""Dion2: a sharded matrix optimizer for JAX, as Optax gradient transformations."""

__version__ = "0.1.0"

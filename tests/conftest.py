"""Eight emulated CPU devices, strict rank promotion, and the slow marker."""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Small programs: compiling them takes longer than running them.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption(
        "--examples",
        type=int,
        help="number of random examples of every property (default: a fixed few)",
    )


def pytest_configure(config):
    count = config.getoption("--examples")
    settings.register_profile(
        "chosen",
        max_examples=count or 15,
        derandomize=count is None,  # the same examples every time
        deadline=None,  # every example compiles
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    settings.load_profile("chosen")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--examples"):
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="takes minutes; run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8, "the tests need eight (emulated) devices"

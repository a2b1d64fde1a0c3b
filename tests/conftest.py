"""What every test runs under: reproducible random choices, and frameworks that keep quiet."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator

# Read by libraries when they are first imported, in this process and in those it starts. On tensors
# of a few bytes a second thread does nothing but spin, on the cores that the other tests run on, and
# sums come out alike on any number of cores. (batch_norm of 3 rows: 48 ms on 2 busy cores, not 0.1.)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest

from ckptfmt import CkptWarning

# Every store that the suite writes is read back by spec/reference_reader.py as well.
pytest_plugins = ["reference_watch"]

# Under `make test` a red run means that the change is wrong, not that a die fell otherwise: the
# same examples every time. HYPOTHESIS_PROFILE=explore draws new ones, and more; what it finds is
# printed as a decorator that brings it back. No deadline: the machine may be busy.
QUIET = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=QUIET
)
hypothesis.settings.register_profile(
    "explore",
    deadline=None,
    derandomize=False,
    print_blob=True,
    max_examples=1000,
    suppress_health_check=QUIET,
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
hypothesis.settings.load_profile(PROFILE)

SEED = int(os.environ.get("CKPTFMT_TEST_SEED", "20250601"))


def pytest_report_header() -> str:
    return f"random choices: hypothesis profile {PROFILE!r}, CKPTFMT_TEST_SEED={SEED}"


def _mixed(test: str) -> int:
    return random.Random(f"{SEED} {test}").getrandbits(32)


def _start_anew(mixed: int) -> None:
    random.seed(mixed)
    np.random.seed(mixed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(mixed)
    if keras := sys.modules.get("keras"):
        keras.utils.set_random_seed(mixed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the global generators anew for each test, whichever ran before: weights that nobody
    seeded are the same in every run, and others under another CKPTFMT_TEST_SEED."""
    _start_anew(_mixed(item.name))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Iterator[None]:
    """The same for what several tests share, whichever of them comes first; and for that one after."""
    if fixturedef.scope == "function":
        return (yield)
    _start_anew(_mixed(f"{fixturedef.baseid} {fixturedef.argname}"))
    try:
        return (yield)
    finally:
        _start_anew(_mixed(request._pyfuncitem.name))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test: the session's, mixed with the test's name. Shown if the test fails."""
    mixed = _mixed(request.node.name)
    print(f"seed {mixed} (CKPTFMT_TEST_SEED={SEED})")
    return mixed


@pytest.fixture
def expecting_failures() -> Iterator[None]:
    """What goes wrong in these tests is meant to, and neither logged nor warned of; what comes of it
    is checked."""
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkptWarning)
        yield
    logging.disable(logging.NOTSET)

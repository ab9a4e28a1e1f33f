"""Seeds of the fuzz tests: fresh ones each run, told by the name of the test that fails.

``PAGEMILL_SEED=n`` runs exactly that seed again; ``PAGEMILL_FUZZ=k`` runs k times as many.
"""

import os
import random


def fuzz_seeds(count: int) -> list[int]:
    """What to hand to ``pytest.mark.parametrize("seed", ...)``."""
    if "PAGEMILL_SEED" in os.environ:
        return [int(os.environ["PAGEMILL_SEED"])]
    scale = float(os.environ.get("PAGEMILL_FUZZ", "1"))
    # processes that share one test run must draw the same seeds
    shared = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(random.SystemRandom().random())
    stream = random.Random(shared)
    return [stream.randrange(1 << 40) for _ in range(max(1, round(count * scale)))]


def fresh_seed() -> int:
    """One seed, for a test that draws inside itself; it must print it."""
    if "PAGEMILL_SEED" in os.environ:
        return int(os.environ["PAGEMILL_SEED"])
    return random.SystemRandom().randrange(1 << 40)

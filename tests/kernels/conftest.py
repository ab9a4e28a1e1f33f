"""Random numbers of this room: fresh ones in each test, and the seed of a failure is told."""

import pytest
import torch

from model.seeds import fresh_seed


@pytest.fixture(autouse=True)
def torch_seed() -> int:
    """Seeds torch. pytest shows what is printed here when the test fails."""
    seed = fresh_seed()
    torch.manual_seed(seed)
    print(f"torch is seeded with {seed}: PAGEMILL_SEED={seed} runs these numbers again")
    return seed

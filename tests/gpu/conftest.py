"""The Triton kernels: on the GPU where there is one, else on the CPU under Triton's interpreter.

The interpreter is chosen by the environment, before Triton is imported.
"""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` need a device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(autouse=True)
def torch_seed() -> None:
    torch.manual_seed(7)

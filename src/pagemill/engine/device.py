"""Which device an engine computes on, with whose kernels, and how much memory is free there."""

import importlib.util

import torch

from pagemill.core.errors import ConfigError, MissingExtraError
from pagemill.kernels.device import CpuKernels, Kernels

GPU_MEMORY_SHARE = 0.8
"""Without --kv-memory the pool takes at most this part of a GPU's memory that is free once the
weights are there; a step's own tensors need the rest."""


def choose_kernels(device: str) -> Kernels:
    """The kernels of ``cpu``, ``cuda`` or ``auto`` (cuda where there is a device and Triton).
    ConfigError where no CUDA device can be used, MissingExtraError without Triton."""
    has_device, has_triton = torch.cuda.is_available(), _has_triton()
    if device == "cpu" or (device == "auto" and not (has_device and has_triton)):
        return CpuKernels()
    if not has_device:
        raise ConfigError(f"device is cuda, and {_why_none()}; or take --device cpu")
    if not has_triton:
        raise MissingExtraError("--device cuda", "gpu")
    return triton_kernels(torch.device("cuda"))


def triton_kernels(device: torch.device) -> Kernels:
    """The Triton kernels on a device. (On the CPU they run under Triton's interpreter only.)"""
    from pagemill.kernels.triton.kernels import TritonKernels

    return TritonKernels(device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _why_none() -> str:
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA: install a build with it"
            " (PyTorch's install page has the command)"
        )
    return "PyTorch finds no CUDA device: see whether nvidia-smi lists one and the driver is loaded"


def free_gpu_bytes(kernels: Kernels) -> int | None:
    """Memory that the kernels' GPU can still give; None where they compute in host memory."""
    if kernels.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(kernels.device)
    return int(free)

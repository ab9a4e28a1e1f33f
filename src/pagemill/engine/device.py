"""Which device an engine computes on, with whose kernels, and how much memory is free there."""

import importlib.util

import torch

from pagemill.core.errors import ConfigError, MissingExtraError
from pagemill.core.units import format_bytes
from pagemill.kernels.device import CpuKernels, Kernels
from pagemill.models.placement import weights_on
from pagemill.models.weights import Weights

MIN_CAPABILITY = (8, 0)
"""From here on GPUs multiply bfloat16 and copy past their registers."""
GPU_MEMORY_SHARE = 0.8
"""Without --kv-memory the pool takes at most this part of a GPU's memory that is free once the
weights are there; a step's own tensors need the rest."""


def choose_kernels(device: str) -> Kernels:
    """The kernels of ``cpu``, ``cuda`` or ``auto`` (cuda where there is a device and Triton).
    ConfigError where no CUDA device can be used, MissingExtraError without Triton."""
    if device == "cpu":
        return CpuKernels()
    missing, has_triton = _what_is_missing(), _has_triton()
    if device == "auto" and (missing or not has_triton):
        return CpuKernels()
    if missing:
        raise ConfigError(f"device is cuda, and {missing}; or take --device cpu")
    if not has_triton:
        raise MissingExtraError("--device cuda", "gpu")
    return triton_kernels(torch.device("cuda"))


def triton_kernels(device: torch.device) -> Kernels:
    """The Triton kernels on a device. (On the CPU they run under Triton's interpreter only.)"""
    from pagemill.kernels.triton.kernels import TritonKernels

    return TritonKernels(device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _what_is_missing() -> str | None:
    """Why no GPU can be used, and what to do about it; None where one can."""
    if torch.version.cuda is None:
        return (
            f"this PyTorch ({torch.__version__}) is built without CUDA: install a build with it"
            " (PyTorch's install page has the command)"
        )
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device: see whether nvidia-smi lists one"
    found = torch.cuda.get_device_capability()
    if found < MIN_CAPABILITY:
        return (
            f"this GPU has compute capability {found[0]}.{found[1]}: the kernels need"
            f" {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, as an A100 has"
        )
    return None


def can_stay_packed(weight_format: str, kernels: Kernels) -> bool:
    """Whether the kernels multiply packed weights; ConfigError where they do not and must."""
    if isinstance(kernels, CpuKernels):
        return True
    if weight_format == "packed":
        raise ConfigError(
            "weight_format packed: only the CPU multiplies packed weights; leave it out, or take"
            " --device cpu"
        )
    return False


def move_weights(weights: Weights, kernels: Kernels) -> Weights:
    """The weights where the kernels compute. ConfigError where they do not fit."""
    try:
        return weights_on(weights, kernels.device)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights ({format_bytes(weights.num_bytes())} a step) do not fit into the GPU's"
            " free memory: end what else runs there, take a smaller model, or --device cpu"
        ) from error


def free_gpu_bytes(kernels: Kernels) -> int | None:
    """Memory that the kernels' GPU can still give; None where they compute in host memory."""
    if kernels.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(kernels.device)
    return int(free)

"""One compute pool for torch and the compiled kernels."""

import torch

from pagemill import _native


def use_threads(count: int | None = None) -> int:
    """Let torch and the kernels compute on ``count`` threads (None: as many as torch has chosen).

    The kernels join the OpenMP runtime that torch loaded, where it is found; otherwise they have
    threads of their own, which sleep between calls. Returns the number of threads.
    """
    if count is not None:
        torch.set_num_threads(count)
    _native.adopt_openmp()
    _native.set_num_threads(torch.get_num_threads())
    return _native.num_threads()

"""The compute pool: torch's own where it is loaded, and never a lost or doubled item."""

import subprocess
import sys
import threading

import numpy as np
import torch

from pagemill import _native
from pagemill.kernels.linear import linear_bf16
from pagemill.kernels.threads import use_threads


def test_the_runtime_of_torch_is_used() -> None:
    assert _native.thread_runtime() == "openmp"
    assert _native.num_threads() == torch.get_num_threads()


def test_the_number_of_threads_follows() -> None:
    before = torch.get_num_threads()
    assert use_threads(1) == 1
    assert torch.get_num_threads() == 1
    assert use_threads(before) == before


def test_without_torch_the_pool_has_threads_of_its_own() -> None:
    code = (
        "import sys, numpy as np\n"
        "from pagemill import _native\n"
        "_native.set_num_threads(4)\n"
        "values = np.arange(1 << 20, dtype=np.float32)\n"
        "for _ in range(50):\n"
        "    out = np.zeros_like(values)\n"
        "    _native.gguf_decode('F32', values.tobytes(), out)\n"
        "    assert (out == values).all()\n"
        "    _native.set_num_threads(_ % 5 + 1)\n"
        "assert _native.thread_runtime() == 'own' and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_calls_from_several_threads() -> None:
    weight, x = torch.randn(500, 64).bfloat16(), torch.randn(3, 64)
    want = linear_bf16(x, weight).numpy()
    wrong = []

    def work() -> None:
        for _ in range(50):
            if not np.array_equal(linear_bf16(x, weight).numpy(), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

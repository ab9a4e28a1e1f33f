"""The kernels of the CPU path once more in Triton, over the same bytes. Import needs ``[gpu]``.

``numbers`` (bits of fp16, bf16, e4m3, the Hadamard transform), ``read`` and ``write`` (a group's
bytes, as codec.py has them), ``attend`` (attention), ``rope``; ``plan`` cuts a step into programs,
``storage`` holds the tiles, ``kernels`` is what the decoder calls.

With TRITON_INTERPRET=1 in the environment all of it runs on the CPU, slowly: that is how it is
tested where there is no GPU.
"""

"""Floor 2: KV layout and formats, attention, sampling. Torch starts here.

``PAGEMILL_ISA`` (portable, avx2, avx512, amx) takes an instruction set other than the best one.
"""

import os

from pagemill import _native
from pagemill.core.errors import ConfigError
from pagemill.kernels.threads import use_threads

use_threads()
if (_isa := os.environ.get("PAGEMILL_ISA")) and not _native.set_isa(_isa):
    raise ConfigError(
        f"PAGEMILL_ISA is {_isa!r}; this machine has {', '.join(_native.available_isas())}"
    )

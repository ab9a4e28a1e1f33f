"""Floor 2: KV layout and formats, attention, sampling. Torch starts here."""

from pagemill.kernels.threads import use_threads

use_threads()

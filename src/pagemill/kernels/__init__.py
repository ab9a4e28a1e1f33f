"""Floor 2: KV layout and formats, attention, sampling. Torch starts here."""

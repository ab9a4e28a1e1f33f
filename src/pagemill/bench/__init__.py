"""Floor 7: traces, and what a cache makes of them. Without torch."""

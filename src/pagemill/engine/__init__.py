"""Floor 5: the loop, the facade over it, and the one place that names concrete classes."""

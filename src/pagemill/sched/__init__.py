"""Floor 2: who computes what next. Knows no tensor, no HTTP and no text."""

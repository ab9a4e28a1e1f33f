"""Floor 0: words, values and seams. Standard library only."""

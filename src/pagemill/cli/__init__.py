"""Floor 8: argument parsing and nothing else."""

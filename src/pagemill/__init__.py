"""pagemill: a KV-cache manager for large language models."""

"""pagemill: a KV-cache manager for large language models."""

from pagemill.cache.manager import CacheManager
from pagemill.core.layers import CacheConfig, LayerGroup

__all__ = ["CacheConfig", "CacheManager", "LayerGroup"]

"""Floor 1: blocks and prefixes. Knows no request, no tensor and no model.

The structures are compiled (``csrc/cache``); this package holds their contracts, and the one face
that everybody else sees, ``CacheManager``.
"""

from pagemill.cache.manager import CacheManager
from pagemill.cache.prefix_index import PrefixMatch
from pagemill.cache.stats import CacheStats, GroupStats

__all__ = ["CacheManager", "CacheStats", "GroupStats", "PrefixMatch"]

"""Floor 7: the HTTP face. Parses, calls the engine, writes; decides nothing about the cache."""

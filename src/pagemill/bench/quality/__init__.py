"""Quality of KV formats on long contexts: questions, scores through the cache, bars, verdicts."""

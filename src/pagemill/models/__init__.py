"""Floor 3: decoder families, weights, tokenizer, chat template."""

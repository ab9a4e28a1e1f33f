"""Floor 3: decoder families, weights, tokenizer and chat template.

``config``, ``tokenizer``, ``template`` and ``gguf`` never import torch.
"""

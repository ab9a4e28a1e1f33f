"""Floor 4: the executor. Step plan -> tensors -> step result."""

"""One text through the cache, step by step, without a scheduler: for measuring.

The trunk is one growing sequence. Questions fork from it: they share its full blocks, copy the
block that is partly filled, and run as separate sequences of one ragged step.

    trunk     |  blocks of the context, shared  | tail |
    fork i    |  the same block ids             | copy + tokens of question i |
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill.core.errors import ConfigError
from pagemill.core.layers import CacheConfig
from pagemill.core.step import GroupTables, SequencePlan, StepPlan
from pagemill.core.types import SequenceId, StepId, TableId
from pagemill.core.units import ceil_div
from pagemill.kernels.kv_storage import KVStorage
from pagemill.kernels.threads import use_threads
from pagemill.models.config import ModelConfig
from pagemill.models.decoder import Decoder
from pagemill.models.home import find_model
from pagemill.models.loader import Model, load_model
from pagemill.models.weights import Progress
from pagemill.runtime.batch import make_batch

STEP_TOKENS = 1024
"""Questions are packed into steps of at most so many tokens (one question is never cut)."""


def make_storage(config: ModelConfig, kv_format: str, num_blocks: int, size: int) -> KVStorage:
    """KV memory of ``num_blocks`` blocks of ``size`` tokens in every layer group."""
    groups = config.layer_groups
    cache_config = CacheConfig(groups, (num_blocks,) * len(groups), size)
    return KVStorage(cache_config, kv_format, config.num_kv_heads, config.head_dim)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_decoder(
    name: str,
    lengths: Sequence[int],
    *,
    is_exact: bool = True,
    dtype: str = "float32",
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> tuple[Model, Decoder]:
    """The model of that name, with positions for the ``lengths`` that it can hold. Raises
    PagemillError, also where it cannot hold one of them (all of them, if not ``is_exact``)."""
    if num_threads is not None:
        use_threads(num_threads)
    model = load_model(find_model(name), _DTYPES[dtype], progress=progress)
    most = model.config.max_positions
    held = [length for length in lengths if length <= most]
    if not held or (is_exact and len(held) < len(lengths)):
        raise ConfigError(
            f"contexts of {max(lengths)} tokens: {model.name} was made for {most} positions; ask"
            " for shorter ones with --lengths"
        )
    return model, Decoder(model.config, model.weights, max(held))


@dataclass(frozen=True, slots=True)
class Answer:
    """``hidden`` float32 [answer, N]: the states that predict each token of an answer.
    ``context_bytes``: what the question read of its context."""

    hidden: Tensor
    context_bytes: int


class CacheRun:
    """The KV of one sequence in one format, and questions that fork from it.

    1. The trunk holds ``num_tokens`` tokens; only ``prefill``, ``recode`` and ``adopt`` change it.
    2. A fork reads the trunk and itself, never another fork, and never writes into a trunk's block.
    3. Forks live until the next call of ``ask``, ``prefill`` or ``adopt``.

    ``capacity_tokens`` bounds the trunk and all forks of one ``ask``, ``num_forks`` their number.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_format: str,
        capacity_tokens: int,
        num_forks: int,
        block_size: int = 16,
    ) -> None:
        num_blocks = 1 + ceil_div(capacity_tokens, block_size) + 2 * num_forks + 1
        self._decoder = decoder
        self.storage = make_storage(decoder.config, kv_format, num_blocks, block_size)
        self.kv_format = kv_format
        self.num_tokens = 0
        self._table: list[int] = []
        self._forks: list[list[int]] = []
        self._fork_tokens: list[int] = []
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._num_steps = 0

    # ------------------------------------------------------------ trunk

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], chunk_tokens: int) -> None:
        """Append ``token_ids`` to the trunk in chunks; each reads what the ones before wrote."""
        self._release_forks()
        self._grow(self._table, self.num_tokens + len(token_ids))
        for first in range(0, len(token_ids), chunk_tokens):
            part = token_ids[first : first + chunk_tokens]
            self._step([self._table], [self.num_tokens], [part])
            self.num_tokens += len(part)

    @torch.inference_mode()
    def recode(self, source: "CacheRun", num_tokens: int) -> None:
        """Take over the first tokens of ``source``'s trunk, coded anew in the own format."""
        assert not self._table, "the trunk is empty before it is recoded"
        assert 0 < num_tokens <= source.num_tokens
        self._grow(self._table, num_tokens)
        self.num_tokens = num_tokens
        slots = self._slots(self._table)[:num_tokens]
        for layer in range(self._decoder.config.num_layers):
            k, v = source.trunk_kv(layer)
            self.storage.write_kv(layer, k[:num_tokens], v[:num_tokens], slots)

    def trunk_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of the trunk as a reader sees them: float32 [T, K heads, D] each."""
        group, index = self.storage.place(layer)
        k, v = self.storage.layout.decode_tiles(self.storage.arenas[group][index][self._table])
        return k.flatten(0, 1)[: self.num_tokens], v.flatten(0, 1)[: self.num_tokens]

    def adopt(self, index: int) -> None:
        """Let fork ``index`` of the last ``ask`` be the trunk: a next turn reuses all of it."""
        table, num_tokens = self._forks[index], self._fork_tokens[index]
        self._empty += sorted(set(self._table).difference(table))
        self._table, self._forks[index], self.num_tokens = table, [], num_tokens
        self._release_forks()

    # ------------------------------------------------------------ forks

    @torch.inference_mode()
    def ask(self, parts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run each part as a fork of the trunk. Hidden states, float32 [len(part), N] each."""
        self._release_forks()
        self._forks = [self._fork(len(part)) for part in parts]
        self._fork_tokens = [self.num_tokens + len(part) for part in parts]
        hidden: list[Tensor] = []
        for first, last in _packs(list(map(len, parts))):
            packed = parts[first:last]
            starts = [self.num_tokens] * len(packed)
            out = self._step(self._forks[first:last], starts, packed)
            hidden += torch.split(out, list(map(len, packed)))
        return hidden

    def answers(self, asked: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Answer]:
        """``ask`` for (prompt, answer) pairs; each prompt has a token at least."""
        hidden = self.ask([[*prompt, *answer] for prompt, answer in asked])
        found = []
        for (prompt, answer), states in zip(asked, hidden, strict=True):
            first = len(prompt) - 1
            rows = states[first : first + len(answer)].clone()
            found.append(Answer(rows, self.context_bytes()))
        return found

    def context_bytes(self) -> int:
        """Bytes of the trunk that a fork reads: of each layer the tokens that its first query sees,
        at the size they have in the arena."""
        total = 0
        for index, group in enumerate(self.storage.groups):
            arena = self.storage.arenas[index]
            first = 0 if group.window is None else max(0, self.num_tokens - group.window + 1)
            token_bytes = arena.stride(1) // self.storage.block_size
            total += arena.shape[0] * token_bytes * (self.num_tokens - first)
        return total

    def _fork(self, num_new_tokens: int) -> list[int]:
        num_full, rest = divmod(self.num_tokens, self.storage.block_size)
        table = self._table[:num_full]
        self._grow(table, self.num_tokens + num_new_tokens)
        if rest:
            for group in range(len(self.storage.groups)):
                self.storage.copy_blocks(group, [(self._table[num_full], table[num_full])])
        return table

    def _release_forks(self) -> None:
        for table in self._forks:
            self._empty += sorted(set(table).difference(self._table))
        self._forks, self._fork_tokens = [], []

    def _grow(self, table: list[int], num_tokens: int) -> None:
        for _ in range(ceil_div(num_tokens, self.storage.block_size) - len(table)):
            table.append(self._empty.pop())

    # ------------------------------------------------------------ damage

    @torch.inference_mode()
    def poison(self) -> None:
        """Damage the trunk as a wrong layout would, for a control that must be noticed.

        The values of each pair of neighbouring blocks change places; their keys stay. (Whole blocks
        may change places unseen: attention does not know an order besides the positions in keys.)
        """
        num_pairs = self.num_tokens // self.storage.block_size // 2
        assert num_pairs, "a control needs two full blocks at least"
        table = self._table[: 2 * num_pairs]
        slots = self._slots(table)
        for layer in range(self._decoder.config.num_layers):
            group, index = self.storage.place(layer)
            k, v = self.storage.layout.decode_tiles(self.storage.arenas[group][index][table])
            swapped = v.view(num_pairs, 2, *v.shape[1:]).flip(1).flatten(0, 2)
            self.storage.write_kv(layer, k.flatten(0, 1), swapped.contiguous(), slots)

    # ------------------------------------------------------------ steps

    def _slots(self, table: Sequence[int]) -> Tensor:
        size = self.storage.block_size
        blocks = torch.tensor(table, dtype=torch.int32)
        return (blocks[:, None] * size + torch.arange(size, dtype=torch.int32)).flatten()

    def _step(
        self, tables: Sequence[list[int]], starts: Sequence[int], parts: Sequence[Sequence[int]]
    ) -> Tensor:
        lengths = [0, *(len(table) for table in tables)]
        indptr = np.cumsum(lengths, dtype=np.int32)
        block_ids = np.array([block for table in tables for block in table], dtype=np.int32)
        plan = StepPlan(
            step_id=StepId(self._num_steps),
            sequences=tuple(
                SequencePlan(
                    sequence_id=SequenceId(i),
                    table_id=TableId(i),
                    start=start,
                    count=len(part),
                    token_ids=array("I", part),
                    num_prompt_tokens=start + len(part),
                )
                for i, (start, part) in enumerate(zip(starts, parts, strict=True))
            ),
            tables=(GroupTables(block_ids, indptr),) * len(self.storage.groups),
        )
        self._num_steps += 1
        return self._decoder.forward(make_batch(plan, self.storage.block_size), self.storage)


def _packs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """[first, last) of runs whose lengths sum to at most STEP_TOKENS."""
    packs, first, total = [], 0, 0
    for index, length in enumerate(lengths):
        if total and total + length > STEP_TOKENS:
            packs.append((first, index))
            first, total = index, 0
        total += length
    return [*packs, (first, len(lengths))] if lengths else []

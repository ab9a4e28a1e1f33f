"""One text through the cache, step by step, without a scheduler: for measuring.

The trunk is one growing sequence. Questions fork from it: they share its full blocks, copy the
block that is partly filled, and run as separate sequences of one ragged step.

    trunk     |  blocks of the context, shared  | tail |
    fork i    |  the same block ids             | copy + tokens of question i |

Formats that code whole groups keep the unfilled one in a tail slot: a fork has one of its own.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagemill.core.errors import ConfigError
from pagemill.core.layers import TOKEN_GROUP, CacheConfig
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


@dataclass(frozen=True, slots=True)
class KvChoice:
    """A format for all layers, the constant that keys are stored without (None: 0), tokens of a
    block."""

    kv_format: str
    centers: Tensor | None = None
    block_size: int = 16

    def storage(self, config: ModelConfig, num_blocks: int, num_sequences: int) -> KVStorage:
        """KV memory of ``num_blocks`` blocks in every layer group."""
        groups = config.layer_groups
        return KVStorage(
            CacheConfig(groups, (num_blocks,) * len(groups), self.block_size),
            self.kv_format,
            config.num_kv_heads,
            config.head_dim,
            centers=self.centers,
            num_tails=num_sequences,
        )


@dataclass(slots=True)
class _Sequence:
    """A block table, the tokens it holds, its tail slot."""

    table: list[int]
    num_tokens: int
    tail_slot: int


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
        choice: KvChoice,
        capacity_tokens: int,
        num_forks: int,
    ) -> None:
        num_blocks = 1 + ceil_div(capacity_tokens, choice.block_size) + 2 * num_forks + 1
        self._decoder = decoder
        self.storage = choice.storage(decoder.config, num_blocks, num_forks + 1)
        self.kv_format = choice.kv_format
        self._trunk = _Sequence([], 0, 0)
        self._forks: list[_Sequence] = []
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._empty_tails = list(range(num_forks, 0, -1))
        self._num_steps = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the trunk."""
        return self._trunk.num_tokens

    # ------------------------------------------------------------ trunk

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], chunk_tokens: int) -> None:
        """Append ``token_ids`` to the trunk in chunks; each reads what the ones before wrote."""
        self._release_forks()
        for first in range(0, len(token_ids), chunk_tokens):
            self._step([self._trunk], [token_ids[first : first + chunk_tokens]])

    @torch.inference_mode()
    def recode(self, source: "CacheRun", num_tokens: int) -> None:
        """Take over the first tokens of ``source``'s trunk, coded anew in the own format.

        ``source`` is in a format that codes single tokens, and without centers.
        """
        assert not self.num_tokens, "the trunk is empty before it is recoded"
        assert 0 < num_tokens <= source.num_tokens
        self._grow(self._trunk, num_tokens)
        plan = self._plan([self._trunk], [[0] * num_tokens])
        batch = make_batch(plan, self.storage.block_size)
        for layer in range(self._decoder.config.num_layers):
            group, _ = self.storage.place(layer)
            k, v = (x[:num_tokens].contiguous() for x in source.trunk_kv(layer))
            if self.storage.layouts[layer].format.codes_whole_groups:
                self.storage.write_step(layer, k, v, batch.attention[group])
            else:
                self.storage.write_kv(layer, k, v, batch.slots[group])
        self._trunk.num_tokens = num_tokens

    def trunk_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """K (less its center) and V of the trunk's blocks: float32 [T, K heads, D] each.

        Tokens in a tail slot are not there yet.
        """
        tiles = self.storage.tiles(layer)[self._trunk.table]
        k, v = self.storage.layouts[layer].decode_tiles(tiles)
        return k.flatten(0, 1)[: self.num_tokens], v.flatten(0, 1)[: self.num_tokens]

    def adopt(self, index: int) -> None:
        """Let fork ``index`` of the last ``ask`` be the trunk: a next turn reuses all of it."""
        before, self._trunk = self._trunk, self._forks.pop(index)
        self._forks.append(before)
        self._release_forks()

    # ------------------------------------------------------------ forks

    @torch.inference_mode()
    def ask(self, parts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run each part as a fork of the trunk. Hidden states, float32 [len(part), N] each."""
        self._release_forks()
        self._forks = [self._fork() for _ in parts]
        hidden: list[Tensor] = []
        for first, last in _packs(list(map(len, parts))):
            packed = parts[first:last]
            out = self._step(self._forks[first:last], packed)
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
        at the size they have in the tiles, or in a tail slot."""
        total = 0
        for group in self.storage.groups:
            first = 0 if group.window is None else max(0, self.num_tokens - group.window + 1)
            for layer in group.layers:
                layout = self.storage.layouts[layer]
                raw = self.num_tokens % TOKEN_GROUP if layout.tail_bytes else 0
                coded = self.num_tokens - raw - first
                tile_bytes = self.storage.tiles(layer).shape[1]
                total += coded * tile_bytes // self.storage.block_size
                total += raw * layout.tail_bytes // TOKEN_GROUP
        return total

    def _fork(self) -> _Sequence:
        num_full, rest = divmod(self.num_tokens, self.storage.block_size)
        fork = _Sequence(self._trunk.table[:num_full], self.num_tokens, self._empty_tails.pop())
        if self.storage.has_tails:
            self.storage.copy_tails([(self._trunk.tail_slot, fork.tail_slot)])
        if rest:
            self._grow(fork, self.num_tokens)
            for group in range(len(self.storage.groups)):
                pair = (self._trunk.table[num_full], fork.table[num_full])
                self.storage.copy_blocks(group, [pair])
        return fork

    def _release_forks(self) -> None:
        for fork in self._forks:
            self._empty += sorted(set(fork.table).difference(self._trunk.table))
            self._empty_tails.append(fork.tail_slot)
        self._forks = []

    def _grow(self, sequence: _Sequence, num_tokens: int) -> None:
        for _ in range(ceil_div(num_tokens, self.storage.block_size) - len(sequence.table)):
            sequence.table.append(self._empty.pop())

    # ------------------------------------------------------------ damage

    def poison(self) -> None:
        """Damage the trunk as a wrong layout would, for a control that must be noticed.

        The scales of each pair of neighbouring blocks change places; in a format without scales
        their values, while their keys stay. (Whole blocks may change places unseen: attention knows
        no order but the positions in the keys.)
        """
        num_pairs = self.num_tokens // self.storage.block_size // 2
        assert num_pairs, "a control needs two full blocks at least"
        table = self._trunk.table[: 2 * num_pairs]
        for layer in range(self._decoder.config.num_layers):
            layout, tiles = self.storage.layouts[layer], self.storage.tiles(layer)
            meta_bytes = layout.format.meta_bytes(layout.head_dim)
            first = 0 if meta_bytes else layout.format.k_bytes(layout.head_dim)
            last = meta_bytes or layout.group_bytes
            groups = tiles[table].view(num_pairs, 2, -1, layout.group_bytes)
            groups[..., first:last] = groups[..., first:last].flip(1)
            tiles[table] = groups.view(2 * num_pairs, -1)

    # ------------------------------------------------------------ steps

    def _plan(self, sequences: Sequence[_Sequence], parts: Sequence[Sequence[int]]) -> StepPlan:
        lengths = [0, *(len(sequence.table) for sequence in sequences)]
        block_ids = [block for sequence in sequences for block in sequence.table]
        tables = GroupTables(
            np.array(block_ids, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)
        )
        has_tails = self.storage.has_tails
        return StepPlan(
            step_id=StepId(0),
            sequences=tuple(
                SequencePlan(
                    sequence_id=SequenceId(i),
                    table_id=TableId(i),
                    start=sequence.num_tokens,
                    count=len(part),
                    token_ids=array("I", part),
                    num_prompt_tokens=sequence.num_tokens + len(part),
                )
                for i, (sequence, part) in enumerate(zip(sequences, parts, strict=True))
            ),
            tables=(tables,) * len(self.storage.groups),
            tail_slots=tuple(sequence.tail_slot for sequence in sequences) if has_tails else (),
        )

    def _step(self, sequences: Sequence[_Sequence], parts: Sequence[Sequence[int]]) -> Tensor:
        for sequence, part in zip(sequences, parts, strict=True):
            self._grow(sequence, sequence.num_tokens + len(part))
        plan = self._plan(sequences, parts)
        hidden = self._decoder.forward(make_batch(plan, self.storage.block_size), self.storage)
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.num_tokens += len(part)
        return hidden


def _packs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """[first, last) of runs whose lengths sum to at most STEP_TOKENS."""
    packs, first, total = [], 0, 0
    for index, length in enumerate(lengths):
        if total and total + length > STEP_TOKENS:
            packs.append((first, index))
            first, total = index, 0
        total += length
    return [*packs, (first, len(lengths))] if lengths else []

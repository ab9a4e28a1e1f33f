"""What a step must read and compute at least: the two limits of DESIGN section 7."""

from dataclasses import dataclass

from pagemill.core.step import StepPlan
from pagemill.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class StepCost:
    weight_bytes: int
    kv_bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Counts from shapes alone. ``kv_token_bytes``: one token's K and V, one number a layer."""

    config: ModelConfig
    weight_bytes: int
    matrix_parameters: int
    kv_token_bytes: tuple[float, ...]

    def of(self, plan: StepPlan) -> StepCost:
        """Bytes and floating-point operations (a multiply-add counts two) of a plan."""
        config, groups = self.config, self.config.layer_groups
        kv_bytes, pairs, num_tokens, num_logits = 0.0, 0, 0, 0
        token_bytes = [sum(self.kv_token_bytes[i] for i in group.layers) for group in groups]
        for part in plan.sequences:
            num_tokens += part.count
            num_logits += part.sampling is not None
            for group, one in zip(groups, token_bytes, strict=True):
                num_layers = len(group.layers)
                kv_bytes += one * _tokens_read(part.start, part.count, group.window)
                pairs += num_layers * _pairs(part.start, part.count, group.window)
        head = config.vocab_size * config.hidden_size * num_logits
        attention = 2 * config.num_heads * config.head_dim * pairs
        return StepCost(
            weight_bytes=self.weight_bytes,
            kv_bytes=round(kv_bytes),
            flops=2 * (self.matrix_parameters * num_tokens + head + attention),
        )


def _tokens_read(start: int, count: int, window: int | None) -> int:
    first = 0 if window is None else max(0, start - window + 1)
    return start + count - first


def _pairs(start: int, count: int, window: int | None) -> int:
    """Query-key pairs of the part: query p reads min(p + 1, window) keys."""
    full = count * start + count * (count + 1) // 2
    if window is None or start + count <= window:
        return full
    inside = max(0, window - start)  # queries that still read everything before them
    return inside * start + inside * (inside + 1) // 2 + (count - inside) * window

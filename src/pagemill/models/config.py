"""What a decoder is, in numbers: from a Hugging Face config or GGUF metadata. No torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagemill.core.errors import ModelError
from pagemill.core.layers import LayerGroup

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
GEMMA3_LOCAL_ROPE_BASE = 10_000.0
"""Not stored in Gemma GGUF files; the value of the published Gemma 3 configs."""
GEMMA3_GLOBAL_EVERY = 6
"""Every sixth layer of Gemma 3 reads all tokens."""
GEMMA3_DEFAULTS = (
    ("vocab_size", 262_208), ("num_attention_heads", 8), ("num_key_value_heads", 4),
    ("head_dim", 256), ("rms_norm_eps", 1e-6), ("max_position_embeddings", 131_072),
    ("rope_theta", 1e6), ("sliding_window", 4096), ("query_pre_attn_scalar", 256),
    ("hidden_activation", "gelu_pytorch_tanh"),
)  # fmt: skip
"""The published configs of Gemma 3 leave out what equals these (Gemma3TextConfig's defaults)."""
MAX_SIZE = 1 << 31
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: theta_i = base ** (-2 i / D), changed as ``kind`` says.

    ``linear`` divides the angles by ``factor``; ``llama3`` divides the low frequencies only
    (Llama 3.1 model card: factor, low_freq_factor, high_freq_factor, original context).
    """

    base: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one decoder. ``windows`` has one entry per layer: None reads every token.

    ``ropes`` is (rope of full layers, rope of window layers). ``interleaved_rope`` marks weights
    whose Q and K rows are stored for rotating pairs (2i, 2i + 1), as llama-type GGUF files do.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    ropes: tuple[RopeConfig, RopeConfig]
    windows: tuple[int | None, ...]
    attention_scale: float
    activation: str = "silu"
    embedding_scale: float = 1.0
    tied_output: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    interleaved_rope: bool = False
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            if not 0 < getattr(self, name) < MAX_SIZE:
                raise ModelError(
                    f"{name} is {getattr(self, name)}: the model's config is damaged; get it again"
                )
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"the config names the kind of {len(self.windows)} layers, of {self.num_layers}:"
                " it is damaged; get it again"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly:"
                " the model's config is damaged"
            )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers that keep the same tokens, full layers first."""
        kinds = sorted(set(self.windows), key=lambda window: (window is not None, window or 0))
        return tuple(
            LayerGroup(
                name="full" if window is None else f"window({window})",
                layers=tuple(i for i, w in enumerate(self.windows) if w == window),
                window=window,
            )
            for window in kinds
        )


def _family(name: str) -> str:
    known = {"gemma3_text": "gemma3", "smollm": "llama"}
    family = known.get(name, name)
    if family not in FAMILIES:
        raise ModelError(
            f"the model family {name!r} is not supported; pagemill runs {', '.join(FAMILIES)}"
            " (SmolLM is of the family llama)"
        )
    return family


def _need(source: Mapping[str, Any], key: str, kind: type = int) -> Any:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(
            f"the model's config has no number {key!r}: it is damaged or not a decoder"
        )
    return kind(value)


@contextmanager
def _damage_is_a_model_error(what: str) -> Iterator[None]:
    """Foreign values (a list for a number, a word for a window) fail in many ways, all the same."""
    try:
        yield
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ModelError(
            f"{what} cannot be understood ({type(error).__name__}: {error}): it is damaged, or of a"
            " kind of model that pagemill does not run"
        ) from error


def _num_layers(source: Mapping[str, Any], key: str) -> int:
    """Checked before anything is made for each layer: a damaged count asks for terabytes."""
    count = int(_need(source, key))
    if not 0 < count <= MAX_LAYERS:
        raise ModelError(f"{key} is {count}: the model's config is damaged; get it again")
    return count


# ---------------------------------------------------------------- Hugging Face


def from_hugging_face(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a ``config.json``. Raises ModelError for what is not supported."""
    with _damage_is_a_model_error("the model's config.json"):
        return _from_hugging_face(_text_part(config))


def _text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's own settings, with the defaults that Gemma 3 leaves out."""
    source = dict(config)
    if source.get("model_type") == "gemma3" and "text_config" in source:
        source = {**source["text_config"], "eos_token_id": source.get("eos_token_id")}
        source["model_type"] = "gemma3_text"
    if source.get("model_type") == "gemma3_text":
        source = {**dict(GEMMA3_DEFAULTS), **source}
    if coding := config.get("quantization_config"):
        raise ModelError(
            f"the weights are quantized ({coding.get('quant_method', 'in some way')}), which"
            " pagemill reads from GGUF files only: take the model's GGUF or its 16-bit weights"
        )
    if (part := source.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise ModelError(f"partial_rotary_factor {part} is not supported: only whole heads rotate")
    if source.get("mlp_bias"):
        raise ModelError("mlp_bias is true: feed-forward layers with a bias are not supported")
    return source


def _from_hugging_face(source: Mapping[str, Any]) -> ModelConfig:
    family = _family(str(source.get("model_type")))
    num_heads = _need(source, "num_attention_heads")
    head_dim = int(source.get("head_dim") or _need(source, "hidden_size") // num_heads)
    gemma = family == "gemma3"
    scalar = float(source.get("query_pre_attn_scalar") or head_dim) if gemma else float(head_dim)
    return ModelConfig(
        family=family,
        vocab_size=_need(source, "vocab_size"),
        hidden_size=_need(source, "hidden_size"),
        intermediate_size=_need(source, "intermediate_size"),
        num_layers=_num_layers(source, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=int(source.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rms_eps=_need(source, "rms_norm_eps", float),
        max_positions=_need(source, "max_position_embeddings"),
        ropes=_hf_ropes(source, gemma),
        windows=_hf_windows(source, family),
        attention_scale=scalar**-0.5,
        activation=_activation(source, gemma),
        embedding_scale=_need(source, "hidden_size") ** 0.5 if gemma else 1.0,
        tied_output=bool(source.get("tie_word_embeddings", gemma)),
        qkv_bias=family == "qwen2" or bool(source.get("attention_bias", False)),
        output_bias=family != "qwen2" and bool(source.get("attention_bias", False)),
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        logit_softcap=source.get("final_logit_softcapping"),
        attention_softcap=source.get("attn_logit_softcapping"),
        eos_token_ids=_as_ids(source.get("eos_token_id")),
    )


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def _activation(source: Mapping[str, Any], gemma: bool) -> str:
    name = source.get("hidden_activation") or source.get("hidden_act") or "silu"
    if name == "silu" and not gemma:
        return "silu"
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return "gelu_tanh"
    raise ModelError(f"the activation {name!r} is not supported; silu and gelu_pytorch_tanh are")


def _hf_ropes(source: Mapping[str, Any], gemma: bool) -> tuple[RopeConfig, RopeConfig]:
    parameters = source.get("rope_parameters") or {}
    if "full_attention" in parameters:
        full = _hf_rope(parameters["full_attention"], source)
        if "sliding_attention" in parameters:
            return full, _hf_rope(parameters["sliding_attention"], source)
    else:
        full = _hf_rope(parameters or source.get("rope_scaling") or {}, source)
    if gemma:
        local = float(source.get("rope_local_base_freq") or GEMMA3_LOCAL_ROPE_BASE)
        return full, RopeConfig(base=local)
    return full, full


def _hf_rope(parameters: Mapping[str, Any], source: Mapping[str, Any]) -> RopeConfig:
    base = float(parameters.get("rope_theta") or source.get("rope_theta") or 10_000.0)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind not in ("default", "linear", "llama3"):
        raise ModelError(f"rope scaling {kind!r} is not supported; default, linear and llama3 are")
    return RopeConfig(
        base=base,
        kind=kind,
        factor=float(parameters.get("factor") or 1.0),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_positions=int(parameters.get("original_max_position_embeddings") or 8192),
    )


def _hf_windows(source: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    num_layers = _num_layers(source, "num_hidden_layers")
    window = source.get("sliding_window")
    kinds = source.get("layer_types")
    if family in ("qwen2", "qwen3") and not source.get("use_sliding_window"):
        return (None,) * num_layers
    if not window or family == "llama":
        return (None,) * num_layers
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    if family == "gemma3":
        every = int(source.get("sliding_window_pattern") or GEMMA3_GLOBAL_EVERY)
        return tuple(None if (i + 1) % every == 0 else int(window) for i in range(num_layers))
    first = int(source.get("max_window_layers") or 0) if family != "mistral" else 0
    return tuple(int(window) if i >= first else None for i in range(num_layers))


# ---------------------------------------------------------------- GGUF


def from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    """ModelConfig of a GGUF file (keys as in the GGUF specification of ggml). Raises ModelError."""
    with _damage_is_a_model_error("the metadata of this GGUF file"):
        num_files = int(metadata.get("split.count") or 1)
        if num_files > 1:
            raise ModelError(
                f"this GGUF file is one of {num_files} parts: join them with llama.cpp's"
                " llama-gguf-split --merge, or take the model in one file"
            )
        return _from_gguf(metadata, tensor_names)


def _from_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> ModelConfig:
    arch = str(metadata.get("general.architecture"))
    family = _family(arch)

    def need(key: str, kind: type = int) -> Any:
        return _need(metadata, f"{arch}.{key}", kind)

    num_heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = int(metadata.get(f"{arch}.attention.key_length") or hidden // num_heads)
    num_layers = _num_layers(metadata, f"{arch}.block_count")
    gemma = family == "gemma3"
    turned = int(metadata.get(f"{arch}.rope.dimension_count") or head_dim)
    if turned != head_dim:
        raise ModelError(f"only {turned} of {head_dim} channels rotate: that is not supported")
    scale_dim = hidden // num_heads if gemma and num_layers == 62 else head_dim
    return ModelConfig(
        family=family,
        vocab_size=len(metadata.get("tokenizer.ggml.tokens") or ()) or need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        rms_eps=need("attention.layer_norm_rms_epsilon", float),
        max_positions=need("context_length"),
        ropes=_gguf_ropes(metadata, arch, gemma),
        windows=_gguf_windows(metadata, arch, family, num_layers),
        attention_scale=float(scale_dim) ** -0.5,
        activation="gelu_tanh" if gemma else "silu",
        embedding_scale=hidden**0.5 if gemma else 1.0,
        tied_output="output.weight" not in tensor_names,
        qkv_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        post_norms=gemma,
        interleaved_rope=family == "llama",
        logit_softcap=metadata.get(f"{arch}.final_logit_softcapping"),
        eos_token_ids=_gguf_eos(metadata),
    )


def _gguf_eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    found = [metadata.get(name) for name in names]
    return tuple(dict.fromkeys(int(value) for value in found if isinstance(value, int)))


def _gguf_ropes(
    metadata: Mapping[str, Any], arch: str, gemma: bool
) -> tuple[RopeConfig, RopeConfig]:
    base = float(metadata.get(f"{arch}.rope.freq_base") or 10_000.0)
    kind = str(metadata.get(f"{arch}.rope.scaling.type") or "none")
    factor = float(metadata.get(f"{arch}.rope.scaling.factor") or 1.0)
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling {kind!r} of this GGUF file is not supported; linear is")
    full = RopeConfig(base=base, kind="linear" if kind == "linear" else "default", factor=factor)
    local = metadata.get(f"{arch}.rope.freq_base_swa") or GEMMA3_LOCAL_ROPE_BASE
    return (full, RopeConfig(base=float(local))) if gemma else (full, full)


def _gguf_windows(
    metadata: Mapping[str, Any], arch: str, family: str, num_layers: int
) -> tuple[int | None, ...]:
    """Gemma files name their window; llama-type files of Mistral models never do."""
    window = metadata.get(f"{arch}.attention.sliding_window")
    if not window or family not in ("gemma3", "mistral"):
        return (None,) * num_layers
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return tuple(int(window) if slides else None for slides in pattern[:num_layers])
    every = int(pattern or (GEMMA3_GLOBAL_EVERY if family == "gemma3" else 0))
    return tuple(None if every and (i + 1) % every == 0 else int(window) for i in range(num_layers))

"""Small random checkpoints of every family, made with ``transformers``, and a small tokenizer.

Weights are spread widely enough that attention looks at single tokens and logits differ: a slip
in rope, a norm, a window or a scale moves logits by far more than the tolerance of the tests.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A page of memory holds sixteen tokens, and a block table lists the pages in order.",
    "Whoever reads a cache must know what was written there, and when it was written.",
    "Numbers such as 0, 7, 42, 1999 and 65536 stand beside words in most texts.",
    "def add(first, second):\n    return first + second  # a small function\n",
    "Grüße aus Köln: naïve café, 東京, Москва, 🙂🙂 and a few more signs — “quoted”.",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-rope3-bias": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": LLAMA3_ROPE},
    ),
    "smollm": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1,
         "hidden_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    ),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral-window": ("MistralConfig", {"sliding_window": 23, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "num_hidden_layers": 7, "sliding_window": 19, "pad_token_id": 0,
         "query_pre_attn_scalar": 20, "num_key_value_heads": 1},
    ),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 16, "pad_token_id": 0,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_parameters": {
             "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
             "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}},
    ),
}  # fmt: skip


def random_model(case: str, **changes: Any) -> Any:
    """The reference model of a case in float32, eager attention."""
    class_name, settings = CASES[case]
    config = getattr(transformers, class_name)(**{**SIZES, **settings, **changes})
    return reference_model(config)


def reference_model(config: Any) -> Any:
    """A ``transformers`` model of a config, with random weights from a fixed seed."""
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    gemma = config.model_type == "gemma3_text"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(_spread(name, noise, gemma))
    return model.eval()


def _spread(name: str, noise: torch.Tensor, gemma: bool) -> torch.Tensor:
    if "norm" in name:
        return noise * 0.2 + (0.0 if gemma else 1.0)
    if noise.dim() == 1:
        return noise * 0.3
    if "embed_tokens" in name:
        return noise * 0.4
    gain = 1.6 if ("q_proj" in name or "k_proj" in name) else 1.0
    return noise * gain / noise.shape[1] ** 0.5


def tiny_tokenizer(vocab_size: int = 384) -> Tokenizer:
    """A byte-level BPE with digits one by one, as SmolLM's, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def save_folder(model: Any, folder: Path, **save: Any) -> Path:
    """A Hugging Face folder as ``save_pretrained`` writes it, with the small tokenizer."""
    model.save_pretrained(folder, **save)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    about = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


@torch.inference_mode()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """float32 [len - 1, V]: the reference's logits for every token but the last."""
    logits: torch.Tensor = model(torch.tensor([token_ids[:-1]])).logits[0].float()
    return logits


def random_prompt(num_tokens: int, vocab_size: int = 384) -> list[int]:
    """Tokens without the special ones, from a fixed seed."""
    generator = torch.Generator().manual_seed(num_tokens)
    drawn: list[int] = torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()
    return drawn

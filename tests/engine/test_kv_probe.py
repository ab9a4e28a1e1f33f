"""The look at a model's keys before a KV format is taken: warn, fall back, or keep by force."""

from pathlib import Path

import pytest
import torch

from model.checkpoints import random_model, save_folder
from model.tiny_engine import TinyEngine
from pagemill.engine import build, kv_choice


def biased_model(folder: Path) -> Path:
    """Keys with a constant part 60 times what differs between tokens, in the slow channels: the
    rotation hardly turns them, and their mean over all positions is the constant itself."""
    model = random_model("qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.zero_()
        bias.view(2, -1)[:, 6:8] = 60.0  # of 16 channels; 7 turns with 15
    return save_folder(model, folder / "biased")


@pytest.fixture
def without_centers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "key_centers", lambda *_: None)


def choices(model: Path, key_file: Path, **settings: str) -> tuple[str, str]:
    engine = TinyEngine(model, key_file, **settings)
    engine.close()
    return engine.built.kv_format, "\n".join(engine.built.choices)


@pytest.mark.parametrize("kv_format", ["i8", "k8v4", "f8", "i4c"])
def test_centered_keys_suit_every_format(tmp_path: Path, key_file: Path, kv_format: str) -> None:
    used, words = choices(biased_model(tmp_path), key_file, kv_format=kv_format)
    assert used == kv_format
    assert "does not suit" not in words


@pytest.mark.usefixtures("without_centers")
def test_a_format_that_breaks_keys_is_left_loudly(tmp_path: Path, key_file: Path) -> None:
    """One step each, until one holds: k8v4 -> i8 -> bf16."""
    used, words = choices(biased_model(tmp_path), key_file, kv_format="k8v4")
    assert used == "bf16"
    assert "KV format k8v4 does not suit this model: i8 is used instead" in words
    assert "KV format i8 does not suit this model: bf16 is used instead" in words
    assert "warning: KV format k8v4 damages the keys" in words
    assert "constant part" in words


@pytest.mark.usefixtures("without_centers")
def test_force_keeps_it(tmp_path: Path, key_file: Path) -> None:
    used, words = choices(biased_model(tmp_path), key_file, kv_format="i8", kv_format_force="on")
    assert used == "i8"
    assert "KV format i8 is kept" in words and "damages the keys" in words


def test_formats_that_code_nothing_are_not_looked_at(tmp_path: Path, key_file: Path) -> None:
    used, words = choices(biased_model(tmp_path), key_file, kv_format="bf16")
    assert used == "bf16" and "warning" not in words
    assert "tokens in 1 GiB of KV: fp32 " in words and ", i4c " in words


@pytest.mark.parametrize("case", ["qwen2", "qwen2-window"])
def test_the_center_is_the_mean_of_the_rotated_bias(tmp_path: Path, case: str) -> None:
    from pagemill.models.loader import load_model
    from pagemill.models.rope import cos_sin_table

    reference = random_model(case)
    model = load_model(save_folder(reference, tmp_path / case), torch.float32)
    centers = kv_choice.key_centers(model.config, model.weights)
    assert centers is not None and centers.shape == (3, 2, 16)
    table = cos_sin_table(model.config.ropes[0], 16, model.config.max_positions)
    cosine, sine = table[:, None, :8], table[:, None, 8:]
    for layer in range(3):
        bias = reference.model.layers[layer].self_attn.k_proj.bias.data.view(2, 16)
        low, high = bias[:, :8], bias[:, 8:]
        turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)
        torch.testing.assert_close(centers[layer], turned.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_format", ["i8", "i4c"])
def test_a_short_context_is_served(tmp_path: Path, key_file: Path, kv_format: str) -> None:
    model = save_folder(random_model("qwen2"), tmp_path / "qwen2")
    engine = TinyEngine(model, key_file, kv_format=kv_format, max_model_len=16)
    assert len(engine.ask([5, 6, 7], max_tokens=4).token_ids) == 4
    engine.close()


def test_a_declared_length_of_any_size_costs_no_time(tmp_path: Path, key_file: Path) -> None:
    wide = random_model("qwen2", max_position_embeddings=2**31 - 1)
    model = save_folder(wide, tmp_path / "wide")
    engine = TinyEngine(model, key_file, kv_format="i8", max_model_len=64)
    assert len(engine.ask([5, 6, 7], max_tokens=4).token_ids) == 4
    engine.close()

"""Whole models: what is loaded, and that each damaged or foreign one is a ModelError."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.checkpoints import random_model, save_folder, tiny_tokenizer
from model.gguf_files import write_gguf
from pagemill.core.errors import ModelError, RequestError
from pagemill.models.loader import load_model

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}

DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``hf`` (one file), ``sharded`` and ``model.gguf`` of the same small model."""
    base = tmp_path_factory.mktemp("made")
    model = random_model("qwen3", **SMALL)
    save_folder(model, base / "hf")
    save_folder(model, base / "sharded", max_shard_size="20KB")
    write_gguf(model, base / "model.gguf", lambda name: Kind.Q8_0)
    return base


@pytest.fixture
def hf(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "hf", tmp_path / "hf"))


def load(path: Path, **settings: Any) -> Any:
    return load_model(path, torch.float32, **settings)


def change_json(path: Path, **changes: Any) -> None:
    about = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**about, **changes}), encoding="utf-8")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---------------------------------------------------------------- what is loaded


def test_a_folder(hf: Path) -> None:
    change_json(hf / "generation_config.json", eos_token_id=[5, 2])
    steps: list[tuple[int, int]] = []
    model = load(hf, progress=lambda done, total: steps.append((done, total)))
    assert (model.name, model.path) == ("hf", hf)
    assert model.eos_token_ids == (2, 5)
    assert steps == [(1, 2), (2, 2)]
    assert model.template is not None and "Hi" in model.template.render([{"content": "Hi"}])
    assert model.weights.embedding.dtype == torch.float32


def test_loading_leaves_the_number_of_threads_as_it_was(hf: Path) -> None:
    torch.set_num_threads(3)
    load(hf)
    (hf / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError):
        load(hf)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)


def test_bfloat16_keeps_norms_wide(hf: Path) -> None:
    weights = load_model(hf, torch.bfloat16).weights
    layer = weights.layers[0]
    assert {weights.embedding.dtype, layer.qkv.dtype, layer.down.dtype} == {torch.bfloat16}
    assert {weights.final_norm.dtype, layer.query_norm.dtype} == {torch.float32}
    assert weights.num_bytes() == 2 * (weights.output.numel() + weights.num_matrix_parameters())


def test_shards_and_single_file_hold_the_same(made: Path) -> None:
    one, many = load(made / "hf").weights, load(made / "sharded").weights
    assert len(list((made / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(one.embedding, many.embedding)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(one.layers, many.layers, strict=True))


def test_other_safetensors_beside_the_model_are_left_alone(hf: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(3)}, hf / "zz_adapter.safetensors")
    assert load(hf).weights.final_norm.shape == (32,)


def test_names_of_a_multimodal_checkpoint(hf: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.replace("model.", "model.language_model.")] = tensors.pop(name)

    expected = load(hf).weights.embedding
    change_tensors(hf, rename)
    assert torch.equal(load(hf).weights.embedding, expected)


def test_the_template_of_a_file_wins(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("own {{ messages | length }}")
    model = load(hf, template_file=tmp_path / "own.jinja")
    assert model.template.render([{}]) == "own 1"
    with pytest.raises(ModelError, match=r"chat template .* cannot be read"):
        load(hf, template_file=tmp_path / "absent.jinja")
    (hf / "chat_template.jinja").write_text("{% broken")
    with pytest.raises(ModelError, match="error in line 1"):
        load(hf)


def test_a_model_without_template(made: Path, hf: Path) -> None:
    (hf / "tokenizer_config.json").unlink()
    assert load(hf).template is None
    assert load(made / "model.gguf").template.render([{"content": "x"}]) == "x"


# ---------------------------------------------------------------- damaged folders


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json: it is not a model folder"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: (f / "config.json").write_text(DEEP), r"config\.json cannot be read as JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text(DEEP), "cannot be read as JSON"),
        (lambda f: (f / "model.safetensors.index.json").write_text(DEEP), "is damaged"),
        (lambda f: (f / "tokenizer.json").write_text(DEEP), "is not a tokenizer"),
        (lambda f: change_json(f / "config.json", model_type="bert"), "family 'bert'"),
        (lambda f: change_json(f / "config.json", hidden_size=64), "do not belong together"),
        (lambda f: change_json(f / "config.json", num_hidden_layers=3), "have no tensor"),
        (lambda f: (f / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "is not a tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("no"), "cannot be read as JSON"),
        (lambda f: (f / "generation_config.json").write_text("no"), "cannot be read as JSON"),
        (lambda f: (f / "model.safetensors").unlink(), r"no \*\.safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "damaged or cut off"),
        (lambda f: (f / "model.safetensors").write_bytes(bytes(99)), "damaged or cut off"),
        (lambda f: change_tensors(f, lambda t: t.pop("model.norm.weight")), "have no tensor"),
        (
            lambda f: change_tensors(f, lambda t: t.update({"lm_head.weight": torch.ones(2, 2)})),
            r"'lm_head.weight' has the shape \(2, 2\)",
        ),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "is damaged"),
        (
            lambda f: change_json(
                f / "model.safetensors.index.json", weight_map={"a": "model-2.safetensors"}
            ),
            r"lacks model-2\.safetensors.*incomplete",
        ),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(hf: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(hf)
    with pytest.raises(ModelError, match=words):
        load(hf)


def test_every_cut_of_the_weights_is_refused(hf: Path) -> None:
    whole = (hf / "model.safetensors").read_bytes()
    for size in range(0, len(whole), len(whole) // 40):
        (hf / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelError):
            load(hf)


@settings(max_examples=80, deadline=None)
@given(
    key=st.integers(0, 200),
    value=st.sampled_from([None, -1, 0, 1, 7, 2**70, 1e308, "x", [], {}, [3], True]),
)
def test_a_config_with_any_wrong_value_never_crashes(made: Path, key: int, value: Any) -> None:
    folder = made / "wrong"
    if not folder.is_dir():
        shutil.copytree(made / "hf", folder)
    about = json.loads((made / "hf" / "config.json").read_text())
    change_json(folder / "config.json", **{**about, sorted(about)[key % len(about)]: value})
    try:
        load(folder)
    except ModelError:
        pass


# ---------------------------------------------------------------- damaged GGUF files


def test_one_file_of_a_folder_is_refused(hf: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        with pytest.raises(ModelError, match="one file of a model folder: name the folder"):
            load(hf / name)
    (hf / "notes.txt").write_text("no model at all")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(hf / "notes.txt")


def test_every_cut_of_a_gguf_file_is_refused(made: Path, tmp_path: Path) -> None:
    whole = (made / "model.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(0, len(whole) - 64, len(whole) // 60):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            load(cut)


@settings(max_examples=120, deadline=None)
@given(position=st.integers(0, 1 << 20), byte=st.integers(0, 255))
def test_a_gguf_file_with_any_wrong_byte_never_crashes(
    made: Path, position: int, byte: int
) -> None:
    """Of the first half, where keys, tokens, names and shapes lie."""
    data = bytearray((made / "model.gguf").read_bytes())
    data[position % (len(data) // 2)] = byte
    (made / "wrong.gguf").write_bytes(data)
    try:
        load(made / "wrong.gguf")
    except ModelError:
        pass


@pytest.mark.parametrize("template", [7, 1.5, True, ["{{ messages }}"]])
def test_a_gguf_file_whose_template_is_no_text(tmp_path: Path, template: Any) -> None:
    model = random_model("qwen3", **SMALL)
    path = write_gguf(
        model, tmp_path / "a.gguf", lambda name: Kind.F16, tokenizer__chat_template=template
    )
    with pytest.raises(ModelError, match="chat template of this GGUF file is no text"):
        load(path)


def test_a_gguf_file_without_a_tensor_or_with_a_foreign_one(tmp_path: Path) -> None:
    model = random_model("qwen3", **SMALL)
    path = write_gguf(model, tmp_path / "a.gguf", lambda name: Kind.F16)
    data = path.read_bytes()
    assert b"blk.1.ffn_up.weight" in data
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelError, match=r"no tensor 'blk\.1\.ffn_up\.weight'"):
        load(path)
    path.write_bytes(data.replace(b"qwen3.feed_forward_length", b"qwen3.feed_forward_lengtX"))
    with pytest.raises(ModelError, match=r"no number 'qwen3\.feed_forward_length'"):
        load(path)


# ---------------------------------------------------------------- more tokens than rows, or fewer


def add_token(folder: Path, token: str) -> None:
    """A special token that the embedding has no row for, as Gemma 3's text models have one."""
    whole = tiny_tokenizer()
    assert whole.add_special_tokens([token]) == 1
    whole.save(str(folder / "tokenizer.json"))


def test_a_token_without_an_embedding_is_refused_by_name(hf: Path) -> None:
    add_token(hf, "<image_soft_token>")
    model = load(hf)
    assert model.tokenizer.token_id("<image_soft_token>") == 384
    assert model.tokenizer.vocab_size == model.config.vocab_size == 384
    with pytest.raises(RequestError, match=r"'<image_soft_token>' \(id 384\), for which"):
        model.tokenizer.encode("see <image_soft_token>")
    assert model.tokenizer.encode("see")


def test_texts_cannot_begin_with_a_token_without_an_embedding(hf: Path) -> None:
    add_token(hf, "<start>")
    change_json(hf / "tokenizer_config.json", bos_token="<start>", add_bos_token=True)
    with pytest.raises(ModelError, match=r"begins texts with '<start>' \(id 384\)"):
        load(hf)


def test_rows_that_no_token_has_cannot_be_sampled(tmp_path: Path) -> None:
    model = load(save_folder(random_model("qwen3", vocab_size=400, **SMALL), tmp_path))
    assert model.config.vocab_size == model.tokenizer.vocab_size == 384
    assert len(model.weights.output) == len(model.weights.embedding) == 384


# ---------------------------------------------------------------- tensors that nobody would use


def give(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.ones(2)})


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate_proj.bias",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.sinks",
        "score.weight",
    ],
)
def test_a_tensor_that_the_decoder_does_not_use_is_refused(hf: Path, name: str) -> None:
    change_tensors(hf, give(name))
    short = name.removeprefix("model.").replace(".", r"\.")
    with pytest.raises(ModelError, match=f"qwen3 decoder does not use: {short}. It is another"):
        load(hf)


def test_many_unused_tensors_are_named_shortly(hf: Path) -> None:
    for i in range(9):
        change_tensors(hf, give(f"model.layers.0.extra.{i}"))
    with pytest.raises(ModelError, match=r"extra\.3 and 5 more"):
        load(hf)


def test_unused_tensors_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    """One whose config names no norm of the queries, though the file has some."""
    path = write_gguf(random_model("qwen3", **SMALL), tmp_path / "a.gguf", lambda name: Kind.F16)
    data = path.read_bytes().replace(b"blk.0.attn_q_norm.weight", b"blk.0.attn_r_norm.weight")
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"does not use: blk\.0\.attn_k_norm\.weight, blk"):
        load(path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.vision_tower.encoder.layers.0.mlp.fc1.bias",
        "vision_tower.vision_model.embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight",
    ],
)
def test_harmless_tensors_are_let_be(hf: Path, name: str) -> None:
    change_tensors(hf, give(name))
    assert load(hf).weights.layers


def test_the_stored_copy_of_a_tied_head_is_let_be(tmp_path: Path) -> None:
    folder = save_folder(random_model("qwen2", **SMALL), tmp_path)
    change_tensors(folder, give("lm_head.weight"))
    assert load(folder).weights.layers


def test_biases_of_feed_forward_layers_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_folder(random_model("llama", mlp_bias=True, **SMALL), tmp_path)
    with pytest.raises(ModelError, match="mlp_bias is true"):
        load(folder)

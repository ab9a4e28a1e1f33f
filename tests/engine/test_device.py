"""Which device is taken, and what is said where there is none."""

import pytest
import torch

from pagemill.cli.main import main
from pagemill.core.config import EngineConfig
from pagemill.core.errors import ConfigError, MissingExtraError
from pagemill.core.layers import CacheConfig, LayerGroup
from pagemill.engine import build, device
from pagemill.engine.device import (
    GPU_MEMORY_SHARE,
    can_stay_packed,
    choose_kernels,
    move_weights,
)
from pagemill.kernels.device import CpuKernels
from pagemill.kernels.kv_storage import KVStorage
from pagemill.models.placement import weights_on
from pagemill.models.weights import Weights


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that nothing is computed on."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50_000_000, 80_000_000))


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_without_a_device_the_cpu_computes(no_gpu: None, name: str) -> None:
    assert isinstance(choose_kernels(name), CpuKernels)


def test_cuda_without_a_device_says_what_to_do(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"without CUDA: install .* or take --device cpu"):
        choose_kernels("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"nvidia-smi .* or take --device cpu"):
        choose_kernels("cuda")


def test_serve_ends_before_the_model_is_sought(
    no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-such-model", "--device", "cuda"]) == 1
    said = capsys.readouterr().err
    assert "device is cuda" in said and "--device cpu" in said and "no-such-model" not in said


def test_cuda_without_triton_names_the_command(
    a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_has_triton", lambda: False)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[gpu\]'"):
        choose_kernels("cuda")
    assert isinstance(choose_kernels("auto"), CpuKernels)


def test_auto_takes_a_device_that_is_there(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(device, "_has_triton", lambda: True)
    monkeypatch.setattr(device, "triton_kernels", lambda where: asked.append(where))
    for name in ("cuda", "auto"):
        choose_kernels(name)
    assert asked == [torch.device("cuda")] * 2


def test_an_old_gpu_is_not_taken(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ConfigError, match=r"capability 7\.5: the kernels need 8\.0"):
        choose_kernels("cuda")
    assert isinstance(choose_kernels("auto"), CpuKernels)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of cpu, cuda, auto"):
        EngineConfig(model="any", device="tpu")


def test_the_pool_is_a_part_of_the_gpus_free_memory(a_gpu: None) -> None:
    class OnGpu(CpuKernels):
        device = torch.device("cuda")

    config = EngineConfig(model="any")
    assert build._kv_bytes(config, OnGpu()) == int(50_000_000 * GPU_MEMORY_SHARE)
    assert build._kv_bytes(EngineConfig(model="any", kv_memory_bytes=7), OnGpu()) == 7
    assert build._kv_bytes(config, CpuKernels()) > 0


def test_packed_weights_are_the_cpus(a_gpu: None) -> None:
    class Others:
        device = torch.device("cuda")

    assert can_stay_packed("packed", CpuKernels())
    assert not can_stay_packed("auto", Others())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only the CPU multiplies packed weights"):
        can_stay_packed("packed", Others())  # type: ignore[arg-type]


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    weights = Weights(*(torch.zeros(1),) * 3, layers=[])
    monkeypatch.setattr(device, "weights_on", refuse)
    with pytest.raises(ConfigError, match=r"do not fit .* or --device cpu"):
        move_weights(weights, CpuKernels())


def test_a_tied_output_stays_tied() -> None:
    table, meta = torch.zeros(4, 2), torch.device("meta")
    tied = weights_on(Weights(table, torch.zeros(2), table[:4], []), meta)
    assert tied.output is tied.embedding and tied.final_norm.device == meta
    apart = weights_on(Weights(table, torch.zeros(2), torch.zeros(4, 2), []), meta)
    assert apart.output is not apart.embedding and apart.output.device == meta


def test_the_cpus_kernels_keep_their_storage() -> None:
    config = CacheConfig((LayerGroup("g", (0,)),), (2,))
    assert type(CpuKernels().make_storage(config, "i8", 1, 64)) is KVStorage

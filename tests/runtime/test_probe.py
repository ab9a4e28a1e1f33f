"""The outlier probe: planted offsets and planted damage are found, sound keys are not."""

import math

import pytest
import torch

from pagemill.runtime.probe import FALL_BACK, make_report, probe_layer

T, K, D = 128, 2, 64


def keys(seed: int = 0) -> torch.Tensor:
    return torch.randn(T, K, D, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, levels: float) -> torch.Tensor:
    """Symmetric rounding with a scale a token and head."""
    scale = x.abs().amax(dim=-1, keepdim=True) / levels
    return (x / scale).round() * scale


def test_sound_keys_pass_every_format() -> None:
    report = make_report("i8", [probe_layer(0, keys(), rounded(keys(), 127))])
    assert report.fall_back is None and report.lines() == ()
    assert all(0.9 < head.offset_factor < 1.1 for head in report.heads)
    assert all(0.001 < head.error < 0.02 for head in report.heads)


def test_a_planted_offset_is_found_with_its_size_and_breaks_8_bits() -> None:
    """An outlier channel that is the same in all tokens, as a key bias makes it."""
    x = keys()
    x[:, 1, 7] += 200.0
    report = make_report("i8", [probe_layer(3, x, rounded(x, 127))])
    (bad,) = report.bad_heads
    assert (bad.layer, bad.head) == (3, 1) and report.offset_heads == report.bad_heads
    assert bad.offset_factor == pytest.approx(math.sqrt(200**2 / D + 1), rel=0.05)
    assert report.fall_back == "bf16"
    assert "layer 3 head 1" in report.lines()[0] and "constant part" in report.lines()[1]


def test_a_constant_that_softmax_does_not_see_does_not_excuse_the_error() -> None:
    """The same absolute error is as bad with an offset as without one."""
    x, noise = keys(), 0.05 * keys(1)
    plain = probe_layer(0, x, x + noise)
    shifted = probe_layer(0, x + 100, x + 100 + noise)
    for one, other in zip(plain, shifted, strict=True):
        assert one.error == pytest.approx(other.error, rel=1e-4)


def test_planted_varying_channels_are_no_offset() -> None:
    x = keys()
    x[:, :, 5] *= 30
    report = make_report("i4c", [probe_layer(0, x, x * 1.01)])
    assert report.lines() == () and report.fall_back is None


@pytest.mark.parametrize(
    ("kv_format", "error", "fall_back"),
    [
        ("i4c", 0.07, None),
        ("i4c", 0.09, "k8v4"),
        ("f8", 0.07, None),
        ("f8", 0.09, "i8"),
        ("k8v4", 0.029, None),
        ("k8v4", 0.031, "i8"),
        ("i8", 0.031, "bf16"),
        ("bf16", 0.5, None),
        ("fp32", 0.5, None),
    ],
)
def test_limits_and_the_order_of_falling_back(
    kv_format: str, error: float, fall_back: str | None
) -> None:
    x = keys()
    x = x - x.mean(dim=0)
    report = make_report(kv_format, [probe_layer(0, x, x * (1 + error))])
    assert report.fall_back == fall_back and bool(report.lines()) == bool(fall_back)


def test_every_format_comes_to_an_end() -> None:
    name, steps = "i4c", []
    while name in FALL_BACK:
        name = FALL_BACK[name]
        steps.append(name)
    assert steps == ["k8v4", "i8", "bf16"]


def test_what_is_no_number_is_bad() -> None:
    broken = keys()
    broken[5, 0, 0] = math.nan
    report = make_report("i8", [probe_layer(0, broken, broken), probe_layer(1, keys(), keys())])
    assert [(h.layer, h.head) for h in report.bad_heads] == [(0, 0)]
    assert report.fall_back == "bf16" and "nan" in report.lines()[0]


def test_constant_keys() -> None:
    """One token, or the same key always: any error is beyond all bounds, none is none."""
    x = torch.ones(1, K, D)
    assert all(head.error == 0 and head.offset_factor == math.inf for head in probe_layer(0, x, x))
    assert probe_layer(0, x, 2 * x)[0].error == math.inf
    zero = torch.zeros(4, K, D)
    assert probe_layer(0, zero, zero)[0].offset_factor == 0


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[T, K, D\]"):
        probe_layer(0, keys(), keys()[1:])
    with pytest.raises(ValueError, match=r"\[T, K, D\]"):
        probe_layer(0, keys()[:0], keys()[:0])

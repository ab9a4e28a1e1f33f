"""What tests share: the small real model, and servers in threads of this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model.live_server import LiveServer
from pagemill.models.home import known_model_path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gemma", action="store_true", help="also run the tests on Gemma 3 270M")
    parser.addoption("--qwen", action="store_true", help="also those on Qwen2.5-Coder-0.5B")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """These tests need files that only ``scripts/fetch-gemma`` and ``scripts/fetch-qwen`` bring."""
    for name in ("gemma", "qwen"):
        if not config.getoption(f"--{name}"):
            left_out = [item for item in items if item.get_closest_marker(name)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF of SmolLM2-135M. ``make test`` pulls it."""
    path = known_model_path("smollm2-135m")
    assert path.is_file(), "run pagemill pull smollm2-135m first (make test does)"
    return path


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("key") / "key"


@pytest.fixture(scope="module")
def start_server(key_file: Path) -> Iterator[Callable[..., LiveServer]]:
    """Start a server on a free port; it is stopped, and its blocks counted, after the module."""
    running: list[LiveServer] = []

    def start(model: Path, **settings: object) -> LiveServer:
        server = LiveServer(model, key_file, **settings)
        running.append(server)
        return server

    yield start
    for server in running:
        server.stop()

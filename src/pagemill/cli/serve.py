"""``pagemill serve``: an OpenAI-compatible server over the managed cache."""

import argparse
import logging
from typing import Any

from pagemill.cli.options import add_options, read_settings
from pagemill.core.config import EngineConfig
from pagemill.core.errors import MissingExtraError

ENGINE_PARTS = ("torch", "tokenizers", "jinja2", "starlette", "uvicorn", "pydantic", "safetensors")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model with the OpenAI API",
        description="Serve a model with the OpenAI API over a managed, paged KV cache.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with safetensors, a GGUF file, a hub name, or a short name (smollm2-135m)",
    )
    parser.add_argument("--model", dest="model_flag", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=_path, metavar="FILE", help="settings from a TOML file")
    add_options(parser)
    parser.set_defaults(run=run)


def _path(text: str) -> Any:
    from pathlib import Path

    return Path(text)


def run(parsed: argparse.Namespace) -> int:
    engine_config, server_config = read_settings(parsed)
    try:
        from pagemill.server.run import RunningServer
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in (*ENGINE_PARTS, "prometheus_client"):
            raise MissingExtraError("pagemill serve", "engine") from error
        raise
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    server = _with_progress(RunningServer, engine_config, server_config)
    for line in server.built.choices:
        print(f"  {line}")
    host = f"[{server_config.host}]" if ":" in server_config.host else server_config.host
    print(f"pagemill serves {server.model_name} at http://{host}:{server.port}/v1", flush=True)
    server.serve()
    print("pagemill has stopped")
    return 0


def _with_progress(make: Any, engine_config: EngineConfig, server_config: Any) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"loading {engine_config.model}", total=None)
        return make(
            engine_config,
            server_config,
            lambda done, total: bar.update(task, completed=done, total=total),
        )

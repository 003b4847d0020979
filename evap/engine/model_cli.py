"""What `evap model list | pull | path` does; the command line prints what these return."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from evap.engine import model, model_builtin
from evap.engine.gguf_convert import Progress
from evap.engine.model import DEFAULT_MODEL, LocalModel, no_progress


class ModelEntry(msgspec.Struct, frozen=True):
    """One line of the list. `path` is None and `size_bytes` 0 for a model that would have to be fetched."""

    name: str
    source: str  # "builtin" | "hub"
    path: Path | None
    size_bytes: int
    default: bool = False


def list_models() -> list[ModelEntry]:
    """Built-in models, fetched or not, then what is in the Hugging Face cache. No network."""
    entries = []
    for name in model_builtin.BUILTIN:
        path = model_builtin.directory(name) if model_builtin.is_ready(name) else None
        size = sum(f.stat().st_size for f in path.iterdir()) if path else 0
        entries.append(ModelEntry(name, "builtin", path, size, name == DEFAULT_MODEL))
    return entries + _hub_models()


def _hub_models() -> list[ModelEntry]:
    import huggingface_hub  # noqa: PLC0415

    try:
        cache = huggingface_hub.scan_cache_dir()
    except (huggingface_hub.CacheNotFound, OSError):
        return []
    found = []
    for repo in sorted((r for r in cache.repos if r.repo_type == "model"), key=lambda r: r.repo_id):
        newest = max(repo.revisions, key=lambda r: r.last_modified, default=None)
        if newest is not None:
            found.append(ModelEntry(repo.repo_id, "hub", newest.snapshot_path, repo.size_on_disk))
    return found


def pull(name: str = "", progress: Progress = no_progress) -> LocalModel:
    """Fetch `name` ("" is the default model) if it is not here. Raises StartupError."""
    return model.resolve(name, progress)


def path(name: str = "") -> Path:
    """The directory of `name`, fetched if need be. Raises StartupError."""
    return model.resolve(name).path


@contextlib.contextmanager
def console_progress() -> Iterator[Progress]:
    """A Progress on standard error: a bar on a terminal, one line per kind of work elsewhere."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    percent = TextColumn("{task.percentage:>3.0f}%")
    columns = (TextColumn("{task.description}"), BarColumn(), percent, TimeElapsedColumn())
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(what: str, done: int, total: int) -> None:
            new = what not in tasks
            if new:
                for task in tasks.values():
                    bars.stop_task(task)
                tasks[what] = bars.add_task(what, total=total or None)
            if new and not console.is_terminal:
                console.print(what, highlight=False)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report

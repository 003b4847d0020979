"""Models from the Hugging Face hub (or whatever HF_ENDPOINT names), through huggingface_hub's own cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from evap.engine.gguf_convert import Progress
from evap.engine.model import LocalModel, check_directory
from evap.errors import StartupError, echo

#: What an engine reads. Not in sub-directories (other formats live there), and nothing pickled.
_WANTED: Final = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED: Final = ["*/*"]


def fetch(name: str, progress: Progress, *, cache_dir: Path | None = None) -> LocalModel:
    """Download `org/name` or `org/name@revision`, or take it from the cache when the hub cannot be reached.

    Token from HF_TOKEN or the hub's token file. Raises StartupError with a remedy.
    """
    import huggingface_hub  # noqa: PLC0415  (half a second of imports)

    repo, _, revision = name.partition("@")
    progress(f"fetching {repo} from the Hugging Face hub", 0, 0)
    try:
        found = huggingface_hub.snapshot_download(
            repo,
            revision=revision or None,
            cache_dir=cache_dir,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            tqdm_class=_bar(progress),
        )
    except Exception as e:
        raise _explain(repo, revision, e) from e
    check_directory(Path(found), name=repo)
    return LocalModel(Path(found), repo, "hub")


def _bar(progress: Progress) -> Any:
    """A tqdm that tells `progress` instead of drawing. The hub makes one for files and one for bytes."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415  (comes with huggingface_hub)

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own argument
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self.seen = 0
            self.bytes = kwargs.get("unit") == "B"

        def update(self, n: float | None = 1) -> bool | None:
            self.seen += int(n or 0)
            if self.bytes:
                progress("downloading", self.seen, int(self.total or 0))
            return None

    return Bar


def _explain(repo: str, revision: str, error: Exception) -> StartupError:
    """Whatever huggingface_hub raised, as one line and a remedy."""
    from huggingface_hub import errors  # noqa: PLC0415

    shown = echo(repo)
    token = "accept its terms on the hub, then set HF_TOKEN to a token that may read it"  # noqa: S105  (advice)
    table: list[tuple[type[Exception], str, str]] = [
        (errors.GatedRepoError, f"model {shown} is gated", token),
        (errors.RevisionNotFoundError, f"model {shown} has no revision {echo(revision)}", "check the part after @"),
        (
            errors.RepositoryNotFoundError,
            f"the hub has no model {shown}, or it is private",
            "check the name; for a private model set HF_TOKEN",
        ),
        (errors.HFValidationError, f"{shown} is not a hub id", "use org/name"),
        (
            errors.LocalEntryNotFoundError,
            f"model {shown} is not in the cache and the hub cannot be reached",
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or give a model directory",
        ),
        (
            errors.OfflineModeIsEnabled,
            f"model {shown} is not in the cache and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE once to fetch it",
        ),
        (OSError, f"cannot fetch {shown}: {error}", "check the network and the free space of the cache (HF_HOME)"),
    ]
    for kind, message, remedy in table:
        if isinstance(error, kind):
            return StartupError(message, remedy=remedy)
    return StartupError(f"cannot fetch {shown}: {type(error).__name__}: {error}", remedy="check the network")

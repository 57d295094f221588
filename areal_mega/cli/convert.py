"""``areal-mega convert``: between HuggingFace folders and checkpoints, and the proof that two of them hold the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from areal_mega.core.errors import UserError

if TYPE_CHECKING:
    from areal_mega.checkpoint.convert import Meter


class Dtype(StrEnum):
    """Dtype policy of a conversion."""

    keep = "keep"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


DtypeOption = Annotated[Dtype, typer.Option(help="Dtype of the weights; keep: as stored. Parameters that must stay fp32 stay so.")]
WorkersOption = Annotated[int | None, typer.Option(min=1, help="Threads that read and write at once. [default: CPUs + 6, at most 16]")]
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

app = typer.Typer(help="Convert between HuggingFace folders and checkpoints, and verify.", no_args_is_help=True, rich_markup_mode=None)


@app.command("to-hf")
def to_hf(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder or URL.", show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write.", show_default=False)],
    dtype: DtypeOption = Dtype.keep,
    shard_size: Annotated[str, typer.Option(help="Largest safetensors file, e.g. 500MB or 4GiB.")] = "5GiB",
    workers: WorkersOption = None,
) -> None:
    """Write a HuggingFace folder from a checkpoint.

    Config, tokenizer and chat template are copied byte for byte. After an interruption the same command goes on where it stopped.
    """
    shard_bytes = parse_size(shard_size)
    with one_line(out), progress("to-hf") as meter:
        from areal_mega.checkpoint import convert
        from areal_mega.core.memory import keep_freed_memory

        keep_freed_memory(arenas=1)
        plan = convert.to_hf(checkpoint, out, dtype=_dtype(dtype), shard_bytes=shard_bytes, workers=workers, meter=meter)
    typer.echo(f"{out}: {len(plan)} tensors, {sum(spec.nbytes for spec in plan) / 1e9:.2f} GB")


@app.command("from-hf")
def from_hf(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="HuggingFace folder or hub name.", show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write.", show_default=False)],
    strategy: Annotated[str, typer.Option(help="Strategy whose shards become the chunks, e.g. megatron:d1t2p2; any other can load them.")],
    dtype: DtypeOption = Dtype.keep,
    workers: WorkersOption = None,
) -> None:
    """Write a checkpoint from a HuggingFace model.

    After an interruption the same command goes on where it stopped.
    """
    with one_line(out), progress("from-hf") as meter:
        from areal_mega.checkpoint import convert
        from areal_mega.core.memory import keep_freed_memory

        keep_freed_memory(arenas=1)
        manifest = convert.from_hf(model, out, strategy=strategy, dtype=_dtype(dtype), workers=workers, meter=meter)
    typer.echo(f"{out}: {len(manifest.arrays)} arrays, {manifest.nbytes / 1e9:.2f} GB")


@app.command("verify")
def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="HuggingFace folder, hub name, checkpoint folder or URL.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    workers: WorkersOption = None,
) -> None:
    """Compare two models tensor by tensor and config field by field.

    Prints what differs, and ends with 1 where anything does.
    """
    with one_line(None), progress("verify") as meter:
        from areal_mega.checkpoint.verify import verify as compare
        from areal_mega.core.memory import keep_freed_memory

        keep_freed_memory(arenas=1)
        differences = compare(a, b, workers=workers, meter=meter)
    for line in differences:
        typer.echo(line)
    if differences:
        typer.echo(f"{len(differences)} differences", err=True)
        raise typer.Exit(1)
    typer.echo("equal: every tensor, every config field, every file")


def parse_size(text: str) -> int:
    """Bytes of ``500MB``, ``4GiB`` or a plain number.

    Raises:
        UserError: it is none of these, or not positive.
    """
    number = text.strip().upper()
    factor = 1
    for unit, size in _UNITS.items():
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), size
            break
    try:
        value = int(float(number) * factor)
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise UserError(f"--shard-size {text}: not a size; give a number with KB, MB, GB, KiB, MiB or GiB, e.g. 4GiB")
    return value


@contextmanager
def one_line(out: str | None) -> Iterator[None]:
    """Whatever a conversion meets is said in one line, and ends with 2: an interruption (``SIGTERM`` like ``SIGINT``), and what the
    system refuses.

    Args:
        out: what is written; None where nothing is.

    Raises:
        UserError: in place of ``KeyboardInterrupt`` and ``OSError``.
    """
    caught = ["SIGINT"]

    def stop(number: int, frame: Any) -> None:
        caught[0] = signal.Signals(number).name
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise UserError(_interrupted(out, caught[0])) from None
    except OSError as error:
        raise UserError(f"{error.filename or out}: {error.strerror or error}; see that it exists and may be used") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupted(out: str | None, by: str) -> str:
    if out is None:
        return f"interrupted by {by}; nothing was compared to the end"
    from areal_mega.checkpoint.location import Location
    from areal_mega.checkpoint.manifest import MANIFEST

    place = Location.parse(out)
    if place.path.exists() if place.path is not None else place.read(MANIFEST) is not None:
        return f"interrupted by {by}, but {out} is complete"
    return f"interrupted by {by}; {out} is not complete, and the same command goes on where it stopped"


def _dtype(policy: Dtype) -> Any:
    import torch

    return {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[policy.value]


class _Bar:
    """A meter on a terminal."""

    def __init__(self, bar: Any, what: str) -> None:
        self._bar, self._task = bar, bar.add_task(what, total=None)

    def begin(self, total: int, done: int) -> None:
        self._bar.reset(self._task, total=total, completed=done)

    def advance(self, nbytes: int) -> None:
        self._bar.advance(self._task, nbytes)


@contextmanager
def progress(what: str) -> Iterator[Meter | None]:
    """A progress bar with bytes, speed and time left on a terminal's standard error; None, and nothing shown, elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar, what)

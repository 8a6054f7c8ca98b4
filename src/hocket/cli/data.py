"""``hocket data``: pack samples into shards, check shards, list them, show samples."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hocket.data import load
from hocket.data.registry import DATA_SETS
from hocket.data.shards import check as checks
from hocket.data.shards import sources
from hocket.data.shards.dataset import TEST
from hocket.data.shards.decode import fields
from hocket.data.shards.index import Index
from hocket.data.shards.order import ShardOrder
from hocket.data.shards.pack import SHARD_BYTES, Source, pack
from hocket.data.shards.reader import ShardReader
from hocket.errors import HocketError, bytes_text

app = typer.Typer(help="Pack data into shards that any number of workers can read.", no_args_is_help=True)
_URL = Annotated[str, typer.Argument(metavar="URL", help="A folder, http(s)://… or what fsspec opens, such as s3://….")]


@app.command("pack")
def pack_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A folder of pictures (one folder per class) or of text, a .jsonl, .csv or .parquet file, a data set "
            "(cifar10, text:FOLDER, …) or module:factory.",
        ),
    ],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write into.")],
    shard_mb: Annotated[float, typer.Option(help="The size of a shard in MB, about.")] = SHARD_BYTES / 2**20,
    size: Annotated[int | None, typer.Option(min=1, help="Crop and scale pictures to squares of this many pixels.")] = None,
    test: Annotated[float | None, typer.Option(help="Put this fraction of the samples into DEST/test.")] = None,
    shuffle: Annotated[bool, typer.Option(help="Shuffle the samples once; otherwise they keep their order.")] = True,
    compress: Annotated[bool, typer.Option("--compress", help="Write .tar.gz; for samples of a few kB or less.")] = False,
    seed: Annotated[int, typer.Option(help="Decides that order.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="How many shards are written in parallel.")] = os.cpu_count() or 1,
    data_dir: Annotated[Path | None, typer.Option(envvar="HOCKET_DATA", help="The folder of the data sets.")] = None,
) -> None:
    """Pack samples into WebDataset tar shards with an index; an interrupted run goes on when it is started again."""
    if shard_mb <= 0:
        raise HocketError(f"--shard-mb {shard_mb:g}: the size of a shard must be above 0; 16 is usual.")
    for name, part in _parts(source, size, test, data_dir).items():
        with _bar(f"packing {name or 'samples'}", len(part)) as advance:
            given = {"seed": seed, "shuffle": shuffle, "compress": compress, "threads": threads, "advance": advance}
            index = pack(part, dest / name, shard_bytes=int(shard_mb * 2**20), **given)  # type: ignore[arg-type]
        print(f"{dest / name}: {_size(index)}")
    print(f"Train on it with `hocket train --data shards:{dest}`, or read it with hocket.data.stream('{dest}').")


@app.command("check")
def check_command(
    url: _URL,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step of all workers, to judge the shuffle.")] = 100,
    lanes: Annotated[int | None, typer.Option(min=1, help="Parts of the data that are read side by side (default: 16).")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Samples in the shuffle buffer of each part (default: a shard's).")
    ] = None,
) -> None:
    """Read all shards and compare them with the index; show how balanced the classes are and how well the order mixes them."""
    index = Index.load(url)
    with _bar("checking", len(index.shards)) as advance, ThreadPoolExecutor(4) as pool:
        bad = []
        for done, (shard, found) in enumerate(zip(index.shards, pool.map(checks.shard(url), index.shards), strict=True), 1):
            advance(done, len(index.shards))
            bad += [f"{shard.name}: {found}"] if found else []
    print(f"{url}: {_size(index)}; {'all shards match the index' if not bad else f'damaged shards: {len(bad)}'}")
    if (index.labels >= 0).any():
        for line in checks.balance(index):
            print(line)
        order = ShardOrder.of(index, 0, lanes, window)
        for line in checks.quality(index, order, batch_size):
            print(line)
    if bad:
        raise HocketError(f"{'; '.join(bad)}: copy these shards again, pack again, or train with on_bad_shard=skip.")


@app.command("ls")
def ls_command(url: _URL) -> None:
    """List the shards."""
    index = Index.load(url)
    table = Table(box=None)
    for column in ("shard", "samples", "bytes", "sha256"):
        table.add_column(column, justify="left" if column in ("shard", "sha256") else "right")
    for shard in index.shards:
        table.add_row(shard.name, f"{shard.samples:,}", f"{shard.bytes:,}", shard.sha256[:12])
    Console().print(table)
    print(f"{_size(index)}; fields {', '.join(index.fields)}")


@app.command("sample")
def sample_command(
    url: _URL,
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="How many samples to show.")] = 4,
    epoch: Annotated[int, typer.Option(min=0, help="The epoch whose first samples are shown.")] = 0,
) -> None:
    """Show the first samples of an epoch, as pictures or text."""
    index = Index.load(url)
    reader, console = ShardReader(url, index), Console()
    order = ShardOrder.of(index, 0)
    start = epoch * order.samples
    for number in order.at(start, start + min(count, order.samples)).tolist():
        console.print(Text(reader.where(number), style="dim"))
        for name, value in fields(reader.sample(number) or {}).items():
            console.print(Text(f"{name}: "), shown(value))
    reader.close()


def shown(value: object, width: int = 64) -> Text:
    """A field for the terminal: a picture as half blocks, the beginning of anything else.

    >>> print(shown("one two"), shown(3))
    one two 3
    """
    if isinstance(value, Tensor) and value.dim() == 3 and len(value) in (1, 3):
        step = max(1, -(-value.shape[2] // width))
        pixels = value[:, ::step, ::step].expand(3, -1, -1)
        text = Text("\n")
        for row in range(0, pixels.shape[1] - 1, 2):
            for column in range(pixels.shape[2]):
                upper, lower = ("rgb({},{},{})".format(*pixels[:, row + k, column].tolist()) for k in (0, 1))
                text.append("▀", style=f"{upper} on {lower}")
            text.append("\n")
        return text
    written = str(value.tolist() if isinstance(value, Tensor) else value)
    return Text(written if len(written) <= 300 else f"{written[:300]}…")


def _parts(source: str, size: int | None, test: float | None, data_dir: Path | None) -> dict[str, Source]:
    known = not Path(source).expanduser().exists() and (source in DATA_SETS or ":" in source)
    if known:
        sys.path.insert(0, os.getcwd())  # for module:factory
    elif not Path(source).expanduser().exists():
        raise HocketError(f"There is no '{source}' to pack: give a folder, a file, {', '.join(DATA_SETS)} or module:factory.")
    if size is not None and known:
        raise HocketError(f"--size {size}: only pictures in folders are scaled; leave it out.")
    parts = sources.parts(source, load(source, data_dir) if known else None, size)
    if test is None:
        return parts
    if TEST in parts:
        raise HocketError(f"--test {test:g}: {source} has samples for testing already; leave it out.")
    return sources.divided(parts[""], test)


def _size(index: Index) -> str:
    return f"{len(index.labels):,} samples in {len(index.shards):,} shards, {bytes_text(index.bytes)}"


@contextmanager
def _bar(label: str, total: int) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done, of: bar.update(task, completed=done)

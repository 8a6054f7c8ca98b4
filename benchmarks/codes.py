"""Bytes and errors of codes on random values, without training.

python benchmarks/codes.py              bytes of a message of 4 million values, by code, and its relative squared error
python benchmarks/codes.py --indices    bits per index in Rice's code, by density
python benchmarks/codes.py --bins       relative squared error of bins(2) beside other codes of two bits
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.distributions import Laplace, StudentT

from hocket import Strategy
from hocket.compression import Codec
from hocket.compression.base import Context

SIZE = 1 << 22
CODES = ["cast(bf16)", "cast(fp8)", "cast(e3m0)", "qsgd(4)", "bins(2)", "sign", "topk(0.015625)", "topk(64/4096)"]
CODES += ["topk(64/4096, indices=plain) | bins(2)", "topk(64/4096) | bins(2)"]
HERE = Context(0, 0, 0, 0, torch.arange(1))


def codec(text: str) -> Codec:
    found = Strategy.parse(text).compression
    assert isinstance(found, Codec)
    return found


def through(text: str, rows: Tensor) -> tuple[int, Tensor]:
    """The bytes of the first row's message, and the rows as receivers decode them."""
    code = codec(text)
    message, _ = code.encode(rows, torch.arange(len(rows)), {}, HERE)
    return int(message.payload_bytes()[0]), code.decode(message, rows.shape[1], HERE)


def error(decoded: Tensor, rows: Tensor) -> float:
    return float((decoded - rows).double().square().sum() / rows.double().square().sum())


def sizes() -> None:
    rows = torch.randn(1, SIZE)
    print("| | bytes | times fewer than fp32 | squared error |\n|---|---|---|---|")
    for text in CODES:
        count, decoded = through(text, rows)
        label = text.replace("|", r"\|")
        print(f"| `{label}` | {count:,} | {4 * SIZE / count:.1f} | {error(decoded, rows):.3f} |")


def indices() -> None:
    print("| density | bits per index | entropy |\n|---|---|---|")
    rows = torch.randn(1, SIZE)
    for text, p in [("64/4096", 1 / 64), *((str(d), d) for d in (0.5, 0.1, 0.01, 0.001))]:
        values = math.ceil(p * SIZE)
        bits = 8 * (through(f"topk({text}, indices=rice)", rows)[0] - 4 * values) / values
        print(f"| {text} | {bits:.2f} | {-math.log2(p) - (1 - p) / p * math.log2(1 - p):.2f} |")


def equal_bins(rows: Tensor, means: bool) -> Tensor:
    """Four equal bins over 6σ around the mean; a bin stands for its centre or for the mean of its values."""
    count, mean = 4, rows.mean(1, keepdim=True)
    width = 6 * rows.std(1, keepdim=True) / count
    codes = ((rows - mean) / width + count / 2).floor().clamp(0, count - 1)
    if not means:
        return mean + (codes + 0.5 - count / 2) * width
    members = torch.stack([codes == k for k in range(count)])
    levels = (members * rows).sum(2, keepdim=True) / members.sum(2, keepdim=True).clamp(min=1)
    return (members * levels).sum(0)


def bins() -> None:
    sources = {"normal": torch.randn, "Laplace": lambda *shape: Laplace(0.0, 1.0).sample(shape)}
    sources["Student's t, 3 degrees"] = lambda *shape: StudentT(3.0).sample(shape)
    print("| values | `bins(2)` | equal bins, means | equal bins, centres | `qsgd(2)` |\n|---|---|---|---|---|")
    for chosen in (False, True):
        for name, draw in sources.items():
            rows = draw(64, 8 * 4096) if chosen else draw(64, 512)
            if chosen:
                rows = rows.view(64, 8, 4096).gather(2, rows.view(64, 8, 4096).abs().topk(64, 2).indices).flatten(1)
            found = [through("bins(2)", rows)[1], equal_bins(rows, True), equal_bins(rows, False), through("qsgd(2)", rows)[1]]
            cells = " | ".join(f"{error(decoded, rows):.4f}" for decoded in found)
            print(f"| {name}{', 64 largest of 4,096' if chosen else ''} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--indices", action="store_true")
    parser.add_argument("--bins", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    (indices if options.indices else bins if options.bins else sizes)()


if __name__ == "__main__":
    main()

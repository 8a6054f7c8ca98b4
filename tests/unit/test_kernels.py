"""Fused kernels give what the torch text of each code gives: those compiled for a CPU, and those in Triton, if it is there.

Without CUDA the latter run in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from hocket import Strategy
from hocket.cluster.message import Message
from hocket.compression import Codec, kernels
from hocket.compression.base import Context
from hocket.compression.indices import _read_rice, _rice
from hocket.compression.kernels.build import library

INSTALLED = importlib.util.find_spec("triton") is not None
if INSTALLED and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported

CUDA = "cuda" if torch.cuda.is_available() else "cpu"
CODES = ["cast(fp16)", "cast(bf16)", "cast(fp8)", "cast(e3m0)", "qsgd(2)", "qsgd(3)", "qsgd(4)", "qsgd(8)", "qsgd(4, block=64)"]
CODES += ["ternary", "natural", "sign", "sign(block=4096)", "bins(2)"]
SPARSE = ["topk(0.01)", "topk(0.3)", "topk(64/4096)", "topk(3/64)", "threshold(1.0)", "threshold(keep=0.02)"]
SPARSE += [
    "topk(0.05) | qsgd(4)",
    "topk(64/4096) | bins(2)",
    "threshold(0.9) | sign",
    "threshold(keep=0.1) | bins(2)",
    "randomk(0.1) | sign",
]
SUMMED = ("sign", "bins")
"""Codes whose kernels add many values in another order than PyTorch does."""


@pytest.fixture(params=["cpu", "cuda"], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of kernels that a test is about; returns where its tensors are."""
    if request.param == "cuda" and not INSTALLED:
        pytest.skip("Triton is not installed")
    if request.param == "cpu" and library() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(kernels, "device_of", lambda tensor: request.param)
    return CUDA if request.param == "cuda" else "cpu"


def device_kind() -> str:
    """The kind of kernels that the present test is about."""
    return kernels.device_of(torch.empty(0))


def codec(text: str) -> Codec:
    found = Strategy.parse(text).compression
    assert isinstance(found, Codec)
    return found


def rows_of(count: int, size: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, size, generator=generator)
    rows[:, size // 2 :] *= 1e-3
    rows[:, : size // 10] = 0
    return rows.to(device)


def through(text: str, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch, fused: bool) -> tuple[Message, torch.Tensor]:
    with monkeypatch.context() as patch:
        if not fused:
            patch.setattr(kernels, "device_of", lambda tensor: "none")
            rows = rows.cpu()
        context = Context(0, 0, 0, 0, torch.arange(len(rows)))
        keys = torch.arange(5, 5 + len(rows)).to(rows.device) * 77_777_777_777
        code = codec(text)
        message, _ = code.encode(rows, keys, {}, context)
        decoded = code.decode(message, rows.shape[1], context).cpu()
        return Message(tuple(part.cpu() for part in message.parts), message.lengths), decoded


@pytest.mark.parametrize("size", [1, 7, 513, 5_000, 66_000])
@pytest.mark.parametrize("text", CODES)
def test_quantizers(text: str, size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device_kind() != device and text in ("cast(bf16)", "cast(fp8)"):
        pytest.skip("Triton's interpreter rounds these formats otherwise than a GPU does")
    rows = rows_of(2, size, device)
    (fused, decoded), (plain, expected) = (through(text, rows, monkeypatch, on) for on in (True, False))
    for part, other in zip(fused.parts, plain.parts, strict=True):
        assert part.dtype == other.dtype
        assert part.shape == other.shape
        if text.startswith(SUMMED) and part.dtype == torch.float32:
            torch.testing.assert_close(part, other, rtol=2e-6, atol=0)
        elif not text.startswith("bins"):
            assert torch.equal(part.view(torch.uint8), other.view(torch.uint8))
    if text.startswith("bins"):  # a value on the edge between two bins may go to either
        assert ((decoded - expected).abs() > 1e-5 * expected.abs()).float().mean() < 1e-3
    else:
        torch.testing.assert_close(decoded, expected, rtol=2e-6 if text.startswith("sign") else 0, atol=0)


@pytest.mark.parametrize("size", [300, 5_000, 140_000])
@pytest.mark.parametrize("text", SPARSE)
def test_selections(text: str, size: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(2, size, device, seed=1)
    (fused, decoded), (plain, expected) = (through(text, rows, monkeypatch, on) for on in (True, False))
    assert torch.equal(fused.payload_bytes().cpu(), plain.payload_bytes().cpu())
    assert [(p.shape, p.dtype) for p in fused.parts] == [(p.shape, p.dtype) for p in plain.parts]
    if "bins" in text or "sign" in text:
        assert ((decoded - expected).abs() > 1e-5 * expected.abs()).float().mean() < 1e-3
    else:
        assert torch.equal(decoded, expected)


def test_of_equal_magnitudes_the_first_are_chosen(device: str) -> None:
    rows = torch.tensor([[1.0, -2.0, 2.0, -1.0, 1.0, 2.0, 0.0, 1.0]] * 2, device=device)
    select = kernels.select_kernels(rows, 8)
    assert select is not None
    indices, values = select.largest(rows, 5)
    assert indices.tolist() == [[0, 1, 2, 3, 5]] * 2
    assert values.tolist() == [[1.0, -2.0, 2.0, -1.0, 2.0]] * 2


@pytest.mark.parametrize("k", [1, 2, 500, 4_999, 5_000])
def test_the_kth_largest(k: int, device: str) -> None:
    rows = rows_of(3, 5_000, device, seed=k)
    rows[1] = rows[1].round()
    select = kernels.select_kernels(rows, 5_000)
    assert select is not None
    level, equal = select.kth_largest(rows, k)
    magnitudes = rows.abs()
    assert torch.equal(level, magnitudes.sort(1, descending=True).values[:, k - 1])
    assert torch.equal(equal.cpu(), k - (magnitudes > level.unsqueeze(1)).sum(1).cpu())


@pytest.mark.parametrize("misleading", [False, True])
@pytest.mark.parametrize("k", [1, 200, 900])
def test_a_sample_narrows_the_search_and_never_changes_its_result(
    k: int, misleading: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, step = (20_000, 20) if device_kind() == "cuda" else (150_000, 9)
    rows = rows_of(3, size, device, seed=k)
    select = kernels.select_kernels(rows, size)
    assert select is not None
    if device_kind() == "cuda":
        monkeypatch.setattr(select, "SAMPLE", 1_000)
        monkeypatch.setattr(select, "SAMPLED", 20_000)
        assert select._bounds(rows, k) is not None
    if misleading:
        rows[:, ::step] = 9.0  # what the sample sees is larger than all else
    level, equal = select.kth_largest(rows, k)
    assert torch.equal(level, rows.abs().sort(1, descending=True).values[:, k - 1])
    assert torch.equal(equal.cpu(), k - (rows.abs() > level.unsqueeze(1)).sum(1).cpu())


@pytest.mark.parametrize("counts", [None, [3, 0, 700]])
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_rice_gives_the_bytes_of_the_text(size: int, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.rand(3, size, generator=torch.Generator().manual_seed(size)).argsort(1)[:, :700].sort(1).values
    given = torch.tensor(counts or [700] * 3)
    fused = _rice(rows, given, size)
    read = _read_rice(*fused[:2], size)
    monkeypatch.setattr(kernels, "device_of", lambda tensor: "none")
    for part, other in zip(fused, _rice(rows, given, size), strict=True):
        assert torch.equal(part, other)
    assert torch.equal(read[1], given)
    again = _read_rice(*fused[:2], size)
    for row, count in enumerate(given.tolist()):
        assert torch.equal(read[0][row, :count], rows[row, :count])
        assert torch.equal(again[0][row, :count], rows[row, :count])


def test_rows_that_are_no_float32_are_refused(device: str) -> None:
    if device_kind() == "cuda":
        pytest.skip("kernels in Triton take any dtype")
    with pytest.raises(AssertionError, match="float32"):
        codec("qsgd(4)").encode(torch.zeros(1, 9, dtype=torch.float64), torch.zeros(1), {}, Context(0, 0, 0, 0, torch.arange(1)))


def test_not_a_number_stays(device: str) -> None:
    rows = rows_of(1, 5_000, device)
    rows[0, 17] = float("nan")
    blocks, select = kernels.block_kernels(rows, 5_000, 512), kernels.select_kernels(rows, 5_000)
    assert blocks is not None
    assert select is not None
    norms, _ = blocks.qsgd(rows, torch.zeros(1, dtype=torch.int64, device=device), 4, 512)
    assert norms.isnan().sum() == 1
    assert 17 in select.largest(rows, 3)[0].tolist()[0]


def test_counts_of_a_peer_that_lie_are_harmless(device: str) -> None:
    low, values = torch.zeros(1, 4, dtype=torch.int16, device=device), torch.ones(1, 4, device=device)
    counts = torch.tensor([[-5, 2_000_000_000]], dtype=torch.int32, device=device)
    select = kernels.select_kernels(low, 70_000)
    assert select is not None
    assert select.put(counts, low, values, 70_000).abs().sum() <= 4


@pytest.mark.parametrize("text", CODES + SPARSE)
def test_pytorchs_default_type_changes_nothing(text: str, device: str) -> None:
    code, rows, found = codec(text), torch.randn(3, 5_000, generator=torch.Generator().manual_seed(1)).to(device), []
    for default in (torch.float32, torch.float64):
        torch.set_default_dtype(default)
        try:
            context = Context(0, 0, 0, 0, torch.arange(3), 3)
            message = code.encode(rows, torch.arange(3, device=device), {}, context)[0]
            found.append((*message.parts, code.decode(message, rows.shape[1], context)))
        finally:
            torch.set_default_dtype(torch.float32)
    assert [part.dtype for part in found[0]] == [part.dtype for part in found[1]]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

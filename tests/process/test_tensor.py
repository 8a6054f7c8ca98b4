"""Tensor parallelism over real processes: equal to one process, whole parameters equal bit for bit, bytes as the formulas say."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.cluster.message import framed, ring_bytes
from process.launch import Nursery
from process.tensor import CASES

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]


@pytest.fixture(scope="module", params=[2, 4])
def world(request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every process found, case by case; one world runs them all."""
    group = nursery.start("process.tensor:real", request.param, tmp_path_factory.mktemp("tensor"))
    assert group.wait(120, together=True) == [0] * request.param, group.said()
    return group.results()


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_trains_like_the_whole_one(name: str, world: list[dict[str, Any]]) -> None:
    for found in (result[name] for result in world):
        assert found["moved"] > 1e-3
        assert found["loss"] <= 1e-5
        assert found["weights"] <= 1e-5
        assert found["evaluation"] <= 1e-4
    assert all(result[name]["same"] == world[0][name]["same"] for result in world), "whole parameters drifted apart"


@pytest.mark.parametrize("name", CASES)
def test_parts_tile_the_whole(name: str, world: list[dict[str, Any]]) -> None:
    split = False
    for parameter, shape in world[0][name]["shapes"].items():
        held = [result[name]["parts"][parameter] for result in world if parameter in result[name]["parts"]]
        dim = held[0][1]
        if dim is None:
            assert [own for own, _, _ in held] == [shape] * len(world)
            continue
        split = True
        ranges = sorted(r for _, _, ranges in held for r in ranges)
        assert [i for a, b in ranges for i in range(a, b)] == list(range(shape[dim]))
        for own, _, lies in held:
            assert own == (*shape[:dim], sum(b - a for a, b in lies), *shape[dim + 1 :])
    assert split


def floats(*shape: int) -> int:
    """Bytes of a float32 tensor."""
    size = 4
    for n in shape:
        size *= n
    return size


def mlp_bytes(p: int) -> tuple[int, int]:
    """The pair sums its output; the head, where 10 divides, gathers its output and sums its input's gradient."""
    pair = ring_bytes(floats(8, 32), p)
    return (pair, 1) if p == 4 else (pair + framed(floats(8, 5)) + ring_bytes(floats(8, 32), p), 3)


def cnn_bytes(p: int) -> tuple[int, int]:
    """Both convolutions gather their channels, the second sums its input's gradient; so does the pair, which sums its output."""
    gathers = (p - 1) * (framed(floats(4, 32 // p, 8, 8)) + framed(floats(4, 64 // p, 4, 4)))
    return gathers + sum(ring_bytes(n, p) for n in (floats(4, 32, 4, 4), floats(4, 256), floats(4, 10))), 5


def gpt_bytes(p: int) -> tuple[int, int]:
    """Embedding: a sum. Each of two blocks: attention and perceptron, each a sum forward and one backward. Logits: gathered, and a
    sum backward."""
    tokens = 2 * 8
    return (1 + 2 * 4 + 1) * ring_bytes(floats(tokens, 16), p) + (p - 1) * framed(floats(tokens, 64 // p)), 11


def rotate_bytes(p: int) -> tuple[int, int]:
    """Two rotating layers of 32 and 16 inputs: P − 1 blocks forward and as many backward; the last layer sums 10 outputs."""
    turns = 2 * (p - 1)
    return turns * (framed(floats(8, 32 // p)) + framed(floats(8, 16 // p))) + ring_bytes(floats(8, 10), p), 2 * turns + 1


def closed_bytes(p: int) -> tuple[int, int]:
    """The same, but the last rotating layer's 24 outputs are gathered for a layer that is whole."""
    sent, exchanges = rotate_bytes(p)
    return sent - ring_bytes(floats(8, 10), p) + (p - 1) * framed(floats(8, 24 // p)), exchanges


def classical_bytes(p: int) -> tuple[int, int]:
    """Three layers gather; all but the first, whose input needs no gradient, sum their input's gradient."""
    gathers = (p - 1) * sum(framed(floats(8, n // p)) for n in (32, 16, 24))
    return gathers + ring_bytes(floats(8, 32), p) + ring_bytes(floats(8, 16), p), 5


def branches_bytes(p: int) -> tuple[int, int]:
    """Joined by a sum of the outputs; the gradient of their input is summed. Layers before and after: gathered, and the last one
    sums its input's gradient."""
    own = ring_bytes(floats(8, 8), p) + ring_bytes(floats(8, 12), p)
    around = (p - 1) * (framed(floats(8, 12 // p)) + framed(floats(8, 4 // p))) + ring_bytes(floats(8, 8), p)
    return own + around, 5


def gated_bytes(p: int) -> tuple[int, int]:
    """Embedding: a sum. Gate and up read one tensor: one sum back; down sums its output. The head gathers, and sums back."""
    return 4 * ring_bytes(floats(2 * 8, 8), p) + (p - 1) * framed(floats(2 * 8, 16 // p)), 5


@pytest.mark.parametrize(
    "name, formula",
    [
        ("mlp", mlp_bytes),
        ("cnn", cnn_bytes),
        ("gpt", gpt_bytes),
        ("gpt, dropout", gpt_bytes),
        ("rotate, rows", rotate_bytes),
        ("rotate, closed", closed_bytes),
        ("classical", classical_bytes),
        ("gated, tied", gated_bytes),
        ("branches, sum", branches_bytes),
    ],
)
def test_bytes_are_those_of_the_formulas(name: str, formula: Any, world: list[dict[str, Any]]) -> None:
    for result in world:
        assert [tuple(stats) for stats in result[name]["comm_stats"]] == [formula(len(world))] * 5

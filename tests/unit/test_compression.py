"""Laws of compressors: what arrives is near what was sent, and the bytes counted are the bytes that travel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hocket.cluster import VirtualCluster
from hocket.cluster.message import Message
from hocket.compression import DGC, Chain, Codec, LowRank, NoCompression, RandomK, Sign, Threshold, TopK
from hocket.compression.base import Context
from hocket.compression.bitpack import pack, pack_trits, packed_size_padded, unpack, unpack_trits
from hocket.compression.damped import Damped
from hocket.compression.feedback import mean_with_feedback
from hocket.compression.indices import BLOCK
from hocket.strategy import Strategy
from hocket.topology import AllReduce, Gossip
from virtual.methods import CHAINS, SINGLE

MORE = (
    "qsgd(3)",
    "qsgd(5)",
    "qsgd(8, block=8)",
    "qsgd(4, block=100000000)",
    "lowrank(3)",
    "threshold(keep=0.5)",
    "threshold(0)",
    "topk(1.0)",
)


def compressor(text: str):
    exchange = " + gradients" if text.startswith("dgc") else ""
    return Strategy.parse(text + exchange).compression


CODECS = [t for t in (*SINGLE, *MORE, *CHAINS) if isinstance(compressor(t), Codec)]
UNBIASED = ["qsgd(2)", "qsgd(4)", "qsgd(3, block=8)", "ternary", "natural", "randomk(0.2, unbiased=True)"]
EXACT = ["topk(1.0)", "threshold(0)", "threshold(keep=1.0)", "randomk(1.0)"]


def context(rows: int = 1, *, step: int = 0, seed: int = 0, bucket: int = 0, exchange: int = 0, shapes=None) -> Context:
    return Context(seed, step, exchange, bucket, torch.arange(rows), world=rows, shapes=shapes)


def through(codec: Codec, rows: Tensor, where: Context | None = None) -> tuple[Message, Tensor]:
    """The message and what it is read as."""
    where = where or context(len(rows))
    message, _ = codec.encode(rows, where.keys(1), {}, where)
    return message, codec.decode(message, rows.shape[1], where)


def packed_and_back(message: Message) -> Message:
    """Over the wire and back, as peers do it."""
    blobs = [message.pack(i) for i in range(message.rows)]
    assert [b.numel() for b in blobs] == message.payload_bytes().tolist()
    width = max(b.numel() for b in blobs)
    return message.unpack(torch.stack([torch.nn.functional.pad(b, (0, width - b.numel())) for b in blobs]))


_sizes = st.integers(1, 70)
_scales = st.sampled_from([1.0, 1e-3, 1e-30, 1e-42, 1e30, 0.0])


@st.composite
def _rows(draw: st.DrawFn) -> Tensor:
    count, size, scale = draw(st.integers(1, 4)), draw(_sizes), draw(_scales)
    values = torch.randn(count, size, generator=torch.Generator().manual_seed(draw(st.integers(0, 10**6)))) * scale
    if draw(st.booleans()):  # sparse rows, so that some messages are empty
        values[torch.rand(count, size, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.9] = 0
    sign = draw(st.sampled_from([None, -1.0, 1.0]))
    return values if sign is None else sign * values.abs()


@pytest.mark.parametrize("text", CODECS)
@given(_rows())
def test_shape_bytes_and_the_way_over_the_wire(text: str, rows: Tensor) -> None:
    codec, where = compressor(text), context(len(rows))
    message, decoded = through(codec, rows, where)
    assert decoded.shape == rows.shape
    assert decoded.dtype == torch.float32
    assert bool(torch.isfinite(decoded).all())
    arrived = packed_and_back(message)
    assert torch.equal(codec.decode(arrived, rows.shape[1], where), decoded)


@pytest.mark.parametrize("text", [t for t in CODECS if compressor(t).contracts])
@given(_rows())
def test_biased_codes_contract(text: str, rows: Tensor) -> None:
    _, decoded = through(compressor(text), rows)
    wide, error = rows.double(), (decoded.double() - rows.double())
    assert bool((error.norm(dim=1) <= wide.norm(dim=1) * (1 + 1e-5) + 1e-37).all())


@pytest.mark.parametrize("text", [t for t in CODECS if not compressor(t).contracts])
@given(_rows())
def test_damped_codes_contract_and_travel(text: str, rows: Tensor) -> None:
    codec = Damped(compressor(text))
    message, decoded = through(codec, rows)
    assert torch.equal(codec.decode(packed_and_back(message), rows.shape[1], context(len(rows))), decoded)
    wide, error = rows.double(), (decoded.double() - rows.double())
    assert bool((error.norm(dim=1) <= wide.norm(dim=1) * (1 + 1e-5) + 1e-37).all())


def test_a_ternary_code_alone_does_not_contract() -> None:
    rows = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0))
    _, decoded = through(compressor("ternary"), rows)
    assert (decoded - rows).norm() > 1.2 * rows.norm()


@pytest.mark.parametrize("text", UNBIASED)
def test_unbiased_codes_are_right_on_average(text: str) -> None:
    codec, draws = compressor(text), 4000
    row = torch.tensor([[1.0, -0.7, 0.31, 0.02, -0.005, 0.0, 0.5, -1.3, 2.0, 0.11, 0.9]])
    if isinstance(codec, RandomK):  # everybody's indices are the same, so that draws differ by the step
        seen = torch.cat([through(codec, row, context(1, step=t))[1] for t in range(draws)])
    else:
        seen = through(codec, row.expand(draws, -1).contiguous())[1]
    error = seen.double().std(0) / math.sqrt(draws)
    assert bool(((seen.double().mean(0) - row[0]).abs() <= 5 * error + 1e-6).all())


@pytest.mark.parametrize("text", [*UNBIASED, "randomk(0.3, unbiased=True) | qsgd(4)", "randomk(0.3, unbiased=True) | natural"])
def test_two_phases_of_an_unbiased_code_are_right_on_average(text: str) -> None:
    """The owner of a slice must not scale up once more what its senders scaled up at the same indices."""
    codec, draws = compressor(text), 1500
    cluster = VirtualCluster(3)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    heard = torch.stack([channel.coded(codec, rows, {}, context(3, step=t)).heard[0] for t in range(draws)]).double()
    error = heard.std(0) / math.sqrt(draws)
    assert bool(((heard.mean(0) - rows.double().mean(0)).abs() <= 5 * error + 1e-6).all())


@pytest.mark.parametrize("text", EXACT)
@given(_rows())
def test_codes_that_lose_nothing_are_exact(text: str, rows: Tensor) -> None:
    codec = compressor(text)
    assert codec.lossless
    assert not codec.uses_error_feedback
    assert torch.equal(through(codec, rows)[1], rows)


@pytest.mark.parametrize("text, bound", [("cast(fp16)", 2**-11), ("cast(bf16)", 2**-8), ("qsgd(8)", 1 / 127), ("cast(fp8)", 2**-4)])
def test_finer_codes_are_finer(text: str, bound: float) -> None:
    rows = torch.rand(3, 300, generator=torch.Generator().manual_seed(0)) + 0.5
    assert ((through(compressor(text), rows)[1] - rows).abs() / rows.max()).max() <= bound


@pytest.mark.parametrize("text", CODECS)
def test_zeros_stay_zeros(text: str) -> None:
    assert through(compressor(text), torch.zeros(2, 33))[1].abs().max() == 0


@pytest.mark.parametrize("text", [t for t in CODECS if not t.startswith("lowrank")])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_rows_longer_than_a_block_of_places(text: str, size: int) -> None:
    codec = compressor(text)
    rows = torch.zeros(2, size)
    at = torch.tensor([0, BLOCK // 2, BLOCK - 2, size - 1])
    rows[0, at] = torch.tensor([4.0, -5.0, 6.0, -7.0])
    rows[1, at[1:3]] = torch.tensor([8.0, -8.0])
    where = context(2)
    message, decoded = through(codec, rows, where)
    assert torch.equal(codec.decode(packed_and_back(message), size, where), decoded)
    if text.startswith(("topk", "threshold")) and "|" not in text:
        assert torch.equal(decoded, rows)


@pytest.mark.parametrize("text, kept", [("threshold(0.5)", 4), ("topk(0.2)", 2), ("threshold(keep=0.2)", 2)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_magnitudes_decide_not_signs(text: str, kept: int, sign: float) -> None:
    """METHODS §3: a peer compares max(x), so that an all-negative gradient is sent whole."""
    rows = sign * torch.tensor([[0.1, 0.9, 0.2, 0.8, 0.5, 0.3, 0.7, 0.05, 0.6, 0.4]])
    _, decoded = through(compressor(text), rows)
    largest = rows.abs().topk(kept).indices
    assert decoded.nonzero()[:, 1].tolist() == sorted(largest[0].tolist())
    assert torch.equal(decoded[0, largest[0]], rows[0, largest[0]])


def test_sparse_messages_count_their_places() -> None:
    rows = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    assert through(TopK(0.01), rows)[0].payload_bytes().tolist() == [10 * (2 + 4)]
    assert through(RandomK(0.01), rows)[0].payload_bytes().tolist() == [10 * 4]
    assert through(Threshold(t=1e9), rows)[0].payload_bytes().tolist() == [3 * 4]  # three lengths of nothing
    assert through(compressor("topk(0.01) | qsgd(4)"), rows)[0].payload_bytes().tolist() == [10 * 2 + 4 + 5]
    assert through(compressor("sign"), rows)[0].payload_bytes().tolist() == [2 * 4 + 125]  # two blocks of 512
    assert through(compressor("ternary"), rows)[0].payload_bytes().tolist() == [4 + 200]
    assert through(compressor("natural"), rows)[0].payload_bytes().tolist() == [1000 + 125]
    assert through(compressor("qsgd(4)"), rows)[0].payload_bytes().tolist() == [2 * 4 + 500]


# --- packing ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 999))
@settings(max_examples=25)
def test_packing_all_widths(bits: int, size: int, rows: int, seed: int) -> None:
    values = torch.randint(0, 2**bits, (rows, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack(values, bits)
    assert packed.shape == (rows, packed_size_padded(size, bits))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, size), values)


@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 999))
def test_packing_trits(size: int, rows: int, seed: int) -> None:
    values = torch.randint(0, 3, (rows, size), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = pack_trits(values)
    assert packed.shape == (rows, -(-size // 5))
    assert torch.equal(unpack_trits(packed, size), values)


# --- randomness ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", CODECS)
def test_a_message_does_not_depend_on_who_hosts_whom(text: str) -> None:
    codec = compressor(text)
    rows = torch.randn(4, 60, generator=torch.Generator().manual_seed(1))
    rows[1] *= 0.01  # so that messages of variable size differ in length
    everyone = Context(5, 3, 0, 2, torch.arange(4), world=4)
    together, _ = codec.encode(rows, everyone.keys(1), {}, everyone)
    for worker in range(4):
        alone = Context(5, 3, 0, 2, torch.tensor([worker]), world=4)
        single, _ = codec.encode(rows[worker : worker + 1], alone.keys(1), {}, alone)
        assert torch.equal(single.pack(0), together.pack(worker))


@pytest.mark.parametrize("text", ["qsgd(4)", "ternary", "natural", "randomk(0.2)"])
@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"bucket": 1}])
def test_randomness_follows_seed_step_and_bucket(text: str, other: dict[str, int]) -> None:
    codec, rows = compressor(text), torch.randn(1, 200, generator=torch.Generator().manual_seed(1))
    here, again, there = (through(codec, rows, context(1, **c))[1] for c in ({}, {}, other))
    assert torch.equal(here, again)
    assert not torch.equal(here, there)


def test_random_places_are_distinct_and_equally_likely() -> None:
    codec, size, draws = RandomK(0.3), 10, 3000
    hits = torch.zeros(size)
    for t in range(draws):
        indices = codec.indices(size, context(1, step=t), torch.device("cpu"))
        assert indices.unique().numel() == codec.max_selected(size) == 3
        hits[indices] += 1
    expected = draws * 3 / size
    assert ((hits - expected) ** 2 / expected).sum() < 30  # chi-square with 9 degrees of freedom: p < 0.001


# --- memory ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.05, 0.2])
@pytest.mark.parametrize("start", ["dense", "almost all zero", "all zero"])
def test_the_adaptive_threshold_follows_a_drifting_stream(keep: float, start: str) -> None:
    codec, state, where = Threshold(keep=keep), {}, context(2)
    generator = torch.Generator().manual_seed(0)
    shares = []
    for t in range(120):
        rows = torch.randn(2, 1000, generator=generator) * 1.05**t
        if t < 3 and start != "dense":
            rows[:, 5 if start == "almost all zero" else 0 :] = 0
        message, state = codec.encode(rows, where.keys(1), state, where)
        shares.append(message.lengths[:, 1].double().mean().item() / 1000)
    assert sum(shares[40:]) / 80 == pytest.approx(keep, rel=0.25)


def test_sign_scales_by_the_values_that_are_sent() -> None:
    codec = compressor("threshold(0.5) | sign")
    rows = torch.tensor([[1.0, 2.0, 0.1, 3.0], [0.0, -4.0, 0.0, 0.0], [0.1, 0.1, 0.1, 0.1]])
    assert through(codec, rows)[1].tolist() == [[2.0, 2.0, 0.0, 2.0], [0.0, -4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("text", [t for t in (*SINGLE, *CHAINS) if compressor(t).uses_error_feedback])
@pytest.mark.parametrize("topology", [AllReduce(), Gossip()], ids=str)
def test_what_was_sent_and_what_is_remembered_is_all_there_was(text: str, topology) -> None:
    codec, cluster, state = compressor(text), VirtualCluster(3), {}
    channel = topology.bind(cluster, cluster.world, 0)
    generator = torch.Generator().manual_seed(0)
    given_, sent = torch.zeros(3, 50), torch.zeros(3, 50)
    for t in range(12):
        rows = torch.randn(3, 50, generator=generator)
        given_ += rows
        _, this, state = mean_with_feedback(codec, rows, channel, state, context(3, step=t, exchange=t, shapes=((5, 8), (10,))))
        sent += this
    torch.testing.assert_close(sent + state["error"], given_, rtol=0, atol=2e-5)
    assert state["error"].abs().max() > 1e-6  # there was something to remember


def test_unbiased_codes_and_lossless_chains_remember_nothing() -> None:
    for text in (*UNBIASED, "topk(1.0) | qsgd(2)", "threshold(0) | ternary", "randomk(0.1, unbiased=True) | qsgd(4)", "none"):
        assert not compressor(text).uses_error_feedback
    assert compressor("topk(1.0) | sign").uses_error_feedback
    assert compressor("topk(0.5) | qsgd(4)").uses_error_feedback
    assert not compressor("topk(0.5, feedback=False) | sign").uses_error_feedback


@pytest.mark.parametrize("matrix_rank", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_is_exact_where_the_rank_suffices(matrix_rank: int, rank: int) -> None:
    """Also where it more than suffices: directions that are rounding noise must not count twice."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((30, 20), (7,))
    codec, cluster, state = LowRank(matrix_rank), VirtualCluster(2), {}
    channel = AllReduce().bind(cluster, cluster.world, 0)
    left, right = torch.randn(30, rank, generator=generator), torch.randn(2, rank, 20, generator=generator)
    left[3:] = 0  # few rows only, as in an embedding
    rows = torch.cat([(left @ right).flatten(1), torch.randn(2, 7, generator=generator)], 1)
    for t in range(3):
        heard, sent, state = codec.mean(rows.clone(), channel, state, context(2, step=t, exchange=t, shapes=shapes))
    mean = rows.mean(0).expand(2, -1)
    assert torch.equal(heard[0], heard[1])
    if matrix_rank >= rank:
        torch.testing.assert_close(heard, mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sent, rows, rtol=1e-4, atol=1e-4)
        _, decoded = through(codec, rows, context(2, shapes=shapes))
        torch.testing.assert_close(decoded, rows, rtol=1e-4, atol=1e-4)
    else:
        assert (heard - mean).norm() > 0.05 * mean.norm()
        torch.testing.assert_close(heard[:, -7:], mean[:, -7:])  # vectors travel plain


@pytest.mark.parametrize("before", [torch.zeros(1, 600), torch.ones(1, 600)], ids=["nothing", "one direction"])
def test_a_direction_that_vanished_once_comes_back(before: Tensor) -> None:
    """Parameters unused in one step, or a first exchange of no displacement, leave a Q of zeros."""
    matrix = (torch.arange(30.0).view(30, 1) @ torch.ones(1, 20) + torch.ones(30, 1) @ torch.arange(20.0).view(1, 20)).view(1, -1)
    where, state = context(1, shapes=((30, 20),)), {}
    for rows in (before, before, matrix, matrix, matrix):
        message, state = LowRank(2).encode(rows, where.keys(1), state, where)
    torch.testing.assert_close(LowRank(2).decode(message, 600, where), matrix, rtol=1e-3, atol=1e-2)


def test_a_warm_start_finds_the_largest_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    u, s, v = torch.linalg.svd(torch.randn(30, 20, generator=generator))
    s[2:] *= 0.5
    matrix = (u[:, :20] * s) @ v
    best = ((u[:, :2] * s[:2]) @ v[:2]).flatten()
    where, state = context(1, shapes=((30, 20),)), {}
    errors = []
    for _ in range(30):
        message, state = LowRank(2).encode(matrix.view(1, -1), where.keys(1), state, where)
        errors.append((LowRank(2).decode(message, 600, where)[0] - best).norm().item())
    assert errors[-1] < 0.01 * errors[0]


# --- DGC -------------------------------------------------------------------------------------------------------------------


class _Plain:
    """A channel of one worker that hears itself as sent."""

    uniform = True

    def coded(self, codec, rows, state, context):
        from hocket.compression.base import Heard

        message, state = codec.encode(rows, context.keys(1), state, context)
        sent = codec.decode(message, rows.shape[1], context)
        return Heard(sent, sent, state)


def _dgc(codec: DGC, gradients: Tensor) -> tuple[list[Tensor], dict]:
    state, heard = {}, []
    for t, g in enumerate(gradients):
        out = codec.mean(g.unsqueeze(0), _Plain(), state, context(1, exchange=t))
        state = out.state
        heard.append(out.heard[0])
    return heard, state


def test_dgc_corrects_momentum() -> None:
    """A value that waits collects exactly what momentum SGD would have moved it by meanwhile."""
    gradients = torch.full((6, 10), 0.01)
    gradients[:5, 1:] += torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) + 1.0  # value 0 is never the largest…
    gradients[5, 0] = 100.0  # …until the end
    heard, _ = _dgc(DGC(0.1, momentum=0.9), gradients)
    w = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w], 1.0, momentum=0.9)
    for g in gradients[:, :1]:
        w.grad = g.clone()
        optimizer.step()
    assert sum(h[0].item() for h in heard[:5]) == 0
    assert heard[5][0].item() == pytest.approx(-w.item(), rel=1e-5)


def test_dgc_masks_what_it_sent() -> None:
    heard, state = _dgc(DGC(0.2, momentum=0.9), torch.tensor([[5.0, 1.0, 2.0, 3.0, 4.0]]))
    assert heard[0].tolist() == [5.0, 0, 0, 0, 0]
    assert state["u"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert state["v"].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]


def test_dgc_with_everything_sent_is_the_plain_gradient() -> None:
    """Masking stops the momentum of whatever was sent (Lin 2018, §3.2); with all of it sent, none is left."""
    gradients = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    heard, state = _dgc(DGC(1.0, momentum=0.9), gradients)
    assert torch.equal(torch.stack(heard), gradients)
    assert state["u"].abs().max() == 0


def test_dgc_warms_up() -> None:
    gradients = torch.randn(10, 1000, generator=torch.Generator().manual_seed(0))
    heard, _ = _dgc(DGC(0.001, warmup=8), gradients)
    assert [int((h != 0).sum()) for h in heard] == [250, 250, 63, 63, 16, 16, 4, 4, 1, 1]


def test_dgc_clips_to_its_share_of_the_norm() -> None:
    rows = torch.tensor([[3.0, 4.0, 0.0], [0.3, 0.4, 0.0], [3.0, 4.0, 0.0], [3.0, 4.0, 0.0]])
    out = DGC(1.0, clip=2.0).mean(rows, _Plain(), {}, context(4))
    torch.testing.assert_close(out.heard.norm(dim=1), torch.tensor([1.0, 0.5, 1.0, 1.0]))


def test_specs_say_what_they_are() -> None:
    assert NoCompression().lossless
    assert not NoCompression().biased
    assert isinstance(compressor("topk(0.1) | sign"), Chain)
    assert compressor("dgc(0.1) | qsgd(4)").precision is not None


def test_a_vote_is_the_majority() -> None:
    cluster = VirtualCluster(3)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, -1.0], [-9.0, 1.0, -1.0]])
    heard = channel.coded(Sign(vote=True), rows, {}, context(3)).heard
    assert heard.sign().tolist() == [[1.0, 1.0, -1.0]] * 3
    mean = channel.coded(Sign(vote=False), rows, {}, context(3)).heard
    assert mean[0, 0] < 0


@pytest.mark.parametrize("workers", [2, 4])
def test_a_tie_is_decided_by_chance_and_alike_for_all(workers: int) -> None:
    """Half of the workers say +, half say −: each sign comes out about as often, another one in another step; a majority wins."""
    cluster = VirtualCluster(workers)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.ones(workers, 4096)
    rows[workers // 2 :] *= -3.0
    rows[:, :8] = 2.0

    def heard(step: int) -> Tensor:
        found = channel.coded(Sign(vote=True, block=4096), rows, {}, context(workers, step=step)).heard
        assert torch.equal(found, found[:1].expand_as(found))
        return found[0]

    first, second = heard(1), heard(2)
    assert bool((first[:8] > 0).all())
    torch.testing.assert_close(first.abs(), torch.full((4096,), float(rows.abs().mean())))
    for found in (first, second):
        assert 0.45 < float((found[8:] > 0).float().mean()) < 0.55
    assert 0.45 < float((first[8:] == second[8:]).float().mean()) < 0.55
    assert torch.equal(first, heard(1))


PRECISION = {
    "": lambda k: 4 * k,
    " | cast(fp16)": lambda k: 2 * k,
    " | qsgd(4)": lambda k: 4 * -(-k // 512) + -(-k // 2),
    " | sign": lambda k: 4 * -(-k // 512) + -(-k // 8),
}
"""Bytes of so many values, with the scales of their blocks."""


@pytest.mark.parametrize("code", PRECISION)
@pytest.mark.parametrize("size", [1000, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_messages_of_variable_size_have_exactly_the_bytes_of_what_they_carry(code: str, size: int) -> None:
    """The lengths of all parts, the counts of blocks where a row has several, two bytes per index, and the values."""
    rows, kept = torch.zeros(5, size), [0, 1, 7, 600, 999]
    for row, k in zip(rows, kept, strict=True):
        row[torch.randperm(size, generator=torch.Generator().manual_seed(k))[:k]] = -2.0
        row[row == 0] = 0.5
    codec = compressor(f"threshold(0.5){code}")
    message, decoded = through(codec, rows)
    blocks = 0 if size <= BLOCK else 4 * -(-size // BLOCK)
    assert message.payload_bytes().tolist() == [4 * len(message.parts) + blocks + 2 * k + PRECISION[code](k) for k in kept]
    assert [message.pack(row).numel() for row in range(5)] == message.payload_bytes().tolist()
    assert (decoded != 0).sum(1).tolist() == kept
    torch.testing.assert_close(decoded, torch.where(rows == -2.0, rows, 0.0))

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
from hocket.compression import DGC, Bins, Cast, Chain, Codec, LowRank, NoCompression, RandomK, Sign, Threshold, TopK
from hocket.compression.base import Context
from hocket.compression.bitpack import pack, pack_trits, packed_size_padded, unpack, unpack_trits
from hocket.compression.damped import Damped
from hocket.compression.feedback import mean_with_feedback, with_feedback
from hocket.compression.indices import BLOCK, read_indices, rice_bits, with_indices
from hocket.compression.threshold import compact
from hocket.notation import Ratio
from hocket.strategy import Strategy
from hocket.topology import AllReduce, Gossip
from virtual.methods import CHAINS, COMPRESSION, SINGLE

MORE = (
    "qsgd(3)",
    "qsgd(5)",
    "qsgd(8, block=8)",
    "qsgd(4, block=100000000)",
    "lowrank(3)",
    "threshold(keep=0.5)",
    "threshold(0)",
    "topk(1.0)",
    "topk(5/5)",
    "topk(2/7) | sign",
    "topk(0.1, indices=rice) | qsgd(3)",
    "threshold(keep=0.2, indices=rice)",
    "bins(3)",
    "bins(4, block=8)",
)


def compressor(text: str):
    exchange = " + gradients" if text.startswith("dgc") else ""
    return Strategy.parse(text + exchange).compression


CODECS = [t for t in (*SINGLE, *MORE, *CHAINS) if isinstance(compressor(t), Codec)]
UNBIASED = ["qsgd(2)", "qsgd(4)", "qsgd(3, block=8)", "ternary", "natural", "randomk(0.2, unbiased=True)"]
EXACT = ["topk(1.0)", "topk(5/5)", "threshold(0)", "threshold(keep=1.0)", "randomk(1.0)"]


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
    heard = torch.stack([channel.coded(codec, rows, {}, context(3, step=t)).mixed[0] for t in range(draws)]).double()
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
    if text.startswith(("topk", "threshold")) and "|" not in text and "/7" not in text:
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


# --- packing ------------------------------------------------------------------------------------------------------------


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


# --- randomness ---------------------------------------------------------------------------------------------------------


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


# --- memory -------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("text", [t for t in (*SINGLE, *CHAINS) if compressor(t).uses_error_feedback and "ef21" not in t])
@pytest.mark.parametrize("topology", [AllReduce(), Gossip()], ids=str)
def test_what_was_sent_and_what_is_remembered_is_all_there_was(text: str, topology) -> None:
    codec, cluster, state = compressor(text), VirtualCluster(3), {}
    channel = topology.bind(cluster, cluster.world, 0)
    generator = torch.Generator().manual_seed(0)
    given_, sent = torch.zeros(3, 50), torch.zeros(3, 50)
    for t in range(12):
        rows = torch.randn(3, 50, generator=generator)
        given_ = codec.feedback_decay * given_ + rows
        _, this, state = mean_with_feedback(codec, rows, channel, state, context(3, step=t, exchange=t, shapes=((5, 8), (10,))))
        sent = codec.feedback_decay * sent + this
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


# --- DGC ----------------------------------------------------------------------------------------------------------------


class _Plain:
    """A channel of one worker that hears itself as sent."""

    uniform = True

    def coded(self, codec, rows, state, context, wants_sent=True):
        from hocket.compression.base import Mixed

        message, state = codec.encode(rows, context.keys(1), state, context)
        sent = codec.decode(message, rows.shape[1], context)
        return Mixed(sent, sent, state)


def _dgc(codec: DGC, gradients: Tensor) -> tuple[list[Tensor], dict]:
    state, heard = {}, []
    for t, g in enumerate(gradients):
        out = codec.mean(g.unsqueeze(0), _Plain(), state, context(1, exchange=t))
        state = out.state
        heard.append(out.mixed[0])
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
    torch.testing.assert_close(out.mixed.norm(dim=1), torch.tensor([1.0, 0.5, 1.0, 1.0]))


def test_specs_say_what_they_are() -> None:
    assert NoCompression().lossless
    assert not NoCompression().biased
    assert isinstance(compressor("topk(0.1) | sign"), Chain)
    assert compressor("dgc(0.1) | qsgd(4)").precision is not None


def test_a_vote_is_the_majority() -> None:
    cluster = VirtualCluster(3)
    channel = AllReduce().bind(cluster, cluster.world, 0)
    rows = torch.tensor([[1.0, 1.0, -1.0], [1.0, -1.0, -1.0], [-9.0, 1.0, -1.0]])
    heard = channel.coded(Sign(vote=True), rows, {}, context(3)).mixed
    assert heard.sign().tolist() == [[1.0, 1.0, -1.0]] * 3
    mean = channel.coded(Sign(vote=False), rows, {}, context(3)).mixed
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
        found = channel.coded(Sign(vote=True, block=4096), rows, {}, context(workers, step=step)).mixed
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


# --- Rice's code of indices -----------------------------------------------------------------------------------------------------


def _coded_by_hand(indices: list[int], k: int) -> tuple[list[int], list[int]]:
    """The bits of ``low`` and of ``unary``, gap by gap; ``low`` in groups of eight gaps, whose first bits come first."""
    gaps = [b - a - 1 for a, b in zip([-1, *indices], indices, strict=False)]
    low = [
        sum((gap >> bit & 1) << place for place, gap in enumerate(gaps[start : start + 8]))
        for start in range(0, len(gaps), 8)
        for bit in range(k)
    ]
    bits = [bit for gap in gaps for bit in [*[0] * (gap >> k), 1]]
    return low, [sum(bit << place for place, bit in enumerate(bits[start : start + 8])) for start in range(0, len(bits), 8)]


@given(st.integers(1, 3000), st.lists(st.sampled_from([0.0, 1e-3, 0.02, 0.3, 1.0]), min_size=1, max_size=4), st.integers(0, 999))
@settings(max_examples=60)
def test_rices_code_gives_back_rows_of_any_density(size: int, densities: list[float], seed: int) -> None:
    """Empty and full rows beside each other, whatever the others are; and the bytes are those of the code written by hand."""
    mask = torch.rand(len(densities), size, generator=torch.Generator().manual_seed(seed)) < torch.tensor(densities).unsqueeze(1)
    chosen = compact(torch.ones(mask.shape), mask)
    message = with_indices(chosen, Message((chosen.values,), chosen.counts.unsqueeze(1)), size, rice=True)
    for found in (message, packed_and_back(message)):
        indices, counts = read_indices(found, size, rice=True)
        assert counts.tolist() == mask.sum(1).tolist()
        for row, count in enumerate(counts.tolist()):
            assert indices[row, :count].tolist() == mask[row].nonzero().flatten().tolist()
        assert indices.numel() == 0 or 0 <= int(indices.min()) <= int(indices.max()) < size
    for row, k in enumerate(rice_bits(mask.sum(1), size).tolist()):
        low, unary = _coded_by_hand(mask[row].nonzero().flatten().tolist(), k)
        assert message.lengths[row].tolist() == [len(low), len(unary), int(mask[row].sum())]
        assert message.parts[0][row, : len(low)].tolist() == low
        assert message.parts[1][row, : len(unary)].tolist() == unary


@pytest.mark.parametrize("count", [2, 17, 64, 65, 700, 2000, 3000])
def test_rices_parameter_is_the_best_and_near_the_entropy(count: int) -> None:
    """For places that are independent of each other: no other ``k`` is shorter, and the best is 4 % above the entropy at most."""
    size, p = 4096, count / 4096
    bits = [k + 1 / (1 - (1 - p) ** 2**k) for k in range(14)]
    found = bits[int(rice_bits(torch.tensor([count]), size))]
    assert found <= min(bits) * 1.001
    entropy = -math.log2(p) - (1 - p) / p * math.log2(1 - p)
    assert found <= 1.04 * entropy or p > 0.5  # a bitmap, one bit per place, where most are sent
    assert found <= 1 / p + 1e-9


def test_chunked_top_k_sends_an_index_in_seven_and_a_half_bits() -> None:
    rows = torch.randn(1, 64 * 4096, generator=torch.Generator().manual_seed(0))
    message, _ = through(compressor("topk(64/4096)"), rows)
    assert 7.3 < 8 * float(message.lengths[0, :2].sum()) / 4096 < 7.6
    assert message.payload_bytes().tolist() == [3 * 4 + int(message.lengths[0, :2].sum()) + 4 * 4096]
    small, _ = through(compressor("topk(64/4096) | bins(2)"), rows)
    assert small.payload_bytes().tolist() == [4 * 4 + int(message.lengths[0, :2].sum()) + 8 * 2 * 4 + 4096 // 4]
    assert 4 * rows.numel() / int(small.payload_bytes()) > 200


@pytest.mark.parametrize("text", ["topk(0.02)", "threshold(2.5)", "threshold(keep=0.02) | sign", "topk(0.02) | qsgd(4)"])
def test_the_code_of_indices_changes_bytes_and_nothing_else(text: str) -> None:
    rows = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    plain, expected = through(compressor(text), rows)
    rice, decoded = through(compressor(text.replace(")", ", indices=rice)", 1)), rows)
    assert torch.equal(decoded, expected)
    assert bool((rice.payload_bytes() < plain.payload_bytes()).all())


def test_deep_gradient_compression_takes_rices_code() -> None:
    cluster = {code: VirtualCluster(2) for code in ("plain", "rice")}
    heard = {}
    for code, workers in cluster.items():
        channel = AllReduce().bind(workers, workers.world, 0)
        rows = torch.randn(2, 40000, generator=torch.Generator().manual_seed(0))
        heard[code] = DGC(0.05, indices=code).mean(rows, channel, {}, context(2)).mixed
    assert torch.equal(heard["plain"], heard["rice"])
    assert bool((cluster["rice"].ledger.bytes_sent < cluster["plain"].ledger.bytes_sent).all())


@pytest.mark.parametrize("text", ["topk(0.1)", "topk(64/4096) | bins(2)", "bins(2)", "cast(e3m0)", "threshold(0.1, indices=rice)"])
def test_a_slice_may_be_empty(text: str) -> None:
    """A bucket has fewer values than there are servers."""
    message, decoded = through(compressor(text), torch.zeros(2, 0))
    assert decoded.shape == compressor(text).decode(packed_and_back(message), 0, context(2)).shape == (2, 0)


# --- chunks ---------------------------------------------------------------------------------------------------------------------


@given(_rows(), st.integers(1, 20), st.data())
def test_chunked_top_k_is_top_k_of_each_chunk(rows: Tensor, of: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, of))
    codec = TopK(Ratio(count, of))
    _, decoded = through(codec, rows)
    sent = 0
    for start in range(0, rows.shape[1], of):
        chunk, found = rows[:, start : start + of], decoded[:, start : start + of]
        k = -(-count * chunk.shape[1] // of)
        sent += k
        largest = chunk.abs().topk(k, 1).values.sort(1).values
        assert torch.equal(found.abs().topk(k, 1).values.sort(1).values, largest)
        assert bool(((found == chunk) | (found == 0)).all())
        assert int((found != 0).sum(1).max()) <= k
    assert codec.max_selected(rows.shape[1]) == sent


def test_chunks_need_no_view_of_the_whole_model() -> None:
    assert not compressor("topk(64/4096)").global_selection
    assert not compressor("topk(64/4096) | bins(2)").single_bucket
    assert compressor("topk(0.015625)").global_selection
    assert compressor("topk(64/4096)").sends_per_value(128) == 2.0


# --- decay ----------------------------------------------------------------------------------------------------------------------


def test_a_residual_counts_by_its_decay() -> None:
    rows, residual = torch.randn(2, 1, 300, generator=torch.Generator().manual_seed(0))
    wanted = []

    def send(values: Tensor) -> tuple[None, Tensor]:
        wanted.append(values)
        return None, values.floor()

    for decay, expected in ((1.0, rows + residual), (0.75, rows + 0.75 * residual)):
        _, kept = with_feedback(rows, residual, decay, send)
        assert torch.equal(wanted[-1], expected)
        assert torch.equal(kept, wanted[-1] - wanted[-1].floor())


@pytest.mark.parametrize("text", ["topk(0.1)", "threshold(keep=0.2)", "randomk(0.2)", "sign", "bins(2)", "cast(fp8)", "lowrank(1)"])
def test_a_decay_of_one_is_plain_feedback_bit_for_bit(text: str) -> None:
    name, _, arguments = text.removesuffix(")").partition("(")
    texts = [f"{name}({', '.join([*filter(None, [arguments]), f'feedback={value}'])})" for value in ("True", "1.0", "1", "0.5")]
    plain, *others = (_after_exchanges(compressor(t)) for t in (text, *texts))
    for same in others[:3]:
        assert torch.equal(same, plain)
    assert not torch.equal(others[3], plain)


def _after_exchanges(codec) -> Tensor:
    cluster, state = VirtualCluster(3), {}
    channel, generator = AllReduce().bind(cluster, cluster.world, 0), torch.Generator().manual_seed(0)
    heard = []
    for t in range(5):
        where = context(3, step=t, exchange=t, shapes=((5, 8), (10,)))
        mixed, state = channel.gradients(codec, torch.randn(3, 50, generator=generator), state, where)
        heard.append(mixed)
    return torch.cat(heard)


@pytest.mark.parametrize("text", ["topk(0.2, feedback=0.5)", "topk(2/10, feedback=0.5) | bins(2)", "sign(feedback=0.5)"])
def test_senders_and_slice_owners_forget_alike(text: str) -> None:
    """Two exchanges by hand: slices are coded by their senders, averaged and coded again by their owner, both with decay."""
    codec, cluster, state = compressor(text), VirtualCluster(2), {}
    channel = AllReduce().bind(cluster, cluster.world, 0)
    sender_error, owner_error = torch.zeros(2, 40), torch.zeros(2, 20)
    for t, rows in enumerate(torch.randn(3, 2, 40, generator=torch.Generator().manual_seed(0))):
        where = context(2, step=t, exchange=t)
        whole = channel.whole_gradients(codec, rows, state, where)
        heard, state = channel.gradients(codec, rows, state, where)
        slices = (
            (rows + 0.5 * sender_error).view(2, 20, 2).mT if codec.global_selection else (rows + 0.5 * sender_error).view(2, 2, 20)
        )
        sent = through(codec, slices.reshape(4, 20), context(4))[1].view(2, 2, 20)
        mean = sent.mean(0) + 0.5 * owner_error
        expected = through(codec, mean, where)[1]
        everything = slices.mean(0) + 0.5 * owner_error
        sender_error, owner_error = (slices - sent), mean - expected
        joined = [x.mT.reshape(-1) if codec.global_selection else x.reshape(-1) for x in (expected, everything)]
        sender_error = (sender_error.mT if codec.global_selection else sender_error).reshape(2, 40)
        torch.testing.assert_close(heard, joined[0].expand(2, -1))
        torch.testing.assert_close(whole, joined[1].expand(2, -1))


# --- four bits and two ----------------------------------------------------------------------------------------------------------

_E3M0 = torch.tensor([0.0, *(2.0**-k for k in range(7))])


@given(st.lists(st.sampled_from([*_E3M0.tolist(), *(-_E3M0).tolist()]), max_size=40), st.sampled_from([1.0, 3.7, -1e-20, 1e30]))
def test_values_that_e3m0_has_are_exact(units: list[float], scale: float) -> None:
    rows = torch.tensor([[1.0, *units]]) * scale
    assert torch.equal(through(Cast("e3m0"), rows)[1], rows)


def test_e3m0_rounds_to_the_nearest_of_each_blocks_values() -> None:
    rows = torch.randn(2, 1200, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(0, -4, 1200)
    message, decoded = through(Cast("e3m0"), rows)
    for row, found in zip(rows, decoded, strict=True):
        for block, got in zip(row.split(512), found.split(512), strict=True):
            table = block.abs().max() * torch.cat([_E3M0, -_E3M0])
            torch.testing.assert_close((got - block).abs(), (block.unsqueeze(1) - table).abs().amin(1), rtol=0, atol=1e-7)
    assert message.payload_bytes().tolist() == [3 * 4 + 600] * 2
    assert compressor("cast(e3m0)").uses_error_feedback
    assert not compressor("cast(e3m0, feedback=False)").uses_error_feedback


def _equal_bins(rows: Tensor, bits: int) -> Tensor:
    """As in the paper: equal bins over 6σ around the mean of a row, each with the mean of its values."""
    count, centred = 2**bits, rows - rows.mean(1, keepdim=True)
    codes = (centred / (6 * centred.std(1, keepdim=True) / count) + count / 2).floor().clamp(0, count - 1)
    decoded = torch.zeros_like(rows)
    for k in range(count):
        members = codes == k
        decoded += members * (rows * members).sum(1, keepdim=True) / members.sum(1, keepdim=True).clamp(min=1)
    return decoded


def _rounded(rows: Tensor, bits: int) -> Tensor:
    """Equal levels over 6σ around zero, and each value to the nearest."""
    width, half = 6 * rows.std(1, keepdim=True) / 2**bits, 2 ** (bits - 1)
    return ((rows / width).floor().clamp(-half, half - 1) + 0.5) * width


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("chosen", [False, True], ids=["all", "top-k"])
@pytest.mark.parametrize("tails", ["normal", "laplace", "student"])
def test_bins_err_less_than_rounding_and_than_equal_bins(bits: int, chosen: bool, tails: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(16, 8 * 4096, generator=generator)
    if tails != "normal":
        values *= torch.empty_like(values).exponential_(generator=generator).sqrt()
    if tails == "student":
        values /= torch.rand(values.shape, generator=generator).sqrt()
    rows = TopK(Ratio(64, 4096)).select(values, torch.zeros(16), {}, context(16))[0].values if chosen else values[:, :512]
    assert rows.shape == (16, 512)
    error = (through(Bins(bits), rows)[1] - rows).norm()
    assert error <= (_rounded(rows, bits) - rows).norm()
    assert error <= (_equal_bins(rows, bits) - rows).norm()


def test_bins_are_means_of_what_they_stand_for() -> None:
    rows = torch.randn(2, 700, generator=torch.Generator().manual_seed(0))
    message, decoded = through(Bins(2), rows)
    assert message.payload_bytes().tolist() == [2 * 2 * 4 + 175] * 2
    for row, found in zip(rows, decoded, strict=True):
        for block, got in zip(row.split(512), found.split(512), strict=True):
            assert torch.equal(got.sign(), block.sign())
            assert got.abs().unique().numel() == 2
            for level in got.abs().unique():
                torch.testing.assert_close(level, block[got.abs() == level].abs().mean())


CODECS = [text for text in COMPRESSION if compressor(text).codec is not None]


@pytest.mark.parametrize("text", CODECS)
def test_rows_without_values_and_with_one_pass_through_every_code(text: str) -> None:
    """A shard or a worker may own an empty slice of a small bucket."""
    codec = compressor(text).codec
    assert codec is not None
    for size in (0, 1):
        message, decoded = through(codec, torch.ones(2, size))
        assert decoded.shape == (2, size)
        assert message.rows == 2


@pytest.mark.parametrize("text", ["qsgd(3)", "qsgd(4, block=100)", "sign", "natural", "ternary", "cast(fp8)", "cast(e3m0)"])
def test_tiles_change_no_bit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, rows, keys = Strategy.parse(text).compression, torch.randn(2, 9_999), torch.tensor([3, 4])
    here = Context(0, 0, 0, 0, torch.arange(2))
    whole, _ = code.encode(rows, keys, {}, here)
    decoded = code.decode(whole, 9_999, here)
    monkeypatch.setattr("hocket.compression.tiles.TILE", 64)
    tiled, _ = code.encode(rows, keys, {}, here)
    assert all(torch.equal(a, b) for a, b in zip(whole.parts, tiled.parts, strict=True))
    assert torch.equal(code.decode(tiled, 9_999, here), decoded)

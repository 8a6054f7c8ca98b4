"""Laws of strategies at work: each equals its formula, and in its trivial cases it equals plain training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hocket
from hocket.cluster import Message, Subgroups, VirtualCluster, layout_of
from hocket.cluster.message import FRAME_BYTES, HEADER_SHARE, framed, ring_bytes
from hocket.cluster.relay import gather_trips, radix_for
from hocket.compression.kernels.build import library
from hocket.errors import HocketError
from hocket.programs.collective import CollectiveProgram, _weigh
from hocket.strategy import Strategy
from hocket.sync import DiLoCo
from hocket.topology import Gossip
from virtual.methods import COMPRESSION, SYNC, TOPOLOGY
from virtual.world import FEATURES, Tiny, World, gradients, plain, row_of, seeded, sgd

LR, STEPS = 0.2, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def _valid(*parts: str) -> bool:
    try:
        Strategy.parse(" + ".join(parts))
    except HocketError:
        return False
    return True


# --- one worker ------------------------------------------------------------------------------------------------------------

ALONE = [t for t in TOPOLOGY if "size" not in t and "matrix" not in t] + ["hierarchical(allreduce, gossip)"]


@pytest.mark.parametrize("sync", [s for s in SYNC if "diloco" not in s])
@pytest.mark.parametrize("exchange", ["", "exchange=weights", "exchange=gradients"])
def test_one_worker_is_plain_training_bit_for_bit_and_sends_nothing(sync: str, exchange: str) -> None:
    optimizer = sgd(LR)
    expected = None
    for topology in ALONE:
        for compression in COMPRESSION:
            parts = [p for p in (sync, topology, compression, exchange) if p]
            if not _valid(*parts):
                continue
            world = World(" + ".join(parts), workers=1, optimizer=optimizer).step(STEPS)
            expected = plain(world, steps=STEPS, optimizer=optimizer) if expected is None else expected
            assert torch.equal(world.rows[0], expected), parts
            assert (world.sent, world.cluster.ledger.exchanges) == ([0], 0), parts


# --- exact definitions -----------------------------------------------------------------------------------------------------


FULL = "gossip(matrix=[" + ", ".join(["[0.25, 0.25, 0.25, 0.25]"] * 4) + "])"


@pytest.mark.parametrize("topology", ["allreduce", "hierarchical(size=2)", f"{FULL} + gradients"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_bulk_is_one_model_on_the_whole_batch(topology: str, momentum: float) -> None:
    world = World(f"bulk + {topology}", optimizer=sgd(LR, momentum=momentum)).step(STEPS)
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=momentum)
    for t in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(world.x[t].flatten(0, 1)), world.y[t].flatten()).backward()
        optimizer.step()
    for row in world.rows:
        torch.testing.assert_close(row, row_of(model, world), **CLOSE)


def _reference(world: World, steps: int, mix, start: torch.Tensor) -> torch.Tensor:
    """``w ← mix(t, w) − η g(w)``; ``mix`` says what the weights before the update become."""
    rows = start.expand(world.cluster.size, -1).clone()
    for t in range(1, steps + 1):
        update = -LR * gradients(rows, world, t - 1)
        rows = mix(t, rows) + update
    return rows


def _start(world: World) -> torch.Tensor:
    return row_of(seeded(), world)


@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("caps", [(10**6, 10**6), (16, 16)], ids=["one bucket", "many buckets"])
def test_local_is_its_formula(p: int, caps: tuple[int, int]) -> None:
    """w_t = mean_j w_{t−1,j} + u_i when t mod p = 0, with u_i computed at w_{t−1,i}."""
    world = World(f"local({p})", caps=caps).step(STEPS)
    expected = _reference(world, STEPS, lambda t, w: w if t % p else w.mean(0).expand_as(w), _start(world))
    torch.testing.assert_close(world.rows, expected, **CLOSE)
    assert (world.rows[0] - world.rows[1]).norm() > 1e-3  # replicas stay an update apart


def test_bulk_with_weights_is_local_of_one() -> None:
    assert torch.equal(World("bulk + exchange=weights").step(STEPS).rows, World("local(1)").step(STEPS).rows)


def test_local_with_the_mean_after_the_update() -> None:
    world = World("local(3, mean=after)").step(STEPS)
    rows = _start(world).expand(4, -1).clone()
    for t in range(1, STEPS + 1):
        rows = rows - LR * gradients(rows, world, t - 1)
        rows = rows if t % 3 else rows.mean(0).expand_as(rows)
    torch.testing.assert_close(world.rows, rows, **CLOSE)
    assert torch.equal(*World("local(2, mean=after)").step(4).rows[:2])


def test_local_exchange_of_gradients() -> None:
    world = World("local(2) + exchange=gradients").step(STEPS)
    rows = _start(world).expand(4, -1).clone()
    for t in range(1, STEPS + 1):
        g = gradients(rows, world, t - 1)
        rows = rows - LR * (g if t % 2 else g.mean(0))
    torch.testing.assert_close(world.rows, rows, **CLOSE)


@pytest.mark.parametrize("kind", ["rotating", "ring", "exponential", "random"])
@pytest.mark.parametrize("sync, p", [("bulk", 1), ("local(2)", 2)])
def test_gossip_of_weights_is_its_formula(kind: str, sync: str, p: int) -> None:
    """w_t = Σ_j K_ij w_{t−1,j} + u_i, the partners advancing once per exchange."""
    from unit.test_topology import matrix

    world = World(f"{sync} + gossip({kind})", workers=5).step(STEPS)
    expected = _reference(
        world, STEPS, lambda t, w: w if t % p else matrix(Gossip(kind).partners(5, t // p - 1), 5) @ w, _start(world)
    )
    torch.testing.assert_close(world.rows, expected, **CLOSE)


def test_gossip_of_gradients_is_its_formula() -> None:
    from unit.test_topology import matrix

    world = World("local(2) + gossip + exchange=gradients", workers=5).step(STEPS)
    rows = _start(world).expand(5, -1).clone()
    for t in range(1, STEPS + 1):
        g = gradients(rows, world, t - 1)
        rows = rows - LR * (g if t % 2 else matrix(Gossip().partners(5, t // 2 - 1), 5) @ g)
    torch.testing.assert_close(world.rows, rows, **CLOSE)


@pytest.mark.parametrize("after", [0, 3, 4])
def test_postlocal_is_bulk_until_after_and_then_local(after: int) -> None:
    world = World(f"postlocal(2, {after})")
    if after:
        assert torch.equal(world.step(after).rows, World("bulk").step(after).rows)
        assert torch.equal(*world.rows[:2])
    world.step(STEPS - after)
    rows = World("bulk").step(after).rows if after else _start(world).expand(4, -1)
    for t in range(after + 1, STEPS + 1):
        update = -LR * gradients(rows, world, t - 1)
        rows = (rows if t % 2 else rows.mean(0).expand_as(rows)) + update
    torch.testing.assert_close(world.rows, rows, **CLOSE)


@pytest.mark.parametrize("compression", ["topk(0.2)", "sign", "lowrank(1)", "topk(0.3) | qsgd(4)"])
@pytest.mark.parametrize("topology", ["allreduce", "hierarchical(size=2)"])
def test_postlocal_has_sent_all_gradients_of_its_bulk_phase_when_it_ends(topology: str, compression: str) -> None:
    """The gradients of a linear loss do not depend on the weights: after the phase the mean of all of them has arrived."""
    linear = {"make": lambda: torch.nn.Linear(4, 3), "loss": lambda out, y: out.gather(1, y[:, None]).mean()}
    ended = World(f"postlocal(2, 4) + {topology} + {compression}", **linear).step(3)
    uncompressed = World(f"postlocal(2, 4) + {topology}", **linear).step(3)
    assert not torch.allclose(ended.rows, uncompressed.rows, **CLOSE)
    for _ in range(2):
        torch.testing.assert_close(ended.step().rows, uncompressed.step().rows, **CLOSE)
    assert ended.replicas.program.gradient_state == [{} for _ in ended.replicas.layout.buckets]


@pytest.mark.parametrize("workers", [1, 4])
def test_diloco_is_torchs_nesterov_on_the_mean_displacement(workers: int) -> None:
    world = World("diloco(2, lr=0.7, momentum=0.9)", workers=workers).step(STEPS)
    outer = torch.nn.Parameter(_start(world))
    optimizer = torch.optim.SGD([outer], 0.7, momentum=0.9, nesterov=True)
    rows = outer.detach().expand(workers, -1).clone()
    for t in range(1, STEPS + 1):
        rows = rows - LR * gradients(rows, world, t - 1)
        if t % 2 == 0:
            outer.grad = outer.detach() - rows.mean(0)
            optimizer.step()
            rows = outer.detach().expand(workers, -1).clone()
    torch.testing.assert_close(world.rows, rows, **CLOSE)


STREAMS = {
    "fragments=2": {"fragments": 2},
    "fragments=3, outer=heavyball": {"fragments": 3, "outer": "heavyball"},
    "overlap=2": {"overlap": 2},
    "overlap=4": {"overlap": 4},
    "fragments=2, overlap=1": {"fragments": 2, "overlap": 1},
    "fragments=2, overlap=2, mix=0.25": {"fragments": 2, "overlap": 2, "mix": 0.25},
    "overlap=3, mix=0": {"overlap": 3, "mix": 0.0},
    "overlap=1, mix=0.75": {"overlap": 1, "mix": 0.75},
    "overlap=3, keep=0": {"overlap": 3, "keep": 0.0},
    "overlap=4, keep=eager": {"overlap": 4, "keep": 0.25},
    "fragments=4, overlap=1, keep=0.5": {"fragments": 4, "overlap": 1, "keep": 0.5},
}


@pytest.mark.parametrize("text", STREAMS)
def test_fragments_and_overlap_follow_their_equations(text: str) -> None:
    """Every fragment has its turn; what returns after ``overlap`` steps meets the progress made meanwhile; none of it is lost."""
    world = World(f"diloco(4, lr=0.7, momentum=0.6, {text})", caps=(4, 4)).step(14)
    sizes = [bucket.size for bucket in world.replicas.layout.buckets]
    assert len(sizes) == 4
    torch.testing.assert_close(world.rows, _streamed(world, sizes, **STREAMS[text]), **CLOSE)


def _streamed(
    world: World, sizes: list[int], fragments: int = 1, overlap: int = 0, keep: float = 1, mix: float | None = None, outer: str = ""
) -> Tensor:
    """The equations of ``diloco(4, lr=0.7, momentum=0.6)`` with fragments and overlap, by the letter."""
    common = _start(world)
    rows, velocity = common.expand(4, -1).clone(), torch.zeros_like(common)
    parts = [torch.cat(torch.arange(sum(sizes)).split(sizes)[f::fragments]) for f in range(fragments)]
    held, travelling, turn = torch.zeros_like(rows), [], 0
    for t in range(1, 15):
        rows = rows - LR * gradients(rows, world, t - 1)
        begins = t * fragments // 4 > (t - 1) * fragments // 4
        for begin in (False, True):  # what arrives after this step comes before what leaves after it
            if begin and begins:
                at = parts[turn % fragments]
                travelling.append((t + overlap, at, rows[:, at].clone(), (rows + held)[:, at].mean(0)))
                turn += 1
            while travelling and travelling[0][0] == t:
                _, at, sent, mean = travelling.pop(0)
                delta = common[at] - mean
                velocity[at] = 0.6 * velocity[at] + delta
                common[at] -= 0.7 * (velocity[at] if outer else delta + 0.6 * velocity[at])
                progress = rows[:, at] - sent
                rows[:, at] = common[at] + keep * progress if mix is None else mix * rows[:, at] + (1 - mix) * common[at]
                held[:, at] = (1 - keep) * progress
    return rows


def test_a_mix_is_the_share_of_local_weights_after_an_exchange() -> None:
    """0: all go on from the outer weights; near 1: each worker from its own, as if it were alone; between: the blend exactly."""
    common, rows, sent = torch.arange(8.0).expand(4, -1), torch.arange(32.0).view(4, 8), torch.rand(4, 8)
    for mix in (0.0, 0.25, 0.5, 0.75):
        sync = DiLoCo(4, overlap=1, mix=mix)
        assert torch.equal(sync.merge(common, rows, sent, {}, 4)[0], mix * rows + (1 - mix) * common)
    common, alone, near = (
        World(text).step(5).rows for text in ("diloco(4, overlap=1, mix=0)", "local(6)", "diloco(4, overlap=1, mix=0.9999999)")
    )
    assert torch.equal(common, common[:1].expand_as(common))
    torch.testing.assert_close(near, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(common, alone, rtol=1e-2)


@pytest.mark.parametrize("topology", ["gossip(exponential)", "gossip", "hierarchical(size=2, every=2)", "allreduce"])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_every_fragment_reaches_consensus(topology: str, fragments: int) -> None:
    """Nobody trains: each fragment must count its own exchanges, or it would always have the same partners."""
    world = World(f"diloco(6, lr=1, momentum=0, fragments={fragments}) + {topology}", caps=(4, 4))
    for rows in world.replicas.weights:
        rows.normal_(generator=torch.Generator().manual_seed(0))
    for _ in range(240):
        world.replicas.program.after_update(world.replicas.weights)
    torch.testing.assert_close(world.rows, world.rows.mean(0, keepdim=True).expand_as(world.rows), rtol=0, atol=1e-3)


def test_the_mean_model_holds_the_progress_that_workers_hold_back() -> None:
    world = World("diloco(2, lr=1, momentum=0, overlap=2, keep=0)", caps=(4, 4))
    start, weights = _start(world), world.replicas.weights
    for _ in range(6):
        for rows in weights:
            rows += 1.0
        world.replicas.program.after_update(weights)
    torch.testing.assert_close(world.rows[0], start + 4)
    with world.replicas.averaged() as model:
        torch.testing.assert_close(row_of(model, world), start + 6)


def test_norms_of_the_guard_are_those_of_float32() -> None:
    rows = torch.full((2, 4160), 1e-4, dtype=torch.float16)
    rows[1] *= 2
    sync, seen = Strategy.parse("diloco(2, guard=3)").sync, []
    watched = type("Watched", (), {"factors": lambda self, norms, state: (seen.append(norms), sync.factors(norms, state))[1]})()
    _weigh(watched, VirtualCluster(2), rows, {"outer": torch.zeros(2, 4160)})
    torch.testing.assert_close(seen[0][0], torch.tensor([1e-4, 2e-4]) * 4160**0.5, rtol=1e-2, atol=0)


def test_an_exchange_that_travels_for_one_step_is_that_of_local() -> None:
    """Both add this step's update to the mean of the weights from before it."""
    one, two = World("diloco(1, lr=1, momentum=0, overlap=1)").step(STEPS), World("local(1)").step(STEPS)
    torch.testing.assert_close(one.rows, two.rows, **CLOSE)


def test_noloco_is_an_outer_heavy_ball_among_partners() -> None:
    """``m ← a·m + η·mean(θ − φ) + η·(mean φ − φ)``, ``φ ← φ + m`` (arXiv:2506.10911), with the matrix of each exchange."""
    matrix = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]]).double()
    text = "[" + ", ".join(str(row) for row in matrix.tolist()) + "]"
    world = World(f"diloco(3, outer=heavyball(0.7, 0.5)) + gossip(matrix={text})").step(12)
    phi = _start(world).expand(4, -1).clone()
    theta, momentum = phi.clone(), torch.zeros_like(phi)
    for t in range(1, 13):
        theta = theta - LR * gradients(theta, world, t - 1)
        if t % 3 == 0:
            momentum = 0.5 * momentum + 0.7 * matrix @ (theta - phi) + 0.7 * (matrix @ phi - phi)
            phi = phi + momentum
            theta = phi.clone()
    torch.testing.assert_close(world.rows, theta, **CLOSE)


def test_the_guard_weighs_displacements_and_leaves_out_what_is_not_finite() -> None:
    world = World("diloco(2, lr=1, momentum=0, guard=3)").step(4)
    rows = outer = _start(world).expand(4, -1).clone()
    for t in range(1, 5):
        rows = rows - LR * gradients(rows, world, t - 1)
        if t % 2 == 0:
            delta = rows - outer
            outer = outer + (torch.softmax(-delta.norm(dim=1), 0)[:, None] * delta).sum(0)
            rows = outer.clone()
    torch.testing.assert_close(world.rows, rows, **CLOSE)
    world.replicas.weights[0][2, 0] = torch.inf
    program = world.replicas.program
    before = program.outer_state[0]["outer"].clone()
    program.after_update(world.replicas.weights)
    program.after_update(world.replicas.weights)
    assert torch.isfinite(world.rows).all()
    torch.testing.assert_close(world.replicas.weights[0], before)  # the others have not moved since


# --- nothing lost is nothing changed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["topk(1.0)", "threshold(0)", "randomk(1.0)", "threshold(keep=1)"])
@pytest.mark.parametrize("base", [
    "bulk + allreduce", "bulk + gossip + exchange=gradients", "local(2) + allreduce", "local(2) + gossip", "diloco(2) + allreduce",
    "postlocal(2, 3)", "bulk + gossip(ring)", "hierarchical(allreduce, gossip, size=2)",
    "diloco(2) + hierarchical(size=2, every=2)",
])  # fmt: skip
def test_a_code_that_loses_nothing_changes_nothing(base: str, compression: str) -> None:
    plainly, coded = World(base).step(STEPS), World(f"{base} + {compression}").step(STEPS)
    torch.testing.assert_close(coded.rows, plainly.rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sync", ["bulk", "local(2)", "local(2, mean=after)", "diloco(2)"])
@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_the_full_matrix_is_allreduce(sync: str, exchange: str) -> None:
    if not _valid(sync, f"exchange={exchange}"):
        return  # diloco and mean=after are about weights
    one, two = (World(f"{sync} + {t} + exchange={exchange}").step(STEPS) for t in (FULL, "allreduce"))
    torch.testing.assert_close(one.rows, two.rows, **CLOSE)


@pytest.mark.parametrize("topology", ["allreduce", "gossip", "hierarchical(gossip, gossip, size=2)", "hierarchical(size=2)"])
@pytest.mark.parametrize("exchange", ["weights", "gradients"])
def test_float64_stays_float64_without_compression(topology: str, exchange: str) -> None:
    layout = layout_of(torch.nn.Linear(3, 2).double().named_parameters())
    weights = [torch.full((4, 8), 1 / 3, dtype=torch.float64)]
    program = CollectiveProgram(Strategy.parse(f"bulk + {topology} + exchange={exchange}"), layout, VirtualCluster(4), weights)
    rows = [w.clone() for w in weights]
    program.gradient_ready(0, rows[0])
    program.gradients_done()
    program.before_update(weights)
    for mixed in (rows[0], weights[0]):
        torch.testing.assert_close(mixed, torch.full_like(mixed, 1 / 3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", [
    "postlocal(2, 3) + hierarchical(gossip, allreduce, size=2)", "diloco(2) + hierarchical(size=2, every=2)",
    "diloco(2) + hierarchical(gossip, allreduce, size=2, every=2)",
])  # fmt: skip
def test_displacements_count_from_a_place_that_all_share(text: str) -> None:
    """A nearly exact code changes nearly nothing: references that differ between workers would keep replicas apart for ever."""
    one, two = (World(t, optimizer=sgd(0.05)).step(16) for t in (text, f"{text} + topk(0.98, feedback=False)"))
    torch.testing.assert_close(two.rows, one.rows, rtol=0, atol=0.02)


# --- uneven batches --------------------------------------------------------------------------------------------------------


def test_uneven_last_batches_weigh_by_samples() -> None:
    """Three workers, batches of 4 and a last round of 2, 2, 1: bulk equals one model on the same samples."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(29, FEATURES, generator=generator), torch.randint(0, 3, (29,), generator=generator)
    options = {"optimizer": sgd(LR), "epochs": 2, "evaluate": False}
    many = hocket.simulate(Tiny, F.cross_entropy, (x, y), workers=3, batch_size=4, strategy="bulk", **options)
    one = hocket.simulate(Tiny, F.cross_entropy, (x, y), workers=1, batch_size=12, **options)
    for a, b in zip(many.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# --- traffic ---------------------------------------------------------------------------------------------------------------

CODED = [c for c in COMPRESSION if c != "none"]


class _Bare(VirtualCluster):
    """Counts what is in the messages, frames and headers aside."""

    def _count_mean(self, rows: torch.Tensor, subgroups: Subgroups) -> None:
        self.ledger.sent += 2 * (subgroups.size - 1) * rows.shape[1] * rows.element_size() // subgroups.size

    def _count_messages(self, message: Message, copies: torch.Tensor | int) -> None:
        self.ledger.sent += (message.payload_bytes() * copies).view(self.rows, -1).sum(1)

    def _radix(self, *_: object) -> None:
        """All messages go directly."""


def _payload(text: str, workers: int, size: int = 60_000) -> int:
    """Bytes one worker sends for one exchange of gradients."""
    cluster = _Bare(workers)
    layout = layout_of(torch.nn.Linear(size // 200 - 1, 200).named_parameters())
    program = CollectiveProgram(Strategy.parse(text), layout, cluster, [b.empty(workers) for b in layout.buckets])
    rows = torch.randn(workers, layout.buckets[0].size, generator=torch.Generator().manual_seed(0)) * 0.01
    program.gradient_ready(0, rows)
    program.gradients_done()
    return max(cluster.ledger.sent.tolist())


@pytest.mark.parametrize("compression", [c for c in CODED if "demo" not in c])  # demo's mean has the values of all workers
def test_compressed_allreduce_does_not_grow_with_the_workers(compression: str) -> None:
    two, eight, many = (_payload(f"bulk + {compression}", n) for n in (2, 8, 32))
    plainly = _payload("bulk", 2)
    assert two < 0.55 * plainly or "threshold(0.01)" in compression
    # 2(N−1)/N of the message, and a few bytes per slice (scales, lengths, rounding up to whole places).
    assert eight < 2.3 * two + 8 * 64
    assert many < 2.3 * two + 32 * 64
    assert many < _payload("bulk", 32)


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_plain_allreduce_sends_the_rings_bytes(workers: int) -> None:
    world = World("bulk", workers=workers, steps=3)
    world.step(3)
    parameters = sum(p.numel() for p in Tiny().parameters())
    messages = sum(len(trip.shifts) for trip in gather_trips(workers, radix_for(workers, 0, True)))
    flags = messages * framed(5)  # four parameters used or not, and one for what is not finite
    assert world.sent == [3 * (ring_bytes(4 * parameters, workers) + flags)] * workers


@pytest.mark.parametrize("workers", [4, 8, 32])
def test_gossip_sends_two_messages_whatever_the_number_of_workers(workers: int) -> None:
    world = World("gossip(ring)", workers=workers, steps=3).step(2)
    parameters = sum(p.numel() for p in Tiny().parameters())
    one = 4 * parameters + int(4 * parameters * HEADER_SHARE) + FRAME_BYTES
    assert world.sent == [3 * 2 * one] * workers  # two steps, and the mix for the third is on its way


# --- NaN and Inf -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bulk", "local(4)", "gossip + topk(0.1)"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_is_named_or_left_out(strategy: str, bad: float) -> None:
    world = World(strategy)
    world.x[1, 2, 0, 0] = bad
    world.step()
    with pytest.raises(hocket.NonFiniteGradient) as caught:
        world.step()
    for word in ("hidden.weight" if bad == float("inf") else "out.bias", "step 2", "worker 2"):
        assert word in str(caught.value)

    skipping = World(strategy, nonfinite="skip")
    skipping.x[1, 2, 0, 0] = bad
    skipping.step(6)
    assert bool(torch.isfinite(skipping.rows).all())
    assert skipping.cluster.ledger.nonfinite >= 1


class _Calls(TorchDispatchMode):
    """Counts calls of operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("code", "most"), [("qsgd(4)", 40), ("sign", 60), ("topk(0.1)", 80)])
def test_a_coded_exchange_starts_few_operations_however_many_workers(code: str, most: int) -> None:
    """On a GPU each operation of small rows costs as much as a fused kernel of large ones."""
    if library() is None:
        pytest.skip("there is no C++ compiler")
    counts = []
    for workers in (4, 8):
        world = World(f"bulk + {code}", workers=workers).step(3)
        program, grads = world.replicas.program, world.replicas.grads
        with _Calls() as calls:
            for bucket, rows in enumerate(grads):
                program.gradient_ready(bucket, rows)
            program.gradients_done()
        counts.append(calls.count)
    assert max(counts) < most
    assert counts[1] <= counts[0] + 4  # means that sum in worker order

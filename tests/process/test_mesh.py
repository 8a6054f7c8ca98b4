"""Laws of split models on real processes: whatever the mesh, the training is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hocket.cluster.message import framed, ring_bytes
from process.launch import Nursery
from process.meshes import STEPS, alone, build

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

TWO = ("tensor=2", "pipeline=2", "data=2")
FOUR = ("data=2,tensor=2", "data=2,pipeline=2", "pipeline=2,tensor=2", "tensor=4", "pipeline=4")
MODELS = ("mlp", "cnn", "vgg11", "gpt")
SCHEDULES = ("naive", "gpipe", "interleaved", "zero-bubble")  # 1f1b is everywhere else
HYBRID = ("local(2) + gossip", "diloco(2)", "bulk + topk(0.2)", "local(2) + qsgd(4)")


def cases(world: int) -> list[tuple[str, str, dict[str, Any]]]:
    wanted: list[tuple[str, str, dict[str, Any]]] = []
    for mesh in TWO if world == 2 else FOUR:
        names = MODELS if mesh not in ("tensor=4", "pipeline=4") else ("mlp", "gpt")
        wanted += [(f"{name} {mesh}", "equal", {"name": name, "mesh": mesh}) for name in names]
    if world == 2:
        wanted += [(f"hybrid {s}", "equal", {"name": "gpt", "mesh": "data=2", "strategy": s}) for s in HYBRID]
        wanted += [(f"drop {mesh}", "equal", {"name": "drop", "mesh": mesh}) for mesh in ("tensor=2", "pipeline=2")]
        wanted += [(f"taken {name}", "taken", {"name": name, "mesh": "pipeline=2", "folder": ""}) for name in ("mlp", "gpt")]
        wanted += [(f"stands in {mesh}", "stands_in", {"mesh": mesh}) for mesh in ("pipeline=2", "tensor=2")]
        wanted.append(("untouched", "untouched", {"mesh": "tensor=2"}))
        wanted.append(("two names", "equal", {"name": "tied", "mesh": "pipeline=2", "num_microbatches": 1, "schedule": "gpipe"}))
        dream = {"mesh": "pipeline=2", "schedule": "pipedream"}
        wanted += [(f"dream {name}", "equal", {"name": name, **dream}) for name in ("mlp", "gpt")]
        wanted += [
            (f"sharded {shard}", "sharded", way)
            for shard, way in (("state", {"sharding": "zero1"}), ("full", {"sharding": "fsdp"}))
        ]
        wanted.append(("state on a mesh", "equal", {"name": "mlp", "mesh": "data=2", "sharding": "zero1"}))
        wanted.append(("born", "born", {"mesh": None}))
        wanted += [(f"born {mesh}", "born", {"mesh": mesh}) for mesh in ("pipeline=2", "tensor=2")]
    else:
        wanted += [(f"hybrid {s}", "equal", {"name": "gpt", "mesh": "data=2,pipeline=2", "strategy": s}) for s in HYBRID]
        dream = {"mesh": "data=2,pipeline=2", "schedule": "pipedream"}
        wanted += [(f"dream {name}", "equal", {"name": name, **dream}) for name in ("mlp", "gpt")]
        for schedule in SCHEDULES:
            way = {"mesh": "data=2,pipeline=2", "schedule": schedule}
            wanted += [(f"{schedule} {name}", "equal", {"name": name, **way}) for name in ("mlp", "gpt")]
        wanted.append(("drop", "equal", {"name": "drop", "mesh": "pipeline=2,tensor=2"}))
        wanted += [
            (f"served {name} {mesh} {strategy}", "equal", {"name": name, "mesh": mesh, "strategy": strategy})
            for name, mesh, strategy in SERVED
        ]
        wanted.append(("other", "checkpoints", {"name": "gpt", "first": "pipeline=2,tensor=2", "then": "data=2,tensor=2"}))
        wanted.append(("resumed", "resumed", {"name": "gpt", "mesh": "data=2,pipeline=2"}))
        kept = {"name": "gpt", "mesh": "data=2,pipeline=2", "sharding": "zero1"}
        wanted.append(("resumed state", "resumed", kept))
        moved = {"name": "mlp", "first": "data=2,pipeline=2", "then": "data=2,tensor=2", "sharding": "zero1"}
        wanted.append(("other state", "checkpoints", moved))
        wanted += [(f"left {name}", "left", {"name": name, "mesh": "data=2,pipeline=2"}) for name in ("mlp", "gpt")]
        wanted.append(("elsewhere", "elsewhere", {"mesh": "data=2,pipeline=2", "cut": ["4"]}))
        wanted.append(("clipped", "clipped", {"name": "gpt", "mesh": "pipeline=2,tensor=2"}))
        wanted += [(f"refused {k}", "refused", arguments) for k, arguments in enumerate(REFUSED)]
    return wanted


SERVED = (
    ("gpt", "data=2,pipeline=2", "downpour(1, 1) + server"),  # its embedding is held by both stages
    ("gpt", "data=2,tensor=2", "downpour(1, 1) + server"),  # its norms are held by both parts
    ("gpt", "data=2,tensor=2", "bulk + server"),
)
REFUSED: list[dict[str, Any]] = [
    {"mesh": "data=3"},
    {"mesh": "pipeline=4", "name": "mlp", "schedule": "1f1b", "num_microbatches": 2},
    {"mesh": "data=2,pipeline=2", "schedule": "2f2b"},
    {"mesh": "tensor=4", "plan": {"1": "colums"}},
    {"mesh": "pipeline=2,tensor=2", "accumulate": 2},
    {"mesh": "data=2,tensor=2", "sharding": "fsdp"},
    {"mesh": "data=2,tensor=2", "sharding": "zero1", "strategy": "local(2)"},
    {"mesh": "data=2,tensor=2", "strategy": "async + gossip"},
    {"mesh": "data=2,pipeline=2", "name": "gpt", "strategy": "downpour(1, 1) + server", "schedule": "pipedream"},
    {"mesh": "data=2,tensor=2", "num_microbatches": 3},
    {"mesh": "data=2,pipeline=2", "plan": {"1": "columns"}},
    {"mesh": "data=2,pipeline=2", "schedule": "pipedream", "num_microbatches": 3},
]
SENTENCES = ("3 places, but the job has 4", "cannot fill 4 stages with 2", "no schedule '2f2b'", "columns", "leave accumulate=") + (
    "use ZeRO-1",
    "needs equal replicas",
    "use downpour + server",
    "cannot keep the parameter",
    "num_microbatches= is for a model cut into stages",
    "is for operations that are split",
    "leave num_microbatches= out",
)


@pytest.fixture(scope="module")
def worlds(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every process returned, per case, for two and for four processes."""
    found: dict[int, list[dict[str, Any]]] = {}
    folder = ""
    for size in (4, 2):  # two go on with what four have left
        wanted = [(label, f, {**given, "folder": folder} if f == "taken" else given) for label, f, given in cases(size)]
        group = nursery.start("process.meshes:main", size, tmp_path_factory.mktemp(f"mesh{size}"), wanted=wanted)
        folder = str(group.folder)
        assert group.wait(300, together=True) == [0] * size, group.said()
        found[size] = group.results()
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return {name: alone(name) for name in MODELS}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.mark.parametrize("mesh", [*TWO, *FOUR])
@pytest.mark.parametrize("name", MODELS)
def test_every_mesh_trains_as_one_process_does(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]], name: str, mesh: str
) -> None:
    size = 2 if mesh in TWO else 4
    if f"{name} {mesh}" not in worlds[size][0]:
        pytest.skip("mlp and gpt stand for all on four parts")
    results = [worker[f"{name} {mesh}"] for worker in worlds[size]]
    whole, losses = reference[name]
    assert furthest(results[0]["whole"], whole) < 1e-5
    assert furthest(whole, dict(build(name).state_dict())) > 1e-3
    if "data" not in mesh:
        assert all(r["losses"] == pytest.approx(losses, abs=1e-5) for r in results)
    else:  # each replica tells its own half's
        for step in range(STEPS):
            halves = {round(r["losses"][step], 6) for r in results}
            assert sum(halves) / len(halves) == pytest.approx(losses[step], abs=1e-5)


@pytest.mark.parametrize("strategy", HYBRID[:2])
def test_any_strategy_between_split_replicas_does_what_it_does_between_whole_ones(worlds: dict[int, Any], strategy: str) -> None:
    split, whole = worlds[4][0][f"hybrid {strategy}"], worlds[2][0][f"hybrid {strategy}"]
    assert furthest(split["whole"], whole["whole"]) < 1e-5


@pytest.mark.parametrize("strategy", HYBRID[2:])
def test_codes_between_split_replicas_leave_tied_copies_equal_and_the_model_trained(worlds: dict[int, Any], strategy: str) -> None:
    results = [worker[f"hybrid {strategy}"] for worker in worlds[4]]
    start = dict(build("gpt").state_dict())
    moved = {n: (results[0]["whole"][n] - start[n]).norm() / start[n].norm() for n in start}
    assert all(torch.isfinite(t).all() for t in results[0]["whole"].values())
    assert min(moved.values()) > 1e-6
    for first, last in ((0, 1), (2, 3)):  # the stages of a replica
        assert torch.equal(results[first]["tied"], results[last]["tied"])


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_replicas_of_an_asynchronous_pipe_train_as_one_on_all_samples(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]], name: str
) -> None:
    one, two = worlds[2][0][f"dream {name}"], worlds[4][0][f"dream {name}"]
    assert furthest(one["whole"], two["whole"]) < 1e-5
    assert furthest(one["whole"], reference[name][0]) > 1e-4  # late gradients lead elsewhere


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_replicas_under_every_schedule_train_as_one_process_does(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]], name: str, schedule: str
) -> None:
    results = [worker[f"{schedule} {name}"] for worker in worlds[4]]
    assert furthest(results[0]["whole"], reference[name][0]) < 1e-5
    for step in range(STEPS):  # a replica's processes agree on the loss of its half
        first, second = ({r["losses"][step] for r in results[k : k + 2]} for k in (0, 2))
        assert len(first) == len(second) == 1
        assert (first.pop() + second.pop()) / 2 == pytest.approx(reference[name][1][step], abs=1e-5)
    per_process = 2 if schedule == "interleaved" else 1
    assert {worker[f"{schedule} {name}"]["stages"] for worker in worlds[4]} == {2 * per_process}


def test_a_parameter_of_two_names_is_one(worlds: dict[int, Any]) -> None:
    found = worlds[2][0]["two names"]
    assert furthest(found["whole"], alone("tied")[0]) < 1e-5  # its running statistics too: there is one micro-batch
    build("tied").load_state_dict(found["whole"])


def test_dropout_is_that_of_the_whole_model_whatever_the_split(worlds: dict[int, Any]) -> None:
    found = [worlds[2][0]["drop tensor=2"], worlds[2][0]["drop pipeline=2"], worlds[4][0]["drop"]]
    assert furthest(found[0]["whole"], found[1]["whole"]) < 1e-5
    assert furthest(found[0]["whole"], found[2]["whole"]) < 1e-5
    assert found[0]["losses"] != pytest.approx(alone("gpt")[1], abs=1e-3)


def test_where_only_operations_are_split_the_plain_loop_trains(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]]
) -> None:
    assert furthest(worlds[2][0]["untouched"]["whole"], reference["mlp"][0]) < 1e-5


@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2"])
def test_a_mini_batch_that_stands_in_for_none_moves_no_weights(worlds: dict[int, Any], mesh: str) -> None:
    for worker in worlds[2]:
        nothing, something = worker[f"stands in {mesh}"]["moved"]
        assert nothing == 0 < something


@pytest.mark.parametrize("case", ["sharded state", "sharded full", "state on a mesh"])
def test_sharded_state_trains_as_one_process_does(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]], case: str
) -> None:
    for worker in worlds[2]:
        if worker[case]["whole"] is not None:
            assert furthest(worker[case]["whole"], reference["mlp"][0]) < 1e-5
    if case == "sharded state":
        values = sum(t.numel() for t in reference["mlp"][0].values())
        assert sum(worker[case]["state"] for worker in worlds[2]) == values
        assert max(worker[case]["state"] for worker in worlds[2]) < values


def test_a_model_born_in_parts_has_the_weights_of_one_born_whole(worlds: dict[int, Any]) -> None:
    whole = worlds[2][0]["born"]["whole"]
    assert furthest(whole, worlds[2][1]["born"]["whole"]) == 0
    assert furthest(worlds[2][0]["born pipeline=2"]["whole"], whole) == 0
    assert furthest(worlds[2][0]["born tensor=2"]["whole"], whole) == 0
    assert 0.05 < float(whole["1.weight"].std()) < 0.2


@pytest.mark.parametrize(("name", "mesh", "strategy"), SERVED)
def test_servers_between_split_replicas_leave_all_copies_equal(worlds: dict[int, Any], name: str, mesh: str, strategy: str) -> None:
    results = [worker[f"served {name} {mesh} {strategy}"] for worker in worlds[4]]
    for one, other in ((0, 2), (1, 3)):  # the same part of both replicas
        assert furthest(results[one]["ended"], results[other]["ended"]) == 0
    whole = {n: t.shape for n, t in build(name).state_dict().items()}
    common = [n for n, t in results[0]["ended"].items() if n in results[1]["ended"] and t.shape == whole[n]]
    assert common
    assert all(torch.equal(results[0]["ended"][n], results[1]["ended"][n]) for n in common)
    assert all(torch.isfinite(t).all() for t in results[0]["whole"].values())
    assert furthest(results[0]["whole"], dict(build(name).state_dict())) > 1e-3


@pytest.mark.parametrize(("name", "mesh", "strategy"), [case for case in SERVED if case[2].startswith("bulk")])
def test_a_server_of_means_trains_split_replicas_as_one_process_does(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]], name: str, mesh: str, strategy: str
) -> None:
    assert furthest(worlds[4][0][f"served {name} {mesh} {strategy}"]["whole"], reference[name][0]) < 1e-5


def test_a_split_model_goes_on_split_otherwise_and_its_whole_fits_an_unsplit_one(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]]
) -> None:
    results = [worker["other"] for worker in worlds[4]]
    assert furthest(results[0]["whole"], reference["gpt"][0]) < 1e-5
    saved = results[0]["saved"]
    model = build("gpt")
    model.load_state_dict(saved["model"])
    from process.meshes import batch, cross_entropy, optimizer_of

    optimizer = optimizer_of(model)
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(2, STEPS):
        x, y = batch("gpt", step)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert furthest(dict(model.state_dict()), reference["gpt"][0]) < 1e-5


@pytest.mark.parametrize("case", ["resumed", "resumed state"])
def test_resumed_equals_never_stopped(worlds: dict[int, Any], case: str) -> None:
    assert furthest(worlds[4][0][case]["whole"], worlds[4][0]["gpt data=2,pipeline=2"]["whole"]) == 0


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_fewer_replicas_begin_with_means_and_with_the_sum_of_what_was_owed_of_each_part(worlds: dict[int, Any], name: str) -> None:
    """The embedding of gpt is held by both stages."""
    for worker in worlds[2]:
        begun, saved = worker[f"taken {name}"]["state"], worker[f"taken {name}"]["saved"]
        for field, tensor in begun["model"].items():
            torch.testing.assert_close(tensor, torch.stack([one["model"][field] for one in saved]).mean(0))
        for k, entries in begun["optimizer"]["state"].items():
            momenta = [one["optimizer"]["state"][k]["momentum_buffer"] for one in saved]
            torch.testing.assert_close(entries["momentum_buffer"], torch.stack(momenta).mean(0))
        owed = [[bucket["error"] for bucket in one["job"]["gradient_state"]] for one in saved]
        for bucket, *others in zip(begun["job"]["gradient_state"], *owed, strict=True):
            assert len(others) == 2
            torch.testing.assert_close(bucket["error"], others[0] + others[1])
            assert not torch.equal(others[0], others[1])
        assert begun["step"] == begun["job"]["step"] == 3


def test_sharded_state_goes_on_where_the_model_is_split_otherwise(
    worlds: dict[int, Any], reference: dict[str, tuple[dict[str, Tensor], list[float]]]
) -> None:
    found = worlds[4][0]["other state"]
    assert furthest(found["whole"], reference["mlp"][0]) < 1e-5
    momenta = [entries["momentum_buffer"] for entries in found["saved"]["optimizer"]["state"].values()]
    assert sum(m.numel() for m in momenta) == sum(p.numel() for p in build("mlp").parameters())


def test_own_parts_of_a_model_cut_elsewhere_are_refused(worlds: dict[int, Any]) -> None:
    assert all("cut or split elsewhere" in worker["elsewhere"]["sentence"] for worker in worlds[4])


def test_clipping_sees_the_whole_gradient_once(worlds: dict[int, Any]) -> None:
    from process.meshes import batch, cross_entropy

    model = build("gpt")
    x, y = batch("gpt", 0)
    cross_entropy(model(x), y).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    for worker in worlds[4]:
        assert worker["clipped"]["norm"] == pytest.approx(norm, rel=1e-4)
        assert worker["clipped"]["again"] == pytest.approx(0.1, rel=1e-3)


def test_bytes_of_each_axis_follow_their_formulas(worlds: dict[int, Any]) -> None:
    # Two stages of mlp, 8 samples in 4 micro-batches: what crosses the cut goes forward once and back once per micro-batch.
    ledger = worlds[2][0]["mlp pipeline=2"]["ledger"]
    assert ledger["axes"]["data"]["bytes_sent"] == ledger["axes"]["tensor"]["bytes_sent"] == 0
    # The cut is after the first hidden layer, of 32 values; the loss is summed over both stages once per step.
    assert ledger["axes"]["pipeline"]["bytes_sent"] == STEPS * (4 * 2 * framed(2 * 32 * 4) + 2 * ring_bytes(4, 2))
    assert ledger["axes"]["pipeline"]["exchanges"] == STEPS * (4 * 2 + 2)
    # Replicas of whole models: in each step a ring all-reduce of each bucket (weights, biases), and a byte per parameter and one.
    named = dict(build("mlp").named_parameters())
    buckets = [sum(p.numel() for p in named.values() if (p.dim() > 1) == weights) for weights in (True, False)]
    each = sum(ring_bytes(4 * values, 2) for values in buckets) + framed(len(named) + 1)
    assert worlds[2][0]["mlp data=2"]["ledger"]["axes"]["data"]["bytes_sent"] == 2 * STEPS * each


def test_a_process_holds_its_part_and_no_more(worlds: dict[int, Any]) -> None:
    whole = sum(t.numel() for t in build("gpt").parameters())
    for mesh in ("pipeline=2,tensor=2", "tensor=4"):
        held = [sum(worker[f"gpt {mesh}"]["held"].values()) for worker in worlds[4]]
        apart = sum(build("gpt").token.weight.shape) * 16  # small vectors and a shared embedding weigh much in so small a model
        assert max(held) < whole / 4 + apart, (mesh, held, whole)


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_a_bad_mesh_meets_one_sentence(worlds: dict[int, Any], number: int) -> None:
    for worker in worlds[4]:
        sentence = worker[f"refused {number}"]["sentence"]
        assert SENTENCES[number] in sentence
        assert "\n" not in sentence

"""Models of transformers on real processes: found, split both ways, and trained as one process trains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from process.launch import Nursery

pytest.importorskip("transformers")

from process.hugging_face import MODELS, alone, batch, build

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCHEDULES = ("gpipe", "interleaved", "zero-bubble")  # 1f1b is everywhere else
FOUR = (
    ("gpt2", "pipeline=2,tensor=2"),
    ("gpt2", "data=2,tensor=2"),
    ("llama", "pipeline=2,tensor=2"),
    ("bert", "data=2,pipeline=2"),
    ("t5", "pipeline=4"),
)
BORN = ("gpt2", "llama", "bert", "t5")
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("llama", {"mesh": "tensor=2", "num_key_value_heads": 1}, "'model.layers.0.self_attn' has 1 heads of keys and values"),
    ("gpt2", {"mesh": "tensor=2", "n_head": 1}, "'transformer.h.0.attn' has 1 heads of keys and values"),
    ("bert", {"mesh": "pipeline=2", "keys": ("input_ids",)}, "The model's output has no loss: give it labels"),
)


def cases(world: int) -> list[tuple[str, str, dict[str, Any]]]:
    if world == 4:
        return [(f"{name} {mesh}", "equal", {"name": name, "mesh": mesh}) for name, mesh in FOUR]
    meshes = ("pipeline=2", "tensor=2")
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        (f"{name} {mesh}", "equal", {"name": name, "mesh": mesh}) for name in MODELS for mesh in meshes
    ]
    wanted += [(f"own loss {m}", "equal", {"name": "bert, classes", "mesh": m, "own_loss": True}) for m in meshes]
    wanted += [(s, "equal", {"name": "gpt2", "mesh": "pipeline=2", "schedule": s}) for s in SCHEDULES]
    wanted += [("loop", "loop", {"name": "llama", "mesh": "tensor=2"}), ("documented", "documented", {})]
    wanted += [(f"born {n} {mesh}", "born", {"name": n, "mesh": mesh}) for n in BORN for mesh in (None, *meshes)]
    return wanted + [(f"refused {name}", "refused", {"name": name, **arguments}) for name, arguments, _ in REFUSED]


@pytest.fixture(scope="module")
def worlds(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every process returned, per case, for two and for four processes."""
    found = {}
    for size in (2, 4):
        group = nursery.start("process.hugging_face:main", size, tmp_path_factory.mktemp(f"hf{size}"), wanted=cases(size))
        assert group.wait(240, together=True) == [0] * size, group.said()
        found[size] = group.results()
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    return {name: alone(name) for name in MODELS}


def furthest(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def check_equal(
    workers: list[dict[str, Any]], label: str, reference: tuple[dict[str, Tensor], list[float]], name: str, replicas: int = 1
) -> None:
    whole, losses = reference
    results = [worker[label] for worker in workers]
    assert furthest(results[0]["whole"], whole) < 1e-5
    assert furthest(whole, dict(build(name).state_dict())) > 1e-2
    per_replica = len(results) // replicas
    for step, loss in enumerate(losses):
        assert sum(r["losses"][step] for r in results[::per_replica]) / replicas == pytest.approx(loss, abs=1e-5)
    model = build(name)
    model.load_state_dict(whole)
    with torch.no_grad():
        wanted = model.eval()(**batch(name, 0, 4)).logits
    assert all(float((r["logits"] - wanted).abs().max()) < 1e-4 for r in results)
    total = sum(p.numel() for p in model.parameters())
    assert all(sum(r["held"].values()) < 0.85 * total for r in results)


@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_trains_as_one_process_does(name: str, mesh: str, worlds: dict[int, Any], reference: dict[str, Any]) -> None:
    check_equal(worlds[2], f"{name} {mesh}", reference[name], name)


@pytest.mark.parametrize(("name", "mesh"), FOUR)
def test_axes_go_together(name: str, mesh: str, worlds: dict[int, Any], reference: dict[str, Any]) -> None:
    check_equal(worlds[4], f"{name} {mesh}", reference[name], name, 2 if "data" in mesh else 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_process_does(schedule: str, worlds: dict[int, Any], reference: dict[str, Any]) -> None:
    check_equal(worlds[2], schedule, reference["gpt2"], "gpt2")


@pytest.mark.parametrize("mesh", ["pipeline=2", "tensor=2"])
def test_a_loss_of_ones_own_reads_the_output(mesh: str, worlds: dict[int, Any], reference: dict[str, Any]) -> None:
    check_equal(worlds[2], f"own loss {mesh}", reference["bert, classes"], "bert, classes")


def test_where_only_operations_are_split_the_plain_loop_trains(worlds: dict[int, Any], reference: dict[str, Any]) -> None:
    assert furthest(worlds[2][0]["loop"]["whole"], reference["llama"][0]) < 1e-5


@pytest.mark.parametrize("name", BORN)
def test_a_model_born_in_parts_is_the_one_born_whole(name: str, worlds: dict[int, Any]) -> None:
    whole = worlds[2][0][f"born {name} None"]
    for mesh in ("pipeline=2", "tensor=2"):
        found = [worker[f"born {name} {mesh}"] for worker in worlds[2]]
        assert furthest(found[0]["whole"], whole["whole"]) == 0
        assert [result["loss"] for result in found] == pytest.approx([whole["loss"]] * 2, abs=1e-5)
    model = build(name)
    usual = {n: t.std() for n, t in model.state_dict().items() if t.numel() > 100}
    assert all(float(whole["whole"][n].std()) == pytest.approx(float(std), rel=0.25) for n, std in usual.items())
    model.load_state_dict(whole["whole"])
    assert float(model(**batch(name, 0)).loss) == pytest.approx(whole["loss"], abs=1e-5)  # what is not saved is right, too


def test_the_example_of_the_guide_trains(worlds: dict[int, Any]) -> None:
    first, second = (worker["documented"] for worker in worlds[2])
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0]
    assert first["logits"].shape == (8, 16, 100)
    assert torch.equal(first["logits"], second["logits"])


def test_attention_is_split_by_heads_and_embeddings_by_the_vocabulary(worlds: dict[int, Any]) -> None:
    said = {name: worlds[2][0][f"{name} tensor=2"]["explained"] for name in MODELS}
    for line in (
        "transformer.wte: vocabulary",
        "transformer.h.2.attn: heads",
        "transformer.h.2.mlp.c_proj: rows",
        "lm_head: gather",
    ):
        assert line in said["gpt2"]
    assert "model.layers.0.mlp.down_proj: rows" in said["llama"]
    assert "bert.embeddings.word_embeddings: vocabulary" in said["bert"]
    assert all(": heads" in text for text in said.values())


@pytest.mark.parametrize(("name", "arguments", "sentence"), REFUSED)
def test_what_cannot_be_split_meets_one_sentence(
    name: str, arguments: dict[str, Any], sentence: str, worlds: dict[int, Any]
) -> None:
    for worker in worlds[2]:
        assert sentence in worker[f"refused {name}"]["sentence"]
        assert "\n" not in worker[f"refused {name}"]["sentence"]

"""What two workers of the tests of Lightning, Accelerate and Hugging Face run: the examples, and laws of each framework."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hocket

EXAMPLES = Path(__file__).parents[2] / "examples"


def main(rank: int, folder: str, wanted: list[str]) -> None:
    """Both workers, of which the second is a fork: packages that take long to import are imported once."""
    if "lightning" in wanted:
        import lightning.fabric
        import lightning.pytorch  # noqa: F401
    if "hugging_face" in wanted:
        import accelerate  # noqa: F401
        import peft  # noqa: F401
        from transformers import GPT2LMHeadModel, Trainer  # noqa: F401
    os.environ |= {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": "1", "LOCAL_RANK": "1"}
        code = 1
        try:
            _work(1, folder, wanted)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    _work(0, folder, wanted)
    assert os.waitpid(child, 0)[1] == 0


def _work(rank: int, folder: str, wanted: list[str]) -> None:
    os.chdir(folder)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo")
    cases: dict[str, Callable[[int], dict[str, Any]]] = {"lightning": on_lightning, "hugging_face": on_hugging_face}
    found = {name: cases[name](rank) for name in wanted}
    torch.save(found, Path(folder, f"{rank}.pt"))
    hocket.shutdown()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def example(name: str, *options: str) -> str:
    """What an example prints."""
    sys.argv, said = [name, *options], io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except hocket.HocketError as error:
        return str(error)
    return ""


# --- Lightning -------------------------------------------------------------------------------------------------------------

STRATEGY = "local(3) + topk(0.2)"


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(96, 5, generator=draw)
    return TensorDataset(x, (x.sum(1) > 0).long())


def on_lightning(rank: int) -> dict[str, Any]:
    import lightning
    from lightning.pytorch.callbacks import BaseFinetuning

    from hocket.integrations.fabric import FabricHocketStrategy
    from hocket.integrations.lightning import HocketStrategy

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net, self.seen = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)), list[Tensor]()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.seen.append(flat(self))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            """Nothing."""

        def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
            """Nothing."""

    def fit(strategy: Any, epochs: int, resume: str | None = None, **options: Any) -> tuple[Any, Net]:
        model = Net()
        settings = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False} | options
        trainer = lightning.Trainer(
            strategy=strategy, max_epochs=epochs, enable_model_summary=False, num_sanity_val_steps=0, barebones=False, **settings
        )
        trainer.fit(model, DataLoader(data(), 4), DataLoader(data(), 48), ckpt_path=resume)
        return trainer, model

    found: dict[str, Any] = {"example": example("lightning_trainer.py", "--epochs", "2", "--folder", "lightning_example")}
    accumulated = {"accumulate_grad_batches": 5, "gradient_clip_val": 0.02}  # 12 batches: the last step has two passes
    _, model = fit(HocketStrategy("bulk + topk(0.2)"), 2, enable_checkpointing=False, **accumulated)
    found["fit"], found["ours"] = flat(model), own_loop(Net(), rank)
    _, whole = fit(HocketStrategy(STRATEGY), 3, default_root_dir="whole")
    found["whole"], found["validated"] = flat(whole), torch.stack(whole.seen)
    fit(HocketStrategy(STRATEGY), 2, default_root_dir="begun")
    file = str(next(Path("begun/checkpoints").glob("*.ckpt")))
    found["saved"] = torch.cat([v.flatten() for v in torch.load(file, weights_only=True)["state_dict"].values()])
    found["resumed"] = flat(fit(HocketStrategy(STRATEGY), 3, file, default_root_dir="begun")[1])
    found["named"] = str(fit("hocket", 1, enable_checkpointing=False)[0].strategy.hocket)
    found["fabric"] = example("fabric_loop.py", "--epochs", "2", "--save", "fabric.ckpt")
    found["fabric_workers"] = len(torch.load("fabric.ckpt", weights_only=True)["hocket"]["workers"])
    refused = [
        lambda: HocketStrategy("async + server"),
        lambda: HocketStrategy("bulk", find_unused_parameters=True),
        lambda: FabricHocketStrategy("downpour + server"),
        lambda: fit(HocketStrategy("bulk"), 1, callbacks=[Unfreezing()], enable_checkpointing=False),
        lambda: fit(HocketStrategy("bulk + demo"), 1, gradient_clip_val=1.0, enable_checkpointing=False),
    ]
    return {**found, "refused": [refusal(function) for function in refused]}


def own_loop(model: nn.Module, rank: int) -> Tensor:
    """The same training in a loop of one's own."""
    hocket.init(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = hocket.parallelize(model, optimizer, "bulk + topk(0.2)", accumulate=5)
    sampler = DistributedSampler(data(), 2, rank)  # Lightning shuffles what is trained on
    loader = DataLoader(data(), 4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            step = number % 5 == 4 or number == len(loader) - 1
            passes = 5  # Lightning divides by it in any case
            (nn.functional.cross_entropy(model.net(x), y) / passes).backward()  # type: ignore[operator,union-attr]
            if step:
                job.exchange()
                nn.utils.clip_grad_norm_(model.parameters(), 0.02)
                optimizer.step()
                optimizer.zero_grad()
    job.finish()
    return flat(model)


# --- Hugging Face ------------------------------------------------------------------------------------------------------------


def on_hugging_face(rank: int) -> dict[str, Any]:
    from accelerate.state import AcceleratorState, GradientState
    from safetensors.torch import load_file

    def fresh() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    found: dict[str, Any] = {"accelerate": example("accelerate_loop.py", "--epochs", "1", "--save", "state")}
    fresh()
    found["accelerate_resumed"] = example("accelerate_loop.py", "--epochs", "1", "--resume", "state")
    fresh()
    found["pair"] = pair(4, save_at=2)
    fresh()
    found["pair_resumed"] = pair(4, resume_at=2)
    trained = ["--strategy", "local(3) + qsgd(4)", "--width", "16", "--steps", "8"]
    fresh()
    found["trainer"] = example("hugging_face_trainer.py", *trained, "--out", "whole")
    torch.distributed.barrier()
    found["whole"] = load_file("whole/checkpoint-8/model.safetensors")
    found["own"] = [worker[0]["model"] for worker in torch.load("whole/checkpoint-8/hocket.pt", weights_only=True)["workers"]]
    fresh()
    example("hugging_face_trainer.py", *trained, "--out", "again", "--resume", "whole/checkpoint-4")
    torch.distributed.barrier()
    found["resumed"] = load_file("again/checkpoint-8/model.safetensors")
    fresh()
    found["lora"] = example("hugging_face_trainer.py", *trained, "--out", "lora", "--from", "whole/final", "--lora")
    return found


def pair(steps: int, save_at: int = -1, resume_at: int = 0) -> Tensor:
    """Two models with an optimiser each, in one loop on Accelerate."""
    from accelerate import Accelerator

    from hocket.integrations.accelerate import HocketAccelerator

    accelerator = Accelerator(cpu=True)
    parallel = HocketAccelerator(accelerator, "local(3) + topk(0.2)")
    torch.manual_seed(1)
    models = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    made, critic, *stepped = accelerator.prepare(*models, *optimizers)
    if resume_at:
        accelerator.load_state("pair")
    jobs = [parallel.begin(model, optimizer) for model, optimizer in zip((made, critic), stepped, strict=True)]
    for step in range(resume_at, steps):
        if step == save_at:
            accelerator.save_state("pair")
            torch.distributed.barrier()
        z = torch.randn(5, 4, generator=torch.Generator().manual_seed(2 * step + accelerator.process_index))
        for number, optimizer in enumerate(stepped):
            optimizer.zero_grad()
            accelerator.backward(critic(z).pow(2).mean() if number else made(z).pow(2).mean() - critic(made(z)).mean())
            optimizer.step()
    for job in jobs:
        job.finish()
    return torch.cat([flat(model) for model in models])

"""Lightning's Trainer with a strategy of Hocket: it starts the processes, validates the mean model and writes checkpoints.

    python examples/lightning_trainer.py --strategy "local(4) + gossip" --devices 2
    torchrun --nproc-per-node 2 examples/lightning_trainer.py

Needs ``pip install 'hocket[lightning]'``. ``--resume FILE`` goes on from a checkpoint.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hocket.data import load
from hocket.integrations.lightning import HocketStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        right = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--strategy", default="local(4) + gossip")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--folder", default="lightning_run")
    parser.add_argument("--resume")
    arguments = parser.parse_args()

    digits = load("digits")
    train, test = ((digits.prepare(x), y) for x, y in (digits.train, digits.test))
    strategy = HocketStrategy(arguments.strategy)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=arguments.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    lightning.seed_everything(0, verbose=False)
    loaders = DataLoader(TensorDataset(*train), 16, shuffle=True), DataLoader(TensorDataset(*test), 100)
    trainer.fit(Digits(), *loaders, ckpt_path=arguments.resume)
    if trainer.is_global_zero:
        accuracy, sent = float(trainer.callback_metrics["accuracy"]), strategy.summary()["bytes_sent"]
        print(f"lightning: accuracy {accuracy:.3f} after {trainer.global_step} steps, {sent / 1e3:.0f} kB sent by this worker")
        print(f"checkpoint {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    main()

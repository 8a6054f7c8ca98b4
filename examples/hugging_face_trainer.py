"""Fine-tuning with Hugging Face's Trainer and a strategy of Hocket: from a config, or from a folder with a model.

    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --strategy "diloco(8) + qsgd(4)"
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --from runs/model --lora

Needs ``pip install 'hocket[hf]'``. With ``--lora`` only the adapters are trained, and only they travel.
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hocket.integrations.transformers import attach


class Texts(Dataset):
    """Pieces of 64 bytes of a text that every machine has: the source of a module of Python's."""

    def __init__(self, count: int) -> None:
        text = Path(argparse.__file__).read_bytes()
        self.tokens = torch.tensor(list(text[: 64 * count])).view(-1, 64)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="diloco(8) + qsgd(4)")
    parser.add_argument("--from", dest="folder", help="a folder with a causal language model of 256 tokens")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", default="trainer_run")
    parser.add_argument("--resume", help="a folder checkpoint-N")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    if arguments.folder:
        model = AutoModelForCausalLM.from_pretrained(arguments.folder, local_files_only=True)
    else:
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=arguments.width, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config)
    if arguments.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    settings = TrainingArguments(
        arguments.out,
        max_steps=arguments.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=3e-3,
        logging_steps=10,
        save_steps=max(1, arguments.steps // 2),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=Texts(512), eval_dataset=Texts(16))
    parallel = attach(trainer, arguments.strategy)
    trainer.train(resume_from_checkpoint=arguments.resume)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        trainer.save_model(f"{arguments.out}/final")
        found = parallel.summary()
        print(f"trainer: loss {loss:.3f} after {trainer.state.global_step} steps, {found['exchanges']} exchanges")
        print(f"trainer: {found['bytes_sent']:,} bytes sent by this worker")


if __name__ == "__main__":
    main()

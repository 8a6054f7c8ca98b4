"""Training loops as people publish them, small. Each takes a :class:`Parallel`, the only thing in them that is ours or DDP's, and
yields the losses.

A loop's docstring is its line on the page "Does my loop work?" (docs/guide/loops.md).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

import hocket


class Parallel:
    """Makes models parallel: by DDP, by Hocket under a strategy, or not at all (on one worker)."""

    def __init__(self, strategy: str, rank: int) -> None:
        self.strategy, self.rank = strategy, rank
        self.models: list[nn.Module] = []
        self.jobs: list[hocket.Job] = []

    def __call__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, unused: bool = False, **options: Any) -> nn.Module:
        """The model to call in the loop; ``unused``: some parameters may have no gradient (DDP must know)."""
        self.models.append(model)
        if self.strategy == "ddp":
            return DistributedDataParallel(model, find_unused_parameters=unused)
        for optimizer in optimizers:
            self.jobs.append(hocket.parallelize(model, optimizer, self.strategy, **options))
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """DDP's ``no_sync()``; Hocket is told by ``accumulate=`` instead."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def finish(self) -> list[Tensor]:
        """End the jobs; all weights as vectors, in the models' own precision."""
        for job in self.jobs:
            job.finish()
        return [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in self.models]


Run = Callable[[Parallel], Iterator[float]]


@dataclass(frozen=True)
class Loop:
    """A loop and what is expected of it."""

    run: Run
    tolerance: float = 0.0
    """How far bulk's weights may be from DDP's."""
    ddp: bool = True
    """Whether DDP can run it as it stands."""
    refused: dict[str, str] = field(default_factory=dict)
    """Words of the sentence with which the strategy that is the key refuses it, or (an empty key) every one."""
    learns: bool = True
    """Whether the loss must fall (not where two networks play against each other)."""
    except_: tuple[str, ...] = ()
    """Strategies under which the loss need not fall in so few steps."""

    @property
    def name(self) -> str:
        return self.run.__name__


LOOPS: dict[str, Loop] = {}


def loop(**expected: Any) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        LOOPS[run.__name__] = Loop(run, **expected)
        return run

    return add


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def blobs(rank: int, steps: int = 16, size: int = 16, features: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of a problem that is easy to learn; every worker has its own."""
    centres = torch.randn(3, features, generator=torch.Generator().manual_seed(1)) * 2
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        y = torch.randint(3, (size,), generator=own)
        yield centres[y] + torch.randn(size, features, generator=own), y


def words(rank: int, steps: int = 12, size: int = 4, length: int = 12) -> Iterator[Tensor]:
    """Sequences that count up by one: easy to learn."""
    own = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield (torch.randint(20, (size, 1), generator=own) + torch.arange(length)) % 20


# --- classifiers -------------------------------------------------------------------------------------------------------------


@loop()
def classifier(parallel: Parallel) -> Iterator[float]:
    """A classifier with SGD and momentum."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop()
def metrics(parallel: Parallel) -> Iterator[float]:
    """Metrics reduced by the user after every step (`dist.all_reduce(loss)`)."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        yield shown.item() / dist.get_world_size()


@loop()
def closure(parallel: Parallel) -> Iterator[float]:
    """`optimizer.step(closure)`, as Lightning calls it."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank):

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        yield float(optimizer.step(evaluate))  # type: ignore[arg-type]


@loop()
def float64(parallel: Parallel) -> Iterator[float]:
    """`torch.set_default_dtype(torch.float64)`."""
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp(8, 16, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        net = parallel(model, optimizer)
        for x, y in blobs(parallel.rank):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x.double()), y)
            loss.backward()
            optimizer.step()
            yield loss.item()
    finally:
        torch.set_default_dtype(torch.float32)


@loop(tolerance=1e-6)
def channels_last(parallel: Parallel) -> Iterator[float]:
    """A convolutional network with BatchNorm in `channels_last`."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3)
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank, features=48):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop()
def accumulation(parallel: Parallel) -> Iterator[float]:
    """Gradients of four mini-batches per step (`no_sync()` under DDP, `accumulate=4` here)."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    net = parallel(model, optimizer, accumulate=4)
    for number, (x, y) in enumerate(blobs(parallel.rank, 32), 1):
        with parallel.no_sync(net) if number % 4 else nullcontext():
            loss = F.cross_entropy(net(x), y) / 4
            loss.backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item() * 4


@loop()
def weight_average(parallel: Parallel) -> Iterator[float]:
    """An exponential moving average of the weights, updated after every step."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    net = parallel(model, optimizer)
    shadow = copy.deepcopy(model)
    for x, y in blobs(parallel.rank):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(shadow.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        yield loss.item()


@loop()
def swa(parallel: Parallel) -> Iterator[float]:
    """Stochastic weight averaging (`torch.optim.swa_utils`) with BatchNorm updated at the end."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    net = parallel(model, optimizer)
    average = AveragedModel(model)
    for number, (x, y) in enumerate(blobs(parallel.rank)):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        if number >= 8:
            average.update_parameters(model)
        yield loss.item()
    update_bn(blobs(parallel.rank, 4), average)


@loop(ddp=False, refused={"": "job.detach() and parallelize again"})
def unfrozen(parallel: Parallel) -> Iterator[float]:
    """A backbone that is frozen at first and trained from the middle on (`requires_grad_(True)`)."""
    body, head = mlp(8, 16, 16), nn.Linear(16, 3)
    model = nn.Sequential(body, nn.Tanh(), head)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    body.requires_grad_(False)
    net = parallel(model, optimizer)
    for number, (x, y) in enumerate(blobs(parallel.rank)):
        if number == 8:
            body.requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop(ddp=False, refused={"": "parameter"})
def grown(parallel: Parallel) -> Iterator[float]:
    """A layer added in mid-training (`optimizer.add_param_group`)."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    net = parallel(model, optimizer)
    for number, (x, y) in enumerate(blobs(parallel.rank)):
        if number == 8:
            model.append(nn.Linear(3, 3))
            optimizer.add_param_group({"params": list(model[-1].parameters())})
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop(ddp=False, refused={"": "use a first-order optimiser"})
def lbfgs(parallel: Parallel) -> Iterator[float]:
    """`torch.optim.LBFGS` with its closure, which it calls several times per step."""
    model = mlp(8, 16, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank, 4):

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        yield float(optimizer.step(evaluate))  # type: ignore[arg-type]


@loop(ddp=False, refused={"bulk": "sparse", "bulk + qsgd(8)": "sparse"})
def sparse_embedding(parallel: Parallel) -> Iterator[float]:
    """`nn.Embedding(sparse=True)` with SparseAdam."""
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), 1e-2)
    net = parallel(model, optimizer)
    for tokens in words(parallel.rank):
        optimizer.zero_grad()
        loss = net(tokens).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


# --- several optimisers, several passes --------------------------------------------------------------------------------------


@loop(learns=False)
def gan(parallel: Parallel) -> Iterator[float]:
    """A GAN with two optimisers; the generator's backward pass goes through the discriminator."""
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1)
    adams = torch.optim.Adam(maker.parameters(), 1e-3), torch.optim.Adam(judge.parameters(), 1e-3)
    generator, discriminator = parallel(maker, adams[0]), parallel(judge, adams[1])
    for x, _ in blobs(parallel.rank):
        noise = torch.randn(len(x), 4)
        adams[1].zero_grad()
        fake = generator(noise)
        loss = F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
        loss.backward()
        adams[1].step()
        adams[0].zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        adams[0].step()
        yield loss.item()


@loop(learns=False)
def wgan(parallel: Parallel) -> Iterator[float]:
    """A Wasserstein GAN that clamps the critic's weights (`p.data.clamp_` and `p.data = …`)."""
    maker, judge = mlp(4, 16, 8), mlp(8, 16, 1)
    optimizers = torch.optim.RMSprop(maker.parameters(), 1e-3), torch.optim.RMSprop(judge.parameters(), 1e-3)
    generator, critic = parallel(maker, optimizers[0]), parallel(judge, optimizers[1])
    for number, (x, _) in enumerate(blobs(parallel.rank)):
        noise = torch.randn(len(x), 4)
        optimizers[1].zero_grad()
        loss = critic(generator(noise).detach()).mean() - critic(x).mean()
        loss.backward()
        optimizers[1].step()
        for p in judge.parameters():
            if number % 2:
                p.data = p.data.clamp(-0.1, 0.1)
            else:
                p.data.clamp_(-0.1, 0.1)
        if number % 4 == 3:
            optimizers[0].zero_grad()
            (-critic(generator(noise)).mean()).backward()
            optimizers[0].step()
        yield loss.item()


@loop(learns=False, tolerance=1e-6)
def gradient_penalty(parallel: Parallel) -> Iterator[float]:
    """A critic with a gradient penalty (double backward)."""
    judge = mlp(8, 16, 1)
    optimizer = torch.optim.Adam(judge.parameters(), 1e-3)
    critic = parallel(judge, optimizer)
    for x, _ in blobs(parallel.rank):
        fake = torch.randn_like(x).requires_grad_()
        optimizer.zero_grad()
        judged = critic(fake)
        (slope,) = torch.autograd.grad(judged.sum(), fake, create_graph=True)
        loss = judged.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop()
def muon_and_adamw(parallel: Parallel) -> Iterator[float]:
    """Muon for matrices and AdamW for the rest: two optimisers over one model, two jobs."""
    model = mlp(8, 16, 3)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(others, 1e-2)
    net = parallel(model, *optimizers)
    for x, y in blobs(parallel.rank):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.item()


class Contrast(nn.Module):
    """Gathers the embeddings of all workers, so its backward pass has a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(8, 16, 8)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        own = F.normalize(self.body(x))
        everyone = torch.cat(collectives.all_gather(F.normalize(self.body(other))))
        return F.cross_entropy(own @ everyone.t() * 5, torch.arange(len(own)) + dist.get_rank() * len(own))


@loop(tolerance=1e-6)
def contrastive(parallel: Parallel) -> Iterator[float]:
    """Contrastive learning with embeddings gathered from all workers (a collective in the backward pass)."""
    model = Contrast()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    net = parallel(model, optimizer)
    for x, _ in blobs(parallel.rank):
        optimizer.zero_grad()
        loss = net(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        loss.backward()
        optimizer.step()
        yield loss.item()


# --- what a step uses --------------------------------------------------------------------------------------------------------


class Detections(nn.Module):
    """Two heads; which of them a step uses depends on the data, and one is never used on worker 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(8, 16, 16), nn.ModuleList(nn.Linear(16, 3) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> list[Tensor]:
        h = torch.tanh(self.body(x))
        return [self.heads[k](h) for k in used]


@loop(tolerance=1e-6)
def unused_branches(parallel: Parallel) -> Iterator[float]:
    """A loss over several heads, some of which a step does not use (DETR, multi-task)."""
    model = Detections()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    net = parallel(model, optimizer, unused=True)
    for number, (x, y) in enumerate(blobs(parallel.rank)):
        used = [0] + [1] * (number % 2) + [2] * (parallel.rank == 0)
        optimizer.zero_grad()
        losses = [F.cross_entropy(found, y) for found in net(x, used)]
        torch.stack(losses).sum().backward()
        optimizer.step()
        yield losses[0].item()


class Experts(nn.Module):
    """Sends every sample to one expert; a worker's mini-batch may leave some without any."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 8, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 3)
        for k, expert in enumerate(self.experts):
            if (mine := chosen == k).any():
                out[mine] = weights[mine, None] * expert(x[mine])
        return out


@loop(tolerance=1e-6)
def mixture_of_experts(parallel: Parallel) -> Iterator[float]:
    """A mixture of experts; some are unused on some workers."""
    model = Experts()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    net = parallel(model, optimizer, unused=True)
    for x, y in blobs(parallel.rank, size=6):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


class Checkpointed(nn.Module):
    """Keeps no activations of its body."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.last, self.reentrant = nn.Linear(8, 16), mlp(16, 16, 16), nn.Linear(16, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.body, torch.tanh(self.first(x)), use_reentrant=self.reentrant))


def _checkpointed(parallel: Parallel, reentrant: bool) -> Iterator[float]:
    model = Checkpointed(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    net = parallel(model, optimizer)
    for x, y in blobs(parallel.rank):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        yield loss.item()


@loop()
def checkpointing(parallel: Parallel) -> Iterator[float]:
    """Activation checkpointing with `use_reentrant=False`."""
    yield from _checkpointed(parallel, False)


@loop(tolerance=1e-6)
def reentrant_checkpointing(parallel: Parallel) -> Iterator[float]:
    """Activation checkpointing with `use_reentrant=True`."""
    yield from _checkpointed(parallel, True)


# --- sequences ---------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(20, 16), nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


@loop()
def lstm(parallel: Parallel) -> Iterator[float]:
    """An LSTM with gradient clipping."""
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    net = parallel(model, optimizer)
    for tokens in words(parallel.rank):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(8, 16, 8), mlp(4, 16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


@loop()
def vae(parallel: Parallel) -> Iterator[float]:
    """A variational auto-encoder (`randn_like` in the forward pass, a tuple as output)."""
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    net = parallel(model, optimizer)
    for x, _ in blobs(parallel.rank):
        optimizer.zero_grad()
        found, mean, log_var = net(x)
        loss = F.mse_loss(found, x) - 0.01 * (1 + log_var - mean.square() - log_var.exp()).mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


class Block(nn.Module):
    """A tiny GPT with a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layer(self.embedding(tokens), mask, is_causal=True))


def _nanogpt(parallel: Parallel, scaled: bool) -> Iterator[float]:
    model, steps, accumulate = Block(), 8, 2
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95))
    net = parallel(model, optimizer, accumulate=accumulate)
    if not scaled:
        net = torch.compile(net, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    batches = words(parallel.rank, steps * accumulate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for micro in range(accumulate):
            tokens = next(batches)
            with parallel.no_sync(net) if micro + 1 < accumulate and scaled else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    logits = net(tokens[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / accumulate
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item() * accumulate


@loop(tolerance=1e-6)
def nanogpt(parallel: Parallel) -> Iterator[float]:
    """nanoGPT's loop: accumulation, bf16 autocast, clipping, a cosine schedule, `torch.compile`, tied weights."""
    yield from _nanogpt(parallel, False)


@loop(tolerance=1e-6)
def grad_scaler(parallel: Parallel) -> Iterator[float]:
    """The same with a `GradScaler`, unscaled before clipping."""
    yield from _nanogpt(parallel, True)


def _hugging_face(parallel: Parallel, model: nn.Module, labels: Callable[[Tensor], dict[str, Tensor]]) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    net = parallel(model, optimizer, unused=True)
    for tokens in words(parallel.rank, 8):
        optimizer.zero_grad()
        loss = net(**labels(tokens)).loss
        loss.backward()
        optimizer.step()
        yield loss.item()


_SMALL = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@loop(tolerance=1e-6)
def gpt2(parallel: Parallel) -> Iterator[float]:
    """Hugging Face's GPT-2: dictionaries as outputs, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **drop, **_SMALL)
    yield from _hugging_face(parallel, GPT2LMHeadModel(config), lambda t: {"input_ids": t, "labels": t})


@loop(tolerance=1e-6)
def bert(parallel: Parallel) -> Iterator[float]:
    """Hugging Face's BERT with its masked-language-model head."""
    from transformers import BertConfig, BertForMaskedLM

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    yield from _hugging_face(
        parallel, BertForMaskedLM(BertConfig(**size, **drop, **_SMALL)), lambda t: {"input_ids": t * (t % 3 > 0), "labels": t}
    )


@loop(tolerance=1e-6)
def t5(parallel: Parallel) -> Iterator[float]:
    """Hugging Face's T5: an encoder and a decoder that share embeddings."""
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    yield from _hugging_face(
        parallel, T5ForConditionalGeneration(T5Config(dropout_rate=0.0, **size, **_SMALL)), lambda t: {"input_ids": t, "labels": t}
    )

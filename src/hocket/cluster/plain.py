"""Plain data of all processes of a group: numbers, text, lists, mappings and tensors, never objects.

torch's own object collectives unpickle what peers send, and so execute whatever a peer puts there. Here the reader is torch's for
weights alone (``weights_only``), which builds plain data and nothing else.
"""

import io
from typing import Any

import torch
import torch.distributed as dist


def all_gather_plain(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each process of the group gives, in the order of ranks; all of them must call it together."""
    on_cuda = str(dist.get_backend(group)) == "nccl"  # others have a backend for the CPU, or find one
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    file = io.BytesIO()
    torch.save(own, file)
    body = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(body)], device=device), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=device)
    padded[: len(body)] = body
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    bodies = [heard[: int(size)].cpu().numpy().tobytes() for heard, size in zip(everyone, sizes, strict=True)]
    return [torch.load(io.BytesIO(heard), weights_only=True, map_location="cpu") for heard in bodies]

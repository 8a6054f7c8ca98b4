"""What carries out the exchanges of a job: collectives, servers, peers, or PyTorch's FSDP2; one protocol for all."""

from hocket.train.runtimes.base import Binding, Runtime

__all__ = ["Binding", "Runtime"]

"""The table of methods that conformance and strategy tests share; a registered method without a row here fails the tests."""

from __future__ import annotations

from hocket import compression, sync, topology

SYNC = ("bulk", "local(2)", "local(3, mean=after)", "postlocal(2, 2)", "diloco(2)", "diloco(4, fragments=2, overlap=1)", "acco")
TOPOLOGY = (
    "allreduce",
    "gossip",
    "gossip(ring)",
    "gossip(exponential)",
    "gossip(random)",
    "gossip(matrix=[[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5], [0, 0, 0.5, 0.5]])",
    "hierarchical(size=2)",
    "hierarchical(size=2, every=2)",
    "hierarchical(allreduce, gossip, size=2)",
    "hierarchical(gossip, allreduce, size=2, every=2)",
    "server(2, role=sum)",
)
FREE = (
    "async",
    "async(compensation=rate)",
    "async(compensation=taylor)",
    "async(compensation=adaptive) + server(2)",
    "async(overlap=True)",
    "ssp(0)",
    "ssp(2) + server(shards=3)",
    "downpour(2, 3)",
    "downpour(3, 2, overlap=False) + server(2, optimizer=adagrad)",
    "downpour(1, 1, warm=3)",
    "bulk + server(2)",
    "bulk + server(fetch=bf16)",
    "asyncdiloco(2)",
    "asyncdiloco(3, 0.9, 0.5, delay=2, quorum=2, grace=0.01, weights=steps, direction=True) + server(2)",
    "stale(3)",
    "aedit(0.05)",
    "aedit(0.1, 1.0, 0.5, guard=None) + server(2)",
    "stale(2) + server",
    "async + gossip",
    "async + gossip(ring)",
    "async + gossip(random)",
    "async + gossip(pushsum)",
)
"""Whole strategies whose workers do not go in step; what they can push is all of COMPRESSION."""
LOSSLESS = ("none", "topk(1.0)", "threshold(0)", "randomk(1.0)")
SINGLE = (
    "none",
    "cast(fp16)",
    "cast(bf16)",
    "cast(fp8)",
    "cast(e3m0)",
    "qsgd(2)",
    "qsgd(4, block=16)",
    "bins(2)",
    "ternary",
    "sign",
    "natural",
    "threshold(0.01)",
    "threshold(keep=0.2)",
    "topk(0.1)",
    "topk(0.1, feedback=False)",
    "topk(3/16, feedback=0.9)",
    "topk(0.3, feedback=ef21)",
    "randomk(0.2)",
    "randomk(0.2, unbiased=True)",
    "lowrank(1)",
    "dgc(0.1)",
    "demo(8)",
    "demo(32, 0.95, sign=False)",
)
CHAINS = (
    "topk(0.2) | qsgd(4)",
    "topk(0.2) | sign",
    "threshold(keep=0.2) | ternary",
    "threshold(0.02) | cast(fp8)",
    "threshold(0.02, indices=rice) | bins(3)",
    "topk(4/16) | bins(2)",
    "topk(4/16, feedback=ef21) | bins(3)",
    "randomk(0.2) | natural",
    "randomk(0.2, unbiased=True) | qsgd(8)",
    "dgc(0.1, warmup=4) | cast(fp16)",
    "demo(8, decay=0.5) | qsgd(8)",
)
COMPRESSION = SINGLE + CHAINS


def name(text: str) -> str:
    """The registry's name of a term's first link."""
    return text.split("(")[0].split(" ")[0]


def missing() -> list[str]:
    """Registered methods that no row of the table names."""
    free = [part for text in FREE for part in text.split(" + ")]
    rows = {name(t) for t in (*SYNC, *TOPOLOGY, *COMPRESSION, *free)}
    return sorted({*sync.METHODS, *topology.METHODS, *compression.METHODS} - rows)

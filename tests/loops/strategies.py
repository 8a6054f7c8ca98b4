"""The strategies under which every published loop is run."""

STRATEGIES = (
    "bulk",
    "bulk + qsgd(8)",
    "bulk + topk(0.2)",
    "bulk + sign",
    "bulk + lowrank(2)",
    "local(2)",
    "local(2) + topk(0.2)",
    "diloco(2)",
    "local(1) + gossip",
)

"""Names that the field has for methods, and how the notation writes them: for messages about unknown names.

Keys are in lower case, without spaces, hyphens and underscores. A value in :data:`WRITTEN` is a strategy of this notation; one in
:data:`ELSEWHERE` says what there is instead.
"""

from __future__ import annotations

import re

from hocket.errors import nearest

_ROWS = {
    "bulk": "ddp distributeddataparallel dataparallel sync synchronous syncsgd bsp sgd ssgd horovod",
    "allreduce": "ringallreduce",
    "local(16)": "fedavg federated federatedaveraging localsgd parallelsgd averaging",
    "local(16, moments=3)": "desloc localadam",
    "postlocal(16, 1000)": "postlocalsgd",
    "diloco(16)": "bmuf slowmo fedopt lookahead outer",
    "diloco(30, fragments=3, overlap=1)": "streaming streamingdiloco",
    "asyncdiloco(50)": "asynclocalsgd delayednesterov dnesterov asynchronousdiloco",
    "asyncdiloco(24, quorum=2)": "decoupled decoupleddiloco",
    "diloco(30, overlap=30, keep=eager)": "eager eagerdiloco",
    "diloco(50, outer=heavyball(0.7, 0.5)) + gossip(random)": "noloco",
    "diloco(30, 0.7, 0.8, guard=3)": "edit",
    "diloco(30, 0.8, 0.8) + sign(block=4096)": "muloco",
    "acco": "accumulatewhilecommunicate delayedparameterupdate dpu",
    "async": "hogwild asgd asyncsgd asynchronous asp",
    "async(compensation=taylor)": "dcasgd",
    "async(compensation=rate)": "staleness stalenessaware",
    "ssp(3)": "stalesynchronous stalesynchronousparallel boundedstaleness",
    "downpour(4, 4)": "downpoursgd distbelief",
    "async + gossip": "adpsgd",
    "async + gossip(pushsum)": "sgp pushsum stochasticgradientpush gosgd",
    "bulk + gossip": "dsgd dpsgd decentralized decentralised decentralizedsgd peertopeer p2p",
    "bulk + gossip + topk(0.05)": "choco chocosgd chocogossip",
    "hierarchical(allreduce, gossip)": "hier twolevel",
    "async + server": "ps parameterserver paramserver servers",
    "bulk + server(role=sum)": "byteps",
    "lowrank(2)": "powersgd powersgdhook rankk lowrankapproximation",
    "topk(0.01)": "topksgd sparse sparsification gradientdropping",
    "randomk(0.01)": "randk randomsparsification",
    "dgc(0.001)": "deepgradientcompression",
    "demo": "decoupledmomentum demooptimizer",
    "sign": "signsgd efsignsgd signum 1bit onebit 1bitsgd onebitsgd",
    "bulk + sign + exchange=updates": "efadam compressedadam",
    "ternary": "terngrad",
    "bins(2)": "2bit int2 twobit",
    "topk(64/4096)": "chunkedtopk topkchunked blocktopk chunks",
    "topk(64/4096, feedback=0.95)": "ef efdecay errorfeedback feedback",
    "topk(0.01, feedback=ef21)": "ef21 ef21sgdm",
    "topk(0.01, indices=rice)": "rice elias golomb entropy entropycoding huffman",
    "diloco(30, 1.0, 0) + topk(64/4096, feedback=0.95) | bins(2)": "sparseloco templar",
    "natural": "naturalcompression",
    "qsgd(8)": "int8 8bit quantize quantized quantization",
    "qsgd(4)": "int4 4bit",
    "cast(fp16)": "fp16 half float16 fp16compress",
    "cast(bf16)": "bf16 bfloat16",
    "cast(fp8)": "fp8 float8",
    "cast(e3m0)": "e3m0 fp4 float4",
}
WRITTEN = {name: strategy for strategy, row in _ROWS.items() for name in row.split()}
_SHARDING = "shards what a worker holds and is no part of a strategy: use sharding='zero1' or 'fsdp' (--zero 1, --fsdp)"
_MESH = "splits a model and is no part of a strategy: use mesh=, such as hocket.Mesh(pipeline=2) (--mesh pipeline=2)"
_ONEBIT = "is an optimiser: use hocket.OneBitAdam(…, freeze_step=…), or --optimizer onebit, with 'bulk + sign + exchange=momentum'"
_ZEROONE = "is an optimiser: use hocket.OneBitAdam(…, freeze_step=…, refresh=16) with 'local(4) + sign + exchange=momentum'"
ELSEWHERE = {
    **dict.fromkeys(("1bitadam", "onebitadam", "1bitlamb", "onebitlamb"), _ONEBIT),
    **dict.fromkeys(("01adam", "zerooneadam"), _ZEROONE),
    **dict.fromkeys(("deepspeed", "zero", "zero1", "zero2", "zero3", "fsdp", "fsdp2", "sharding", "sharded"), _SHARDING),
    **dict.fromkeys(("pipeline", "gpipe", "pipedream", "1f1b", "tensor", "megatron", "mesh"), _MESH),
    **dict.fromkeys(("easgd", "elasticaveraging", "elasticsgd"), "is not there; nearest is 'diloco(16)'"),
    **dict.fromkeys(("sandblaster", "lbfgs"), "is an optimiser and no part of a strategy: use --optimizer sandblaster"),
}


def meant(name: str, known: tuple[str, ...]) -> str:
    """What to write for ``name``: how the notation writes the field's name, or the nearest known word; or an empty string.

    >>> meant("PowerSGD", ("lowrank", "qsgd")), meant("easgd", ())
    (": write 'lowrank(2)'.", ": it is not there; nearest is 'diloco(16)'.")
    >>> meant("asink", ("async", "sign"))
    " — did you mean 'async'?"
    """
    plain = _plain(name)
    if plain in WRITTEN:
        return f": write '{WRITTEN[plain]}'."
    if plain in ELSEWHERE:
        return f": it {ELSEWHERE[plain]}."
    return f" — did you mean '{plain}'?" if plain in known else nearest(name, known)


def meant_by_text(text: str, known: tuple[str, ...]) -> str:
    """The same for a text that cannot be read: a percentage, or a name with spaces, hyphens or a digit at its beginning.

    >>> meant_by_text("topk(1%)", ()), meant_by_text("bulk + 1-bit", ())
    ('; write 0.01 for 1 %', "; for '1-bit' write 'sign'")
    """
    text = text[:200]  # the search takes time by the square of the length
    if (percent := re.search(r"([0-9]+(?:\.[0-9]+)?)\s*%", text)) is not None:
        return f"; write {float(percent[1]) / 100:g} for {percent[1]} %"
    for part in re.split(r"[+|]", text):
        name = part.split("(")[0].strip()
        plain = _plain(name)
        if name.isidentifier():
            continue
        if plain in ELSEWHERE:
            return f"; '{name}' {ELSEWHERE[plain]}"
        if plain in WRITTEN or plain in known:
            return f"; for '{name}' write '{WRITTEN.get(plain, plain)}'"
    return ""


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()

"""Laws of the notation: any text gives a strategy or one sentence, and a strategy's text gives it back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hocket import compression, sync, topology
from hocket.compression import (
    DGC,
    QSGD,
    Bins,
    Cast,
    Chain,
    DeMo,
    LowRank,
    Natural,
    NoCompression,
    RandomK,
    Sign,
    Ternary,
    Threshold,
    TopK,
)
from hocket.errors import HocketError
from hocket.notation import Ratio
from hocket.strategy import EXCHANGES, Strategy
from hocket.sync import Bulk, DiLoCo, Local, Moment, PostLocal
from hocket.topology import AllReduce, Gossip, Hierarchical
from virtual.methods import CHAINS, COMPRESSION, SINGLE, SYNC, TOPOLOGY, missing

# --- all valid specs -------------------------------------------------------------------------------------------------------

_shares = st.floats(1e-6, 1.0) | st.just(1)
_flags = st.sampled_from([None, True, False]) | st.floats(1e-3, 1.0)
_indices = st.sampled_from([None, "plain", "rice"])
_ratios = st.integers(1, 10**6).flatmap(lambda of: st.builds(Ratio, st.integers(1, of), st.just(of)))
_whole = st.integers(1, 10**9)
_syncs = st.one_of(
    st.just(Bulk()),
    st.builds(Local, _whole, st.sampled_from(["before", "after"]), st.just("memory"), st.integers(0, 9)),
    st.builds(PostLocal, _whole, st.integers(0, 10**9)),
    st.builds(DiLoCo, _whole, st.floats(0, 1e6), st.floats(0, 0.99)),
)


@st.composite
def _matrices(draw: st.DrawFn) -> tuple[tuple[float, ...], ...]:
    """Doubly stochastic: a mean of permutations."""
    size = draw(st.integers(1, 5))
    orders = draw(st.lists(st.permutations(range(size)), min_size=1, max_size=4))
    return tuple(tuple(sum(o[i] == j for o in orders) / len(orders) for j in range(size)) for i in range(size))


_steps = st.none() | st.floats(1e-3, 1.0)
_gossips = st.one_of(
    st.builds(Gossip, st.sampled_from(["rotating", "ring", "exponential", "random"]), st.none(), _steps),
    st.builds(Gossip, st.just("rotating"), _matrices(), _steps),
    st.builds(lambda m, k: Gossip(matrix=(m,) * k), _matrices(), st.integers(1, 3)),
)
_flat = st.just(AllReduce()) | _gossips
_topologies = _flat | st.builds(Hierarchical, _flat, _flat, st.none() | _whole, _whole)
_selections = st.one_of(
    st.builds(TopK, _shares | _ratios, _flags, _indices),
    st.builds(Threshold, st.floats(0, 1e30), st.none(), _flags, _indices),
    st.builds(Threshold, st.none(), _shares, _flags, _indices),
    st.builds(RandomK, _shares, st.just(False), _flags),
    st.builds(RandomK, _shares, st.just(True), st.sampled_from([None, False])),
)


def _precisions(flags: st.SearchStrategy, votes: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(
        st.builds(Cast, st.sampled_from(["fp16", "bf16", "fp8", "e3m0"]), flags),
        st.builds(Bins, st.integers(2, 4), st.integers(8, 10**6), flags),
        st.builds(QSGD, st.integers(2, 8), st.integers(8, 10**6)),
        st.just(Ternary()),
        st.just(Natural()),
        st.builds(Sign, votes, flags),
    )


_alone = _precisions(_flags, st.booleans())
_second = _precisions(st.none(), st.just(False))
_compressions = st.one_of(
    st.just(NoCompression()),
    _selections,
    _alone,
    st.builds(LowRank, _whole, _flags),
    st.builds(
        DGC,
        _shares,
        st.integers(0, 10**9),
        st.floats(0, 0.999),
        st.none() | st.floats(1e-9, 1e9),
        _indices,
        precision=st.none() | _second,
    ),
    st.builds(DeMo, st.integers(1, 4096), st.floats(0, 0.999), st.booleans(), precision=st.none() | _second),
    st.builds(Chain, _selections, _second),
)


@st.composite
def _strategies(draw: st.DrawFn) -> Strategy:
    parts = [draw(s) for s in (_syncs, _topologies, _compressions, st.sampled_from([None, *EXCHANGES]))]
    try:
        return Strategy(*parts)
    except HocketError:
        return Strategy(parts[0])


@settings(max_examples=300)
@given(_strategies())
def test_the_text_of_a_strategy_gives_it_back(strategy: Strategy) -> None:
    text = str(strategy)
    assert Strategy.parse(text) == strategy
    assert str(Strategy.parse(text)) == text


# --- any text --------------------------------------------------------------------------------------------------------------

_names = [*sync.METHODS, *topology.METHODS, *compression.METHODS]
_words = [
    *_names,
    "exchange",
    "weights",
    "gradients",
    "keep",
    "feedback",
    "matrix",
    "size",
    "mean",
    "after",
    "ring",
    "True",
    "none",
]
_numbers = ["0", "1", "4", "-1", "0.01", "1e999", "1e-5", ".5", "5.", "00", "9" * 400, "64/4096", "1/0"]
_tokens = st.sampled_from([*_words, *_numbers, *"+|/(),=[]", "+", "(", ")", " ", "\n", "'", "é"])


def _one_sentence(text: object) -> None:
    """Parsing gives a strategy that prints and reads, or exactly one HocketError that is one sentence."""
    try:
        strategy = Strategy.parse(text)  # type: ignore[arg-type]
    except HocketError as error:
        sentence = str(error)
        assert sentence.strip() == sentence
        assert "\n" not in sentence
        assert sentence.endswith(".")
        assert 10 < len(sentence) < 1000
        assert "object at 0x" not in sentence
        assert "Term(" not in sentence
    else:
        assert Strategy.parse(str(strategy)) == strategy


@settings(max_examples=300)
@given(st.text(max_size=60))
def test_any_text_gives_a_strategy_or_one_sentence(text: str) -> None:
    _one_sentence(text)


@settings(max_examples=600)
@given(st.lists(_tokens, max_size=14).map(lambda tokens: " ".join(tokens)) | st.lists(_tokens, max_size=14).map("".join))
@example("cast([fp16])")
@example("dgc(clip=1e999)")
@example("gossip(matrix=[[a]])")
@example("exchange=[weights]")
@example("topk(feedback=[[]])")
@example("topk(64/[4096])")
@example("hierarchical(topk, [gossip])")
@example("x" * 5000)
def test_any_row_of_known_words_gives_a_strategy_or_one_sentence(text: str) -> None:
    _one_sentence(text)


_values = st.sampled_from([*_numbers, "ring", "True", "none", "[[1]]", "[[0.5, 0.5], [0.5, 0.5]]", "gossip", "topk(0.1)"])
_fields = ["share", "keep", "feedback", "p", "lr", "momentum", "inner", "outer", "every", "step", "bits", "block", "vote", "clip"]
_arguments = st.lists(st.builds("{}{}".format, st.sampled_from(["", *[f"{f}=" for f in _fields]]), _values), max_size=3)
_terms = st.builds(lambda n, a: f"{n}({', '.join(a)})" if a else n, st.sampled_from([*_names, "exchange"]), _arguments)
_chains = st.lists(_terms, min_size=1, max_size=3).map(" | ".join)


@settings(max_examples=600)
@given(st.lists(_chains, min_size=1, max_size=4).map(" + ".join))
def test_any_well_formed_text_gives_a_strategy_or_one_sentence(text: str) -> None:
    _one_sentence(text)


@pytest.mark.parametrize(
    "text",
    [
        "topk(" + "1" * 100_000 + "x)",
        "(" * 50_000,
        "local(" * 30_000,
        "a=" * 50_000,
        " " * 200_000 + "?",
        "bulk+" * 40_000,
        "[" * 9000,
    ],
    ids=lambda text: text[:6],
)
def test_long_text_meets_its_sentence_at_once(text: str) -> None:
    _one_sentence(text)


@pytest.mark.parametrize("value", [None, 4, ["bulk"], b"bulk", Bulk()])
def test_what_is_no_text_is_refused(value: object) -> None:
    _one_sentence(value)
    with pytest.raises(HocketError, match="text"):
        Strategy.parse(value)  # type: ignore[arg-type]


# --- meaning ---------------------------------------------------------------------------------------------------------------


def test_every_registered_method_has_a_row_in_the_table() -> None:
    assert missing() == []


@pytest.mark.parametrize("text, expected", [
    ("bulk", Strategy(Bulk(), AllReduce(), NoCompression())),
    ("gossip", Strategy(Bulk(), Gossip())),
    ("topk", Strategy(compression=TopK(0.01))),
    ("local(4)", Strategy(Local(4, "before"))),
    ("local(16) + gossip + threshold(keep=0.05)", Strategy(Local(16), Gossip(), Threshold(keep=0.05))),
    ("diloco(p=500)", Strategy(DiLoCo(500, 0.7, 0.9))),
    ("diloco(30, fragments=4, overlap=1, outer=heavyball(0.5, momentum=0.2))",
     Strategy(DiLoCo(30, 0.5, 0.2, fragments=4, overlap=1, outer="heavyball"))),
    ("gossip(exponential) + exchange=gradients", Strategy(Bulk(), Gossip("exponential"), exchange="gradients")),
    ("gossip + gradients", Strategy(Bulk(), Gossip(), exchange="gradients")),
    ("topk(0.01) | qsgd(4)", Strategy(compression=Chain(TopK(0.01), QSGD(4)))),
    ("dgc(0.01) | qsgd(4)", Strategy(compression=DGC(0.01, precision=QSGD(4)))),
    ("topk( 64 / 4096 )", Strategy(compression=TopK(Ratio(64, 4096)))),
    ("topk(64/4096, feedback=0.95) | bins", Strategy(compression=Chain(TopK(Ratio(64, 4096), 0.95), Bins(2)))),
    ("hierarchical(gossip(ring), outer=gossip)", Strategy(topology=Hierarchical(Gossip("ring"), Gossip()))),
    ("  bulk+none ", Strategy()),
])  # fmt: skip
def test_text_and_objects_agree(text: str, expected: Strategy) -> None:
    assert Strategy.parse(text) == expected == Strategy.parse(expected)


def test_the_order_of_terms_is_free() -> None:
    terms = ["local(4)", "gossip", "topk(0.01) | qsgd(4)", "exchange=weights"]
    assert len({Strategy.parse(" + ".join(order)) for order in itertools.permutations(terms)}) == 1


@pytest.mark.parametrize("text, weights", [
    ("bulk", False), ("bulk + hierarchical(size=2)", False), ("local(4)", True), ("diloco(4)", True), ("postlocal(4, 8)", True),
    ("gossip", True), ("bulk + gossip + exchange=gradients", False), ("local(4) + exchange=gradients", False),
    ("bulk + exchange=weights", True), ("hierarchical(allreduce, gossip)", True), ("hierarchical(every=2)", True),
])  # fmt: skip
def test_what_is_exchanged_by_default(text: str, weights: bool) -> None:
    assert Strategy.parse(text).weights is weights


@pytest.mark.parametrize("text, fragment", [
    ("diloco(4) + exchange=gradients", "weights by definition"),
    ("local(2, mean=after) + exchange=gradients", "mean=after is about weights"),
    ("local(2) + dgc", "cannot carry weights"),
    ("gossip + dgc", "cannot carry weights"),
    ("gossip(random) + topk", "partners that repeat"),
    ("hierarchical(allreduce, gossip(random)) + topk", "partners that repeat"),
    ("hierarchical(gossip, allreduce) + topk", "residual or overshoot"),
    ("gossip + sign(vote=True)", "vote needs all workers"),
    ("topk | sign(vote=True)", "no vote"),
    ("topk | sign(feedback=True)", "feedback covers the whole chain"),
    ("randomk(0.1, unbiased=True, feedback=True)", "diverges with feedback"),
    ("qsgd(4) | topk(0.1)", "from what is sent"),
    ("topk | topk", "from what is sent"),
    ("lowrank(2) | qsgd(4)", "from what is sent"),
    ("local(4, residual=weights)", "leave it out"), ("local(4, residual=weights) + gossip + topk(0.1)", "leave it out"),
    ("local(4, residual=weights) + lowrank(2)", "leave it out"), ("local(4, residual=somewhere) + topk(0.1)", "in a memory"),
    ("none | qsgd(4)", "from what is sent"),
    ("topk | qsgd(4) | sign", "two links"),
    ("bulk | topk", "only compressions are chained"),
    ("topk | gossip", "from what is sent"),
    ("bulk + local(4)", "two methods of one kind"),
    ("gossip + allreduce", "two methods of one kind"),
    ("topk + qsgd(4)", "two methods of one kind"),
    ("exchange=weights + exchange=gradients", "two methods of one kind"),
    ("local(2) + exchange=updates", "exchange=updates is for bulk + allreduce"), ("gossip + updates", "is for bulk + allreduce"),
    ("async + exchange=updates", "is for bulk + allreduce"), ("bulk + server + updates", "is for bulk + allreduce"),
    ("diloco(2) + updates", "is for bulk + allreduce"), ("hierarchical(size=2, every=2) + updates", "is for bulk + allreduce"),
    ("dgc(0.1) + updates", "cannot carry updates"), ("dgc(0.1) + momentum", "cannot carry momentum"),
    ("diloco(2) + momentum", "exchange=momentum is for bulk and local(p)"), ("async + momentum", "is for bulk and local(p)"),
    ("exchange=models", "exchange=gradients or exchange=weights or exchange=updates or exchange=momentum"),
    ("exchange=weights(3)", "exchange=gradients or exchange=weights or exchange=updates or exchange=momentum"),
    ("topk | exchange=weights", "exchange=gradients or exchange=weights or exchange=updates or exchange=momentum"),
    ("topk(0)", "(0, 1]"), ("topk(1.5)", "(0, 1]"), ("topk(True)", "(0, 1]"), ("topk(ring)", "(0, 1]"),
    ("topk(0.1, feedback=3)", "True or False"), ("sign(vote=maybe)", "True or False"), ("cast(fp16, feedback=no)", "True or False"),
    ("lowrank(2, feedback=3)", "True or False"), ("randomk(0.1, unbiased=3)", "True or False"),
    ("threshold(0, feedback=3)", "True or"), ("topk(0.1, feedback=0)", "(0, 1]"), ("sign(feedback=-0.5)", "(0, 1]"),
    ("bins(2, feedback=1.1)", "(0, 1]"), ("topk(0.1) | bins(2, feedback=0.9)", "feedback covers the whole chain"),
    ("local(4, residual=weights) + topk(0.1, feedback=0.9)", "leave it out"), ("bins(1)", "2, 3 or 4"), ("bins(5)", "2, 3 or 4"),
    ("bins(2, block=4)", "at least 8"), ("topk(0.1, indices=elias)", "plain"), ("dgc(0.1, indices=3)", "plain"),
    ("topk(0/4)", "from 1 up to the second"), ("topk(5/4)", "from 1 up to the second"), ("topk(0.5/4)", "whole numbers"),
    ("topk(64/)", "after '/'"), ("topk(64/x)", "after '/'"), ("topk(/4)", "a value"), ("topk(1/2/3)", "expected ','"),
    ("randomk(1/4)", "such as 0.25"), ("local(1/4)", "such as 0.25"), ("topk(0.1, 1/4)", "such as 0.25"),
    ("threshold", "exactly one of t and keep"), ("threshold(0.1, keep=0.1)", "exactly one of t and keep"),
    ("threshold(-1)", "at least 0"), ("threshold(1e999)", "finite"),
    ("qsgd(1)", "from 2 to 8"), ("qsgd(9)", "from 2 to 8"), ("qsgd(4, block=4)", "at least 8"), ("qsgd(4.0)", "whole number"),
    ("cast(fp4)", "fp16, bf16, fp8 or e3m0"), ("cast([fp16])", "not a list"), ("topk([])", "not a list"),
    ("lowrank(0)", "at least 1"), ("dgc(momentum=1)", "[0, 1)"), ("dgc(clip=0)", "above 0"), ("dgc(clip=1e999)", "finite"),
    ("dgc(warmup=-1)", "whole number"),
    ("local(0)", "at least 1"), ("local(2.5)", "whole number"), ("local(2, mean=during)", "before or after"),
    ("postlocal(2, -1)", "at least 0"), ("diloco(2, lr=-1)", "[0, inf)"), ("diloco(2, momentum=1)", "[0, 1)"),
    ("gossip(circle)", "unknown kind"), ("gossip(step=0)", "(0, 1]"), ("gossip(ring, matrix=[[1]])", "either a kind or a matrix"),
    ("gossip(matrix=[[0.9, 0.2], [0.1, 0.8]])", "doubly stochastic"),
    ("gossip(matrix=[[0.9, 0.1], [0.2, 0.8]])", "doubly stochastic"),
    ("gossip(matrix=[[2, -1], [-1, 2]])", "doubly stochastic"), ("gossip(matrix=[[1e999]])", "doubly stochastic"),
    ("gossip(matrix=[[1, 0]])", "square"), ("gossip(matrix=[1, 0])", "square"), ("gossip(matrix=[])", "square"),
    ("gossip(matrix=ring)", "square"), ("gossip(matrix=[[1, 0], [1]])", "square"),
    ("gossip(matrix=[[[1]], [[0, 1], [1, 0]]])", "one size"),
    ("hierarchical(topk, gossip)", "allreduce or a gossip"), ("hierarchical(hierarchical, gossip)", "allreduce or a gossip"),
    ("hierarchical(size=0)", "at least 1"), ("hierarchical(every=0)", "at least 1"),
    ("bulk + hierarchical(every=2) + gradients", "use exchange=weights, or every=1"),
    ("local(1, 2, 3, 4, 5)", "at most 4 arguments"), ("bulk(1)", "at most 0 arguments"), ("local(4, p=4)", "given p twice"),
    ("local(p=4, p=4)", "given p twice"), ("local(p=4, 5)", "without a name come first"), ("local=4", "in parentheses"),
    ("async + allreduce", "async + server"), ("ssp(2) + gossip", "ssp + server"),
    ("local(4) + server", "downpour(push=4, fetch=4)"),
    ("async + server + lowrank(2)", "topk"), ("stale(2) + topk(0.1)", "leave the compression out"),
    ("stale(2) + gossip", "allreduce or server"), ("stale(2) + server(role=sum)", "leave role=sum out"),
    ("stale(2) + hierarchical(size=2)", "allreduce or server"), ("stale(2) + server(fetch=bf16)", "server(shards=n)"),
    ("stale(2) + server(optimizer=adagrad)", "server(shards=n)"), ("stale(2) + gradients", "weights by definition"),
    ("async + gossip + topk(0.1)", "bulk + gossip"), ("async + gossip + gradients", "leave exchange=gradients out"),
    ("async + gossip(exponential)", "gossip(ring)"), ("async + gossip(matrix=[[1]])", "even with odd workers"),
    ("async(overlap=True) + gossip", "write async + gossip"), ("bulk + gossip(pushsum)", "async + gossip(pushsum)"),
    ("async + hierarchical(size=2)", "async + server"), ("async + server(role=sum)", "bulk"),
    ("downpour + exchange=weights", "leave exchange=weights out"), ("bulk + server + weights", "leave exchange=weights out"),
    ("", "got the end"), ("+", "method's name"), ("bulk +", "got the end"), ("local(4", "expected"),
    ("bulk gossip", "expected '+'"),
    ("bulk ? gossip", "position 6"), ("4", "method's name"), ("topk(9e)", "unexpected"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_with_the_reason(text: str, fragment: str) -> None:
    with pytest.raises(HocketError) as caught:
        Strategy.parse(text)
    assert fragment in str(caught.value)
    _one_sentence(text)


@pytest.mark.parametrize("text, suggestion", [
    ("gosip", "gossip"), ("alreduce", "allreduce"), ("topq(0.1)", "topk"), ("locl(4)", "local"), ("exchnge=weights", "exchange"),
    ("gossip(rnig)", "ring"), ("cast(bf61)", "bf16"), ("threshold(kep=0.1)", "keep"), ("local(2, mean=aftr)", "after"),
])  # fmt: skip
def test_a_slip_is_answered_with_the_nearest_word(text: str, suggestion: str) -> None:
    with pytest.raises(HocketError, match=f"did you mean '{suggestion}'"):
        Strategy.parse(text)


@pytest.mark.parametrize("part", ["sync", "topology", "compression"])
def test_text_in_place_of_a_part_is_refused(part: str) -> None:
    with pytest.raises(HocketError, match=r"Strategy\.parse"):
        Strategy(**{part: "topk"})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [*SYNC, *TOPOLOGY, *SINGLE, *CHAINS])
def test_every_method_that_stems_from_a_paper_names_it(text: str) -> None:
    strategy = Strategy.parse(text + (" + gradients" if "dgc" in text else ""))
    papers = strategy.citation()
    assert papers
    assert len(papers) == len(set(papers))
    assert all(paper.split(",")[-1].strip()[-4:].isdigit() for paper in papers)


def test_a_chain_cites_both_links() -> None:
    plain = Strategy.parse("bulk").citation()
    extra = [p for p in Strategy.parse("topk(0.01) | qsgd(4)").citation() if p not in plain]
    assert ["Stich" in extra[0], "Alistarh" in extra[1]] == [True, True]


@pytest.mark.parametrize("text, moments", [
    ("bulk + sign + updates", "aaaaaa"), ("bulk + sign + momentum", "gggggg"),
    ("bulk", "gggggg"), ("bulk + exchange=weights", "bbbbbb"), ("gossip", "bbbbbb"), ("gossip + gradients", "gggggg"),
    ("local(1)", "bbbbbb"), ("local(3)", "..b..b"), ("local(3, mean=after)", "..a..a"), ("local(2) + gradients", ".g.g.g"),
    ("postlocal(2, 3)", "gggb.b"), ("postlocal(3, 0)", "..b..b"), ("postlocal(2, 3) + gossip", "bbbb.b"),
    ("postlocal(2, 3) + gradients", "gggg.g"), ("diloco(3)", "..a..a"),
    ("diloco(4, fragments=2, overlap=1)", ".a.a.a"), ("diloco(4, fragments=3)", ".aaa.a"),
    ("diloco(2) + gossip", ".a.a.a"),
])  # fmt: skip
def test_the_schedule_is_data(text: str, moments: str) -> None:
    letters = {Moment.NEVER: ".", Moment.GRADIENTS: "g", Moment.BEFORE: "b", Moment.AFTER: "a"}
    strategy = Strategy.parse(text)
    assert "".join(letters[strategy.moment(t)] for t in range(1, 7)) == moments


def test_the_whole_table_is_strategies_or_refused() -> None:
    for parts in itertools.product(SYNC, TOPOLOGY, COMPRESSION, EXCHANGES):
        _one_sentence(" + ".join([*parts[:3], f"exchange={parts[3]}"]))


@pytest.mark.parametrize(
    ("older", "text"),
    [
        ("local(2, rest=weights) + topk(share=0.1)", "local(2, residual=weights) + allreduce + topk(0.1)"),
        ("bulk + dgc(share=0.01)", "bulk + allreduce + dgc(0.01)"),
        ("bulk + randomk(share=0.5)", "bulk + allreduce + randomk(0.5)"),
        ("async + server(optimizer=adagrad, rate=10)", "async + server(1, optimizer=adagrad, lr=10)"),
    ],
)
def test_older_names_of_arguments_are_read_and_printed_as_the_new_ones(older: str, text: str) -> None:
    assert str(Strategy.parse(older)) == text
    assert Strategy.parse(text) == Strategy.parse(older)


def test_an_argument_under_both_its_names_is_given_twice() -> None:
    with pytest.raises(HocketError, match="topk is given density twice"):
        Strategy.parse("topk(0.1, share=0.2)")

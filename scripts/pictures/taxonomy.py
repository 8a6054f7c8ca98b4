"""The three axes: the methods on each, by what their classes say of themselves, and which go with which, by what is refused."""

from __future__ import annotations

from svg import BLUE, GREEN, INK, ORANGE, Drawing

from hocket import compression, sync, topology
from hocket.errors import HocketError
from hocket.strategy import Strategy

ARGUMENTS = {
    "local": "local(4)", "postlocal": "postlocal(4, 100)", "diloco": "diloco(30)", "ssp": "ssp(4)", "stale": "stale(4)",
    "downpour": "downpour(5, 5)", "aedit": "aedit(60)", "asyncdiloco": "asyncdiloco(30)",
    "hierarchical": "hierarchical(allreduce, allreduce, size=4)", "qsgd": "qsgd(4)", "bins": "bins(2)", "cast": "cast(bf16)",
    "threshold": "threshold(keep=0.01)", "topk": "topk(0.01)", "randomk": "randomk(0.01)", "lowrank": "lowrank(2)",
    "dgc": "dgc(0.01)",
}  # fmt: skip
"""Notation of a method with the arguments that it needs."""
EXAMPLE = ("local", "gossip", "topk")


def groups() -> list[tuple[str, str, list[tuple[str, list[str]]]]]:
    """The axes: a question, the axis's name, and groups of methods."""
    when: dict[str, list[str]] = {"in step with each other": [], "not in step": []}
    for name, method in sync.METHODS.items():
        when["not in step" if method.asynchronous else "in step with each other"].append(name)
    whom: dict[str, list[str]] = {"all of them": [], "a few of them": [], "servers": []}
    for name, kind in topology.METHODS.items():
        whom["servers" if name == "server" else "a few of them" if kind.peer_to_peer else "all of them"].append(name)
    what: dict[str, list[str]] = {
        "everything, as it is": [],
        "every value, in fewer bits": [],
        "some of the values": [],
        "other forms": [],
    }
    for name, code in compression.METHODS.items():
        some = issubclass(code, compression.Selection) or name == "dgc"
        short = issubclass(code, compression.Precision) or name in ("sign",)
        plain = not code.compresses
        of_all = "everything, as it is" if plain else "every value, in fewer bits" if short else "other forms"
        what["some of the values" if some else of_all].append(name)
    parts = (
        ("When do workers talk?", "synchronisation", when),
        ("Whom do they talk to?", "topology", whom),
        ("What do they send?", "compression", what),
    )
    return [(question, axis, [item for item in found.items() if item[1]]) for question, axis, found in parts]


def axes() -> Drawing:
    drawing = Drawing(720, 360, "A strategy is one method of each axis: when workers talk, whom they talk to, what they send")
    wide, at = 222, {}
    for column, (question, axis, found) in enumerate(groups()):
        x = 12 + (wide + 15) * column
        drawing.rect(x, 8, wide, 296, (BLUE, GREEN, ORANGE)[column], 0.10, line=True)
        drawing.text(x + wide / 2, 30, question, "middle", 14, bold=True)
        drawing.text(x + wide / 2, 47, axis, "middle", 11, opacity=0.75)
        y = 66.0
        for words, names in found:
            drawing.text(x + 14, y + 6, words, size=11, opacity=0.75)
            y += 12
            for k, name in enumerate(sorted(names, key=lambda name: column == 2 and name not in EXAMPLE)):
                place = x + 14 + 100 * (k % 2), y + 20 * (k // 2)
                chosen = name == EXAMPLE[column]
                drawing.text(place[0] + (6 if chosen else 0), place[1] + 13, name, size=13, bold=chosen)
                if chosen:
                    at[column] = (place[0], place[1] - 2, 13 + 7.6 * len(name))
                    drawing.rect(place[0], place[1] - 2, 13 + 7.6 * len(name), 20, (BLUE, GREEN, ORANGE)[column], 0.28, line=True)
            y += 20 * -(-len(names) // 2) + 14
    for left, right in ((0, 1), (1, 2)):
        (x, y, w), (to_x, to_y, _) = at[left], at[right]
        drawing.arrow(x + w, y + 10, to_x, to_y + 10, INK, 1.4, 0.8)
    drawing.text(360, 332, "local(4) + gossip + topk(0.01)", "middle", 15, bold=True)
    drawing.text(360, 350, "every four steps, with two partners in turn, one percent of the values", "middle", 11, opacity=0.75)
    return drawing


def works(*names: str) -> bool:
    """Whether a strategy of these methods can be built."""
    try:
        Strategy.parse(" + ".join(ARGUMENTS.get(name, name) for name in names if name != "none"))
    except HocketError:
        return False
    return True


def together() -> Drawing:
    """Which methods go together: every pair is built, and what is refused is left empty."""
    whens, whoms, whats = (list(module.METHODS) for module in (sync, topology, compression))
    side, left, top = 30, 104, 96
    columns = [*whoms, *(name for name in whats if name != "none")]
    drawing = Drawing(
        left + side * len(columns) + 74, top + 22 * len(whens) + 40, "Which methods go together, as the library accepts them"
    )
    for k, name in enumerate(columns):
        x = left + side * k + (14 if k >= len(whoms) else 0) + 12
        drawing.turned(x, top - 8, name, -50)
    for n, when in enumerate(whens):
        y = top + 22 * n
        drawing.text(left - 8, y + 14, when, "end")
        for k, name in enumerate(columns):
            x = left + side * k + (14 if k >= len(whoms) else 0)
            whom = k < len(whoms)
            drawing.rect(
                x, y, side - 3, 19, (GREEN if whom else ORANGE) if works(when, name) else INK, 0.85 if works(when, name) else 0.06
            )
    drawing.legend(
        left,
        drawing.height - 12,
        (GREEN, 0.85, "goes with this topology"),
        (ORANGE, 0.85, "takes this code"),
        (INK, 0.06, "refused"),
    )
    return drawing


PICTURES = {"taxonomy": axes, "together": together}

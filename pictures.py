"""Pictures of a generation: every round's draft tree and the way through it, as SVG or HTML.

A round is drawn from the left: a column per depth, a row per leaf, a node on the row of its most
probable child, so the likeliest path is a straight line. The layout is computed from the text's
width in cells of a monospaced font, so no boxes overlap whatever the browser's fonts are.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from config import UserError
from request import Result, Round
from sampling import NO_TOKEN

# Lengths are in pixels. A cell is the advance of the 13 px text, a small cell of the 10 px one.
CELL, SMALL_CELL = 8.0, 6.2
TEXT_CELLS = 18  # longer tokens are shortened
BOX, ROW, GAP, PAD = 24, 30, 30, 8  # a box's height; from row to row; between columns; padding
CAPTION, MARGIN = 28, 14  # above a round's boxes; around them
PAGE, SPACE = 1240, 12  # width that rounds are wrapped to, distance between rounds
HEADER = 72
MOST_ROUNDS = 200  # in an SVG, which is looked at whole; the HTML page has them all

STYLE = """
text { font: 13px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328 }
.small { font-size: 10px; fill: #57606a }
.caption { font: 12px system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif }
.title { font: bold 16px system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif }
.card { fill: #fff; stroke: #d8dee4 }
.edge { fill: none; stroke: #c4cbd3; stroke-width: 1.2 }
.edge.accepted { stroke: #1a7f37; stroke-width: 2.6 }
.edge.bonus { stroke: #b35900; stroke-width: 2.6 }
.box { fill: #f3f4f6; stroke: #c4cbd3 }
.box.accepted { fill: #dff5e3; stroke: #1a7f37; stroke-width: 2 }
.box.bonus { fill: #fff0d6; stroke: #b35900; stroke-width: 2 }
.bar { fill: #1a7f37 } .bar:hover { fill: #0b5323 }
.mean { stroke: #b35900; stroke-dasharray: 5 4 }
"""

PAGE_STYLE = """
body { font: 14px/1.5 system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif; color: #1f2328;
  background: #fff; max-width: 1400px; margin: 24px auto; padding: 0 20px }
h1 { font-size: 22px; margin: 0 0 8px } h2 { font-size: 15px; margin: 20px 0 4px }
pre { font: 13px/1.45 "DejaVu Sans Mono", Menlo, Consolas, monospace; background: #f6f8fa;
  padding: 10px 12px; border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 240px; overflow: auto; unicode-bidi: plaintext; margin: 0 }
dl { display: flex; flex-wrap: wrap; gap: 8px 32px; margin: 0 }
dt { color: #57606a; font-size: 12px } dd { margin: 0; font-size: 17px; font-weight: 600 }
.rounds { display: flex; flex-wrap: wrap; gap: 12px; align-items: flex-start }
.rounds div { max-width: 100%; overflow-x: auto } svg { display: block }
.rounds div:target { outline: 3px solid #b35900; border-radius: 8px }
"""


@dataclass(frozen=True)
class Box:
    """A node as drawn. kind: "accepted", "rejected" or "bonus"; parent: index of a box, or -1.

    x, y    left and top, in pixels from the round's corner;  text: as shown;  note: small, after it
    title   the whole token, its id and its probabilities, shown on hovering
    """

    x: float
    y: float
    width: float
    text: str
    note: str
    title: str
    kind: str
    parent: int


@dataclass(frozen=True)
class Layout:
    """A round as drawn: the boxes in the order of the tree's nodes, and the bonus last."""

    boxes: tuple[Box, ...]
    caption: str
    width: float
    height: float


def write(path: Path, result: Result, token_text: Callable[[int], str], prompt: str) -> None:
    """Draw the rounds of `result` to `path`: one picture (.svg) or one self-contained page (.html).

    token_text  id -> text; white space and controls in it are made visible here
    Raises UserError for another suffix, OSError where the file cannot be written.
    """
    pages = {".svg": svg_page, ".html": html_page}
    if path.suffix not in pages:
        raise UserError(f"{path}: expected a name ending in .svg or .html, got {path.suffix!r}")
    path.write_text(pages[path.suffix](result, token_text, prompt), encoding="utf-8")


# ---- text --------------------------------------------------------------------------------------

_WHITE = {" ": "·", "\n": "⏎", "\t": "→", "\r": "␍"}


def printable(text: str) -> str:
    """Text with controls, bidi marks and lone surrogates as escapes; spaces and lines stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def visible(text: str) -> str:
    """A token on one line: white space as · ⏎ → ␍, other unprintable characters as escapes."""
    return printable("".join(_WHITE.get(c, c) for c in text)) or "∅"


def cells(text: str) -> int:
    """Columns of a monospaced font: 2 for wide characters and for scripts that such fonts lack."""
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" or _borrowed(ord(c)) else 1 for c in text
    )


def _borrowed(code: int) -> bool:
    """Whether the browser takes this character from another font (Indic to Georgian, emoji, …)."""
    return 0x900 <= code < 0x1E00 or code >= 0x2C00


def shortened(text: str, most: int) -> str:
    """At most `most` cells of `text`, ending in … where something is left out."""
    if cells(text) <= most:
        return text
    used = np.cumsum([cells(c) for c in text])
    return text[: int(np.searchsorted(used, most - 1, side="right"))] + "…"


def percent(p: float) -> str:
    """A probability in at most five characters."""
    if p < 0.0005:
        return "<0.1%"
    return f"{p:.1%}" if p < 0.0995 else f"{p:.0%}"


# ---- layout ------------------------------------------------------------------------------------


def layout(round_: Round, caption: str, token_text: Callable[[int], str]) -> Layout:
    """Place a round's nodes, and the bonus as one more child of the last accepted node."""
    tree, walk = round_.tree, round_.walk
    parents = [*tree.parent.tolist(), walk.rows[-1]]
    depths = [*tree.depth.tolist(), int(tree.depth[walk.rows[-1]]) + 1]
    labels = [_label(tree, node, token_text) for node in range(len(tree))]
    labels.append(_bonus_label(walk.tokens[-1], token_text))
    kinds = ["rejected"] * len(tree) + ["bonus"]
    for node in walk.rows:
        kinds[node] = "accepted"
    widths = [_box_width(text, note) for text, note, _ in labels]
    lefts = _column_lefts(depths, widths)
    rows = _rows(parents, [*(-tree.score).tolist(), -np.inf])  # the bonus goes straight on
    boxes = tuple(
        Box(lefts[depths[i]], CAPTION + rows[i] * ROW, widths[i], *labels[i], kinds[i], parents[i])
        for i in range(len(parents))
    )
    right = max(max(b.x + b.width for b in boxes), MARGIN + cells(caption) * SMALL_CELL * 1.15)
    return Layout(boxes, caption, right + MARGIN, CAPTION + max(rows) * ROW + BOX + MARGIN)


def _label(tree, node: int, token_text: Callable[[int], str]) -> tuple[str, str, str]:
    """Text, note and title of a node of the tree."""
    token = int(tree.token_ids[node])
    full = visible(token_text(token))
    text = shortened(full, TEXT_CELLS)
    if node == 0:
        return text, "", f"{full}\nid {token} · root: the last committed token"
    path = float(tree.score[node])
    # Rounding of the scores may put the quotient a hair above 1.
    p = float(np.exp(min(path - float(tree.score[tree.parent[node]]), 0.0)))
    odds = f"draft {percent(p)} · path {percent(float(np.exp(path)))}"
    return text, percent(p), f"{full}\nid {token} · {odds}"


def _bonus_label(token: int, token_text: Callable[[int], str]) -> tuple[str, str, str]:
    if token == NO_TOKEN:
        return "none", "not finite", "The model's logits are not finite: the request ended here."
    full = visible(token_text(token))
    title = f"{full}\nid {token} · bonus: the target's own token, off the tree"
    return shortened(full, TEXT_CELLS), "bonus", title


def _box_width(text: str, note: str) -> float:
    beside = len(note) * SMALL_CELL + PAD if note else 0
    return PAD + cells(text) * CELL + beside + PAD


def _column_lefts(depths: list[int], widths: list[float]) -> list[float]:
    """Left of each depth's column; a column is as wide as its widest box."""
    columns = np.zeros(max(depths) + 1)
    np.maximum.at(columns, depths, widths)
    return [MARGIN + float(left) for left in np.cumsum(columns + GAP) - columns - GAP]


def _rows(parents: list[int], order: list[float]) -> list[int]:
    """Row of each node: that of its parent for a first child, else the next free one."""
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda n: order[n]):
        children[parents[node]].append(node)
    rows, last, waiting = [0] * len(parents), 0, [0]
    while waiting:
        node = waiting.pop()
        if node and children[parents[node]][0] != node:
            last += 1
        rows[node] = last
        waiting += reversed(children[node])
    return rows


def emitted(result: Result) -> list[int]:
    """Tokens that each round gave to the text: all of its walk, but where the text ended."""
    counts, left = [], max(len(result.token_ids) - 1, 0)  # the first token is the prefill's
    for r in result.rounds:
        counts.append(min(len(r.walk.tokens), left))
        left -= counts[-1]
    return counts


def _layouts(result: Result, token_text: Callable[[int], str], most: int) -> list[Layout]:
    placed = []
    for i, (r, n) in enumerate(zip(result.rounds[:most], emitted(result), strict=False)):
        walked = len(r.walk.tokens)
        count = _count(n, "token") if n == walked else f"{n} of {_count(walked, 'token')}, ends"
        caption = f"round {i + 1} · {count} · {_count(len(r.tree), 'node')}"
        placed.append(layout(r, caption, token_text))
    return placed


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# ---- drawing -----------------------------------------------------------------------------------


def draw(placed: Layout) -> str:
    """A round's SVG elements: grey edges, then the path's, then the boxes."""
    parts = [
        f'<rect class="card" x=".5" y=".5" width="{placed.width - 1:g}"'
        f' height="{placed.height - 1:g}" rx="8"/>',
        f'<text class="caption" x="{MARGIN}" y="19">{escape(placed.caption)}</text>',
    ]
    children = [b for b in placed.boxes if b.parent >= 0]
    for box in sorted(children, key=lambda b: b.kind != "rejected"):
        parts.append(_edge(placed.boxes[box.parent], box))
    return "\n".join(parts + [_draw_box(box) for box in placed.boxes])


def _edge(parent: Box, child: Box) -> str:
    """Right of the parent, down in the gap before the child's column, right to the child."""
    start, end, turn = parent.y + BOX / 2, child.y + BOX / 2, child.x - GAP / 2
    line = f"M{parent.x + parent.width:g} {start:g}"
    if end > start:
        line += f"H{turn - 6:g}q6 0 6 6V{end - 6:g}q0 6 6 6"
    return f'<path class="edge {child.kind}" d="{line}H{child.x:g}"/>'


def _draw_box(box: Box) -> str:
    base = box.y + 16.5
    note = box.x + box.width - PAD
    return (
        f"<g><title>{escape(box.title)}</title>"
        f'<rect class="box {box.kind}" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}"'
        f' height="{BOX}" rx="6"/>'
        f'<text x="{box.x + PAD:g}" y="{base:g}">{escape(box.text)}</text>'
        f'<text class="small" x="{note:g}" y="{base:g}" text-anchor="end">{escape(box.note)}</text>'
        "</g>"
    )


def _legend(x: float, y: float) -> str:
    parts = []
    for kind, text in (
        ("accepted", "accepted (first: the root)"),
        ("rejected", "drafted, not taken (draft probability)"),
        ("bonus", "bonus: the target's own"),
    ):
        parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="22" height="14" rx="4"/>'
            f'<text class="caption" x="{x + 29:g}" y="{y + 11.5:g}">{text}</text>'
        )
        x += 56 + 6.4 * len(text)
    return "".join(parts)


def _svg(width: float, height: float, body: str, attributes: str = "") -> str:
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    return f"<svg {attributes}{size}>\n{body}\n</svg>"


def _shelves(placed: list[Layout], width: float) -> list[tuple[float, float]]:
    """Left and top of each round: side by side while they fit, like words on lines."""
    corners, x, y, tall = [], 0.0, 0.0, 0.0
    for p in placed:
        if x and x + p.width > width:
            x, y, tall = 0.0, y + tall + SPACE, 0.0
        corners.append((x, y))
        x, tall = x + p.width + SPACE, max(tall, p.height)
    return corners


def svg_page(result: Result, token_text: Callable[[int], str], prompt: str) -> str:
    """The whole picture: a header, then the rounds in order."""
    placed = _layouts(result, token_text, MOST_ROUNDS)
    corners = _shelves(placed, max([PAGE - 2 * SPACE] + [p.width for p in placed]))
    bottom = max([y + p.height for (_, y), p in zip(corners, placed, strict=True)], default=0)
    facts = " · ".join(f"{name} {value}" for name, value in _figures(result))
    title = shortened(" ".join(printable(prompt).split()), 110)
    # No wider than what stands there; a character of the title's and the facts' fonts is narrower.
    inner = max(
        *(x + p.width for (x, _), p in zip(corners, placed, strict=True)),
        *(cells(title) * 10.5, cells(facts) * 7.5, 790),
    )
    parts = [
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text class="title" x="{SPACE}" y="28">{escape(title)}</text>',
        f'<text class="caption" x="{SPACE}" y="52">{escape(facts)}</text>',
        _legend(SPACE, HEADER - 8),
    ]
    for (x, y), p in zip(corners, placed, strict=True):
        parts.append(f'<g transform="translate({x + SPACE:g} {y + HEADER + 20:g})">{draw(p)}</g>')
    height = HEADER + 20 + bottom + SPACE
    if note := _absence(result, len(placed)):
        parts.append(f'<text class="caption" x="{SPACE}" y="{height + 10:g}">{note}</text>')
        height += 24
    xmlns = 'xmlns="http://www.w3.org/2000/svg" '
    return _svg(inner + 2 * SPACE, height, "\n".join(parts), xmlns) + "\n"


def _absence(result: Result, drawn: int) -> str:
    if not result.rounds:
        return "No rounds: nothing was decoded after the first token."
    left = len(result.rounds) - drawn
    return f"… and {_count(left, 'round')} more, left out here; .html has all." if left else ""


def _mode(rounds: tuple[Round, ...]) -> str:
    """What the trees were; the result does not say what was asked for."""
    largest = max(len(r.tree) for r in rounds)
    if largest == 1:
        return "ar"
    branched = any(len(r.tree) > int(r.tree.depth.max()) + 1 for r in rounds)
    return f"{'tree' if branched else 'chain'} of up to {_count(largest, 'node')}"


def _figures(result: Result) -> list[tuple[str, str]]:
    finish = f"error: {result.error}" if result.error else result.finish_reason
    mode = [("mode", _mode(result.rounds))] if result.rounds else []
    seed = [("seed", str(result.seed))] if result.seed is not None else []
    return [
        *mode,
        ("τ", f"{result.acceptance_length:.2f}"),
        ("steps", str(result.steps)),
        ("tokens", str(len(result.token_ids))),
        ("tok/s", f"{result.tok_per_s:.1f}"),
        ("prompt tokens", str(result.prompt_tokens)),
        ("finish", finish),
        *seed,
    ]


# ---- the page ----------------------------------------------------------------------------------


def strip(result: Result) -> str:
    """Emitted tokens per round as bars, each a link to its round; the dashed line is τ."""
    counts, tall = emitted(result), 72
    top, step = max([*counts, 1]), float(np.clip(PAGE / max(len(counts), 1), 5, 16))
    per_line = int(PAGE / step)
    parts = []
    for start in range(0, len(counts), per_line):
        line = counts[start : start + per_line]
        base = (start // per_line) * (tall + 26) + tall + 10
        mean = base - tall * result.acceptance_length / top
        for i, n in enumerate(line):
            number, high = start + i + 1, max(tall * n / top, 1)
            parts.append(
                f'<a href="#round-{number}"><rect class="bar" x="{30 + i * step:g}"'
                f' y="{base - high:g}" width="{step - 1.5:g}" height="{high:g}">'
                f"<title>round {number}: {_count(n, 'token')}</title></rect></a>"
            )
        right = 30 + len(line) * step
        parts.append(
            f'<text class="small" x="24" y="{base - tall + 8}" text-anchor="end">{top}</text>'
            f'<text class="small" x="24" y="{base}" text-anchor="end">0</text>'
            f'<text class="small" x="30" y="{base + 12}">round {start + 1}</text>'
            f'<path class="mean" d="M30 {mean:g}H{right:g}"/>'
            f'<text class="small" x="{right + 5:g}" y="{mean + 3.5:g}">'
            f"τ {result.acceptance_length:.2f}</text>"
        )
    return _svg(PAGE + 100, -(-len(counts) // per_line) * (tall + 26) + 4, "\n".join(parts))


def html_page(result: Result, token_text: Callable[[int], str], prompt: str) -> str:
    """The page: figures, prompt, text, the strip of τ, every round. It is well-formed XML too."""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _figures(result)
    )
    rounds = "\n".join(
        f'<div id="round-{i + 1}">{_svg(p.width, p.height, draw(p))}</div>'
        for i, p in enumerate(_layouts(result, token_text, len(result.rounds)))
    )
    bars = strip(result) if result.rounds else f"<p>{_absence(result, 0)}</p>"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><title>Rounds of a generation</title>
<style>{STYLE}{PAGE_STYLE}</style></head><body>
<h1>Rounds of a generation</h1>
<dl>{facts}</dl>
<h2>Prompt</h2><pre>{escape(printable(prompt))}</pre>
<h2>Text</h2><pre>{escape(printable(result.text))}</pre>
<h2>Tokens per round</h2>{bars}
<h2>Rounds</h2>
{_svg(PAGE, 28, _legend(1, 4))}
<div class="rounds">{rounds}</div>
</body></html>
"""

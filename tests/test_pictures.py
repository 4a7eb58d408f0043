"""pictures.py: pictures are well-formed, complete, self-contained, and no two boxes overlap."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pictures
from config import UserError
from request import Result, Round
from sampling import NO_TOKEN
from spec_decode import Tree, Walk, build_tree, chain, single, walk

# Every kind of token that pictures must survive.
WORDS = [
    *("the", " quick", ".", "\n", "\r\n\n", "\t\t", "    ", "", "a" * 300, " " * 90),
    *("你好世界", "機械学習モデル" * 9, "、", "한국어", " שלום", " مرحبا", " नमस्ते", "ಕನ್ನಡ"),
    *("\x00\x1b[0m", "\u202e evil", "\u200d", "\ud800", "\ufffe", "\x85", "e\u0301" * 40),
    *("🙂👩‍🚀", "<|im_end|>", "</text>", "&amp;\"'", "]]>", "\\n", "-->", "Ünï", "\\xe4"),
]


def token_text(token: int) -> str:
    return WORDS[token % len(WORDS)]


def random_tree(rng: np.random.Generator, n: int) -> Tree:
    """Any shape: each node hangs under any earlier one."""
    parent, depth, score = np.full(n, -1), np.zeros(n, int), np.zeros(n, np.float32)
    for i in range(1, n):
        parent[i] = rng.integers(0, i)
        depth[i] = depth[parent[i]] + 1
        score[i] = score[parent[i]] - rng.exponential(3)
    return Tree(rng.integers(0, 999, n).astype(np.int32), parent, depth, score)


def random_round(rng: np.random.Generator, n: int) -> Round:
    tree = random_tree(rng, n)
    rows = [0]
    while len(children := np.flatnonzero(tree.parent == rows[-1])) and rng.random() < 0.8:
        rows.append(int(rng.choice(children)))
    tokens = [int(tree.token_ids[row]) for row in rows[1:]]
    return Round(tree, Walk(rows, [*tokens, int(rng.integers(0, 999))]))


def result_of(rounds, cut: int = 0, **fields) -> Result:
    """A result whose text ended `cut` tokens before the last round's walk did."""
    tokens = [1] + [t for r in rounds for t in r.walk.tokens]
    text = "".join(map(token_text, tokens))
    figures = dict(id=1, text=text, finish_reason="length", seed=7, prompt_tokens=3)
    figures |= dict(steps=len(rounds), prefill_s=0.1, decode_s=2.0)
    ids = tokens[: len(tokens) - cut]
    return Result(**(figures | fields), token_ids=ids, rounds=tuple(rounds))


def some_rounds(count: int = 6, n: int = 32) -> list[Round]:
    rng = np.random.default_rng(0)
    return [random_round(rng, n) for _ in range(count)]


def written(tmp_path: Path, suffix: str, result: Result, prompt: str = "p") -> str:
    path = tmp_path / f"picture{suffix}"
    pictures.write(path, result, token_text, prompt)
    return path.read_text(encoding="utf-8")


def parsed(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))


def texts(page: str, tag: str) -> list[str]:
    return [e.text or "" for e in parsed(page).iter() if e.tag.endswith(tag)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 64))
def test_boxes_do_not_overlap_and_hold_their_text(seed, n):
    placed = pictures.layout(random_round(np.random.default_rng(seed), n), "caption", token_text)
    assert len(placed.boxes) == n + 1
    for a, b in combinations(placed.boxes, 2):
        apart = a.x + a.width < b.x or b.x + b.width < a.x
        assert apart or a.y + pictures.BOX < b.y or b.y + pictures.BOX < a.y
    for box in placed.boxes:
        assert box.x > 0 and box.y >= pictures.CAPTION and box.x + box.width < placed.width
        assert box.y + pictures.BOX < placed.height
        assert pictures.cells(box.text) * pictures.CELL < box.width and box.text.strip()
        if box.parent >= 0:
            parent = placed.boxes[box.parent]
            assert parent.x + parent.width + pictures.GAP < box.x + 1e-6 and parent.y <= box.y


def test_no_edge_crosses_a_box():
    """The free piece of a row that an edge runs through is its parent's own; drops are in gaps."""
    rng = np.random.default_rng(3)
    for n in (2, 16, 64):
        boxes = pictures.layout(random_round(rng, n), "", token_text).boxes
        for child in boxes[1:]:
            parent, turn = boxes[child.parent], child.x - pictures.GAP / 2
            for box in boxes:
                assert not box.x <= turn <= box.x + box.width
                between = parent.x + parent.width < box.x + box.width and box.x < turn
                assert not (between and box.y == parent.y)


def test_path_bonus_and_probabilities():
    log_probs = np.log(np.array([[0.6, 0.3], [0.5, 0.25]], np.float32))
    tree = build_tree(0, np.array([[1, 2], [4, 3]]), log_probs, budget=6)
    choices = np.full(len(tree), 6)
    choices[0] = 2
    placed = pictures.layout(Round(tree, walk(tree, choices)), "", token_text)
    shown = [(b.kind, b.text, b.note) for b in placed.boxes if b.kind != "rejected"]
    assert shown == [("accepted", "the", ""), ("accepted", ".", "30%"), ("bonus", "····", "bonus")]
    bonus, last = placed.boxes[-1], placed.boxes[placed.boxes[-1].parent]
    assert last.text == "." and last.y == bonus.y
    rejected = sorted((b.text, b.note) for b in placed.boxes if b.kind == "rejected")
    assert rejected == [("·quick", "60%"), ("⏎", "25%"), ("␍⏎⏎", "50%"), ("␍⏎⏎", "50%")]
    assert "id 4 · draft 50% · path 30%" in {b.title.rpartition("\n")[2] for b in placed.boxes}


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_every_token_is_there_in_full(tmp_path, suffix):
    rounds = some_rounds()
    titles = texts(written(tmp_path, suffix, result_of(rounds)), "title")
    whole = {title.partition("\nid ")[0] for title in titles}
    for r in rounds:
        for token in [*r.tree.token_ids.tolist(), r.walk.tokens[-1]]:
            assert pictures.visible(token_text(token)) in whole


@pytest.mark.parametrize("suffix", [".svg", ".html"])
@pytest.mark.parametrize("kind", ["ar", "chain", "none", "nan"])
def test_every_mode_is_drawn(tmp_path, suffix, kind):
    ids, log_probs = np.arange(12).reshape(6, 2), np.full((6, 2), -0.5, np.float32)
    trees = {"ar": single(5), "chain": chain(5, ids, log_probs), "nan": single(5)}
    rounds = [Round(trees[kind], Walk([0], [3]))] * 9 if kind in trees else []
    error = None
    if kind == "nan":
        rounds[-1], error = Round(single(3), Walk([0], [NO_TOKEN])), "logits are not finite"
    page = written(tmp_path, suffix, result_of(rounds, cut=kind == "nan", error=error))
    shown = " ".join(parsed(page).itertext())
    expected = {"ar": "ar", "chain": "chain of up to 7 nodes", "none": "No rounds", "nan": error}
    assert expected[kind] in shown
    assert page.count('class="box bonus"') == len(rounds) + 1  # one in the legend


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_prompts_of_any_text(tmp_path, suffix):
    for prompt in ("", "\n", "".join(WORDS), "</pre></svg><script>x</script>"):
        page = written(tmp_path, suffix, result_of(some_rounds(1)), prompt)
        assert not [e for e in parsed(page).iter() if e.tag.endswith("script")]


def test_page_is_self_contained(tmp_path):
    result = result_of(some_rounds())
    page, picture = (written(tmp_path, suffix, result) for suffix in (".html", ".svg"))
    assert "http" not in page
    assert picture.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    for text in (page, picture):
        assert not re.search(r"<(script|img|link|iframe|object|image|use)\b|@import|url\(", text)
        assert all(target.startswith("#") for target in re.findall(r'(?:href|src)="([^"]*)', text))


def test_strip_has_a_bar_per_round_with_what_the_text_took(tmp_path):
    rounds = some_rounds(300, 12)
    rounds.append(Round(single(5), Walk([0], [2])))
    rounds[-1] = max(rounds, key=lambda r: len(r.walk.tokens))
    result = result_of(rounds, cut=1)
    walked = len(rounds[-1].walk.tokens)
    assert pictures.emitted(result)[-1] == walked - 1
    assert sum(pictures.emitted(result)) == len(result.token_ids) - 1
    page = written(tmp_path, ".html", result)
    assert page.count('class="bar"') == len(rounds)
    targets = set(re.findall(r'href="#([^"]+)"', page))
    assert targets == set(re.findall(r'<div id="([^"]+)"', page)) and len(targets) == len(rounds)
    assert f"{walked - 1} of {walked} tokens, ends" in page


def test_rounds_on_shelves_do_not_overlap_and_keep_their_order():
    result = result_of(some_rounds(40, 6))
    placed = pictures._layouts(result, token_text, 40)
    width = max([pictures.PAGE] + [p.width for p in placed])
    corners = pictures._shelves(placed, width)
    assert corners == sorted(corners, key=lambda corner: (corner[1], corner[0]))
    for ((x, y), a), ((u, v), b) in combinations(zip(corners, placed, strict=True), 2):
        assert x + a.width < u or u + b.width < x or y + a.height < v or v + b.height < y
        assert max(x + a.width, u + b.width) <= width


def test_a_picture_of_many_rounds_says_what_it_leaves_out(tmp_path):
    result = result_of(some_rounds(pictures.MOST_ROUNDS + 7, 2))
    page = written(tmp_path, ".svg", result)
    assert "and 7 rounds more, left out here" in page
    assert page.count('class="card"') == pictures.MOST_ROUNDS
    assert written(tmp_path, ".html", result).count('class="card"') == pictures.MOST_ROUNDS + 7


@pytest.mark.parametrize(
    "text, shown",
    [(" a\n\tb", "·a⏎→b"), ("\x1b", "\\x1b"), ("\u202e", "\\u202e"), ("", "∅"), ("你", "你")],
)
def test_white_space_and_controls_are_visible(text, shown):
    assert pictures.visible(text) == shown


@pytest.mark.parametrize("text", [w for w in WORDS if pictures.cells(pictures.visible(w)) > 18])
def test_long_tokens_are_shortened(text):
    short = pictures.shortened(pictures.visible(text), 18)
    assert short.endswith("…") and 17 <= pictures.cells(short) <= 18


@pytest.mark.parametrize("name", ["picture.png", "picture", "picture.svg.gz"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"\.svg or \.html"):
        pictures.write(tmp_path / name, result_of([]), token_text, "p")
    assert not list(tmp_path.iterdir())

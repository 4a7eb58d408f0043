"""The DFlash drafter: what goes into a block, what it reads of the target, its exactness (F13)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import oracle
import pytest
import toy

from cache import Placed
from engine import Engine

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.parent.parent.name for path in GOLDENS.glob("*/drafter/golden.npz"))
KINDS = {  # of the toy's drafter layers
    "full": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16},
    "narrow": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5},
    "wide": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 40},
}
ROPES = {
    "plain": None,
    "deepseek_yarn": {**toy.YARN, "type": "deepseek_yarn", "mscale_all_dim": 0.6},
    "yarn": {k: v for k, v in toy.YARN.items() if "mscale" not in k},
}


@functools.cache
def bundle(name: str) -> tuple[Engine, dict[str, np.ndarray], float]:
    """The engine with the bundle's own drafter, its golden, and the bound of a draft logit: four
    times the golden's measured distance from float64 (see test_golden.logit_bound)."""
    golden = dict(np.load(GOLDENS / name / "drafter" / "golden.npz"))
    facts = json.loads((GOLDENS / name / "drafter" / "golden.json").read_text())
    bound = 4 * facts["measured"]["logit_error"]
    assert bound < facts["logit_bound"]
    return toy.engine_of(GOLDENS / name, drafter=True), golden, bound


def extend(engine: Engine, slot: int, taps: np.ndarray, pieces=None) -> None:
    """Make `taps` the context of a slot, in pieces of the given lengths."""
    begin = 0
    for n in pieces or [len(taps)]:
        end = begin + n
        engine.cache.reserve(slot, end)
        at = np.arange(begin, end, dtype=np.int32)
        placed = Placed(at, np.full(n, slot, np.int32), at)
        engine.drafter.extend(taps, placed, engine.cache)
        engine.cache.lengths[slot] = begin = end
    assert begin == len(taps)


def draft(engine: Engine, taps: np.ndarray, anchor: int, pieces=None) -> np.ndarray:
    """Draft logits [block - 1, V] behind a context of given taps, in a slot of its own."""
    slot = engine.cache.admit()
    extend(engine, slot, taps, pieces)
    logits = engine.drafter.draft(np.array([anchor], np.int32), np.array([slot]), engine.cache)
    engine.cache.free(slot)
    return logits[0]


# ---- F13: right drafts ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_f13_draft_logits_equal_the_golden(name):
    engine, golden, bound = bundle(name)
    for context, expected in zip(golden["contexts"], golden["logits"], strict=True):
        anchor = golden["sequence_ids"][context]
        logits = draft(engine, golden["taps"][:context], anchor)
        assert np.abs(logits - expected).max() <= bound, context


@pytest.mark.parametrize("name", NAMES)
def test_f13_taps_and_drafts_from_the_tokens_on(name):
    """From token ids through the target's own taps: equal to the golden of both."""
    engine, golden, bound = bundle(name)
    ids = golden["sequence_ids"]
    target = json.loads((GOLDENS / name / "golden.json").read_text())
    tap_bound = 4 * target["measured"]["logit_error"]
    seen = []
    original = engine.model.forward

    def watched(*arguments):
        seen.append(original(*arguments))
        return seen[-1]

    engine.model.forward = watched
    slot = engine.cache.admit()
    context = int(golden["contexts"][-1])
    toy.feed(engine, slot, ids[:context])
    engine.model.forward = original
    assert np.abs(seen[0].taps - golden["taps"][:context]).max() <= tap_bound
    logits = engine.drafter.draft(ids[[context]], np.array([slot]), engine.cache)[0]
    engine.cache.free(slot)
    assert np.abs(logits - golden["logits"][-1]).max() <= bound + tap_bound


def test_f13_block_is_the_root_then_masks(tmp_path, monkeypatch):
    engine = toy.toy_engine(tmp_path, drafter={})
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, n).tolist() for n in (3, 9)]
    blocks, extended = [], []
    embed, take = engine.ops.embed, engine.drafter.extend

    def watched_embed(ids, *rest):
        blocks.append(ids.copy())
        return embed(ids, *rest)

    def watched_extend(taps, placed, cache):
        extended.append(placed.positions.copy())
        return take(taps, placed, cache)

    monkeypatch.setattr(engine.ops, "embed", watched_embed)
    monkeypatch.setattr(engine.drafter, "extend", watched_extend)
    results = toy.decode(engine, prompts, "chain", max_tokens=4)
    mask, block = engine.drafter.dims.mask_token_id, engine.drafter.dims.block_size
    assert blocks[0].tolist() == prompts[0] + prompts[1]  # the target's, then the first block
    rows = blocks[1].reshape(-1, block)
    assert rows[:, 0].tolist() == [r.token_ids[0] for r in results]
    assert (rows[:, 1:] == mask).all()
    # The context is the committed text alone: prompts first, then roots and accepted nodes.
    assert extended[0].tolist() == [*range(3), *range(9)]
    counts = {n: [at for e in extended for at in e.tolist()].count(n) for n in range(12)}
    assert counts[0] == counts[2] == 2 and counts[11] <= 1
    assert 3 in extended[1] and 9 in extended[1]  # the roots


@pytest.mark.parametrize("layers", [[0], [2], [0, 2], [0, 1, 2]])
def test_f13_taps_are_outputs_of_the_listed_layers(tmp_path, layers):
    drafter = {"dflash_config": {"target_layer_ids": layers}}
    engine = toy.toy_engine(tmp_path, drafter=drafter, dims={"num_hidden_layers": 3})
    ids = np.random.default_rng(2).integers(0, 256, 40).astype(np.int32)
    batch = toy.spec_decode.prompt_rows(ids, engine.cache.admit(), 0, 0)
    taps = engine.model.forward(batch, engine.cache, np.arange(0)).taps
    expected = oracle.forward(*oracle.read_checkpoint(tmp_path / "toy"), ids).taps
    expected = np.concatenate([expected[i] for i in layers], 1)
    assert taps.shape == expected.shape == (40, 64 * len(layers))
    assert np.abs(taps - expected).max() <= toy.logit_bound(engine, np.abs(expected).max())
    # The next layer's output would be noticed.
    assert np.abs(taps - np.roll(expected, 64, 1)).max() > 0.1 or len(layers) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rope", ROPES)
def test_draft_logits_equal_the_oracle(tmp_path, kind, rope):
    drafter = {**KINDS[kind], "rope_scaling": ROPES[rope]}
    engine = toy.toy_engine(tmp_path, drafter=drafter)
    target = oracle.read_checkpoint(tmp_path / "toy")
    own = oracle.read_checkpoint(tmp_path / "toy" / "drafter")
    ids = np.random.default_rng(3).integers(0, 256, 57).astype(np.int32)
    taps = np.concatenate(oracle.forward(*target, ids).taps, 1).astype(np.float32)
    for context in (1, 4, 5, 15, 16, 17, 33, 56):
        expected = oracle.draft(*own, target[1], taps[:context], ids[context])
        logits = draft(engine, taps[:context], ids[context])
        bound = toy.logit_bound(engine, np.abs(expected).max(), layers=2)
        assert np.abs(logits - expected).max() <= bound, context


# ---- exactness -----------------------------------------------------------------------------------


def random_taps(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 128), np.float32)


@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_context_in_any_pieces_gives_the_same_bits(tmp_path, kind, activation):
    engine = toy.toy_engine(tmp_path, drafter=KINDS[kind], activation=activation)
    for n in (1, 15, 16, 17, 48, 56):
        taps = engine.ops.round(random_taps(n, n))
        whole = draft(engine, taps, 7)
        half = n // 2
        for pieces in ([1] * n, [half, n - half] if half else [n], [n - 1, 1] if n > 1 else [n]):
            assert toy.same_bits(draft(engine, taps, 7, pieces), whole), (n, pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_together_equal_blocks_alone_over_uninitialised_pages(tmp_path, kind):
    engine = toy.toy_engine(tmp_path, drafter=KINDS[kind])
    lengths = [1, 15, 16, 17, 33, 47, 48, 56]
    alone = [draft(engine, random_taps(n, n), n) for n in lengths]
    engine.cache.draft[:] = np.nan  # whatever lies in pages beyond the text
    slots = [engine.cache.admit() for _ in lengths]
    for slot, n in zip(slots, lengths, strict=True):
        extend(engine, slot, random_taps(n, n))
    for chosen in (range(8), range(7, -1, -1), (3, 1, 6), (5,)):
        logits = engine.drafter.draft(
            np.array([lengths[i] for i in chosen], np.int32),
            np.array([slots[i] for i in chosen]),
            engine.cache,
        )
        for i, row in zip(chosen, logits, strict=True):
            assert toy.same_bits(row, alone[i])


def test_a_window_wider_than_the_text_is_no_window(tmp_path):
    taps = random_taps(4, 30)
    drafts = {}
    for window in (None, 38, 37, 64):  # the farthest sight: 30 of context and 7 of the block
        kind = "full_attention" if window is None else "sliding_attention"
        own = {"layer_types": [kind] * 2, "sliding_window": window}
        engine = toy.toy_engine(tmp_path / str(window), drafter=own)
        drafts[window] = draft(engine, taps, 7)
    assert toy.same_bits(drafts[38], drafts[None]) and toy.same_bits(drafts[64], drafts[None])
    # One narrower, and the last row of the block no longer sees position 0.
    assert not toy.same_bits(drafts[37], drafts[None])


def test_drafts_do_not_depend_on_what_was_drafted_before(tmp_path):
    """Nothing of a noise block is kept: rejected drafts leave the context as it was."""
    engine = toy.toy_engine(tmp_path, drafter={})
    slot = engine.cache.admit()
    extend(engine, slot, random_taps(5, 21))
    before = engine.cache.draft.copy()
    first, _, again = (
        engine.drafter.draft(np.array([root]), np.array([slot]), engine.cache) for root in (7, 8, 7)
    )
    assert toy.same_bits(engine.cache.draft, before)
    assert toy.same_bits(first, again)

"""Every golden bundle: the engine gives the ids and logits of another implementation, and gives the
same bits by draft trees as by plain decoding."""

from __future__ import annotations

import copy
import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import toy

import config
from config import UserError
from engine import Engine, Result
from reference import yarn_mscale

GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
WITH_DRAFTER = sorted(path.parent.parent.name for path in GOLDENS.glob("*/drafter/golden.npz"))
BUDGETS = (1, 2, 7, 8, 16, 33)
BLOCK = 8  # of the scripted drafters: a step emits 8 tokens at most


@dataclass(frozen=True)
class Bundle:
    """bound: see `logit_bound`;  plain: plain decoding of all prompts in one batch."""

    engine: Engine
    golden: dict[str, np.ndarray]
    prompts: list[list[int]]
    plain: list[Result]
    bound: float


def logit_bound(facts: dict) -> float:
    """How far two honest fp32 forwards may differ in a logit.

    `measured.logit_error` is the golden's own distance e from the float64 oracle, the largest over
    all its logits. Another order of the same sums makes an error of the same size, so the two may
    differ by 2 e; the largest of some 10,000 rounding errors varies less than twofold from one
    order to another, so 4 e. The a priori bound (unit roundoff, depth, widths; see `Bound` in
    tools/make_golden.py) is wider: the generator made sure of 4 e < logit_bound.
    """
    bound = 4 * facts["measured"]["logit_error"]
    assert bound < facts["logit_bound"]
    return bound


@functools.cache
def bundle(name: str) -> Bundle:
    engine = toy.engine_of(GOLDENS / name)
    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    ends = np.cumsum(golden["prompt_lengths"])
    prompts = [p.tolist() for p in np.split(golden["prompt_ids"], ends[:-1])]
    facts = json.loads((GOLDENS / name / "golden.json").read_text())
    tokens = golden["token_ids"].shape[1]
    plain = toy.decode(engine, prompts, max_tokens=tokens)
    return Bundle(engine, golden, prompts, plain, logit_bound(facts))


def context_logits(engine: Engine, ids, pieces=None) -> np.ndarray:
    """Logits of every position of one sequence in a slot of its own."""
    slot = engine.cache.admit()
    try:
        return toy.feed(engine, slot, ids, pieces)
    finally:
        engine.cache.free(slot)


# ---- against the other implementation ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_exact_and_logits_within_the_bound(name):
    b = bundle(name)
    for result, ids, logits in zip(b.plain, b.golden["token_ids"], b.golden["logits"], strict=True):
        assert result.token_ids == ids.tolist()
        assert np.abs(result.logits - logits).max() <= b.bound
    logits = context_logits(b.engine, b.golden["context_ids"])
    assert np.abs(logits - b.golden["context_logits"]).max() <= b.bound


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-int4")])
def test_int4_emits_other_ids_than_fp32(name):
    twin = bundle(name.replace("-int4", "-fp32"))
    assert bundle(name).prompts == twin.prompts
    pairs = zip(bundle(name).plain, twin.plain, strict=True)
    assert any(int4.token_ids != fp32.token_ids for int4, fp32 in pairs)


def set_dims(**changes):
    def change(model) -> None:
        model.dims = replace(model.dims, **changes)

    return change


def plain_scale(model) -> float:
    """Of scores, without what YaRN adds to it."""
    return (model.dims.qk_nope_head_dim + model.dims.qk_rope_head_dim) ** -0.5


def without_mscale_squared(model) -> None:
    assert model.scale > 1.01 * plain_scale(model)
    model.scale = plain_scale(model)


def with_mscale_once(model) -> None:
    rope = model.dims.rope
    model.scale = plain_scale(model) * yarn_mscale(rope.factor, rope.mscale_all_dim)


def rotation(model, rope: config.Rope):
    return model.ops.rope_table(rope, model.dims.qk_rope_head_dim, len(model.cos))


def without_amplitude(model) -> None:
    rope = replace(model.dims.rope, mscale=model.dims.rope.mscale_all_dim)  # their ratio is 1
    model.cos, model.sin = rotation(model, rope)


def without_yarn(model) -> None:
    model.cos, model.sin = rotation(model, replace(model.dims.rope, type="default"))


def without_bias(model) -> None:
    model.layers = [
        layer if layer.bias is None else replace(layer, bias=np.zeros_like(layer.bias))
        for layer in model.layers
    ]


def with_scaling_twice(model) -> None:
    set_dims(routed_scaling_factor=model.dims.routed_scaling_factor**2)(model)


def with_other_normalisation(model) -> None:
    set_dims(norm_topk_prob=not model.dims.norm_topk_prob)(model)


EVERY = ("many", "nano", "odd", "yarn")
MUTATIONS = {  # what is wrong: (shapes that were made to show it, how)
    "lora eps 1e-5": (("odd",), set_dims(lora_norm_eps=1e-5)),
    "rms eps 1e-6": (("odd",), set_dims(rms_norm_eps=1e-6)),
    "mscale squared missing": (("many", "nano", "yarn"), without_mscale_squared),
    "mscale once": (("many", "nano", "yarn"), with_mscale_once),
    "amplitude missing": (("yarn",), without_amplitude),
    "no yarn": (("many", "nano", "yarn"), without_yarn),
    "bias ignored": (EVERY, without_bias),
    "scaling 1": (EVERY, set_dims(routed_scaling_factor=1.0)),
    "scaling twice": (EVERY, with_scaling_twice),
    "norm_topk_prob": (EVERY, with_other_normalisation),
}
TRIALS = [
    pytest.param(name, change, id=f"{name}-{wrong}")
    for wrong, (shapes, change) in MUTATIONS.items()
    for name in NAMES
    if name.partition("-")[0] in shapes
]


@pytest.mark.parametrize("name, change", TRIALS)
def test_the_bound_notices_a_wrong_model(name, change, monkeypatch):
    b = bundle(name)
    model = copy.copy(b.engine.model)
    change(model)
    monkeypatch.setattr(b.engine, "model", model)
    logits = context_logits(b.engine, b.golden["context_ids"])
    error = np.abs(logits - b.golden["context_logits"]).max()
    assert error > 10 * b.bound


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("yarn")])
def test_c3_positions_beyond_the_original_length(name):
    b = bundle(name)
    dims = b.engine.dims
    assert dims.rope.original_max_position_embeddings == 16 and dims.rope.factor == 4
    assert b.engine.settings.decode.context == 64  # and not 4 x 64
    logits = context_logits(b.engine, b.golden["context_ids"])
    for position in (15, 16, 17, 63):
        error = np.abs(logits[position] - b.golden["context_logits"][position]).max()
        assert error <= b.bound, position
    # The same while decoding: the logits of position p choose the token at p + 1.
    crossed = set()
    for prompt, result, expected in zip(b.prompts, b.plain, b.golden["logits"], strict=True):
        for i, row in enumerate(result.logits):
            if len(prompt) - 1 + i in (15, 16, 17, 62):
                assert np.abs(row - expected[i]).max() <= b.bound
                crossed.add(len(prompt) - 1 + i)
    assert crossed == {15, 16, 17, 62}
    with pytest.raises(UserError, match="64 tokens do not fit; decode.context is 64"):
        b.engine.submit([1] * 64)
    with pytest.raises(UserError, match="at most 64, max_position_embeddings"):
        toy.engine_of(GOLDENS / name, context=65)


# ---- against itself ----------------------------------------------------------------------------


def assert_steps(results: list[Result], kind: str, most: int) -> None:
    """A perfect drafter makes a step emit `most` tokens until the cap, a wrong one a single one."""
    for r in results:
        after_first = len(r.token_ids) - 1
        if kind == "perfect":
            assert r.steps == math.ceil(after_first / most)
        elif kind == "wrong":
            assert r.acceptance_length == 1.0 and r.steps == after_first


@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_chain_and_trees_equal_plain_decoding(name, kind):
    b = bundle(name)
    chosen = slice(1, 4)  # three prompts, of which the yarn bundle's cross positions 15, 16 and 17
    prompts, plain = b.prompts[chosen], b.plain[chosen]
    engine = toy.engine_of(GOLDENS / name)
    toy.plug(engine, kind, prompts, plain, block=BLOCK)
    budgets = BUDGETS if kind == "perfect" else BUDGETS[1::2]
    for mode, budget in [("ar", 1), ("chain", 1), *(("tree", n) for n in budgets)]:
        results = toy.decode(engine, prompts, mode, budget)
        toy.assert_same_results(results, plain)
        assert_steps(results, kind, {"ar": 1, "chain": BLOCK}.get(mode, min(budget, BLOCK)))


@pytest.mark.parametrize("name", WITH_DRAFTER)
def test_the_bundles_own_drafter_changes_nothing(name):
    b = bundle(name)
    engine = toy.engine_of(GOLDENS / name, drafter=True)
    for mode, budget in [("ar", 1), ("chain", 1), *(("tree", n) for n in BUDGETS)]:
        toy.assert_same_results(toy.decode(engine, b.prompts, mode, budget), b.plain)


@pytest.mark.parametrize("name", NAMES)
def test_batches_with_mixed_acceptance_give_the_solo_bits(name):
    b = bundle(name)
    context = b.golden["context_ids"].tolist()
    prompts = [*b.prompts, context[:12], context[:33]][-8:]
    alone = toy.engine_of(GOLDENS / name, batch=1)
    solo = [toy.decode(alone, [p])[0] for p in prompts]
    for batch in (1, 3, 8):  # with 3 slots prompts wait, then join sequences that are in mid-text
        engine = toy.engine_of(GOLDENS / name, batch=batch)
        toy.plug(engine, "mixed", prompts, solo, block=BLOCK)
        results = toy.decode(engine, prompts, "tree", 16)
        toy.assert_same_results(results, solo)
        assert len({r.steps for r in results}) > 1  # they did not march in step


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_in_any_pieces_gives_the_same_bits(name):
    b = bundle(name)
    ids = b.golden["context_ids"]
    whole = context_logits(b.engine, ids)
    for pieces in ([16, 16, 32], [5, 11, 1, 30, 17], [15, 1, 1, 46, 1], [1] * len(ids)):
        assert toy.same_bits(context_logits(b.engine, ids, pieces), whole)
    # And as the scheduler cuts it, in chunks of its own: the first token's logits.
    for chunk in (16, 32, 64):
        engine = toy.engine_of(GOLDENS / name, prefill_chunk=chunk)
        [result] = toy.decode(engine, [ids[:50]], max_tokens=2)
        assert toy.same_bits(result.logits[0], whole[49])

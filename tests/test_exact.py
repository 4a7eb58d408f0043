"""The lossless contract of the CPU operations, rule by rule and bit for bit, and the cases of the
field that touch the layer stack, the cache and the trees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import oracle
import pytest
import toy

import config
import spec_decode
from loader import quantise_int4
from reference import (
    Int4Weight,
    ReferenceOps,
    fold_leaves,
    plan_attention,
    softmax_scale,
    tree_sum,
)
from sampling import SamplingParams, choose
from spec_decode import Tree

ACTIVATIONS = ("float32", "bfloat16")
N = 33  # rows of every case of R1
SIZES = (1, 2, 7, 8, 9, 16, 33)
PARTS = (1, 2, 4, 8)
LEAF, SPAN = 16, 2
BORDERS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)  # committed lengths

make_ops = functools.cache(ReferenceOps)


def normal(rng, *shape: int, gain: float = 1.0) -> np.ndarray:
    """Activations: random, and the same in both activation types."""
    x = rng.standard_normal(shape, np.float32) * np.float32(gain)
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def matrix(rng, *shape: int) -> np.ndarray:
    return normal(rng, *shape, gain=shape[-1] ** -0.5)


def assert_same(actual, expected) -> None:
    """Equal bits of two arrays, or of two tuples of them."""
    one = isinstance(actual, np.ndarray)
    for a, e in [(actual, expected)] if one else zip(actual, expected, strict=True):
        assert toy.same_bits(a, e)


# ---- R1: a row depends on its own inputs, the weights and its position ---------------------------


@dataclass(frozen=True)
class Case:
    """An operation over N rows: call(*inputs[rows]) gives an array, or several, with those rows."""

    inputs: tuple[np.ndarray, ...]
    call: Callable


CASES: dict[str, Callable[[ReferenceOps, np.random.Generator], Case]] = {}


def case(make):
    CASES[make.__name__.strip("_")] = make
    return make


def positions(rng) -> np.ndarray:
    return rng.permutation(N).astype(np.int32)


@case
def embed(ops, rng):
    table, ids = normal(rng, 272, 64), rng.integers(0, 272, N).astype(np.int32)
    return Case((ids,), lambda ids: ops.embed(ids, table, 0))


def linear_case(ops, rng, weight, **how):
    prepared = ops.prepare(weight, **how)
    return Case((normal(rng, N, prepared.in_features),), lambda x: ops.linear(x, prepared))


@case
def linear_ragged_float32(ops, rng):
    return linear_case(ops, rng, rng.standard_normal((67, 100), np.float32))


@case
def linear_bfloat16_in_8_shards(ops, rng):
    return linear_case(ops, rng, matrix(rng, 272, 64).astype(ml_dtypes.bfloat16), shards=8)


@case
def linear_int4(ops, rng):
    return linear_case(ops, rng, quantise_int4(matrix(rng, 96, 64)))


@case
def linear_shared_by_threads(ops, rng):
    return linear_case(ops, rng, matrix(rng, 1408, 384), shards=8)


@case
def linear_row_cut_in_8(ops, rng):
    return linear_case(ops, rng, matrix(rng, 100, 128), shards=8, row_cut=True)


@case
def linear_row_cut_shared_by_threads(ops, rng):
    return linear_case(ops, rng, matrix(rng, 512, 1024), shards=8, row_cut=True)


@case
def rms_norm(ops, rng):
    weight = normal(rng, 67)
    return Case((normal(rng, N, 67),), lambda x: ops.rms_norm(x, weight, 1e-5))


@case
def rms_norm_of_heads(ops, rng):
    weight = normal(rng, 16)
    return Case((normal(rng, N, 4, 16),), lambda x: ops.rms_norm(x, weight, 1e-5))


@case
def add(ops, rng):
    return Case((normal(rng, N, 64), rng.standard_normal((N, 64), np.float32)), ops.add)


@case
def silu_mul(ops, rng):
    gate, up = (rng.standard_normal((N, 67), np.float32) for _ in range(2))
    return Case((gate, up), ops.silu_mul)


def rotation(ops, dim: int):
    rope = config.Rope(10000.0, "deepseek_yarn", 4.0, 16, 4.0, 1.0, 1.0, 0.6)
    return ops.rope_table(rope, dim, 64)


@case
def block_inputs(ops, rng):
    turn, q_norm, k_norm = rotation(ops, 16), normal(rng, 16), normal(rng, 16)
    q, k, v = (matrix(rng, heads * 16, 40) for heads in (4, 2, 2))
    [weight], _ = ops.prepare_block_inputs([q], [k], [v], 4, 2)

    def call(x, at):
        return ops.block_inputs(x, weight, q_norm, k_norm, 1e-6, *turn, at)

    return Case((normal(rng, N, 40), positions(rng)), call)


@case
def put_context(ops, rng):
    """Every row goes to its position in a page of its own."""
    turn, norms = rotation(ops, 16), normal(rng, 3, 16)
    keys, values = ([matrix(rng, 2 * 16, 40) for _ in range(3)] for _ in "kv")
    _, weight = ops.prepare_block_inputs(keys, keys, values, 2, 2)

    def call(x, at):
        n = len(x)
        pages = np.zeros((3, n, N, 2 * 2 * 16), x.dtype)
        own, tables = np.arange(n), np.arange(n)[:, None]
        ops.put_context(x, weight, norms, 1e-6, *turn, own, own, at, pages, tables)
        return pages.swapaxes(0, 1)

    return Case((normal(rng, N, 40), positions(rng)), call)


@case
def latent_query(ops, rng):
    cos, sin = rotation(ops, 8)
    key = matrix(rng, 3, 16, 40)
    inputs = (normal(rng, N, 3, 24), positions(rng))
    return Case(inputs, lambda q, at: ops.latent_query(q, key, cos, sin, at))


@case
def latent_entry(ops, rng):
    cos, sin = rotation(ops, 8)
    weight = normal(rng, 40)
    inputs = (rng.standard_normal((N, 48), np.float32), positions(rng))

    def call(kv, at):
        out = np.full_like(kv, np.nan)
        ops.latent_entry(kv, weight, 1e-6, cos, sin, at, out)
        return out

    return Case(inputs, call)


@case
def absorb_v(ops, rng):
    value = matrix(rng, 3, 40, 20)
    return Case((normal(rng, N, 3, 40),), lambda o: ops.absorb_v(o, value))


@case
def latent_attention(ops, rng):
    """Every row is a sequence of its own, at lengths around the borders of leaves and spans."""
    lengths = np.resize(np.array(BORDERS, np.int32), N)
    pages = normal(rng, 5 * N, LEAF, 48)
    tables = np.arange(5 * N).reshape(N, 5)

    def call(q, fresh, sequence):
        n = len(q)
        own = lengths[sequence]
        plan = plan_attention(
            own, np.arange(n), np.full(n, -1), own, [tables[s] for s in sequence], LEAF
        )
        return ops.latent_attention(q, pages, fresh, plan, 0.2, 40, SPAN)

    inputs = (normal(rng, N, 3, 48), normal(rng, N, 48), np.arange(N))
    return Case(inputs, call)


@case
def route(ops, rng):
    router, bias = ops.prepare(matrix(rng, 16, 64)), rng.standard_normal(16, np.float32)
    return Case((normal(rng, N, 64),), lambda x: ops.route(x, router, bias, 4, True, 2.5))


def stack(rng, experts: int, hidden: int, width: int, int4: bool) -> list:
    """Gate, up and down of some experts."""
    shapes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
    made = [matrix(rng, *shape) for shape in shapes]
    return [quantise_int4(w) for w in made] if int4 else made


@case
def mlp(ops, rng):
    weight = ops.prepare_mlp(*stack(rng, 1, 64, 96, False), 8)
    return Case((normal(rng, N, 64),), lambda x: ops.mlp(x, weight))


@case
def moe(ops, rng):
    experts = ops.prepare_mlp(*stack(rng, 5, 64, 256, True), 8)
    shared = ops.prepare_mlp(*stack(rng, 1, 64, 256, False), 8)
    ids = np.sort(np.argsort(rng.random((N, 5)), 1)[:, :3], 1).astype(np.int32)
    inputs = (normal(rng, N, 64), ids, rng.random((N, 3), np.float32))
    return Case(inputs, lambda x, ids, weights: ops.moe(x, ids, weights, experts, shared))


@case
def head(ops, rng):
    weight = ops.prepare(matrix(rng, 72, 96), shards=8)
    return Case((normal(rng, N, 96),), lambda x: ops.head(x, weight, 67))


def block_case(ops, rng, window: int):
    """The rows are blocks of 8 positions, each over a context of its own."""
    lengths = np.resize(np.array(BORDERS), N)
    pages = normal(rng, 5 * N, LEAF, 2, 2, 16)
    tables = np.arange(5 * N).reshape(N, 5)

    def call(q, kv, sequence):
        n = len(sequence)
        own = [tables[s] for s in sequence]
        q, kv = q.reshape(n * 8, 4, 16), kv.reshape(n * 8, 2, 2, 16)
        out = ops.block_attention(q, kv, pages, own, lengths[sequence], window, 0.25, SPAN)
        return out.reshape(n, 8, 4, 16)

    inputs = (normal(rng, N, 8, 4, 16), normal(rng, N, 8, 2, 2, 16), np.arange(N))
    return Case(inputs, call)


@case
def block_attention(ops, rng):
    return block_case(ops, rng, 0)


@case
def block_attention_in_a_window(ops, rng):
    return block_case(ops, rng, 20)


@case
def top_log_probs(ops, rng):
    return Case((np.round(normal(rng, N, 272), 1),), lambda x: ops.top_log_probs(x, 16))


@case
def top_log_probs_of_all(ops, rng):
    return Case((np.round(normal(rng, N, 67), 1),), lambda x: ops.top_log_probs(x, 100))


def rows_of(result, rows) -> tuple[np.ndarray, ...]:
    return tuple(a[rows] for a in (result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", CASES)
def test_r1_a_row_keeps_its_bits_in_any_company(name, activation):
    rng = np.random.default_rng(1)
    c = CASES[name](make_ops(activation), rng)
    alone = [c.call(*(a[i : i + 1] for a in c.inputs)) for i in range(N)]
    for size in SIZES:
        rows = rng.permutation(N)[:size]
        poisoned = rng.random(size) < 0.5
        poisoned[rng.integers(size)] = False
        for bad in (np.zeros(size, bool), poisoned):
            inputs = [a[rows] for a in c.inputs]
            for a in inputs:
                if a.dtype.kind == "f":
                    a[bad] = np.nan
            with np.errstate(all="ignore"):
                result = c.call(*inputs)
            for i in np.flatnonzero(~bad):
                assert_same(rows_of(result, i), rows_of(alone[rows[i]], 0))


ROUNDED = (  # beginnings of the cases' names
    "embed",
    "rms_norm",
    "add",
    "silu_mul",
    "block_inputs",
    "put_context",
    "latent_query",
    "latent_entry",
    "absorb_v",
    "latent_attention",
    "block_attention",
)


@pytest.mark.parametrize("name", CASES)
def test_rounding_map(name):
    """In bfloat16 what the map says is rounded is so, and what it keeps in fp32 is not."""
    c = CASES[name](make_ops("bfloat16"), np.random.default_rng(1))
    result = rows_of(c.call(*c.inputs), slice(None))[-1]
    held = result.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert toy.same_bits(held, result) == name.startswith(ROUNDED)


def test_packed_experts_give_the_bits_of_unpacked_ones():
    rng = np.random.default_rng(2)
    weights = stack(rng, 3, 64, 128, True)
    ids = np.tile(np.array([[0, 2]], np.int32), (9, 1))
    x, share = normal(rng, 9, 64), rng.random((9, 2), np.float32)
    results = []
    for unpack in (True, False):
        ops = ReferenceOps(unpack=unpack)
        results.append(ops.moe(x, ids, share, ops.prepare_mlp(*weights, 4), None))
    assert_same(*results)


# ---- R2: tensor parallelism only says where the tree of leaves is cut ----------------------------


def columns(weight, begin: int, end: int):
    """Input columns of [..., out, in], dense or INT4."""
    if isinstance(weight, Int4Weight):
        group = weight.group_size
        scales = weight.scales[..., begin // group : end // group]
        return Int4Weight(weight.packed[..., begin // 8 : end // 8], scales)
    return weight[..., begin:end]


def rows(weight, begin: int, end: int):
    """Output rows of [..., out, in], dense or INT4."""
    if isinstance(weight, Int4Weight):
        return Int4Weight(weight.packed[..., begin:end, :], weight.scales[..., begin:end, :])
    return weight[..., begin:end, :]


def cuts(width: int, parts: int) -> list[tuple[int, int]]:
    step = width // parts
    return [(r * step, (r + 1) * step) for r in range(parts)]


def some_weight(kind: str, rng, out: int, inputs: int):
    w = matrix(rng, out, inputs)
    make = {"float32": lambda w: w, "bfloat16": lambda w: w.astype(ml_dtypes.bfloat16)}
    return make.get(kind, quantise_int4)(w)


KINDS = ("float32", "bfloat16", "int4")


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", KINDS)
def test_r2_row_cut_linear(kind, parts):
    ops, rng = make_ops(), np.random.default_rng(3)
    weight, x = some_weight(kind, rng, 100, 256), normal(rng, 9, 256)
    whole = ops.linear(x, ops.prepare(weight, shards=8, row_cut=True))
    partials = [
        ops.linear(x[:, b:e], ops.prepare(columns(weight, b, e), shards=8 // parts, row_cut=True))
        for b, e in cuts(256, parts)
    ]
    assert_same(tree_sum(np.stack(partials)), whole)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [8 * 9, 8 * 34, 8 * 176])
def test_r2_column_cut_linear(out, kind, parts):
    ops, rng = make_ops(), np.random.default_rng(4)
    weight, x = some_weight(kind, rng, out, 64), normal(rng, 9, 64)
    whole = ops.linear(x, ops.prepare(weight, shards=8))
    partials = [
        ops.linear(x, ops.prepare(rows(weight, b, e), shards=8 // parts))
        for b, e in cuts(out, parts)
    ]
    assert_same(np.concatenate(partials, 1), whole)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("int4", [False, True])
def test_r2_mlp_and_moe(int4, parts, activation):
    ops, rng = make_ops(activation), np.random.default_rng(5)
    width = 256  # eight leaves of one group
    routed, shared = stack(rng, 6, 64, width, int4), stack(rng, 1, 64, width, False)
    x, weights = normal(rng, 9, 64), rng.random((9, 2), np.float32)
    ids = np.sort(np.argsort(rng.random((9, 6)), 1)[:, :2], 1).astype(np.int32)

    def rank(part: list, begin: int, end: int):
        gate, up, down = part
        cut = rows(gate, begin, end), rows(up, begin, end), columns(down, begin, end)
        return ops.prepare_mlp(*cut, 8 * (end - begin) // width)

    def both(begin: int, end: int):
        experts, one = rank(routed, begin, end), rank(shared, begin, end)
        return ops.mlp(x, one), ops.moe(x, ids, weights, experts, one)

    partials = zip(*(both(b, e) for b, e in cuts(width, parts)), strict=True)
    assert_same(tuple(tree_sum(np.stack(p)) for p in partials), both(0, width))


@pytest.mark.parametrize("parts", PARTS)
def test_r2_heads(parts):
    """A head's attention does not depend on which heads stand beside it."""
    ops, rng = make_ops(), np.random.default_rng(6)
    heads, nope, value, latent = 8, 16, 20, 40
    kv_b, q = matrix(rng, heads * (nope + value), latent), normal(rng, 9, heads, nope + 8)
    fresh, pages = normal(rng, 9, latent + 8), normal(rng, 3, LEAF, latent + 8)
    cos, sin = rotation(ops, 8)
    at = np.arange(20, 29, dtype=np.int32)
    line = np.arange(-1, 8)
    plan = plan_attention(at, np.zeros(9, int), line, np.array([20]), [[2, 0]], LEAF)

    def attend(begin: int, end: int) -> np.ndarray:
        part = kv_b.reshape(heads, -1, latent)[begin:end].reshape(-1, latent)
        key, v = ops.prepare_heads(part, end - begin, nope, value)
        absorbed = ops.latent_query(q[:, begin:end], key, cos, sin, at)
        return ops.absorb_v(
            ops.latent_attention(absorbed, pages, fresh, plan, 0.2, latent, SPAN), v
        )

    assert_same(np.concatenate([attend(b, e) for b, e in cuts(heads, parts)], 1), attend(0, heads))


# ---- R3: a key stands in the slot of its position, committed or not ------------------------------

# Parents of a tree's nodes: two long branches that cross leaves, and shoots on the way.
PARENTS = np.array([-1, 0, 0, 1, 1, 2, 3, *range(6, 22), 5, 23, 24, 25, 10, 11])


def depths(parent: np.ndarray) -> np.ndarray:
    depth = np.zeros(len(parent), np.int32)
    for i in range(1, len(parent)):
        depth[i] = depth[parent[i]] + 1
    return depth


def path_to(parent: np.ndarray, node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node >= 0:
        path.append(int(node))
        node = parent[node]
    return path[::-1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("length", BORDERS)
def test_r3_a_node_equals_plain_decoding_of_its_path(length, activation):
    ops, rng = make_ops(activation), np.random.default_rng(7)
    n, width, latent = len(PARENTS), 48, 40
    prefix, fresh = normal(rng, length, width), normal(rng, n, width)
    q = normal(rng, n, 3, width)

    def paged(keys: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Keys in scattered pages; everything else is what uninitialised memory may hold."""
        pages = np.full((9, LEAF, width), np.nan, np.float32)
        table = rng.permutation(9)[: -(-len(keys) // LEAF)].tolist()
        for i, key in enumerate(keys):
            pages[table[i // LEAF], i % LEAF] = key
        return pages, table

    pages, table = paged(prefix)
    at = length + depths(PARENTS)
    plan = plan_attention(at, np.zeros(n, int), PARENTS, np.array([length]), [table], LEAF)
    tree = ops.latent_attention(q, pages, fresh, plan, 0.2, latent, SPAN)
    assert np.isfinite(tree).all()
    for node in range(n):
        above = path_to(PARENTS, node)[:-1]
        pages, table = paged(np.concatenate([prefix, fresh[above]]))
        own = np.array([length + len(above)])
        plan = plan_attention(own, np.zeros(1, int), np.array([-1]), own, [table], LEAF)
        one = slice(node, node + 1)
        alone = ops.latent_attention(q[one], pages, fresh[one], plan, 0.2, latent, SPAN)
        assert_same(alone, tree[one])


def test_r3_pages_in_a_row_and_scattered():
    ops, rng = make_ops(), np.random.default_rng(8)
    pages, q, fresh = normal(rng, 4, LEAF, 48), normal(rng, 1, 3, 48), normal(rng, 1, 48)
    at = np.array([4 * LEAF])

    def attend(pages: np.ndarray, table: list[int]) -> np.ndarray:
        plan = plan_attention(at, np.zeros(1, int), np.array([-1]), at, [table], LEAF)
        return ops.latent_attention(q, pages, fresh, plan, 0.2, 40, SPAN)

    expected = attend(pages, [0, 1, 2, 3])
    for order in itertools.permutations(range(4)):
        moved = np.empty_like(pages)
        moved[list(order)] = pages
        assert_same(attend(moved, list(order)), expected)


@pytest.mark.parametrize("first, spans", [(0, ["012", "345", "6"]), (4, ["01", "234", "56"])])
def test_r3_leaves_fold_in_spans_at_absolute_borders(first, spans):
    rng = np.random.default_rng(20)
    maxima = rng.integers(-3, 4, (2, 7, 4)).astype(np.float32)
    sums, values = rng.random((2, 7, 4), np.float32), normal(rng, 2, 7, 4, 5)
    factor = np.exp2(maxima - maxima.max(1, keepdims=True))

    def fold(parts: np.ndarray) -> np.ndarray:
        total = None
        for span in spans:
            of_span = functools.reduce(np.add, [parts[:, int(leaf)] for leaf in span])
            total = of_span if total is None else total + of_span
        return total

    expected = fold(sums * factor), fold(values * factor[..., None])
    assert_same(fold_leaves(maxima, sums, values, first, 3), expected)


# ---- R4: ties and the order of experts -----------------------------------------------------------


def test_r4_router_ties_go_to_the_lower_id():
    ops = make_ops()
    router = ops.prepare(np.ones((16, 8), np.float32))
    bias = np.zeros(16, np.float32)
    bias[[3, 7, 12]] = 1
    ids, _ = ops.route(np.ones((1, 8), np.float32), router, bias, 2, True, 1.0)
    assert ids.tolist() == [[3, 7]]
    ids, _ = ops.route(np.ones((1, 8), np.float32), router, bias, 5, True, 1.0)
    assert ids.tolist() == [[0, 1, 3, 7, 12]]


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 100])
def test_r4_top_k_and_argmax_ties_go_to_the_lower_id(k):
    logits = np.array([[1, 5, 3, 5, 3, 3, 5, -np.inf], [2] * 8, [np.nan, 0, 7] * 2 + [7, 0]])
    logits = logits.astype(np.float32)
    ids, log_probs = make_ops().top_log_probs(logits, k)
    expected = [
        [1, 3, 6, 2, 4, 5, 0, 7],
        list(range(8)),
        [2, 5, 6, 1, 4, 7, 0, 3],  # NaN last
    ]
    assert ids.tolist() == [row[:k] for row in expected]
    assert log_probs[1] == pytest.approx(-np.log(8))
    if k > 6:
        assert np.isneginf(log_probs[0, 7]) and np.isneginf(log_probs[2, 6:]).all()
    greedy = [SamplingParams()] * 2
    assert choose(logits[:2], [0, 0], greedy).tolist() == [1, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_r4_experts_by_ascending_id_then_the_shared_one_within_each_leaf(activation):
    ops, rng = make_ops(activation), np.random.default_rng(9)
    leaves, width = 4, 128
    routed, shared = stack(rng, 5, 64, width, False), stack(rng, 1, 64, width, False)
    x, weights = normal(rng, 3, 64), rng.random((3, 3), np.float32)
    ids = np.array([[0, 1, 4], [0, 2, 3], [1, 2, 4]], np.int32)

    def leaf_of(part: list, e: int, b: int, end: int):
        gate, up, down = (w[e : e + 1] for w in part)
        return ops.prepare_mlp(gate[:, b:end], up[:, b:end], down[:, :, b:end], 1)

    sums = []
    for b, end in cuts(width, leaves):
        of = [ops.mlp(x, leaf_of(routed, e, b, end)) for e in range(5)]
        one = ops.mlp(x, leaf_of(shared, 0, b, end))
        total = []
        for t in range(3):
            y = [of[e][t] * w for e, w in zip(ids[t], weights[t], strict=True)]
            total.append(((y[0] + y[1]) + y[2]) + one[t])
        sums.append(np.stack(total))
    expected = (sums[0] + sums[1]) + (sums[2] + sums[3])
    experts, one = ops.prepare_mlp(*routed, leaves), ops.prepare_mlp(*shared, leaves)
    assert_same(ops.moe(x, ids, weights, experts, one), expected)


# ---- routers and experts in the field ------------------------------------------------------------


def route_logits(logits, bias, top_k: int, normalise: bool, scaling: float):
    """The router over given logits, one row."""
    ops = make_ops()
    router = ops.prepare(np.asarray(logits, np.float32)[:, None])
    bias = np.asarray(bias, np.float32)
    return ops.route(np.ones((1, 1), np.float32), router, bias, top_k, normalise, scaling)


def test_b5_the_fp32_bias_decides(tmp_path):
    bias = np.zeros(16, np.float32)
    bias[4], bias[9] = 1.00001, 1.00002

    def change(tensors: dict) -> None:
        gate = tensors["model.layers.1.mlp.gate.weight"]
        gate[9] = gate[4]  # equal scores
        tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias

    engine = toy.toy_engine(tmp_path, dims={"num_experts_per_tok": 1, "change": change})
    layer = engine.model.layers[1]
    assert toy.same_bits(layer.bias, bias)
    x = normal(np.random.default_rng(10), 5, 64)
    ids, _ = engine.ops.route(x, layer.router, layer.bias, 1, True, 1.0)
    assert ids.tolist() == [[9]] * 5


@pytest.mark.parametrize("seed", range(5))
def test_d1_negative_scores_choose_real_experts(seed):
    logits = np.random.default_rng(seed).standard_normal(16)
    ids, weights = route_logits(logits, np.full(16, -4.0), 2, True, 1.0)
    assert ids.tolist() == [sorted(np.argsort(-logits)[:2].tolist())]
    assert weights.sum() == pytest.approx(1)


def test_d3_one_place_applies_the_scale():
    scores = np.full(16, 1e-3)
    scores[[3, 8]] = 0.6, 0.2
    logits = np.log(scores / (1 - scores))
    normalised = route_logits(logits, np.zeros(16), 2, True, 2.5)
    raw = route_logits(logits, np.zeros(16), 2, False, 2.5)
    assert normalised[0].tolist() == raw[0].tolist() == [[3, 8]]
    assert normalised[1][0] == pytest.approx([1.875, 0.625], rel=1e-6)
    assert raw[1][0] == pytest.approx([1.5, 0.5], rel=1e-6)
    # The experts get these weights and no more, the shared one gets none.
    ops, rng = make_ops(), np.random.default_rng(11)
    routed, shared = stack(rng, 16, 64, 32, False), stack(rng, 1, 64, 32, False)
    x = normal(rng, 1, 64)
    out = ops.moe(x, *raw, ops.prepare_mlp(*routed, 1), one := ops.prepare_mlp(*shared, 1))
    of = [ops.mlp(x, ops.prepare_mlp(*(w[e : e + 1] for w in routed), 1)) for e in (3, 8)]
    assert_same(out, (of[0] * raw[1][0, 0] + of[1] * raw[1][0, 1]) + ops.mlp(x, one))


@pytest.mark.parametrize("filler", [-1, 16])
def test_d5_filler_rows_touch_nothing(filler):
    ops, rng = make_ops(), np.random.default_rng(12)
    experts = ops.prepare_mlp(*stack(rng, 16, 64, 64, True), 2)
    shared = ops.prepare_mlp(*stack(rng, 1, 64, 64, False), 2)
    router, bias = ops.prepare(matrix(rng, 16, 64)), rng.standard_normal(16, np.float32)
    x = normal(rng, 3, 64)
    ids, weights = ops.route(x, router, bias, 2, True, 2.5)
    expected = ops.moe(x, ids, weights, experts, shared)

    # A row of NaN, routed like the others.
    padded = np.concatenate([x, np.full((1, 64), np.nan, np.float32)])
    routed = ops.route(padded, router, bias, 2, True, 2.5)
    assert_same((routed[0][:3], routed[1][:3]), (ids, weights))
    assert ((routed[0] >= 0) & (routed[0] < 16)).all()
    with np.errstate(invalid="ignore"):
        assert_same(ops.moe(padded, *routed, experts, shared)[:3], expected)

    # A row that is marked as filler, whatever else it holds.
    none = np.full((1, 2), filler, np.int32)
    marked = np.concatenate([ids, none]), routed[1]
    with np.errstate(invalid="ignore"):
        out = ops.moe(padded, *marked, experts, None)
        assert_same(out[:3], ops.moe(x, ids, weights, experts, None))
        assert_same(ops.moe(padded, *marked, experts, shared)[:3], expected)
    assert (out[3] == 0).all()


# ---- YaRN ----------------------------------------------------------------------------------------

K26_ROPE = config.Rope(50000.0, "deepseek_yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)


def test_c1_softmax_scale_and_amplitude_are_two_corrections():
    assert softmax_scale(K26_ROPE, 192) == pytest.approx(0.1446796, abs=1e-7)
    cos, sin = make_ops().rope_table(K26_ROPE, 64, 64)
    assert cos**2 + sin**2 == pytest.approx(1, abs=2.0**-22)
    unequal = replace(K26_ROPE, mscale=1.0, mscale_all_dim=0.5)
    ratio = oracle.yarn_mscale(64, 1.0) / oracle.yarn_mscale(64, 0.5)
    cos, sin = make_ops().rope_table(unequal, 64, 64)
    assert cos**2 + sin**2 == pytest.approx(ratio**2, rel=2.0**-21)
    expected = 192**-0.5 * oracle.yarn_mscale(64, 0.5) ** 2
    assert softmax_scale(unequal, 192) == pytest.approx(expected)


@pytest.mark.parametrize("mscale, mscale_all_dim", [(1.0, 1.0), (1.0, 0.5), (0.7, 1.0), (1.0, 0.0)])
def test_c1_logits_equal_the_oracles_at_every_position(tmp_path, mscale, mscale_all_dim):
    yarn = {**toy.YARN, "factor": 64.0, "original_max_position_embeddings": 16}
    yarn |= {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    engine = toy.toy_engine(tmp_path, dims={"rope_scaling": yarn, "max_position_embeddings": 1024})
    ids = np.random.default_rng(13).integers(0, 256, 64)
    logits = toy.feed(engine, engine.cache.admit(), ids)
    expected = oracle.forward(*oracle.read_checkpoint(tmp_path / "toy"), ids).logits
    for position in (0, 1, 17, 63):
        error = np.abs(logits[position] - expected[position]).max()
        assert error <= toy.logit_bound(engine, np.abs(expected).max()), position


def test_c3_table_reaches_the_whole_context_and_is_scaled_once(tmp_path):
    engine = toy.toy_engine(tmp_path)  # original length 16, factor 4
    assert engine.settings.decode.context == 64 and len(engine.model.cos) == 64
    ids = np.random.default_rng(14).integers(0, 256, 64)
    config_json, weights = oracle.read_checkpoint(tmp_path / "toy")
    expected = oracle.forward(config_json, weights, ids).logits
    bound = toy.logit_bound(engine, np.abs(expected).max())
    for pieces in ([64], [1] * 64):
        slot = engine.cache.admit()
        logits = toy.feed(engine, slot, ids, pieces)
        engine.cache.free(slot)
        for position in (15, 16, 17, 63):
            assert np.abs(logits[position] - expected[position]).max() <= bound, (pieces, position)


# ---- attention over pieces -----------------------------------------------------------------------


def test_e1_a_prompt_in_pieces_or_with_a_cached_prefix(tmp_path):
    directory = toy.write_checkpoint(tmp_path / "toy")
    engine = toy.engine_of(directory, leaf=4, prefill_chunk=4)
    ids = np.random.default_rng(15).integers(0, 256, 11)
    whole = toy.feed(engine, engine.cache.admit(), ids)
    for pieces in ([4, 4, 3], [8, 3], [1] * 11, [3, 5, 3]):
        assert_same(toy.feed(engine, engine.cache.admit(), ids, pieces), whole)

    rows_seen = []
    forward = engine.model.forward
    engine.model.forward = lambda batch, *rest: (
        rows_seen.append(len(batch)) or forward(batch, *rest)
    )
    for expected in ([4, 4, 3], [3]):  # in chunks, then behind eight cached tokens
        rows_seen.clear()
        [result] = toy.decode(engine, [ids], max_tokens=1)
        assert rows_seen == expected
        assert_same(result.logits[0], whole[10])


def test_e1_a_leaf_without_visible_keys_adds_nothing():
    rng = np.random.default_rng(16)
    maxima = np.ceil(rng.standard_normal((2, 3, 4)) * 5).astype(np.float32)
    sums, values = rng.random((2, 3, 4), np.float32), normal(rng, 2, 3, 4, 5)
    expected = fold_leaves(maxima, sums, values, 0, 2)
    empty = np.full((2, 1, 4), -np.inf, np.float32)
    for n_empty in (1, 2, 3):
        more = fold_leaves(
            np.concatenate([maxima] + [empty] * n_empty, 1),
            np.concatenate([sums] + [np.zeros_like(empty)] * n_empty, 1),
            np.concatenate([values] + [np.zeros((2, 1, 4, 5), np.float32)] * n_empty, 1),
            0,
            2,
        )
        assert_same(more, expected)
    alone = fold_leaves(empty, np.zeros_like(empty), np.zeros((2, 1, 4, 5), np.float32), 0, 2)
    assert all((part == 0).all() for part in alone)


# ---- trees through the layer stack ---------------------------------------------------------------


def tree_of(token_ids, parent) -> Tree:
    parent = np.asarray(parent, np.int32)
    ids = np.asarray(token_ids, np.int32)
    return Tree(ids, parent, depths(parent), np.zeros(len(parent), np.float32))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("length", [0, 5, 14, 15, 16, 47])
def test_f1_a_node_stands_at_its_depth(tmp_path, length, activation):
    engine = toy.toy_engine(tmp_path, activation=activation)
    prefix = np.random.default_rng(17).integers(0, 256, length)
    root, a, b, c = 7, 20, 30, 40

    def verify(b: int) -> np.ndarray:
        slot = engine.cache.admit()
        if length:
            toy.feed(engine, slot, prefix)
        rows = spec_decode.tree_rows(tree_of([root, a, b, c], [-1, 0, 0, 1]), slot, length, 0)
        assert (rows.positions - length).tolist() == [0, 1, 1, 2]
        logits = engine.model.forward(rows, engine.cache, np.arange(4)).logits
        engine.cache.free(slot)
        return logits

    def plain(*path: int) -> np.ndarray:
        slot = engine.cache.admit()
        logits = toy.feed(engine, slot, [*prefix, *path], [1] * (length + len(path)))
        engine.cache.free(slot)
        return logits[-1]

    logits = verify(b)
    for node, path in enumerate([(root,), (root, a), (root, b), (root, a, c)]):
        assert_same(logits[node], plain(*path))
    other = verify(b + 1)
    assert_same(other[[0, 1, 3]], logits[[0, 1, 3]])
    assert not toy.same_bits(other[2], logits[2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("length", [3, 13, 14, 15, 16])
def test_f3_scattered_nodes_become_a_dense_prefix(tmp_path, length, activation):
    engine = toy.toy_engine(tmp_path, drafter={}, activation=activation)
    cache, rng = engine.cache, np.random.default_rng(18)
    prefixes = rng.integers(0, 256, (2, length))
    trees = [tree_of(rng.integers(0, 256, 8), [-1, 0, 0, 0, 1, 3, 3, 5]) for _ in prefixes]
    accepted = [[0, 3, 5], [0]]

    slots = [cache.admit() for _ in prefixes]
    for slot, prefix in zip(slots, prefixes, strict=True):
        toy.feed(engine, slot, prefix)
    parts = [spec_decode.tree_rows(trees[i], slots[i], length, 8 * i) for i in range(2)]
    batch = spec_decode.concatenate(parts)
    forward = engine.model.forward(batch, cache, np.arange(16))
    moved = {s: [8 * i + n for n in accepted[i]] for i, s in enumerate(slots)}
    toy.store(engine, forward, moved)

    for i, slot in enumerate(slots):
        path = trees[i].token_ids[accepted[i]]
        plain = cache.admit()
        logits = toy.feed(engine, plain, [*prefixes[i], *path], [length] + [1] * len(path))
        n = length + len(path)
        assert cache.lengths[slot] == cache.lengths[plain] == n
        for pages in (*cache.pages, *cache.draft):
            width = pages.shape[2]
            here, there = (pages[cache.tables[s]].reshape(-1, width)[:n] for s in (slot, plain))
            assert_same(here, there)
        assert_same(forward.logits[moved[slot]], logits[length:])
        drafts = [engine.drafter.draft(np.array([9]), [s], cache) for s in (slot, plain)]
        assert_same(*drafts)
        assert_same(*(toy.feed(engine, s, [9]) for s in (slot, plain)))


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_bfloat16_is_exact_too(tmp_path, temperature):
    """Modes, batches and chunks in the other activation type, with the toy's own drafter."""
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    prompts = [np.random.default_rng(19 + n).integers(0, 256, n) for n in (1, 9, 15, 16, 37)]
    params = {"temperature": temperature, "seed": None if temperature == 0 else 5}

    def engine(**settings):
        return toy.engine_of(directory, drafter=True, activation="bfloat16", **settings)

    plain = [toy.decode(engine(batch=1), [p], **params)[0] for p in prompts]
    for mode, budget, batch, chunk in [
        ("chain", 1, 8, 16),
        ("tree", 7, 3, 64),
        ("tree", 33, 8, 32),
    ]:
        own = engine(batch=batch, prefill_chunk=chunk)
        toy.assert_same_results(toy.decode(own, prompts, mode, budget, **params), plain)

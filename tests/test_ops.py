"""Every operation on every device against float64, and bit against bit where the contract says so.

One case is one operation at one shape: it draws inputs, runs the operation and returns the result,
the float64 value and a bound on the error. Buffers of the kernels are NaN before they are written.

Bounds. u = 2^-24 is fp32's unit roundoff; a sum of n products in any order errs by at most
n u (sum of |products|), here with (n + 8) for the operations around it. A value rounded to the
activation type errs by `ua` of its size more: 2^-8 for bfloat16, 0 for float32. Worst cases are
far from what happens, so the norm of the error is bounded too: roundings are independent, their sum
grows like a square root, and 32 u (plus 1.5 ua) of the norm is some times what is seen at K = 7168.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import config
import reference
from loader import quantise_int4
from reference import dequantise_int4

if TYPE_CHECKING:
    from tests.conftest import Device

U = 2.0**-24


@dataclass(frozen=True)
class Outcome:
    result: np.ndarray
    expected: np.ndarray
    bound: np.ndarray


def gamma(n: int) -> float:
    return (n + 8) * U


class Draw:
    """Random inputs that are exact in the activation type."""

    def __init__(self, backend: Device, seed: int = 0):
        self.rng = np.random.default_rng(seed)
        self.backend = backend
        self.ua = 2.0**-8 if backend.activation == "bfloat16" else 0.0

    def values(self, *shape, scale: float = 1.0) -> np.ndarray:
        drawn = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        if self.backend.activation == "bfloat16":
            return drawn.astype(ml_dtypes.bfloat16).astype(np.float32)
        return drawn

    def weight(self, kind: str, *shape):
        """f32, bf16, int4 (bf16 scales) or int4_f32, as the loader gives it."""
        drawn = self.rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)
        if kind.startswith("int4"):
            scales = np.float32 if kind == "int4_f32" else ml_dtypes.bfloat16
            return quantise_int4(drawn, 32, scales)
        return drawn.astype(ml_dtypes.bfloat16) if kind == "bf16" else drawn


def f64(weight) -> np.ndarray:
    return reference.to_float32(weight).astype(np.float64)


def product(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x w^T in float64 and the bound of its fp32 twin."""
    return x @ w.T, gamma(x.shape[-1]) * (np.abs(x) @ np.abs(w).T)


# ---- dense -------------------------------------------------------------------------------------


def linear(b: Device, draw: Draw, kind: str, rows: int, out: int, k: int, leaves: int) -> Outcome:
    x, w = draw.values(rows, k), draw.weight(kind, out, k)
    weight = b.ops.prepare(w, shards=leaves, row_cut=leaves > 1)
    result = b.get(b.ops.linear(b.send(x), weight))
    return Outcome(result, *product(x.astype(np.float64), f64(w)))


def embed(b: Device, draw: Draw, kind: str, rows: int, n: int, hidden: int, first: int) -> Outcome:
    table = draw.weight(kind, n, hidden)
    ids = draw.rng.integers(0, n + 2 * first, rows).astype(np.int32)
    result = b.get(b.ops.embed(b.send(ids), b.ops.upload(table), first))
    local = ids - first
    mine = ((local >= 0) & (local < n))[:, None]
    expected = np.where(mine, f64(table)[np.clip(local, 0, n - 1)], 0)
    return Outcome(result, expected, draw.ua * np.abs(expected))


def rms_norm(b: Device, draw: Draw, fp32: bool, *shape: int) -> Outcome:
    x, w, eps = draw.values(*shape, scale=3), draw.values(shape[-1]), 1e-5
    result = b.get(b.ops.rms_norm(b.send(x, fp32), b.ops.upload(w), eps))
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
    expected = x / rms * w
    return Outcome(result, expected, (gamma(shape[-1]) + 2.1 * draw.ua) * np.abs(expected))


def add(b: Device, draw: Draw, rows: int, k: int) -> Outcome:
    x, y = draw.values(rows, k), draw.rng.standard_normal((rows, k), dtype=np.float32)
    result = b.get(b.ops.add(b.send(x), b.send(y, fp32=True)))
    expected = x.astype(np.float64) + y
    bound = (U + draw.ua) * (np.abs(expected) + np.abs(y))
    return Outcome(result, expected, bound)


def round_(b: Device, draw: Draw, rows: int, k: int) -> Outcome:
    x = draw.rng.standard_normal((rows, k), dtype=np.float32)
    x[0, 0] = 1 + 2.0**-8  # a tie: to even
    result = b.get(b.ops.round(b.send(x, fp32=True)))
    kind = ml_dtypes.bfloat16 if draw.ua else np.float32
    return Outcome(result, x.astype(kind).astype(np.float64), np.zeros(x.shape))


def silu_mul(b: Device, draw: Draw, rows: int, k: int) -> Outcome:
    gate, up = (draw.rng.standard_normal((rows, k), dtype=np.float32) * 4 for _ in range(2))
    result = b.get(b.ops.silu_mul(b.send(gate, fp32=True), b.send(up, fp32=True)))
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    return Outcome(result, expected, (12 * U + draw.ua) * np.abs(expected))


def take_rows(b: Device, draw: Draw, rows: int, k: int, n: int) -> Outcome:
    x, chosen = draw.values(rows, k), draw.rng.integers(0, rows, n).astype(np.int32)
    return Outcome(b.get(b.ops.take_rows(b.send(x), b.send(chosen))), x[chosen], np.zeros((n, k)))


def join_columns(b: Device, draw: Draw, rows: int, *widths: int) -> Outcome:
    parts = [draw.values(rows, w) for w in widths]
    result = b.get(b.ops.join_columns([b.send(p) for p in parts]))
    return Outcome(result, np.concatenate(parts, 1), np.zeros(result.shape))


# ---- rotation and latent attention -------------------------------------------------------------

YARN = config.Rope(
    theta=10000.0,
    type="deepseek_yarn",
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=0.7,
)


def rotated(a, b, dim: int, positions):
    """float64 rotation of pairs (a, b) [T, ..., dim / 2] and the sizes its error scales with."""
    inverse, amplitude = reference.rope_frequencies(YARN, dim)
    angle = (positions[:, None] * inverse).reshape(len(positions), *(1,) * (a.ndim - 2), dim // 2)
    c, s = np.cos(angle) * amplitude, np.sin(angle) * amplitude
    value = np.concatenate([a * c - b * s, b * c + a * s], -1)
    size = np.concatenate([np.abs(a * c) + np.abs(b * s), np.abs(b * c) + np.abs(a * s)], -1)
    return value, size


def rope_halves(b: Device, draw: Draw, rows: int, heads: int, d: int) -> Outcome:
    x, positions = draw.values(rows, heads, d), draw.rng.integers(0, 64, rows).astype(np.int32)
    cos, sin = b.ops.rope_table(YARN, d, 64)
    result = b.get(b.ops.rope_halves(b.send(x), cos, sin, b.send(positions)))
    wide = x.astype(np.float64)
    expected, size = rotated(wide[..., : d // 2], wide[..., d // 2 :], d, positions)
    return Outcome(result, expected, 4 * U * size + draw.ua * np.abs(expected))


def latent_query(
    b, draw, kind: str, rows: int, heads: int, nope: int, rope: int, v: int, latent: int
):
    q, kv_b = draw.values(rows, heads, nope + rope), draw.weight(kind, heads * (nope + v), latent)
    positions = draw.rng.integers(0, 64, rows).astype(np.int32)
    key, _ = b.ops.prepare_heads(kv_b, heads, nope, v)
    cos, sin = b.ops.rope_table(YARN, rope, 64)
    result = b.get(b.ops.latent_query(b.send(q), key, cos, sin, b.send(positions)))
    wide, keys = q.astype(np.float64), f64(kv_b).reshape(heads, nope + v, latent)[:, :nope]
    absorbed = np.einsum("thn,hnl->thl", wide[..., :nope], keys)
    size = np.einsum("thn,hnl->thl", np.abs(wide[..., :nope]), np.abs(keys))
    pairs = wide[..., nope:]
    turned, turned_size = rotated(pairs[..., 0::2], pairs[..., 1::2], rope, positions)
    expected = np.concatenate([absorbed, turned], -1)
    bound = np.concatenate([gamma(nope) * size, 4 * U * turned_size], -1)
    return Outcome(result, expected, bound * (1 + draw.ua) + draw.ua * np.abs(expected))


def latent_entry(b: Device, draw: Draw, rows: int, latent: int, rope: int) -> Outcome:
    kv = draw.rng.standard_normal((rows, latent + rope), dtype=np.float32)
    w, eps = draw.values(latent), 1e-6
    positions = draw.rng.integers(0, 64, rows).astype(np.int32)
    cos, sin = b.ops.rope_table(YARN, rope, 64)
    sent, out = b.send(kv, fp32=True), b.ops.activations(kv.shape)
    b.ops.latent_entry(sent, b.ops.upload(w), eps, cos, sin, b.send(positions), out)
    result = b.get(out)
    wide = kv.astype(np.float64)
    rms = np.sqrt((wide[:, :latent] ** 2).mean(-1, keepdims=True) + eps)
    normed = wide[:, :latent] / rms * w
    turned, size = rotated(wide[:, latent::2], wide[:, latent + 1 :: 2], rope, positions)
    bounds = (
        (gamma(latent) + 2.1 * draw.ua) * np.abs(normed),
        4 * U * size + draw.ua * np.abs(turned),
    )
    return Outcome(result, np.concatenate([normed, turned], -1), np.concatenate(bounds, -1))


def absorb_v(b, draw, kind: str, rows: int, heads: int, nope: int, v: int, latent: int) -> Outcome:
    o, kv_b = draw.values(rows, heads, latent), draw.weight(kind, heads * (nope + v), latent)
    _, value = b.ops.prepare_heads(kv_b, heads, nope, v)
    result = b.get(b.ops.absorb_v(b.send(o), value))
    w = f64(kv_b).reshape(heads, nope + v, latent)[:, nope:]
    expected = np.einsum("thl,hvl->thv", o.astype(np.float64), w)
    size = np.einsum("thl,hvl->thv", np.abs(o.astype(np.float64)), np.abs(w))
    return Outcome(
        result, expected, gamma(latent) * size * (1 + draw.ua) + draw.ua * np.abs(expected)
    )


@dataclass(frozen=True)
class Forest:
    """Sequences with committed keys in shuffled pages, and a random tree of new rows on each."""

    leaf: int
    pages: np.ndarray
    fresh: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray
    sequence: np.ndarray
    parent: np.ndarray
    committed: list[np.ndarray]  # keys by position

    def keys_of(self, row: int) -> np.ndarray:
        """All keys that a row sees, by position."""
        path, node = [], row
        while node >= 0:
            path.append(self.fresh[node])
            node = self.parent[node]
        return np.concatenate([self.committed[self.sequence[row]], path[::-1]])

    def plan(self, b: Device):
        rows = self.positions, self.sequence, self.parent
        return b.ops.plan_attention(*rows, self.lengths, self.tables, self.leaf)


def forest(draw: Draw, width: int, leaf: int, lengths, nodes: int) -> Forest:
    rng = draw.rng
    need = [-(-(n + nodes) // leaf) for n in lengths]
    order = rng.permutation(sum(need)).tolist()
    tables = np.full((len(need), max(need)), -1, np.int32)
    for row, n in zip(tables, need, strict=True):
        row[:n] = [order.pop() for _ in range(n)]
    pages = np.full((sum(need) + 1, leaf, width), np.nan, np.float32)
    committed, positions, sequence, parent = [], [], [], []
    for slot, length in enumerate(lengths):
        keys = draw.values(length, width)
        committed.append(keys)
        for position in range(length):
            pages[tables[slot][position // leaf], position % leaf] = keys[position]
        start = len(positions)
        for i in range(nodes):
            above = int(rng.integers(max(0, i - 3), i)) if i else -1
            parent.append(start + above if i else -1)
            positions.append(length if not i else positions[start + above] + 1)
            sequence.append(slot)
    as_int = (np.array(a, np.int32) for a in (lengths, positions, sequence, parent))
    fresh = draw.values(len(sequence), width)
    return Forest(leaf, pages, fresh, tables, *as_int, committed)


def softmax_bound(scores, values, size, factor: float, d: int, ua: float):
    """float64 attention of one query over keys, and its bound. size: |q| . |k| of every key.

    A score errs by gamma(d) size factor (log2); 2^x turns that into a relative error of p, to which
    rounding adds 4 u + ua; sum and P.V add gamma(n).
    """
    p = np.exp2(scores * factor - np.max(scores * factor))
    relative = np.log(2) * gamma(d + 4) * np.max(size) * factor * 2 + 8 * U + ua
    weight = p / p.sum()
    out = weight @ values
    spread = weight @ np.abs(values)
    return out, (2 * relative + 2 * gamma(len(p))) * spread + ua * np.abs(out)


def latent_attention(b, draw, heads, latent, rope, leaf, span, lengths, nodes) -> Outcome:
    width, scale = latent + rope, (latent + rope) ** -0.5
    f = forest(draw, width, leaf, lengths, nodes)
    q = draw.values(len(f.positions), heads, width)
    result = b.get(
        b.ops.latent_attention(
            b.send(q), b.send(f.pages), b.send(f.fresh), f.plan(b), scale, latent, span
        )
    )
    expected, bound = np.empty(result.shape), np.empty(result.shape)
    for t in range(len(q)):
        keys = f.keys_of(t).astype(np.float64)
        for h in range(heads):
            size = np.abs(keys) @ np.abs(q[t, h])
            expected[t, h], bound[t, h] = softmax_bound(
                keys @ q[t, h], keys[:, :latent], size, scale * np.log2(np.e), width, draw.ua
            )
    return Outcome(result, expected, bound)


def block_attention(b, draw, heads, kv_heads, d, leaf, span, lengths, n, window) -> Outcome:
    f = forest(draw, 2 * kv_heads * d, leaf, lengths, 1)
    rows, scale = len(lengths) * n, d**-0.5
    q, kv = draw.values(rows, heads, d), draw.values(rows, 2, kv_heads, d)
    pages = f.pages.reshape(len(f.pages), leaf, 2, kv_heads, d)
    result = b.get(
        b.ops.block_attention(
            b.send(q), b.send(kv), b.send(pages), f.tables, f.lengths, window, scale, span
        )
    )
    expected, bound = np.empty(result.shape), np.empty(result.shape)
    for t in range(rows):
        block, length = t // n, lengths[t // n]
        seen = np.arange(length) > length + t % n - window if window else np.ones(length, bool)
        context = f.committed[block].reshape(length, 2, kv_heads, d)[seen]
        both = np.concatenate([context, kv[block * n : (block + 1) * n]]).astype(np.float64)
        for h in range(heads):
            keys, values = both[:, 0, h * kv_heads // heads], both[:, 1, h * kv_heads // heads]
            size = np.abs(keys) @ np.abs(q[t, h])
            expected[t, h], bound[t, h] = softmax_bound(
                keys @ q[t, h], values, size, scale * np.log2(np.e), d, draw.ua
            )
    return Outcome(result, expected, bound)


# ---- experts -----------------------------------------------------------------------------------


def gated(x: np.ndarray, gate, up, down, ua: float):
    """float64 SwiGLU of rows x and its bound: gate and up err by gamma(K), SiLU's slope is at most
    1.1, h is rounded, and down's sum adds its own."""
    g, g_error = product(x, gate)
    p, p_error = product(x, up)
    s = g / (1 + np.exp(-g))
    h = s * p
    h_error = 1.1 * g_error * np.abs(p) + np.abs(s) * p_error + (12 * U + ua) * np.abs(h)
    y = h @ down.T
    bound = (h_error * 1.01) @ np.abs(down).T + gamma(h.shape[1]) * (np.abs(h) @ np.abs(down).T)
    return y, bound


def mlp(
    b: Device, draw: Draw, kind: str, rows: int, hidden: int, width: int, leaves: int
) -> Outcome:
    x = draw.values(rows, hidden)
    gate, up, down = (draw.weight(kind, 1, *s) for s in ((width, hidden),) * 2 + ((hidden, width),))
    result = b.get(b.ops.mlp(b.send(x), b.ops.prepare_mlp(gate, up, down, leaves)))
    return Outcome(
        result, *gated(x.astype(np.float64), f64(gate)[0], f64(up)[0], f64(down)[0], draw.ua)
    )


def moe(b, draw, kind, rows, hidden, width, experts, top_k, leaves, shared: int) -> Outcome:
    x = draw.values(rows, hidden)
    ids = np.sort(draw.rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)[:, :top_k], 1)
    weights = draw.rng.random((rows, top_k), dtype=np.float32)
    if rows > 2:
        ids[1] = -1, *ids[1, 1:]  # filler: adds nothing
        ids[2] = *ids[2, :-1], experts
    w = [draw.weight(kind, experts, *s) for s in ((width, hidden),) * 2 + ((hidden, width),)]
    one = [draw.weight("bf16", 1, *s) for s in ((shared, hidden),) * 2 + ((hidden, shared),)]
    beside = b.ops.prepare_mlp(*one, leaves) if shared else None
    sent = b.send(x), b.send(ids.astype(np.int32)), b.send(weights, fp32=True)
    result = b.get(b.ops.moe(*sent, b.ops.prepare_mlp(*w, leaves), beside))
    expected, bound = np.zeros((rows, hidden)), np.zeros((rows, hidden))
    gates, ups, downs = (f64(m) for m in w)
    for t in range(rows):
        row = x[t : t + 1].astype(np.float64)
        for e, weight in zip(ids[t], weights[t], strict=True):
            if 0 <= e < experts:
                y, error = gated(row, gates[e], ups[e], downs[e], draw.ua)
                expected[t] += weight * y[0]
                bound[t] += weight * (error[0] + gamma(top_k) * np.abs(y[0]))
        if shared:
            y, error = gated(row, *(f64(m)[0] for m in one), draw.ua)
            expected[t] += y[0]
            bound[t] += error[0]
    # Sums over experts and leaves: at most k + 1 + log2(leaves) additions of terms this large.
    return Outcome(result, expected, bound * 1.1 + gamma(top_k + 4) * np.abs(expected).max())


CASES = [
    *((linear, (kind, *shape)) for kind in ("f32", "bf16") for shape in (
        (1, 1, 1, 1), (3, 17, 33, 1), (9, 40, 64, 8), (17, 8, 96, 4), (8, 16, 7168, 1),
        (2, 24, 1024, 64),
    )),
    *((linear, (kind, *shape)) for kind in ("int4", "int4_f32") for shape in (
        (1, 3, 32, 1), (5, 17, 96, 1), (9, 12, 256, 8), (3, 8, 7168, 1), (2, 20, 256, 2),
    )),
    (embed, ("f32", 5, 7, 33, 0)), (embed, ("bf16", 9, 8, 300, 3)),
    *((rms_norm, s) for s in (
        (False, 1, 1), (True, 3, 33), (False, 2, 7168), (True, 2, 1536), (True, 3, 4, 16),
    )),
    *((f, s) for f in (add, round_, silu_mul) for s in ((1, 1), (3, 333))),
    (take_rows, (7, 65, 4)), (take_rows, (1, 300, 3)),
    (join_columns, (3, 8, 8)), (join_columns, (2, 5, 300, 1)),
    *((rope_halves, s) for s in ((1, 1, 2), (9, 3, 16), (2, 8, 128))),
    *((latent_query, s) for s in (
        ("f32", 1, 1, 4, 2, 4, 8), ("bf16", 9, 4, 16, 8, 16, 32),
        ("bf16", 2, 1, 128, 64, 128, 512),
    )),
    *((latent_entry, s) for s in ((1, 8, 2), (3, 33, 8), (2, 512, 64))),
    *((absorb_v, s) for s in (
        ("f32", 1, 1, 4, 4, 8), ("bf16", 9, 4, 16, 16, 32), ("bf16", 2, 1, 128, 128, 512),
    )),
    *((latent_attention, s) for s in (
        (1, 8, 2, 16, 1, (0,), 1),
        (4, 32, 8, 16, 2, (0, 15, 16, 37), 5),
        (5, 33, 6, 16, 4, (130,), 9),
        (8, 512, 64, 64, 4, (70, 1), 2),
    )),
    *((block_attention, s) for s in (
        (1, 1, 8, 16, 1, (0,), 1, 0),
        (8, 2, 16, 16, 2, (0, 15, 33), 4, 0),
        (12, 2, 16, 16, 4, (100, 7), 8, 20),
        (8, 1, 128, 64, 4, (65,), 8, 0),
    )),
    *((mlp, s) for s in (
        ("f32", 1, 8, 8, 1), ("bf16", 9, 64, 64, 8), ("int4", 3, 64, 256, 8),
        ("bf16", 2, 512, 24, 8),
    )),
    *((moe, s) for s in (
        ("f32", 1, 8, 8, 2, 1, 1, 0),
        ("bf16", 9, 32, 48, 16, 2, 8, 16),
        ("int4", 12, 64, 64, 8, 3, 2, 32),
        ("int4_f32", 5, 64, 256, 4, 4, 8, 0),
        ("int4", 2, 512, 256, 12, 8, 8, 256),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    "case, shape", CASES, ids=lambda v: getattr(v, "__name__", None) or "-".join(map(str, v))
)
def test_operation(backend: Device, case, shape) -> None:
    draw = Draw(backend)
    outcome = case(backend, draw, *shape)
    assert outcome.result.shape == outcome.expected.shape
    error = np.abs(outcome.result - outcome.expected)
    bad = ~(error <= outcome.bound)  # NaN is bad too
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        pytest.fail(
            f"{bad.sum()} of {bad.size} values; first at {at}: {outcome.result[at]!r}, expected "
            f"{outcome.expected[at]!r} within {outcome.bound[at]:.3g}"
        )
    if error.size >= 16:
        norm = np.linalg.norm(error) / np.linalg.norm(outcome.expected)
        assert norm <= 32 * U + 1.5 * draw.ua


# ---- bits --------------------------------------------------------------------------------------


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def assert_same_bits(have: np.ndarray, want: np.ndarray, what: str) -> None:
    differ = np.argwhere(bits(have) != bits(want))
    assert not len(differ), (
        f"{what}: {len(differ)} of {have.size} values differ; first at {differ[0].tolist()}: "
        f"{have[tuple(differ[0])]!r}, expected {want[tuple(differ[0])]!r}"
    )


def row_operations(b: Device, draw: Draw, rows: int) -> dict:
    """name -> f(row numbers): the operation on those rows of one fixed input."""
    ops, hidden, heads, nope, rope, v, latent = b.ops, 64, 4, 16, 8, 16, 32
    x, kv_b = draw.values(rows, hidden), draw.weight("bf16", heads * (nope + v), latent)
    q, o = draw.values(rows, heads, nope + rope), draw.values(rows, heads, latent)
    kv, positions = draw.values(rows, latent + rope), np.arange(rows, dtype=np.int32)
    norm, entry_norm = ops.upload(draw.values(hidden)), ops.upload(draw.values(latent))
    key, value = ops.prepare_heads(kv_b, heads, nope, v)
    cos, sin = ops.rope_table(YARN, rope, 64)
    matrices = {k: ops.prepare(draw.weight(k, 40, hidden)) for k in ("f32", "bf16", "int4")}
    cut = ops.prepare(draw.weight("bf16", 24, hidden), shards=8, row_cut=True)
    sizes = (64, hidden), (64, hidden), (hidden, 64)
    experts = ops.prepare_mlp(*(draw.weight("int4", 6, *s) for s in sizes), 2)
    shared = ops.prepare_mlp(*(draw.weight("bf16", 1, *s) for s in sizes), 2)
    router, bias = ops.prepare(draw.weight("f32", 6, hidden)), ops.upload(draw.values(6))

    def entry(r):
        out = ops.activations((len(r), latent + rope))
        sent = b.send(kv[r], fp32=True)
        ops.latent_entry(sent, entry_norm, 1e-6, cos, sin, b.send(positions[r]), out)
        return out

    def route(r):
        return ops.route(b.send(x[r]), router, bias, 2, True, 2.5)

    return {
        "rms_norm": lambda r: ops.rms_norm(b.send(x[r]), norm, 1e-5),
        **{f"linear {k}": lambda r, w=w: ops.linear(b.send(x[r]), w) for k, w in matrices.items()},
        "linear in 8 leaves": lambda r: ops.linear(b.send(x[r]), cut),
        "latent_query": lambda r: ops.latent_query(
            b.send(q[r]), key, cos, sin, b.send(positions[r])
        ),
        "latent_entry": entry,
        "absorb_v": lambda r: ops.absorb_v(b.send(o[r]), value),
        "route": lambda r: route(r)[1],
        "mlp": lambda r: ops.mlp(b.send(x[r]), shared),
        "moe": lambda r: ops.moe(b.send(x[r]), *route(r), experts, shared),
    }


def test_a_row_does_not_know_its_neighbours(backend: Device) -> None:
    """R1: all rows together, in another order, and each alone give the same bits."""
    rows = np.arange(11)
    for name, run in row_operations(backend, Draw(backend), len(rows)).items():
        together = backend.get(run(rows))
        turned = backend.get(run(rows[::-1].copy()))[::-1]
        alone = np.concatenate([backend.get(run(rows[i : i + 1])) for i in rows])
        assert_same_bits(turned, together, f"{name}, reversed")
        assert_same_bits(alone, together, f"{name}, alone")


@pytest.mark.parametrize("leaf, span", [(16, 1), (16, 3), (32, 4)])
def test_a_tree_node_attends_as_if_decoded(backend: Device, leaf: int, span: int) -> None:
    """R3: a node's output has the bits of plain decoding along its path, across leaf borders."""
    draw, heads, latent, rope = Draw(backend, 1), 5, 32, 8
    f = forest(draw, latent + rope, leaf, (0, 13, 31, 50), 12)
    q = draw.values(len(f.positions), heads, latent + rope)

    def attend(q, pages, fresh, plan):
        sent = backend.send(q), backend.send(pages), backend.send(fresh)
        return backend.get(backend.ops.latent_attention(*sent, plan, 0.3, latent, span))

    together = attend(q, f.pages, f.fresh, f.plan(backend))
    for t in range(len(q)):
        keys = f.keys_of(t)
        before = len(keys) - 1
        pages = np.full((before // leaf + 1, leaf, latent + rope), np.nan, np.float32)
        pages.reshape(-1, latent + rope)[:before] = keys[:-1]
        one = (np.array([n], np.int32) for n in (before, 0, -1, before))
        plan = backend.ops.plan_attention(*one, np.arange(len(pages), dtype=np.int32)[None], leaf)
        alone = attend(q[t : t + 1], pages, keys[-1:], plan)
        assert_same_bits(alone[0], together[t], f"node {t}")


@pytest.mark.parametrize("ranks", (2, 4, 8))
def test_ranks_add_along_the_same_tree(backend: Device, ranks: int) -> None:
    """R2: the leaf sums of several ranks, joined pairwise, have the bits of one rank."""
    draw, hidden, width = Draw(backend, 2), 32, 256
    ops, x, h = backend.ops, draw.values(5, hidden), draw.values(5, width)
    w = draw.weight("f32", 24, width)
    sizes = (width, hidden), (width, hidden), (hidden, width)
    routed = [draw.weight("int4", 4, *s) for s in sizes]
    shared = [draw.weight("bf16", 1, *s) for s in sizes]
    ids = np.tile(np.array([1, 3], np.int32), (5, 1))
    weights = draw.rng.random((5, 2), dtype=np.float32)

    def part(matrix, axis: int, r: int, n: int):
        if isinstance(matrix, reference.Int4Weight):
            return reference.Int4Weight(
                part(matrix.packed, axis, r, n), part(matrix.scales, axis, r, n)
            )
        return np.ascontiguousarray(np.split(matrix, n, axis)[r])

    def linear_of(r: int, n: int):
        cut = ops.prepare(part(w, 1, r, n), shards=8 // n, row_cut=True)
        return backend.get(ops.linear(backend.send(part(h, 1, r, n)), cut))

    def moe_of(r: int, n: int):
        both = [
            ops.prepare_mlp(
                *(part(m, axis, r, n) for m, axis in zip(ms, (1, 1, 2), strict=True)), 8 // n
            )
            for ms in (routed, shared)
        ]
        sent = backend.send(x), backend.send(ids), backend.send(weights, fp32=True)
        return backend.get(ops.moe(*sent, *both))

    for name, run in (("linear", linear_of), ("moe", moe_of)):
        joined = reference.tree_sum(np.stack([run(r, ranks) for r in range(ranks)]))
        assert_same_bits(joined, run(0, 1), f"{name} on {ranks} ranks")


@pytest.mark.parametrize("scales", ("int4", "int4_f32"))
def test_dequantisation_is_exact(device: str, scales: str) -> None:
    """Code times scale, to the bit: the product with the identity is the dequantised weight."""
    from tests.conftest import Device

    b = Device(device, "float32")
    w = Draw(b).weight(scales, 24, 96)
    result = b.get(b.ops.linear(b.send(np.eye(96, dtype=np.float32)), b.ops.prepare(w)))
    assert_same_bits(result + 0.0, dequantise_int4(w).T + 0.0, "weight")  # -0 counts as 0


# ---- the router --------------------------------------------------------------------------------


def test_route(backend: Device) -> None:
    """Ids exactly those of float64, ascending; weights within 8 u and the sum's gamma."""
    draw = Draw(backend)
    for rows, hidden, n, top_k, normalise in (
        (1, 8, 2, 1, True),
        (9, 64, 16, 4, False),
        (3, 512, 384, 8, True),
    ):
        x, w, bias = (
            draw.values(rows, hidden),
            draw.weight("bf16", n, hidden),
            draw.values(n, scale=0.1),
        )
        router = backend.ops.prepare(w), backend.ops.upload(bias)
        ids, weights = backend.ops.route(backend.send(x), *router, top_k, normalise, 2.5)
        scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ f64(w).T)))
        order = np.sort(np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k], 1)
        assert np.array_equal(backend.get(ids), order)
        chosen = np.take_along_axis(scores, order, 1)
        expected = chosen / chosen.sum(1, keepdims=True) * 2.5 if normalise else chosen * 2.5
        np.testing.assert_allclose(backend.get(weights), expected, rtol=64 * U, atol=0)


def test_route_ties_filler_and_nan(backend: Device) -> None:
    """Equal scores go to the lower id, a bias of the file's F32 decides, NaN rows stay alone."""
    ops = backend.ops
    x = np.zeros((3, 32), np.float32)
    x[1] = np.nan
    router = ops.prepare(np.zeros((16, 32), np.float32))
    bias = np.full(16, -4, np.float32)  # every choice is negative: filler lanes must not win (D1)
    bias[5], bias[9] = 1.00001, 1.00002
    ids, weights = ops.route(backend.send(x), router, ops.upload(bias), 3, True, 1.0)
    ids, weights = backend.get(ids), backend.get(weights)
    assert ids[0].tolist() == ids[2].tolist() == [0, 5, 9]
    assert ((ids >= 0) & (ids < 16)).all()
    assert np.isfinite(weights[[0, 2]]).all() and np.isnan(weights[1]).all()


@pytest.fixture
def kernels(device):
    """CudaOps' device; the reference has no kernels to record or to edit."""
    if device == "cpu":
        pytest.skip("there are no kernels on the CPU")
    return device


# ---- what is refused ---------------------------------------------------------------------------


def test_errors_name_operation_and_argument(kernels) -> None:
    from tests.conftest import Device

    b = Device(kernels, "float32")
    w = b.ops.prepare(np.zeros((4, 8), np.float32))
    good = b.send(np.zeros((2, 8), np.float32))
    for x, words in (
        (b.send(np.zeros((2, 9), np.float32)), ("linear: x", "any, 8", "2, 9")),
        (good.astype(np.float64), ("float32", "float64")),
        (b.send(np.zeros((8, 2), np.float32)).T, ("C order",)),
        ([[0.0] * 8], ("expected an array on", "list")),
    ):
        with pytest.raises(config.UserError) as caught:
            b.ops.linear(x, w)
        assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(config.UserError, match="whole groups of 32"):
        b.ops.prepare(quantise_int4(np.zeros((4, 96), np.float32)), shards=2, row_cut=True)
    with pytest.raises(config.UserError, match="shared memory"):
        plan = b.ops.plan_attention(
            *(np.zeros(1, np.int32),) * 3, np.zeros(1, np.int32), [[0]], 32768
        )
        one = b.send(np.zeros((1, 1, 8), np.float32))
        b.ops.latent_attention(
            one, b.send(np.zeros((1, 32768, 8), np.float32)), one.reshape(1, 8), plan, 1.0, 4, 1
        )


def test_start_up_names_a_kernel_that_does_not_fit(kernels) -> None:
    """As if a block had 101,376 bytes (sm_120): all fits, up to a tree that is too wide."""
    import ops
    from tests import toy
    from tests.conftest import launcher

    device = ops.CudaOps(launcher=launcher(kernels))
    device.launcher = SimpleNamespace(limits=ops.Limits("small", "sm_120", 101_376, 1))
    model = config.parse_model({**toy.DIMS, "quantization_config": toy.INT4}, source="toy")
    for leaf in (16, 64, 128, 512):
        device.check_fit(model, None, leaf, 256)
    with pytest.raises(config.UserError, match="build_trees: needs .* lower draft.budget"):
        device.check_fit(model, None, 64, 2048)


def test_no_rows_no_launch(backend: Device) -> None:
    ops = backend.ops
    x = backend.send(np.zeros((0, 64), np.float32))
    assert backend.get(ops.rms_norm(x, ops.upload(np.ones(64, np.float32)), 1e-5)).shape == (0, 64)
    w = ops.prepare(np.zeros((8, 64), np.float32))
    assert backend.get(ops.linear(x, w)).shape == (0, 8)


# ---- recorded work, edited kernels -------------------------------------------------------------


def test_recorded_work_follows_its_inputs(kernels) -> None:
    """A replay reads the inputs as they are by then, and writes the same outputs."""
    from tests.conftest import Device

    b = Device(kernels, "float32")
    draw = Draw(b)
    w, first, second = draw.weight("bf16", 16, 64), draw.values(3, 64), draw.values(3, 64)
    weight, norm, x = b.ops.prepare(w), b.ops.upload(draw.values(64)), b.send(first)

    def run() -> tuple:
        h = b.ops.rms_norm(x, norm, 1e-5)
        return h, b.ops.linear(h, weight)

    captured = b.ops.capture(run)
    for values in (first, second):
        x[...] = b.send(values)
        b.ops.launcher.synchronize()
        captured.replay()
        have = [b.get(out) for out in captured.outputs]
        want = b.ops.rms_norm(b.send(values), norm, 1e-5)
        assert_same_bits(have[0], b.get(want), "rms_norm")
        assert_same_bits(have[1], b.get(b.ops.linear(want, weight)), "linear")


def test_reload_takes_the_changed_section_and_keeps_a_broken_one(kernels, tmp_path) -> None:
    import ops
    from tests.conftest import launcher

    for file in ops.FILES:
        (tmp_path / file).write_text((ops.HERE / file).read_text())
    edited = ops.CudaOps(launcher=launcher(kernels), directory=tmp_path)
    x = edited.launcher.upload(np.ones((1, 4), np.float32))

    def twice() -> list[float]:
        return edited.download(edited.add(x, x))[0].tolist()

    assert twice() == [2.0] * 4 and edited.reload() == []
    source = tmp_path / "kernels.cu"
    text, line = source.read_text(), "__fadd_rn(to_float(x[i]), round_to_act(y[i]))"
    source.write_text(text.replace(line, line.replace("__fadd_rn", "__fsub_rn")))
    assert edited.reload() == ["elementwise"] and twice() == [0.0] * 4
    source.write_text(text.replace(line, "nonsense"))
    number = text[: text.index(line)].count("\n") + 1
    with pytest.raises(config.UserError) as caught:
        edited.reload()
    assert re.search(rf"kernels.cu[(:]{number}\b", str(caught.value)), caught.value
    assert twice() == [0.0] * 4
    source.write_text(text)
    assert edited.reload() == ["elementwise"] and twice() == [2.0] * 4

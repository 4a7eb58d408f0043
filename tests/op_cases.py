"""The cases of the op tests: one operation at one shape against its twin or float64.

pytest runs them on every device (test_ops.py, test_decode_ops.py), `watch.py` after an edit. A case
of SUMS draws inputs, runs the operation and returns the result, the float64 value and a bound on
the error. The cases of ROUTER and DECODING compare by themselves: there one answer is right.

Bounds. u = 2^-24 is fp32's unit roundoff; a sum of n products in any order errs by at most
n u (sum of |products|), here with (n + 8) for the operations around it. A value rounded to the
activation type errs by `ua` of its size more: 2^-8 for bfloat16, 0 for float32. Worst cases are
far from what happens, so the norm of the error is bounded too: roundings are independent, their sum
grows like a square root, and 32 u (plus 1.5 ua) of the norm is some times what is seen at K = 7168.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

import config
import launchers
import ops as kernels
import reference
import sampling
import spec_decode
from loader import quantise_int4
from sampling import Path, SamplingParams

U = 2.0**-24


@dataclass(frozen=True)
class Outcome:
    result: np.ndarray
    expected: np.ndarray
    bound: np.ndarray


class Backend:
    """One set of operations as the cases use it: NumPy in, NumPy out."""

    def __init__(self, operations):
        self.ops, self.activation = operations, operations.activation
        self.host = isinstance(operations, reference.ReferenceOps)

    def send(self, array: np.ndarray, fp32: bool = False):
        """Floats as activations (of values exact in the type) or as fp32; ints as int32."""
        if self.host:
            return np.ascontiguousarray(array)
        if array.dtype.kind in "iu":
            return self.ops.index(array)
        kind = np.float32 if fp32 else self.ops.act
        return self.ops.launcher.upload(array.astype(kind))

    def get(self, array) -> np.ndarray:
        return np.asarray(array) if self.host else self.ops.download(array)


def gamma(n: int) -> float:
    return (n + 8) * U


class Draw:
    """Random inputs that are exact in the activation type."""

    def __init__(self, backend: Backend, seed: int = 0):
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


def linear(b: Backend, draw: Draw, kind: str, rows: int, out: int, k: int, leaves: int) -> Outcome:
    x, w = draw.values(rows, k), draw.weight(kind, out, k)
    weight = b.ops.prepare(w, shards=leaves, row_cut=leaves > 1)
    result = b.get(b.ops.linear(b.send(x), weight))
    return Outcome(result, *product(x.astype(np.float64), f64(w)))


def linear_rounded(b: Backend, draw: Draw, kind: str, rows: int, out: int, k: int) -> Outcome:
    x, w = draw.values(rows, k), draw.weight(kind, out, k)
    result = b.get(b.ops.linear(b.send(x), b.ops.prepare(w), rounded=True))
    expected, bound = product(x.astype(np.float64), f64(w))
    return Outcome(result, expected, bound * (1 + draw.ua) + draw.ua * np.abs(expected))


def embed(b: Backend, draw: Draw, kind: str, rows: int, n: int, hidden: int, first: int) -> Outcome:
    table = draw.weight(kind, n, hidden)
    ids = draw.rng.integers(0, n + 2 * first, rows).astype(np.int32)
    result = b.get(b.ops.embed(b.send(ids), b.ops.upload(table), first))
    local = ids - first
    mine = ((local >= 0) & (local < n))[:, None]
    expected = np.where(mine, f64(table)[np.clip(local, 0, n - 1)], 0)
    return Outcome(result, expected, draw.ua * np.abs(expected))


def rms_norm(b: Backend, draw: Draw, fp32: bool, *shape: int) -> Outcome:
    x, w, eps = draw.values(*shape, scale=3), draw.values(shape[-1]), 1e-5
    result = b.get(b.ops.rms_norm(b.send(x, fp32), b.ops.upload(w), eps))
    rms = np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
    expected = x / rms * w
    return Outcome(result, expected, (gamma(shape[-1]) + 2.1 * draw.ua) * np.abs(expected))


def add_rms_norm(b: Backend, draw: Draw, rows: int, k: int, first: int | None) -> Outcome:
    """Sum and norm beside each other; with `first`, the sum stands in the taps as well."""
    x, w, eps = draw.values(rows, k, scale=2), draw.values(k), 1e-5
    y = draw.rng.standard_normal((rows, k), dtype=np.float32)
    tap = ()
    if first is not None:
        tap = b.ops.activations((rows, 2 * k + first)), first
        tap[0][...] = b.send(np.zeros(tap[0].shape, np.float32))
    sent = b.send(x), b.send(y, fp32=True)
    total, normed = map(b.get, b.ops.add_rms_norm(*sent, b.ops.upload(w), eps, *tap))
    assert np.array_equal(total, b.get(b.ops.add(*sent))), "the sum is `add`'s"
    again = b.get(b.ops.rms_norm(b.send(total), b.ops.upload(w), eps))
    assert np.array_equal(normed, again), "the norm is `rms_norm`'s of the rounded sum"
    if tap:
        taps = b.get(tap[0])
        assert np.array_equal(taps[:, first : first + k], total)
        taps[:, first : first + k] = 0
        assert not taps.any(), "columns beside are written"
    wide = x.astype(np.float64) + y
    held = total.astype(np.float64)
    normed_wide = held / np.sqrt((held**2).mean(-1, keepdims=True) + eps) * w
    bounds = (
        (U + draw.ua) * (np.abs(wide) + np.abs(y)),
        (gamma(k) + 2.1 * draw.ua) * np.abs(normed_wide),
    )
    expected = np.concatenate([wide, normed_wide], 1)
    return Outcome(np.concatenate([total, normed], 1), expected, np.concatenate(bounds, 1))


def add(b: Backend, draw: Draw, rows: int, k: int) -> Outcome:
    x, y = draw.values(rows, k), draw.rng.standard_normal((rows, k), dtype=np.float32)
    result = b.get(b.ops.add(b.send(x), b.send(y, fp32=True)))
    expected = x.astype(np.float64) + y
    bound = (U + draw.ua) * (np.abs(expected) + np.abs(y))
    return Outcome(result, expected, bound)


def round_(b: Backend, draw: Draw, rows: int, k: int) -> Outcome:
    x = draw.rng.standard_normal((rows, k), dtype=np.float32)
    x[0, 0] = 1 + 2.0**-8  # a tie: to even
    result = b.get(b.ops.round(b.send(x, fp32=True)))
    kind = ml_dtypes.bfloat16 if draw.ua else np.float32
    return Outcome(result, x.astype(kind).astype(np.float64), np.zeros(x.shape))


def silu_mul(b: Backend, draw: Draw, rows: int, k: int) -> Outcome:
    gate, up = (draw.rng.standard_normal((rows, k), dtype=np.float32) * 4 for _ in range(2))
    result = b.get(b.ops.silu_mul(b.send(gate, fp32=True), b.send(up, fp32=True)))
    expected = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    return Outcome(result, expected, (12 * U + draw.ua) * np.abs(expected))


def take_rows(b: Backend, draw: Draw, fp32: bool, rows: int, k: int, n: int) -> Outcome:
    x, chosen = draw.values(rows, k), draw.rng.integers(0, rows, n).astype(np.int32)
    result = b.get(b.ops.take_rows(b.send(x, fp32), b.send(chosen)))
    return Outcome(result, x[chosen], np.zeros((n, k)))


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


def layer_entries(ops, rows: int, width: int):
    """Of a forward's entries those of its second layer, which need not begin on 16 bytes."""
    return ops.activations((2, rows, width))[1]


def latent_entry(b: Backend, draw: Draw, rows: int, latent: int, rope: int) -> Outcome:
    kv = draw.rng.standard_normal((rows, latent + rope), dtype=np.float32)
    w, eps = draw.values(latent), 1e-6
    positions = draw.rng.integers(0, 64, rows).astype(np.int32)
    cos, sin = b.ops.rope_table(YARN, rope, 64)
    sent, out = b.send(kv, fp32=True), layer_entries(b.ops, rows, latent + rope)
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


def latent_inputs(
    b, draw, kinds: tuple[str, str], rows: int, hidden: int, q_lora: int, latent: int, rope: int
) -> Outcome:
    """Bits of the operations that it stands for, whose own cases bound the error."""
    ops, eps, width = b.ops, 1e-6, latent + rope
    x, positions = b.send(draw.values(rows, hidden)), draw.rng.integers(0, 64, rows)
    positions = b.send(positions.astype(np.int32))
    q_a, kv_a = (draw.weight(k, n, hidden) for k, n in zip(kinds, (q_lora, width), strict=True))
    q_norm, kv_norm = (ops.upload(draw.values(n)) for n in (q_lora, latent))
    turn = (*ops.rope_table(YARN, rope, 64), positions)
    out, entries = (layer_entries(ops, rows, width) for _ in range(2))
    weight = ops.prepare_latent_inputs(q_a, kv_a)
    normed = b.get(ops.latent_inputs(x, weight, q_norm, kv_norm, eps, *turn, out))
    q = b.get(ops.rms_norm(ops.linear(x, ops.prepare(q_a)), q_norm, eps))
    ops.latent_entry(ops.linear(x, ops.prepare(kv_a)), kv_norm, eps, *turn, entries)
    have = np.concatenate([normed, b.get(out)], 1)
    want = np.concatenate([q, b.get(entries)], 1)
    return Outcome(have, want, np.zeros(have.shape))


def latent_queries(
    b, draw, rows: int, hidden: int, heads: int, q_lora: int, latent: int, nope: int, rope: int,
    v: int,
) -> Outcome:  # fmt: skip
    """Likewise."""
    ops, eps, width = b.ops, 1e-6, latent + rope
    x, positions = b.send(draw.values(rows, hidden)), draw.rng.integers(0, 64, rows)
    sizes = (q_lora, hidden), (width, hidden), (heads * (nope + rope), q_lora)
    q_a, kv_a, q_b = (draw.weight("bf16", *size) for size in sizes)
    weight, q_b = ops.prepare_latent_inputs(q_a, kv_a), ops.prepare(q_b)
    key, _ = ops.prepare_heads(draw.weight("bf16", heads * (nope + v), latent), heads, nope, v)
    norms = *(ops.upload(draw.values(n)) for n in (q_lora, latent)), eps
    turn = (*ops.rope_table(YARN, rope, 64), b.send(positions.astype(np.int32)))
    out, entries = (layer_entries(ops, rows, width) for _ in range(2))
    have = b.get(ops.latent_queries(x, weight, q_b, key, *norms, *turn, out))
    q = ops.linear(ops.latent_inputs(x, weight, *norms, *turn, entries), q_b, rounded=True)
    want = b.get(ops.latent_query(q.reshape(rows, heads, -1), key, *turn))
    have, want = (np.concatenate([a.reshape(rows, -1), b.get(e)], 1)
                  for a, e in ((have, out), (want, entries)))  # fmt: skip
    return Outcome(have, want, np.zeros(have.shape))


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

    def plan(self, b: Backend):
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


def turned(b: Backend, y, norm, eps: float, d: int, positions):
    """Heads [T, n, d] normed by `rms_norm`, then rotated here as float32 does, rounded."""
    normed = b.get(b.ops.rms_norm(b.send(y.reshape(len(y), -1, d), fp32=True), norm, eps))
    cos, sin = (b.get(table)[positions][:, None] for table in b.ops.rope_table(YARN, d, 64))
    first, second = normed[..., : d // 2], normed[..., d // 2 :]
    pairs = first * cos - second * sin, second * cos + first * sin
    return rounded(b, np.concatenate(pairs, -1))


def rounded(b: Backend, x: np.ndarray) -> np.ndarray:
    return b.get(b.ops.round(b.send(x, fp32=True)))


def block_inputs(
    b, draw, kinds: tuple[str, str], rows: int, hidden: int, heads: int, kv_heads: int, d: int
) -> Outcome:
    """Bits of a product, norm and rotation each, whose own cases bound the error."""
    ops, eps, x = b.ops, 1e-6, b.send(draw.values(rows, hidden))
    q, k, v = (
        draw.weight(kind, n * d, hidden)
        for kind, n in zip((kinds[0], *kinds), (heads, kv_heads, kv_heads), strict=True)
    )
    q_norm, k_norm = (ops.upload(draw.values(d)) for _ in range(2))
    positions = draw.rng.integers(0, 64, rows).astype(np.int32)
    [weight], _ = ops.prepare_block_inputs([q], [k], [v], 1, 1)
    turn = (*ops.rope_table(YARN, d, 64), b.send(positions))
    have_q, have_kv = map(b.get, ops.block_inputs(x, weight, q_norm, k_norm, eps, *turn))
    y = [b.get(ops.linear(x, ops.prepare(w))) for w in (q, k, v)]
    want_q, want_k = (
        turned(b, part, norm, eps, d, positions)
        for part, norm in zip(y, (q_norm, k_norm), strict=False)
    )
    want_v = rounded(b, y[2]).reshape(want_k.shape)
    have = np.concatenate([have_q, have_kv.reshape(rows, -1, d)], 1)
    want = np.concatenate([want_q, want_k, want_v], 1)
    return Outcome(have, want, np.zeros(have.shape))


def put_context(
    b, draw, kind: str, rows: int, hidden: int, layers: int, kv_heads: int, d: int
) -> Outcome:
    """The same of every layer, at scattered positions of shuffled pages; all else stays."""
    ops, eps, leaf, x = b.ops, 1e-6, 16, b.send(draw.values(rows, hidden))
    keys, values = ([draw.weight(kind, kv_heads * d, hidden) for _ in range(layers)] for _ in "kv")
    norms, tables = draw.values(layers, d), np.array([[3, 1], [0, 2], [4, -1]], np.int32)
    pages = draw.values(layers, 6, leaf, 2 * kv_heads * d)
    slots = np.arange(rows + 1, dtype=np.int32) % 2
    positions = np.arange(14, 15 + rows, dtype=np.int32)
    chosen = draw.rng.integers(0, rows, rows + 1).astype(np.int32)
    if not b.host:
        slots[-1] = chosen[-1] = -1  # an unused place
    sent, (_, weight) = b.send(pages), ops.prepare_block_inputs(keys, keys, values, 1, 1)
    turn = ops.rope_table(YARN, d, 64)
    at = [b.send(a) for a in (chosen, slots, positions)]
    ops.put_context(x, weight, ops.upload(norms), eps, *turn, *at, sent, b.send(tables))
    for layer in range(layers):
        k, v = (b.get(ops.linear(x, ops.prepare(w[layer]))) for w in (keys, values))
        for row, slot, position in zip(chosen, slots, positions, strict=True):
            if slot >= 0:
                one = turned(b, k[[row]], ops.upload(norms[layer]), eps, d, np.array([position]))
                entry = np.concatenate([one.reshape(-1), rounded(b, v[row])])
                pages[layer, tables[slot][position // leaf], position % leaf] = entry
    return Outcome(b.get(sent), pages, np.zeros(pages.shape))


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
    b: Backend, draw: Draw, kind: str, rows: int, hidden: int, width: int, leaves: int
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


SUMS = [
    *((linear, (kind, *shape)) for kind in ("f32", "bf16") for shape in (
        (1, 1, 1, 1), (3, 17, 33, 1), (9, 40, 64, 8), (17, 8, 96, 4), (8, 16, 7168, 1),
        (2, 24, 1024, 64),
    )),
    (linear, ("bf16", 33, 72, 1024, 1)),  # of many rows
    *((linear, (kind, *shape)) for kind in ("int4", "int4_f32") for shape in (
        (1, 3, 32, 1), (5, 17, 96, 1), (9, 12, 256, 8), (3, 8, 7168, 1), (2, 20, 256, 2),
    )),
    (embed, ("f32", 5, 7, 33, 0)), (embed, ("bf16", 9, 8, 300, 3)),
    *((linear_rounded, (kind, 9, 40, 64)) for kind in ("f32", "bf16", "int4")),
    *((rms_norm, s) for s in (
        (False, 1, 1), (True, 3, 33), (False, 2, 7168), (True, 2, 1536), (True, 3, 4, 16),
        (False, 2, 4100),
    )),
    *((add_rms_norm, s) for s in (
        (1, 1, None), (3, 33, 5), (2, 64, 8), (9, 96, 3), (2, 7168, None), (1, 7168, 7168),
    )),
    *((f, s) for f in (add, round_, silu_mul) for s in ((1, 1), (3, 333))),
    *((take_rows, s) for s in ((False, 7, 65, 4), (True, 1, 302, 3), (False, 5, 72, 9))),
    *((latent_query, s) for s in (
        ("f32", 1, 1, 4, 2, 4, 8), ("bf16", 9, 4, 16, 8, 16, 32),
        ("bf16", 2, 1, 128, 64, 128, 512), ("bf16", 9, 3, 32, 6, 18, 32),
        ("bf16", 17, 2, 192, 64, 128, 256),
    )),
    *((latent_entry, s) for s in ((1, 8, 2), (3, 33, 8), (3, 32, 4), (2, 512, 64))),
    *((latent_inputs, s) for s in (
        (("f32", "f32"), 3, 16, 5, 7, 2), (("bf16", "bf16"), 9, 64, 48, 32, 8),
        (("int4", "bf16"), 2, 96, 24, 16, 4), (("bf16", "bf16"), 2, 64, 1536, 512, 64),
    )),
    *((latent_queries, s) for s in (
        (3, 64, 2, 48, 32, 16, 8, 16), (11, 64, 2, 1024, 256, 32, 32, 32),
    )),
    *((absorb_v, s) for s in (
        ("f32", 1, 1, 4, 4, 8), ("bf16", 9, 4, 16, 16, 32), ("bf16", 2, 1, 128, 128, 512),
        ("bf16", 19, 2, 32, 18, 256), ("bf16", 3, 2, 32, 40, 96),
    )),
    *((latent_attention, s) for s in (
        (1, 8, 2, 16, 1, (0,), 1),
        (4, 32, 8, 16, 2, (0, 15, 16, 37), 5),
        (5, 33, 6, 16, 4, (130,), 9),
        (8, 512, 64, 64, 4, (70, 1), 2),
        (8, 128, 64, 64, 2, (130, 1), 13),  # by warpgroups, where they are
    )),
    *((block_inputs, s) for s in (
        (("f32", "f32"), 3, 16, 2, 1, 6), (("bf16", "bf16"), 9, 64, 4, 2, 16),
        (("bf16", "f32"), 2, 32, 1, 1, 8), (("bf16", "bf16"), 2, 256, 8, 1, 128),
    )),
    *((put_context, s) for s in (
        ("f32", 1, 16, 2, 1, 6), ("bf16", 9, 64, 3, 2, 16), ("bf16", 3, 256, 2, 1, 128),
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
        ("int4", 130, 64, 64, 9, 3, 2, 32),  # so many rows that each expert takes its own together
        ("int4", 2, 512, 256, 12, 8, 8, 256),
    )),
]  # fmt: skip


# ---- the router --------------------------------------------------------------------------------


def route(b: Backend) -> None:
    """Ids exactly those of float64, ascending; weights within 8 u and the sum's gamma."""
    draw = Draw(b)
    for rows, hidden, n, top_k, normalise in (
        (1, 8, 2, 1, True),
        (9, 64, 16, 4, False),
        (3, 512, 384, 8, True),
        (10, 4096, 40, 3, True),
    ):
        x, w, bias = (
            draw.values(rows, hidden),
            draw.weight("bf16", n, hidden),
            draw.values(n, scale=0.1),
        )
        router = b.ops.prepare(w), b.ops.upload(bias)
        ids, weights = b.ops.route(b.send(x), *router, top_k, normalise, 2.5)
        scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ f64(w).T)))
        order = np.sort(np.argsort(-(scores + bias), axis=1, kind="stable")[:, :top_k], 1)
        assert np.array_equal(b.get(ids), order)
        chosen = np.take_along_axis(scores, order, 1)
        expected = chosen / chosen.sum(1, keepdims=True) * 2.5 if normalise else chosen * 2.5
        np.testing.assert_allclose(b.get(weights), expected, rtol=64 * U, atol=0)


def route_of_ties_and_nan(b: Backend) -> None:
    """Equal scores go to the lower id, a bias of the file's F32 decides, NaN rows stay alone."""
    ops = b.ops
    x = np.zeros((3, 32), np.float32)
    x[1] = np.nan
    router = ops.prepare(np.zeros((16, 32), np.float32))
    bias = np.full(16, -4, np.float32)  # every choice is negative: filler lanes must not win (D1)
    bias[5], bias[9] = 1.00001, 1.00002
    ids, weights = ops.route(b.send(x), router, ops.upload(bias), 3, True, 1.0)
    ids, weights = b.get(ids), b.get(weights)
    assert ids[0].tolist() == ids[2].tolist() == [0, 5, 9]
    assert ((ids >= 0) & (ids < 16)).all()
    assert np.isfinite(weights[[0, 2]]).all() and np.isnan(weights[1]).all()


def logits_of(rng, rows: int, vocab: int) -> np.ndarray:
    """Logits with many exact ties, and both zeros."""
    logits = np.round(rng.standard_normal((rows, vocab)) * 4, 1).astype(np.float32)
    logits[:, ::7] = -0.0
    return logits


# ---- tokens ------------------------------------------------------------------------------------

REQUESTS = [
    SamplingParams(),
    SamplingParams(temperature=1e-12),
    SamplingParams(temperature=1.0, seed=42),
    SamplingParams(temperature=0.3, seed=2**64 - 1, top_k=5),
    SamplingParams(temperature=1.5, seed=7, top_p=0.5),
    SamplingParams(temperature=1.0, seed=7, top_p=1e-8),
    SamplingParams(temperature=0.9, seed=1, min_p=0.2),
    SamplingParams(temperature=2.0, seed=3, top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, seed=5, top_k=10**6, top_p=0.999),
    SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4),
    SamplingParams(temperature=1.0, seed=9, repetition_penalty=0.8, logit_bias={3: 4.5, 0: -100}),
    SamplingParams(logit_bias={1: 100.0}),
    SamplingParams(temperature=0.7, seed=11, min_tokens=9, top_p=0.8),
]


def choose(backend: Backend, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for trial in range(6 if vocab < 1000 else 2):
        requests = [p for p in REQUESTS if all(i < vocab for i in p.logit_bias)]
        logits = logits_of(rng, len(requests), vocab)
        if trial == 1:
            logits[:, 1:] = -np.inf  # one token left
        positions = rng.integers(0, 2**31 - 1, len(requests)).astype(np.int32)
        prompt, emitted = rng.integers(0, vocab, 5), rng.integers(0, vocab, 8)
        path = Path.start(prompt, {vocab - 1, 0})
        for token in emitted.tolist():
            path = path.then(token)
        paths = [path] * len(requests)
        tokens = backend.get(
            backend.ops.choose(backend.send(logits, fp32=True), positions, requests, paths)
        )
        expected = sampling.choose(logits, positions, requests, paths)
        assert tokens.tolist() == expected.tolist()


def choose_among_near_equals(backend: Backend, vocab: int) -> None:
    """Filters that cut through thousands: all equal, in a few steps, dense, mostly -inf."""
    rng, minus = np.random.default_rng(vocab), np.float32(-np.inf)
    dense = rng.standard_normal(vocab).astype(np.float32)
    rows = [
        np.zeros(vocab, np.float32),
        np.round(dense),
        dense / 8,
        np.where(np.arange(vocab) % 100 == 7, dense, minus),
        np.where(np.arange(vocab) == vocab - 1, dense, minus),
        dense * np.float32(1e30),
    ]
    requests = [
        SamplingParams(temperature=1.0, seed=2, top_p=0.7),
        SamplingParams(temperature=1.3, seed=3, top_k=vocab // 2),
        SamplingParams(temperature=0.9, seed=4, top_k=vocab // 3, top_p=0.4),
        SamplingParams(temperature=0.9, seed=5, top_k=vocab - 1, top_p=0.999, min_p=0.3),
        SamplingParams(temperature=0.9, seed=5, top_k=vocab // 3, min_p=0.3),
        SamplingParams(temperature=0.7, seed=6, min_p=0.02),
        SamplingParams(temperature=2.0, seed=7),
        SamplingParams(temperature=0.5, seed=8, top_k=9, top_p=1e-9),
    ]
    logits = np.repeat(np.stack(rows), len(requests), 0)
    asked = requests * len(rows)
    positions = rng.integers(0, 2**31 - 1, len(asked)).astype(np.int32)
    tokens = backend.get(backend.ops.choose(backend.send(logits, fp32=True), positions, asked))
    assert tokens.tolist() == sampling.choose(logits, positions, asked).tolist()
    alone = [
        backend.get(backend.ops.choose(backend.send(logits[i : i + 1], fp32=True), [at], [one]))[0]
        for i, (at, one) in enumerate(zip(positions, asked, strict=True))
    ]
    assert alone == tokens.tolist()


def choose_rows_without_a_token(backend: Backend) -> None:
    """NaN, +inf and nothing finite end a row and leave the others alone."""
    logits = np.tile(np.arange(8, dtype=np.float32), (8, 1))
    logits[1, 3], logits[2, 0], logits[3] = np.nan, np.inf, -np.inf
    logits[5, 3], logits[6, 0], logits[7] = np.nan, np.inf, -np.inf
    requests = [SamplingParams()] * 4 + [SamplingParams(temperature=0.1, seed=1, top_p=0.5)] * 4
    tokens = backend.ops.choose(backend.send(logits, fp32=True), np.arange(8), requests)
    assert backend.get(tokens).tolist() == [7, -1, -1, -1] * 2


def choose_takes_the_fewest_tokens_that_reach_top_p(backend: Backend) -> None:
    """0.5, 0.25, 0.25 with top_p 0.5 keep one token, whatever the noise; others that round too."""
    for best in (0.5, 0.4, 0.35, 0.6, 0.7):
        rest = (1 - best) / 2
        logits = np.log(np.array([[rest, best, rest]] * 50)).astype(np.float32)
        requests = [SamplingParams(temperature=1.0, seed=s, top_p=best) for s in range(50)]
        tokens = backend.ops.choose(backend.send(logits, fp32=True), np.arange(50), requests)
        assert backend.get(tokens).tolist() == [1] * 50


def add_noise(backend: Backend) -> None:
    """The drafter sees the bits of the noise that picks the target's token."""
    logits = logits_of(np.random.default_rng(0), 3, 777)
    requests = [
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(),
        SamplingParams(1.3, seed=6),
    ]
    positions = np.array([3, 4, 100_000], np.int32)
    out = backend.get(backend.ops.add_noise(backend.send(logits, fp32=True), positions, requests))
    for row, asked, position, have in zip(logits, requests, positions, out, strict=True):
        want = row
        if not asked.greedy:
            heat = np.float32(asked.temperature)
            want = (row / heat + sampling.gumbel(asked.seed, int(position), len(row))) * heat
        assert np.array_equal(have.view(np.int32), want.view(np.int32))


def top_log_probs(backend: Backend, vocab: int, k: int) -> None:
    """Ids and bits of sampling.log_softmax_top; within fp32's rounding of the drafter's twin."""
    rng = np.random.default_rng(k)
    logits = logits_of(rng, 5, vocab)
    logits[1] *= 20
    chosen = rng.integers(0, vocab, 5).astype(np.int32)
    sent = backend.send(logits, fp32=True)
    have, want = (
        backend.ops.log_softmax_top(sent, chosen, k),
        sampling.log_softmax_top(logits, chosen, k),
    )
    assert np.array_equal(have.top_ids, want.top_ids)
    assert np.array_equal(have.top.view(np.int32), want.top.view(np.int32))
    assert np.array_equal(have.chosen.view(np.int32), want.chosen.view(np.int32))
    ids, log_probs = (backend.get(a) for a in backend.ops.top_log_probs(sent, k))
    ref_ids, ref_log_probs = reference.ReferenceOps().top_log_probs(logits, k)
    assert np.array_equal(ids, ref_ids)
    # fp32: log of a sum of V terms, then a difference of numbers up to max |logit|.
    bound = 2.0**-24 * (math.sqrt(vocab) + 8 + 4 * np.abs(logits).max())
    assert np.abs(log_probs - ref_log_probs).max() <= bound


def top_log_probs_of_drafts(backend: Backend, vocab: int, k: int) -> None:
    """With the noise of sampled rows, among equals, and the same bits alone as together."""
    rng, ops = np.random.default_rng(vocab), backend.ops
    logits = rng.standard_normal((6, vocab)).astype(np.float32) * 4
    logits[2], logits[3, 5:] = 0.5, -np.inf
    logits[4] = np.round(logits[4])
    requests = [SamplingParams()] * 4 + [SamplingParams(temperature=0.8, seed=5)] * 2
    asked = ops.requests(requests)
    owners = np.array([0, 5, -1, 0, 1, 4], np.int32)
    positions = rng.integers(0, 9999, 6).astype(np.int32)
    sent = backend.send(logits, fp32=True)
    noisy = backend.get(ops.add_noise_of(sent, owners, positions, asked))
    ids, log_probs = (
        backend.get(a) for a in ops.top_log_probs(sent, k, noise=(owners, positions, asked))
    )
    want_ids, want = reference.ReferenceOps().top_log_probs(noisy, k)
    assert np.array_equal(ids, want_ids)
    possible = np.isfinite(want)
    assert np.array_equal(possible, np.isfinite(log_probs))
    bound = 2.0**-24 * (math.sqrt(vocab) + 8 + 4 * np.abs(noisy[np.isfinite(noisy)]).max())
    assert np.abs(log_probs[possible] - want[possible]).max() <= bound
    for row in range(6):
        noise = owners[row : row + 1], positions[row : row + 1], asked
        one = ops.top_log_probs(sent[row : row + 1], k, noise=noise)
        assert backend.get(one[0])[0].tolist() == ids[row].tolist()
        assert backend.get(one[1])[0].tobytes() == log_probs[row].tobytes()


def top_log_probs_of_broken_logits(backend: Backend) -> None:
    """NaN sorts last with -inf; a row of nothing is all -inf and in order of ids."""
    logits = np.array([[1, np.nan, 3, 2], [np.nan] * 4], np.float32)
    ids, log_probs = backend.ops.top_log_probs(backend.send(logits, fp32=True), 4)
    assert backend.get(ids).tolist() == [[2, 3, 0, 1], [0, 1, 2, 3]]
    log_probs = backend.get(log_probs)
    assert log_probs[0, 3] == -np.inf and (log_probs[1] == -np.inf).all()


# ---- trees -------------------------------------------------------------------------------------


def drafts(rng, b: int, depth: int, width: int):
    """Candidates with exact ties between scores, some of probability zero."""
    ids = np.stack([[rng.permutation(50)[:width] for _ in range(depth)] for _ in range(b)])
    steps = np.cumsum(rng.integers(0, 3, (b, depth, width)), -1)
    log_probs = (-0.5 * steps).astype(np.float32)
    log_probs[rng.random((b, depth)) < 0.2, width // 2 :] = -np.inf
    for i in np.ndindex(b, depth):  # equal ones stand by id, as top_log_probs gives them
        order = np.lexsort((ids[i], -log_probs[i]))
        ids[i] = ids[i][order]
    return ids.astype(np.int32), log_probs


def trees_rows_and_walks(backend: Backend, budget: int) -> None:
    rng = np.random.default_rng(budget)
    b, depth, width = 11, 6, min(budget, 12)
    ops = backend.ops
    ids, log_probs = drafts(rng, b, depth, width)
    roots = rng.integers(0, 50, b).astype(np.int32)
    limits = rng.integers(0, depth + 2, b).astype(np.int32)
    slots = rng.permutation(b + 3)[:b].astype(np.int32)
    lengths = rng.integers(0, 90, b + 3).astype(np.int32)
    trees = ops.build_trees(
        roots, limits, backend.send(ids), backend.send(log_probs, fp32=True), budget
    )
    sizes = backend.get(trees.sizes)
    expected = [
        spec_decode.build_tree(roots[i], *(a[i, : limits[i]] for a in (ids, log_probs)), budget)
        for i in range(b)
    ]
    assert sizes.tolist() == [len(t) for t in expected]
    for i, tree in enumerate(expected):
        for have, want in (
            (trees.token_ids, tree.token_ids), (trees.parents, tree.parent),
            (trees.depths, tree.depth), (trees.scores, tree.score),
        ):  # fmt: skip
            assert backend.get(have)[i, : len(tree)].tolist() == want.tolist()

    total = int(sizes.sum())
    rows = ops.tree_rows(trees, slots, lengths, total + 3)
    first = np.cumsum(sizes) - sizes
    assert backend.get(rows.first).tolist() == first.tolist()
    batch = spec_decode.concatenate(
        [
            spec_decode.tree_rows(tree, slots[i], lengths[slots[i]], first[i])
            for i, tree in enumerate(expected)
        ]
    )
    for name, filler in (("token_ids", -1), ("positions", 0), ("sequence", -1), ("parent", -1)):
        want = [*getattr(batch, name).tolist(), *[filler] * 3]
        assert backend.get(getattr(rows, name)).tolist() == want

    # The target agrees with a random child of most nodes.
    choices = np.full(total + 3, 99, np.int32)
    for i, tree in enumerate(expected):
        for node in range(1, len(tree)):
            if rng.random() < 0.7:
                choices[first[i] + tree.parent[node]] = tree.token_ids[node]
    choices[first[0]] = -1  # NaN logits at a root
    walks = ops.walk_trees(trees, rows.first, choices, slots, lengths, depth)
    for i, tree in enumerate(expected):
        walk = spec_decode.walk(tree, choices[first[i] : first[i] + len(tree)])
        n = len(walk.rows)
        assert int(backend.get(walks.counts)[i]) == n
        empty = [-1] * (depth + 1 - n)
        accepted = [int(first[i]) + r for r in walk.rows]
        assert backend.get(walks.rows)[i].tolist() == accepted + empty
        assert backend.get(walks.tokens)[i].tolist() == walk.tokens + empty
        assert backend.get(walks.slots)[i].tolist() == [int(slots[i])] * n + empty
        start = int(lengths[slots[i]])
        unused = [0] * len(empty)
        assert backend.get(walks.positions)[i].tolist() == [*range(start, start + n), *unused]
        assert int(backend.get(walks.roots)[i]) == walk.tokens[-1]


def penalties_of_trees(backend: Backend) -> None:
    """Every node sees the counts of its own path (F8), and what is accepted enters them."""
    rng, ops = np.random.default_rng(4), backend.ops
    vocab, budget, depth, slots = 60, 9, 5, np.array([2, 0, 1], np.int32)
    requests = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingParams(logit_bias={3: 4.5, 7: -100}, min_tokens=9, repetition_penalty=0.8),
        SamplingParams(),
    ]
    state, paths = ops.penalties(4, vocab, 3), []
    for slot, asked in zip(slots, requests, strict=True):
        path = Path.start(rng.integers(0, vocab, 5), {vocab - 1, 0})
        for token in rng.integers(0, vocab, 7).tolist():
            path = path.then(token)
        ops.set_penalties(state, slot, asked, path)
        paths.append(path)
    ids, log_probs = drafts(rng, 3, depth, budget)
    roots, limits, lengths = (np.full(n, depth, np.int32) for n in (3, 3, 4))
    sent = backend.send(ids), backend.send(log_probs, fp32=True)
    trees = ops.build_trees(roots, limits, *sent, budget)
    rows = ops.tree_rows(trees, slots, lengths, 3 * budget + 2)
    logits = logits_of(rng, 3 * budget + 2, vocab)
    want, row = logits.copy(), 0
    for i, (asked, path) in enumerate(zip(requests, paths, strict=True)):
        tree = spec_decode.build_tree(roots[i], ids[i], log_probs[i], budget)
        for seen in spec_decode.paths(tree, path, asked):
            want[row] = sampling.penalised(logits[row], asked, seen)
            row += 1
    out = ops.penalise_paths(backend.send(logits, fp32=True), rows, state, depth)
    assert np.array_equal(backend.get(out), want)  # but for the sign of a zero
    tokens = np.array([[5, 5, 7], [9, -1, -1], [-1, -1, -1]], np.int32)
    ops.count_tokens(state, backend.send(tokens), slots)
    counts, emitted = backend.get(state.counts), backend.get(state.emitted)
    for slot, path, row in zip(slots, paths, tokens.tolist(), strict=True):
        for token in row:
            path = path.then(token) if token >= 0 else path
        known = dict.fromkeys(path.prompt.tolist(), 0) | dict(path.output)
        assert {i: n for i, n in enumerate(counts[slot].tolist()) if n >= 0} == known
        assert emitted[slot] == path.length


def entries_move_and_lengths_advance(backend: Backend) -> None:
    """Scattered accepted rows land at the next positions of every layer; all else stays (F3)."""
    rng, ops = np.random.default_rng(0), backend.ops
    layers, leaf, width, tables = 3, 16, 40, np.array([[4, 1], [0, 3], [2, -1]], np.int32)
    pages = rng.standard_normal((layers, 6, leaf, width), dtype=np.float32)
    fresh = rng.standard_normal((layers, 9, width), dtype=np.float32)
    rows, slots, positions = [0, 3, 5, -1, 8, -1], [1, 1, 1, -1, 0, -1], [14, 15, 16, -1, 3, -1]
    sent = backend.send(pages)
    ops.put_entries(sent, backend.send(fresh), rows, slots, positions, tables)
    for row, slot, position in zip(rows, slots, positions, strict=True):
        if slot >= 0:
            pages[:, tables[slot][position // leaf], position % leaf] = fresh[:, row]
    assert np.array_equal(backend.get(sent), pages)
    given = [3, 14, 7, 9], [50, 51, 52, 53], [8, 8, 8, -1], [3, 1, 5, 0], [60, 61, 62, 63]
    lengths, roots, limits, counts, next_roots = (backend.send(np.array(a)) for a in given)
    walks = kernels.Walks(*[None] * 4, counts, next_roots)
    ops.advance(walks, np.array([1, 0, -1, 3], np.int32), lengths, roots, limits)
    assert backend.get(lengths).tolist() == [4, 17, 7, 9]
    assert backend.get(roots).tolist() == [60, 61, 52, 53]
    assert backend.get(limits).tolist() == [5, 7, 8, -1]


LAST_TURN = 2**32 - 1


def sums_of_ranks(b: Backend, size: int, n: int, two_shots: bool) -> None:
    """One rank's part of a sum across ranks, where the others have done theirs: what it adds and
    what it sends, to the bit, also where the numbers of the turns wrap."""
    ops, op = b.ops, b.ops.push_sum_slices if two_shots else b.ops.push_sum
    for rank in (0, size - 1):
        memories = [ops.share_mailbox(size)[0] for _ in range(size)]
        addresses = [ops.launcher.address(memory) for memory in memories]
        mail = ops.mailbox(rank, addresses, ops.launcher.limits.processors, 5.0)
        for turn in (1, LAST_TURN, 2):
            ops.refill(mail.turns, np.array([[turn, 0]] * 2, np.uint32))
            parts = np.random.default_rng([size, n, turn]).standard_normal((size, n), np.float32)
            given, sent = (_two_shots if two_shots else one_shot)(mail, parts, turn)
            for at, values in given:
                ops.launcher.write(addresses[rank] + at, values)
            have = b.get(op(mail, b.send(parts[rank], fp32=True)))
            assert have.tobytes() == reference.tree_sum(parts).tobytes()
            for to, at, values in sent:
                got = ops.launcher.download(memories[to][at : at + values.nbytes])
                assert got.tobytes() == values.tobytes(), f"turn {turn}, to rank {to} at {at}"
            after = ops.launcher.download(mail.turns)[int(two_shots)]
            assert after.tolist() == [2 if turn == LAST_TURN else turn + 1, 0]


def one_shot(mail, parts: np.ndarray, turn: int) -> tuple[list, list]:
    """Lines in this rank's memory, [(place, values)], and in others', [(rank, place, values)]."""
    size, n = parts.shape
    lines = np.zeros((size, n + n % 2), np.uint64)  # a value, and the turn above it
    lines[:, :n] = parts.view(np.uint32)
    lines |= np.uint64(turn << 32)
    box = kernels.mailbox_bytes(size)[0] // 2 // size  # bytes of one sender, in one half
    others = [r for r in range(size) if r != mail.rank]
    places = [(turn % 2 * size + r) * box for r in range(size)]
    given = [(places[r], lines[r]) for r in others]
    return given, [(r, places[mail.rank], lines[mail.rank]) for r in others]


def _two_shots(mail, parts: np.ndarray, turn: int) -> tuple[list, list]:
    """The same of flags, parts of slices and sums of slices."""
    size, n = parts.shape
    lines, slices = kernels.mailbox_bytes(size)
    grid = min(-(-mail.blocks // 2), -(-n // (4 * size * launchers.THREADS)))
    room = kernels.MOST_IN_TWO_SHOTS // size
    values_at = lines + slices - 4 * 4 * kernels.MOST_IN_TWO_SHOTS
    cut, sums = parts.reshape(size, size, -1), reference.tree_sum(parts).reshape(size, -1)
    flags = np.full(grid, turn, np.uint32)
    others = [r for r in range(size) if r != mail.rank]

    def place(shot: int, sender: int) -> int:
        return (turn % 2 * 2 + shot) * size + sender

    given, sent = [], []
    for r in others:
        for shot, mine, theirs in ((0, cut[mail.rank, r], cut[r, mail.rank]),
                                   (1, sums[mail.rank], sums[r])):  # fmt: skip
            there, here = place(shot, mail.rank), place(shot, r)
            given += [(lines + 4 * grid * here, flags), (values_at + 4 * room * here, theirs)]
            sent += [(r, lines + 4 * grid * there, flags), (r, values_at + 4 * room * there, mine)]
    return given, sent


ROUTER = [(route, ()), (route_of_ties_and_nan, ())]
DECODING = [
    *((choose, (vocab,)) for vocab in (2, 33, 640, 5000, 8192, 12289)),
    *((choose_among_near_equals, (vocab,)) for vocab in (999, 4100, 33003)),
    (choose_rows_without_a_token, ()), (choose_takes_the_fewest_tokens_that_reach_top_p, ()),
    (add_noise, ()),
    *((top_log_probs, s) for s in ((1, 1), (33, 33), (640, 20), (5000, 64), (1000, 600))),
    *((top_log_probs_of_drafts, s) for s in ((9, 4), (1001, 700), (8192, 16), (20483, 64))),
    (top_log_probs_of_broken_logits, ()),
    *((trees_rows_and_walks, (budget,)) for budget in (1, 2, 5, 8, 16, 33, 64)),
    (penalties_of_trees, ()),
    (entries_move_and_lengths_advance, ()),
    *((sums_of_ranks, (size, n, False)) for size, n in ((2, 1), (2, 4099), (4, 770), (8, 1536))),
    *((sums_of_ranks, (size, n, True)) for size, n in ((2, 8), (4, 4112), (8, 9984))),
]  # fmt: skip


def check_sum(backend: Backend, case, shape: tuple) -> None:
    """Run a case of SUMS; AssertionError names the first value that is out of bounds."""
    draw = Draw(backend)
    outcome = case(backend, draw, *shape)
    assert outcome.result.shape == outcome.expected.shape
    error = np.abs(outcome.result - outcome.expected)
    bad = ~(error <= outcome.bound)  # NaN is bad too
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{bad.sum()} of {bad.size} values; first at {at}: {outcome.result[at]!r}, expected "
            f"{outcome.expected[at]!r} within {outcome.bound[at]:.3g}"
        )
    if error.size >= 16:
        norm = np.linalg.norm(error) / np.linalg.norm(outcome.expected)
        assert norm <= 32 * U + 1.5 * draw.ua, f"the error's norm is {norm:.3g} of the result's"


def check_exact(backend: Backend, case, shape: tuple) -> None:
    """Run a case of ROUTER or DECODING; AssertionError where anything differs."""
    case(backend, *shape)


def name_of(case, shape: tuple) -> str:
    return "-".join(map(str, (case.__name__.rstrip("_"), *shape)))

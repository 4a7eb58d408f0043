"""Products on tensor cores (kernels_gemm.cu, kernels_moe.cu): errors against float64 and the simple
kernels, and bits.

The error against float64, as a ratio of norms: fp32 sums of exact products stay below 32 u (as in
op_cases.py); a rounded hidden value (2^-8 at most, 0.4 of that in the mean square) enters a sum of
independent terms, so the experts stay below 2^-8 = 0.0039. Between two kernels with the same
roundings only values near a tie differ: an eighth of that is ample.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import launchers
import ops
import ops_mma
import reference
from config import UserError
from loader import quantise_int4
from tests.conftest import launcher
from tests.op_cases import YARN

BF16 = ml_dtypes.bfloat16
ROUNDED = 2.0**-8
pytestmark = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65)


def kernels_on(device: str, **choice) -> ops.CudaOps:
    return ops.CudaOps("bfloat16", launcher=launcher(device), poison=True, **choice)


def draw(rng, *shape) -> np.ndarray:
    return (rng.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5).astype(BF16)


def error(have: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(have - want) / np.linalg.norm(want))


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def both(out: int, k: int, seed: int = 0, rows: int = 65):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, k), dtype=np.float32).astype(BF16)
    return x, draw(rng, out, k)


@pytest.mark.parametrize(
    "out, k, leaves",
    [(1, 32, 1), (33, 256, 8), (48, 384, 1), (20, 1024, 8), (70, 1024, 16), (16, 7168, 1),
     (40, 256, 1), (24, 288, 1)],
)  # fmt: skip
def test_linear_in_every_number_of_rows(device: str, out: int, k: int, leaves: int) -> None:
    """R1: a row has the bits that it has alone; within 32 u of float64; nothing unwritten."""
    kernels = kernels_on(device)
    x, w = both(out, k)
    weight = kernels.prepare(w, shards=leaves, row_cut=leaves > 1)
    assert isinstance(weight, ops_mma.TensorMatrix)
    send = kernels.launcher.upload
    want = x.astype(np.float64) @ w.astype(np.float64).T
    alone = np.concatenate(
        [kernels.download(kernels.linear(send(x[r : r + 1]), weight)) for r in range(0, len(x), 5)]
    )
    for rows in ROWS:
        y = kernels.download(kernels.linear(send(x[:rows]), weight))
        assert error(y, want[:rows]) <= 32 * 2.0**-24
        n = len(y[::5])
        assert np.array_equal(bits(y[::5]), bits(alone[:n])), rows


@pytest.mark.parametrize("k", (1024, 1792))
def test_how_blocks_share_a_product_changes_no_bit(device: str, k: int) -> None:
    """Shares of K in other blocks, warps that share K, rows a block, pieces: one sum."""
    kernels = kernels_on(device)
    x, w = both(40, k, rows=17)
    weight = kernels.prepare(w)
    x, found = kernels.launcher.upload(x), []
    for cut in kernels._cuts(len(x), weight, weight.parts, 1, 8):
        y = kernels.empty((cut.shares, 17, 40))
        kernels._mma("linear_mma", x, weight, y, ((0, 40, 17 * 40), (40,)), cut, weight.parts)
        found.append(reference.tree_sum(kernels.download(y)))
    assert len(found) >= 10
    assert all(np.array_equal(bits(y), bits(found[0])) for y in found)


@pytest.mark.parametrize(
    "out, k, leaves, wide, rows",
    [(40, 256, 8, 1, 33), (170, 512, 1, 2, 40), (200, 1792, 1, 1, 35), (24, 288, 1, 1, 130),
     (100, 1024, 16, 2, 70)],
)  # fmt: skip
def test_many_rows_have_the_bits_of_few(device: str, out, k, leaves, wide, rows) -> None:
    """wide_mma gives linear_mma's sums, however it cuts a product; its counts are at 0 again."""
    kernels = kernels_on(device)
    if device == "emulate":  # all variants that some GPU takes
        limits = dataclasses.replace(kernels.launcher.limits, shared_bytes=232_448)
        kernels.launcher.limits = limits
    x, w = both(out, k, rows=rows)
    x = kernels.launcher.upload(x)
    weight = kernels._pack_dense(kernels.launcher.upload(w), None, leaves, leaves > 1, wide)
    parts = weight.leaves * weight.parts

    def sums(cut):
        y = kernels.empty((cut.shares, rows, out))
        kernels._mma("linear_mma", x, weight, y, ((0, out, rows * out), (out,)), cut, parts)
        return bits(reference.tree_sum(kernels.download(y)))

    want = sums(next(kernels._cuts(rows, weight, parts, 1, 1)))
    bounds = (1, 1), (2, 8)  # splits that join, and that stay apart
    cuts = [c for few, many in bounds for c in kernels._wide_cuts(rows, weight, parts, few, many)]
    assert cuts
    for cut in cuts:
        assert np.array_equal(sums(cut), want), cut
    assert not kernels.download(kernels.arrived).any()


def test_more_processors_change_no_bit(device: str) -> None:
    """What launches do where all blocks run at once: all of a warp's weights on their way, a block
    for every item of the experts' gates; where there are fewer, they draw tickets."""
    if device == "cuda":
        pytest.skip("a GPU has the processors that it has")
    few, many = launchers.EmulatorLauncher(), launchers.EmulatorLauncher()
    many.limits = dataclasses.replace(many.limits, processors=132)
    rng = np.random.default_rng(7)
    routed, beside, x, ids, weights = experts_case(rng, 3072, 32, 4, 2, 32, 9)
    a, w = both(40, 1024, rows=9)
    results = []
    for given in (few, many):
        kernels = ops.CudaOps("bfloat16", launcher=given, poison=True)
        packed = [kernels.prepare_mlp(*m, 1) for m in (routed, beside)]
        some = [[m[:rows].copy() for m in (x, ids, weights)] for rows in (1, 9, 9)]
        made = [kernels.moe(*inputs, *packed) for inputs in some]
        assert not kernels.download(packed[0].tickets).any()
        made.append(kernels.linear(a, kernels.prepare(w)))
        results.append([bits(kernels.download(y)) for y in made])
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_many_outputs_share_rows(device: str) -> None:
    """The wide tiles (two of 16 outputs a warp) give the narrow ones' bits."""
    kernels = kernels_on(device)
    x, w = both(1030, 64, rows=9)
    narrow = kernels.prepare(w)
    wide = kernels._pack_dense(kernels.launcher.upload(w), None, wide=2)
    assert (narrow.wide, wide.wide) == (1, 2)
    y, z = (kernels.linear(kernels.launcher.upload(x), m) for m in (narrow, wide))
    assert np.array_equal(bits(kernels.download(y)), bits(kernels.download(z)))


@pytest.mark.parametrize("ranks", (2, 4, 8))
def test_ranks_add_along_the_same_tree(device: str, ranks: int) -> None:
    """R2: leaf sums of several ranks, joined pairwise, have the bits of one rank, where the leaves
    are as they are and where each is cut in parts again."""
    kernels = kernels_on(device)
    for k in (256, 2048):
        x, w = both(24, k, rows=5)

        def of(r: int, n: int, x=x, w=w):
            cut = [np.ascontiguousarray(np.split(a, n, 1)[r]) for a in (x, w)]
            weight = kernels.prepare(cut[1], shards=8 // n, row_cut=True)
            return kernels.download(kernels.linear(kernels.launcher.upload(cut[0]), weight))

        joined = reference.tree_sum(np.stack([of(r, ranks) for r in range(ranks)]))
        assert np.array_equal(bits(joined), bits(of(0, 1))), k


def test_router_in_every_number_of_rows(device: str) -> None:
    """R1 where the router's K is cut between blocks; its logits are joined by what chooses."""
    kernels = kernels_on(device)
    x, w = both(70, 2048)
    router, bias = kernels.prepare(w), kernels.upload(np.zeros(70, np.float32))

    def route(rows):
        sent = kernels.launcher.upload(np.ascontiguousarray(x[rows]))
        chosen = kernels.route(sent, router, bias, 6, False, 1.0)
        return [kernels.download(a) for a in chosen]

    alone = [np.concatenate(a) for a in zip(*(route([r]) for r in range(65)), strict=True)]
    for rows in ROWS:
        for have, want in zip(route(slice(rows)), alone, strict=True):
            assert np.array_equal(bits(have), bits(want[:rows])), rows


@pytest.mark.parametrize(
    "heads, nope, rope, v, latent", [(2, 32, 6, 18, 64), (3, 128, 64, 128, 512)]
)
def test_heads_in_every_number_of_rows(device: str, heads, nope, rope, v, latent) -> None:
    """R1 for the absorbed projections; all but ties round as the simple kernel's sums do."""
    fast, simple = kernels_on(device), kernels_on(device, linear="simple")
    rng = np.random.default_rng(1)
    kv_b = draw(rng, heads * (nope + v), latent)
    at = rng.integers(0, 64, 65).astype(np.int32)
    inputs = [
        rng.standard_normal((65, heads, n), dtype=np.float32).astype(BF16)
        for n in (nope + rope, latent)
    ]

    def of(kernels):
        key, value = kernels.prepare_heads(kv_b, heads, nope, v)
        table, send = kernels.rope_table(YARN, rope, 64), kernels.launcher.upload
        return (
            lambda r: kernels.download(
                kernels.latent_query(send(inputs[0][r]), key, *table, send(at[r]))
            ),
            lambda r: kernels.download(kernels.absorb_v(send(inputs[1][r]), value)),
        )

    for run, same, k in zip(of(fast), of(simple), (nope, latent), strict=True):
        alone = np.concatenate([run(slice(r, r + 1)) for r in range(65)])
        for rows in ROWS:
            assert np.array_equal(bits(run(slice(rows))), bits(alone[:rows])), rows
        # Sums differ by 32 u of the norm at most; that moves few values over a tie, by 2^-8.
        assert error(alone, same(slice(65))) <= 2.0**-11, k


def queries_case(kernels, rng, heads, lora, latent, nope, rope):
    """rows -> bits of queries and cache entries of these rows out of 17."""
    hidden, v = 256, 32
    inputs = (draw(rng, n, hidden) for n in (lora, latent + rope))
    weight = kernels.prepare_latent_inputs(*inputs)
    q_b = kernels.prepare(draw(rng, heads * (nope + rope), lora))
    key, _ = kernels.prepare_heads(draw(rng, heads * (nope + v), latent), heads, nope, v)
    norms = [kernels.upload(1 + 0.1 * rng.standard_normal(n, np.float32)) for n in (lora, latent)]
    x, at = draw(rng, 17, hidden), rng.integers(0, 64, 17).astype(np.int32)
    table, send = kernels.rope_table(YARN, rope, 64), kernels.launcher.upload

    def run(rows):
        sent, turn = send(x[rows].copy()), (*table, send(at[rows].copy()))
        out = kernels.activations((len(sent), latent + rope))
        q = kernels.latent_queries(sent, weight, q_b, key, *norms, 1e-6, *turn, out)
        return [bits(kernels.download(a)) for a in (q, out)]

    return run


@pytest.mark.parametrize("sizes", [(3, 1024, 256, 32, 32), (2, 1536, 512, 128, 64)])
def test_queries_of_few_rows_in_one_kernel(device: str, monkeypatch, sizes) -> None:
    """R1: query_mma has the bits of the kernels that more rows go through, in one block of rows and
    in two, full or not."""
    kernels, launched = kernels_on(device), set()
    if device == "emulate":
        limits = dataclasses.replace(kernels.launcher.limits, shared_bytes=232_448)
        monkeypatch.setattr(kernels.launcher, "limits", limits)
    monkeypatch.setattr(kernels, "listener", lambda launch: launched.add(launch.kernel))
    run = queries_case(kernels, np.random.default_rng(6), *sizes)
    together = run(slice(17))
    assert "query_mma" not in launched
    for rows in (slice(5, 6), slice(7), slice(9, 17), slice(3, 12), slice(16)):
        for have, want in zip(run(rows), together, strict=True):
            assert np.array_equal(have, want[rows]), rows
    assert "query_mma" in launched


@pytest.mark.parametrize("wide", (768, 1280))
def test_queries_of_another_width_than_q_b_s_are_refused(device: str, wide: int) -> None:
    """query_mma would take q_b's width for that of a row, and read past its end."""
    kernels, rng = kernels_on(device), np.random.default_rng(6)
    weight = kernels.prepare_latent_inputs(draw(rng, wide, 64), draw(rng, 256 + 32, 64))
    q_b = kernels.prepare(draw(rng, 2 * 64, 1024))
    key, _ = kernels.prepare_heads(draw(rng, 2 * (32 + 32), 256), 2, 32, 32)
    norms = [kernels.upload(np.ones(n, np.float32)) for n in (wide, 256)]
    turn = *kernels.rope_table(YARN, 32, 64), kernels.launcher.upload(np.arange(3, dtype=np.int32))
    x, out = kernels.launcher.upload(draw(rng, 3, 64)), kernels.activations((3, 256 + 32))
    with pytest.raises(UserError, match="linear: x: expected bfloat16"):
        kernels.latent_queries(x, weight, q_b, key, *norms, 1e-6, *turn, out)


def experts_case(rng, hidden, width, experts, top_k, shared, rows):
    sizes = (width, hidden), (width, hidden), (hidden, width)
    routed = [
        quantise_int4(rng.standard_normal((experts, *s), dtype=np.float32) / s[1] ** 0.5, 32, BF16)
        for s in sizes
    ]
    beside = [draw(rng, 1, *s) for s in ((shared, hidden), (shared, hidden), (hidden, shared))]
    ids = np.sort([rng.permutation(experts)[:top_k] for _ in range(rows)], 1).astype(np.int32)
    if rows > 2:
        ids[1, 0], ids[2, -1] = -1, experts  # filler adds nothing
    x = rng.standard_normal((rows, hidden), dtype=np.float32).astype(BF16)
    return routed, beside, x, ids, rng.random((rows, top_k), dtype=np.float32)


@pytest.mark.parametrize(
    "hidden, width, experts, top_k, leaves, shared, rows",
    [(64, 64, 8, 3, 2, 64, 12), (384, 256, 16, 4, 8, 256, 70), (96, 32, 40, 5, 1, 32, 130),
     (512, 256, 12, 8, 1, 256, 33)],
)  # fmt: skip
def test_experts(device: str, hidden, width, experts, top_k, leaves, shared, rows) -> None:
    """Rows alone and among others have equal bits (R1, R4); errors within the bounds above."""
    rng = np.random.default_rng(3)
    routed, beside, x, ids, weights = experts_case(rng, hidden, width, experts, top_k, shared, rows)
    fast, simple = kernels_on(device), kernels_on(device, linear="simple", moe="simple")

    def run(kernels, rows, prepared):
        sent = [kernels.launcher.upload(np.ascontiguousarray(a[rows])) for a in (x, ids, weights)]
        return kernels.download(kernels.moe(*sent, *prepared))

    def prepare(kernels):
        return [kernels.prepare_mlp(*m, leaves) for m in (routed, beside)]

    packed = prepare(fast)
    assert [type(p) for p in packed] == [ops_mma.TensorExperts, ops_mma.TensorMlp]
    together = run(fast, slice(None), packed)
    for r in (*range(0, rows, 7), rows - 1):
        assert np.array_equal(bits(run(fast, slice(r, r + 1), packed)[0]), bits(together[r])), r
    some = slice(2, 2 + rows // 2)
    assert np.array_equal(bits(run(fast, some, packed)), bits(together[some]))
    assert error(together, run(simple, slice(None), prepare(simple))) <= ROUNDED / 8
    wide = [[reference.to_float32(m).astype(np.float64) for m in part] for part in (routed, beside)]
    want = np.zeros((rows, hidden))
    for t, row in enumerate(x.astype(np.float64)):
        chosen = [(w, *(m[e] for m in wide[0])) for e, w in zip(ids[t], weights[t], strict=True)
                  if 0 <= e < experts]  # fmt: skip
        for factor, gate, up, down in [*chosen, (1.0, *(m[0] for m in wide[1]))]:
            g = gate @ row
            want[t] += factor * (down @ (g / (1 + np.exp(-g)) * (up @ row)))
    assert error(together, want) <= ROUNDED


@pytest.mark.parametrize("routing", ("random", "one expert", "few experts"))
@pytest.mark.parametrize(
    "hidden, width, experts, top_k, leaves, shared, rows",
    [(64, 128, 20, 3, 2, 64, 41), (1024, 64, 24, 5, 1, 32, 65), (256, 160, 5, 4, 1, 64, 70),
     (96, 256, 9, 8, 8, 256, 33)],
)  # fmt: skip
def test_experts_of_many_rows_have_the_bits_of_few(
    device: str, monkeypatch, routing, hidden, width, experts, top_k, leaves, shared, rows
) -> None:
    """R1, R4: every variant of the kernels for many rows, in one turn and several, gives what those
    for few rows give, however the rows are routed; all counts are at 0 again."""
    kernels, rng = kernels_on(device), np.random.default_rng(8)
    if device == "emulate":  # all variants that some GPU takes
        limits = dataclasses.replace(kernels.launcher.limits, shared_bytes=232_448)
        monkeypatch.setattr(kernels.launcher, "limits", limits)
    routed, beside, x, ids, weights = experts_case(rng, hidden, width, experts, top_k, shared, rows)
    if routing == "one expert":  # of every row; its other choices are filler
        ids[:] = experts
        ids[:, 0] = experts - 1
    elif routing == "few experts":
        ids[:] = np.sort(rng.permutation(experts)[:top_k])
    packed = [kernels.prepare_mlp(*m, leaves) for m in (routed, beside)]
    sent = [kernels.launcher.upload(a) for a in (x, ids, weights)]
    ways, pairs = kernels._many_ways(packed[0]), packed[0].down_groups % 2 == 0
    if device == "emulate":
        assert len(ways) == sum(pairs or not way.warpgroups for way in ops_mma.MANY)

    def run():
        found = bits(kernels.download(kernels.moe(*sent, *packed)))
        assert not kernels.download(packed[0].tickets).any()
        return found

    monkeypatch.setattr(ops_mma, "MANY_FROM", rows + 1)
    want = run()
    monkeypatch.setattr(ops_mma, "MANY_FROM", 1)
    turns = ops_mma.SLOT_BYTES, 2 * rows * top_k * leaves * 128
    for way in ways:
        monkeypatch.setattr(kernels, "_many", lambda *_, way=way: way)
        for most in turns:
            monkeypatch.setattr(ops_mma, "SLOT_BYTES", most)
            assert np.array_equal(run(), want), (str(way), most)
    monkeypatch.setattr(ops_mma, "MANY_ROWS", 4 + rows // 8 * 4)
    assert np.array_equal(run(), want)


def test_items_of_experts_by_number_and_by_ticket(device: str, monkeypatch) -> None:
    """One round, a few of them, many: the same bits, and all tickets put back."""
    # As many blocks as a device of so many processors would run; fewer may run at once.
    rng, rows = np.random.default_rng(5), 3
    routed, beside, x, ids, weights = experts_case(rng, 256, 64, 8, 3, 64, rows)
    kernels = kernels_on(device)
    packed = [kernels.prepare_mlp(*m, 1) for m in (routed, beside)]
    sent, rounds, found = [kernels.launcher.upload(a) for a in (x, ids, weights)], [], []
    launched = kernels._launch

    def launch(section, kernel, grid, *args, **options):
        if kernel == "expert_gate_up_mma":
            rounds.append(-(-packed[0].most_items(rows, 3) // grid[0]))
        launched(section, kernel, grid, *args, **options)

    monkeypatch.setattr(kernels, "_launch", launch)
    for processors in (1, 4, 40):
        limits = dataclasses.replace(kernels.launcher.limits, processors=processors)
        monkeypatch.setattr(kernels.launcher, "limits", limits)
        kernels.tiles.chosen.clear()
        found.append(bits(kernels.download(kernels.moe(*sent, *packed))))
        assert not kernels.download(packed[0].tickets).any()
    assert rounds[0] > ops_mma.FEW_ROUNDS >= rounds[1] > rounds[2] == 1, rounds
    assert all(np.array_equal(y, found[0]) for y in found)


@pytest.mark.parametrize("hidden, experts, leaves", [(2048, 21, 1), (64, 8, 2)])
def test_router_and_shared_experts_as_one(device: str, hidden, experts, leaves) -> None:
    """R1 for the product of both, and for the shared expert's down among the routed ones and apart
    from them (more than BESIDE_ROWS); the simple kernels' values."""
    rng = np.random.default_rng(6)
    rows = ops_mma.BESIDE_ROWS + 2
    routed, beside, x, _, _ = experts_case(rng, hidden, 64, experts, 3, 64, rows)
    w, bias = draw(rng, experts, hidden), rng.random(experts, dtype=np.float32)

    def of(kernels):
        both = kernels.prepare(w), kernels.prepare_mlp(*beside, leaves)
        router, shared = kernels.join_router(*both)
        rest = kernels.prepare_mlp(*routed, leaves), shared
        choice = kernels.upload(bias), 3, True, 2.5

        def run(rows):
            sent = kernels.launcher.upload(np.ascontiguousarray(x[rows]))
            return kernels.download(kernels.mixture(sent, router, *choice, *rest))

        return run

    run, simple = of(kernels_on(device)), of(kernels_on(device, linear="simple", moe="simple"))
    together = run(slice(None))
    for r in (*range(0, rows, 5), rows - 1):
        assert np.array_equal(bits(run(slice(r, r + 1))[0]), bits(together[r])), r
    assert np.array_equal(bits(run(slice(9))), bits(together[:9]))
    assert error(together, simple(slice(None))) <= ROUNDED / 8


@pytest.mark.parametrize("ranks", (2, 8))
def test_expert_ranks_add_along_the_same_tree(device: str, ranks: int) -> None:
    """R2, R4: the experts' width cut between ranks."""
    rng = np.random.default_rng(4)
    width, hidden = 256, 64
    routed, beside, x, ids, weights = experts_case(rng, hidden, width, 4, 2, width, 5)
    kernels = kernels_on(device)

    def part(m, axis: int, r: int, n: int):
        if isinstance(m, reference.Int4Weight):
            return reference.Int4Weight(part(m.packed, axis, r, n), part(m.scales, axis, r, n))
        return np.ascontiguousarray(np.split(m, n, axis)[r])

    def of(r: int, n: int):
        cut = [
            kernels.prepare_mlp(
                *(part(m, a, r, n) for m, a in zip(ms, (1, 1, 2), strict=True)), 8 // n
            )
            for ms in (routed, beside)
        ]
        assert isinstance(cut[0], ops_mma.TensorExperts)
        sent = [kernels.launcher.upload(a) for a in (x, ids, weights)]
        return kernels.download(kernels.moe(*sent, *cut))

    joined = reference.tree_sum(np.stack([of(r, ranks) for r in range(ranks)]))
    assert np.array_equal(bits(joined), bits(of(0, 1)))


def test_copies_of_sixteen_bytes(device: str, monkeypatch) -> None:
    """Before sm_90 every lane copies for itself: the same bits."""
    x, w = both(48, 384, rows=9)
    given = ops.defines_of
    results = []
    for more in ((), ("-DBULK_COPIES=0",)):
        if more and device == "cuda":
            pytest.skip("a GPU runs the copies of its own architecture")
        monkeypatch.setattr(ops, "defines_of", lambda *a, more=more: (*given(*a), *more))
        kernels = kernels_on(device)
        y = kernels.linear(kernels.launcher.upload(x), kernels.prepare(w))
        results.append(bits(kernels.download(y)))
    assert np.array_equal(*results)


def test_what_tensor_cores_cannot_take_stays_simple(device: str) -> None:
    kernels = kernels_on(device)
    rng = np.random.default_rng(0)
    odd = [draw(rng, 8, 24), draw(rng, 8, 64).astype(np.float32)]
    assert all(isinstance(kernels.prepare(w), ops.Matrix) for w in odd)
    assert isinstance(kernels.prepare(draw(rng, 8, 96), shards=2, row_cut=True), ops.Matrix)
    for choice in (dict(linear="simple", moe="simple"),):
        assert isinstance(kernels_on(device, **choice).prepare(draw(rng, 8, 64)), ops.Matrix)
    fp32 = ops.CudaOps("float32", launcher=launcher(device))
    assert isinstance(fp32.prepare(draw(rng, 8, 64)), ops.Matrix)


def test_no_thread_reads_what_is_not_there_yet(device: str, monkeypatch) -> None:
    """The checked build watches barriers, asynchronous copies and bounds."""
    if device == "cuda":
        pytest.skip("the emulator checks")
    kernels = ops.CudaOps(
        "bfloat16", launcher=launchers.EmulatorLauncher(checked=True), poison=True
    )
    sizes = (40, 256, 8, 9), (24, 1024, 16, 2), (48, 384, 1, 17), (70, 512, 4, 65)
    for out, k, leaves, rows in sizes:
        x, w = both(out, k, rows=rows)
        weight = kernels.prepare(w, shards=leaves, row_cut=leaves > 1)
        want = x.astype(np.float64) @ w.astype(np.float64).T
        assert error(kernels.linear(x, weight), want) <= 32 * 2.0**-24
    rng = np.random.default_rng(5)
    key, value = kernels.prepare_heads(draw(rng, 2 * (32 + 18), 256), 2, 32, 18)
    q, o, at = draw(rng, 9, 2, 32 + 6), draw(rng, 9, 2, 256), np.arange(9, dtype=np.int32)
    assert np.isfinite(
        kernels.download(kernels.latent_query(q, key, *kernels.rope_table(YARN, 6, 9), at))
    ).all()
    assert np.isfinite(kernels.download(kernels.absorb_v(o, value))).all()
    run = queries_case(kernels, rng, 2, 1024, 256, 32, 32)
    for have, want in zip(run(slice(11)), run(slice(17)), strict=True):
        assert np.array_equal(have, want[:11])
    routed, beside, x, ids, weights = experts_case(rng, 64, 64, 8, 3, 64, 12)
    packed = [kernels.prepare_mlp(*m, 2) for m in (routed, beside)]
    for rows in (1, 12):
        y = kernels.moe(x[:rows].copy(), ids[:rows].copy(), weights[:rows].copy(), *packed)
        assert np.isfinite(y).all()
    packed = [kernels.prepare_mlp(*m, 1) for m in (routed, beside)]
    want = bits(kernels.moe(x, ids, weights, *packed))
    monkeypatch.setattr(ops_mma, "MANY_FROM", 1)
    monkeypatch.setattr(ops_mma, "SLOT_BYTES", 0)
    for way in kernels._many_ways(packed[0]):
        if way.eights > 2:
            continue
        monkeypatch.setattr(kernels, "_many", lambda *_, way=way: way)
        assert np.array_equal(bits(kernels.moe(x, ids, weights, *packed)), want)

"""Every operation on every device against float64, and bit against bit where the contract says so.

The cases and their bounds are in op_cases.py. Buffers of the kernels are NaN before they are
written.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

import config
import reference
from loader import quantise_int4
from reference import dequantise_int4
from tests import op_cases
from tests.conftest import backend_of
from tests.op_cases import YARN, Backend, Draw, forest, name_of


@pytest.mark.parametrize("case, shape", op_cases.SUMS, ids=[name_of(*c) for c in op_cases.SUMS])
def test_operation(backend: Backend, case, shape) -> None:
    op_cases.check_sum(backend, case, shape)


def drawn_cases(seed: int) -> list[tuple]:
    """One case of every kind, so that each kernel is met."""
    rng, by_kind = np.random.default_rng(seed), {}
    for check, cases in (
        (op_cases.check_sum, op_cases.SUMS),
        (op_cases.check_exact, op_cases.ROUTER + op_cases.DECODING),
    ):
        for case, shape in cases:
            if case is op_cases.sums_of_ranks and shape[-1]:
                continue  # slices are written into memory that is no argument
            if np.prod([n for n in shape if isinstance(n, int)] or [1]) < 10**7:  # for its time
                by_kind.setdefault(case.__name__, []).append((check, case, shape))
    return [cases[rng.integers(len(cases))] for cases in by_kind.values()]


@pytest.mark.parametrize("device", ["checked"], indirect=True)
@pytest.mark.parametrize(
    "check, case, shape", drawn_cases(5), ids=lambda v: getattr(v, "__name__", None)
)
def test_emulated_under_watch(device, check, case, shape) -> None:
    """No race, missing barrier, access out of bounds or undefined operation, and right results."""
    check(backend_of(device, "float32"), case, shape)


@pytest.mark.parametrize("case, shape", op_cases.ROUTER, ids=[name_of(*c) for c in op_cases.ROUTER])
def test_router(backend: Backend, case, shape) -> None:
    op_cases.check_exact(backend, case, shape)


# ---- bits --------------------------------------------------------------------------------------


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def assert_same_bits(have: np.ndarray, want: np.ndarray, what: str) -> None:
    differ = np.argwhere(bits(have) != bits(want))
    assert not len(differ), (
        f"{what}: {len(differ)} of {have.size} values differ; first at {differ[0].tolist()}: "
        f"{have[tuple(differ[0])]!r}, expected {want[tuple(differ[0])]!r}"
    )


def row_operations(b: Backend, draw: Draw, rows: int) -> dict:
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


def test_a_row_does_not_know_its_neighbours(backend: Backend) -> None:
    """R1: all rows together, in another order, and each alone give the same bits."""
    rows = np.arange(11)
    for name, run in row_operations(backend, Draw(backend), len(rows)).items():
        together = backend.get(run(rows))
        turned = backend.get(run(rows[::-1].copy()))[::-1]
        alone = np.concatenate([backend.get(run(rows[i : i + 1])) for i in rows])
        assert_same_bits(turned, together, f"{name}, reversed")
        assert_same_bits(alone, together, f"{name}, alone")


@pytest.mark.parametrize("leaf, span", [(16, 1), (16, 3), (32, 4)])
def test_a_tree_node_attends_as_if_decoded(backend: Backend, leaf: int, span: int) -> None:
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
def test_ranks_add_along_the_same_tree(backend: Backend, ranks: int) -> None:
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
    b = backend_of(device, "float32")
    w = Draw(b).weight(scales, 24, 96)
    result = b.get(b.ops.linear(b.send(np.eye(96, dtype=np.float32)), b.ops.prepare(w)))
    assert_same_bits(result + 0.0, dequantise_int4(w).T + 0.0, "weight")  # -0 counts as 0


@pytest.fixture
def kernels(device):
    """CudaOps' device; the reference has no kernels to record or to edit."""
    if device == "cpu":
        pytest.skip("there are no kernels on the CPU")
    return device


# ---- what is refused ---------------------------------------------------------------------------


def test_errors_name_operation_and_argument(kernels) -> None:
    b = backend_of(kernels, "float32")
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


def test_no_rows_no_launch(backend: Backend) -> None:
    ops = backend.ops
    x = backend.send(np.zeros((0, 64), np.float32))
    assert backend.get(ops.rms_norm(x, ops.upload(np.ones(64, np.float32)), 1e-5)).shape == (0, 64)
    w = ops.prepare(np.zeros((8, 64), np.float32))
    assert backend.get(ops.linear(x, w)).shape == (0, 8)


# ---- recorded work, edited kernels -------------------------------------------------------------


def test_recorded_work_follows_its_inputs(kernels) -> None:
    """A replay reads the inputs as they are by then, and writes the same outputs."""
    b = backend_of(kernels, "float32")
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

"""Attention on tensor cores (kernels_attention.cu): bits over every variant, unit and batch.

Errors against float64 are in op_cases.py. Here: one column has the bits that it has alone (R1, R3),
whichever variant, number of units and slab of rows it is computed in.
"""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

import ops
import ops_mma
from tests import op_cases
from tests.conftest import launcher
from tests.op_cases import Backend, Draw, forest

pytestmark = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)


def backend_on(device: str, processors: int = 2, **choice) -> Backend:
    """bfloat16 operations, as on a device of so many processors; emulated: with sm_90's memory."""
    kernels = ops.CudaOps("bfloat16", launcher=launcher(device), poison=True, **choice)
    limits, twin = kernels.launcher.limits, copy.copy(kernels.launcher)
    most = 232_448 if device == "emulate" else limits.shared_bytes
    twin.limits = dataclasses.replace(limits, processors=processors, shared_bytes=most)
    kernels.launcher = twin
    return Backend(kernels)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def attend(b: Backend, q, pages, fresh, plan, latent: int, span: int) -> np.ndarray:
    sent = b.send(q), b.send(pages), b.send(fresh)
    return b.get(b.ops.latent_attention(*sent, plan, 0.3, latent, span))


def alone(b: Backend, f, q, t: int, latent: int, span: int) -> np.ndarray:
    """Row t decoded by itself, its path committed in pages that are NaN beyond it."""
    keys = f.keys_of(t)
    before, width = len(keys) - 1, keys.shape[1]
    pages = np.full((before // f.leaf + 1, f.leaf, width), np.nan, np.float32)
    pages.reshape(-1, width)[:before] = keys[:-1]
    one = (np.array([n], np.int32) for n in (before, 0, -1, before))
    plan = b.ops.plan_attention(*one, np.arange(len(pages), dtype=np.int32)[None], f.leaf)
    return attend(b, q[t : t + 1], pages, keys[-1:], plan, latent, span)[0]


SHAPES = [  # heads, latent, rope, leaf, span, lengths, nodes
    (1, 32, 8, 16, 1, (0, 47), 9), (2, 16, 16, 16, 3, (61, 5, 128), 5),
    (5, 40, 8, 32, 2, (130, 31), 12), (8, 64, 32, 32, 4, (255, 256), 8),
    (16, 32, 16, 16, 4, (200,), 17), (8, 512, 64, 64, 4, (330,), 3),
    (40, 16, 8, 128, 2, (300, 120), 2), (72, 16, 8, 16, 2, (40,), 2),
    (12, 128, 64, 64, 2, (130, 31), 9), (8, 128, 64, 64, 4, (1100, 65), 10),
]  # fmt: skip


@pytest.mark.parametrize("heads, latent, rope, leaf, span, lengths, nodes", SHAPES)
def test_every_way_of_sharing_out_gives_the_same_bits(
    device: str, monkeypatch, heads, latent, rope, leaf, span, lengths, nodes
) -> None:
    """Trees in a batch against each row alone: every variant, one leaf or a span a unit, slabs."""
    plain = backend_on(device)
    draw = Draw(plain, 1)
    f = forest(draw, latent + rope, leaf, lengths, nodes)
    q = draw.values(len(f.positions), heads, latent + rope)
    seen = set()
    plain.ops.listener = lambda launch: seen.add(launch.kernel)
    some = draw.rng.permutation(len(q))[:5]
    want = {t: alone(plain, f, q, t, latent, span) for t in some.tolist()}
    launched = set()
    for tile in ops_mma.COLUMN_TILES:
        only = (dataclasses.replace(tile, least=0),)
        monkeypatch.setattr(ops_mma, "COLUMN_TILES", only)
        for processors, most in ((1, 1 << 30), (500, 1 << 30), (40, 1)):
            monkeypatch.setattr(ops_mma, "PARTS_BYTES", most)
            b = backend_on(device, processors)
            if b.ops._tensor_shape(latent + rope, latent, leaf, span, False) is None:
                continue  # not for this shape, or too much for the device's shared memory
            b.ops.listener = lambda launch: launched.add(launch.kernel)
            have = attend(b, q, f.pages, f.fresh, f.plan(b), latent, span)
            for t, row in want.items():
                assert np.array_equal(bits(have[t]), bits(row)), (tile, processors, t)
    assert not seen & {"latent_spans", "latent_fold"} and "latent_spans_mma_1" in launched
    if plain.ops.launcher.limits.warpgroups and (leaf, latent) == (64, 128):
        assert "latent_spans_warpgroup" in launched


def test_op_cases_run_warps_and_warpgroups(device: str) -> None:
    """So that --watch checks them after an edit."""
    b = backend_on(device)
    seen, kinds = set(), {"latent_spans_warpgroup"} if b.ops.launcher.limits.warpgroups else set()
    b.ops.listener = lambda launch: seen.add(launch.kernel)
    for case, shape in op_cases.SUMS:
        if case is op_cases.latent_attention:
            case(b, Draw(b), *shape)
    assert seen >= {"latent_spans_mma_1", "latent_fold_mma", "attention_work"} | kinds


def test_filler_rows_become_zero(device: str) -> None:
    """Rows of no sequence behind trees, and a forward of nothing else."""
    b = backend_on(device)
    draw = Draw(b)
    f = forest(draw, 40, 16, (20,), 3)
    q, fresh = draw.values(5, 8, 40), draw.values(5, 40)
    fresh[:3] = f.fresh
    for first in (0, 3):
        rows = [
            np.append(a, np.full(2, filler, np.int32))[first:]
            for a, filler in ((f.positions, 0), (f.sequence, -1), (f.parent, -1))
        ]
        plan = b.ops.plan_attention(*rows, f.lengths, f.tables, f.leaf)
        out = attend(b, q[first:], f.pages, fresh[first:], plan, 32, 2)
        assert not out[-2:].any() and not np.isnan(out).any()


BLOCKS = [  # heads, kv_heads, d, leaf, span, lengths, n, window
    (8, 2, 16, 16, 2, (0, 15, 130), 4, 0), (12, 2, 24, 16, 4, (100, 7), 8, 20),
    (8, 1, 64, 32, 3, (400,), 8, 0), (2, 2, 128, 64, 4, (65, 300), 7, 100),
]  # fmt: skip


@pytest.mark.parametrize("heads, kv_heads, d, leaf, span, lengths, n, window", BLOCKS)
def test_blocks_in_every_way(
    device: str, monkeypatch, heads, kv_heads, d, leaf, span, lengths, n, window
) -> None:
    """The drafter's blocks: a batch has the bits of each block alone, in every variant."""
    plain = backend_on(device)
    draw = Draw(plain, 2)
    f = forest(draw, 2 * kv_heads * d, leaf, lengths, 1)
    q, kv = draw.values(len(lengths) * n, heads, d), draw.values(len(lengths) * n, 2, kv_heads, d)
    pages = f.pages.reshape(len(f.pages), leaf, 2, kv_heads, d)

    def run(b, blocks):
        rows = slice(blocks.start * n, blocks.stop * n)
        sent = b.send(q[rows]), b.send(kv[rows]), b.send(pages)
        of = f.tables[blocks], f.lengths[blocks]
        return b.get(b.ops.block_attention(*sent, *of, window, 0.2, span))

    want = [run(plain, slice(i, i + 1)) for i in range(len(lengths))]
    for tile in (t for t in ops_mma.COLUMN_TILES if not t.warpgroups):
        only = (dataclasses.replace(tile, least=0),)
        monkeypatch.setattr(ops_mma, "COLUMN_TILES", only)
        for processors in (1, 500):
            have = run(backend_on(device, processors), slice(0, len(lengths)))
            assert np.array_equal(bits(have), bits(np.concatenate(want))), (tile, processors)


def test_what_tensor_cores_cannot_take_stays_simple(device: str) -> None:
    """Odd widths, long leaves, `attention: simple`: the simple kernels, and equal within bounds."""
    kernels = set()
    for shape, choice in (
        ((2, 33, 6, 16, 2, (20,), 2), {}),
        ((1, 16, 8, 256, 1, (3,), 1), {}),
        ((8, 32, 8, 16, 2, (20,), 2), dict(attention="simple")),
    ):
        b = backend_on(device, **choice)
        b.ops.listener = lambda launch: kernels.add(launch.kernel)
        op_cases.check_sum(b, op_cases.latent_attention, shape)
    assert kernels == {"plan_ancestors", "latent_spans", "latent_fold"}

"""Choices among launches: the table is followed, with equal bits; the tuner writes it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import bench
import bench_tune
import launchers
import ops
import ops_mma
import tiles
from config import UserError
from tests import toy
from tests.conftest import launcher
from tests.test_gemm import bits, both, experts_case
from tests.test_kernels_compile import ARCHITECTURES

PRODUCT = "dense 40 x 1024, by 16, parts 8"


@pytest.fixture
def kernels() -> ops.CudaOps:
    host = launcher("emulate")
    if isinstance(host, str):
        pytest.skip(host)  # its text says what the emulator lacks, a compiler or headers
    return ops.CudaOps("bfloat16", launcher=host, poison=True)


@pytest.fixture
def file(tmp_path):
    yield tmp_path / "tiles.yaml"
    tiles.read.cache_clear()


def entry(choice: str) -> dict:
    return {"choice": choice, "us": 1.0}


@pytest.mark.parametrize("rows, at", ((9, 16), (17, 32)))
def test_the_table_is_followed_with_the_rule_s_bits(kernels, file, rows, at) -> None:
    """A number of rows goes by the next power of two, by the rule where that has no entry."""
    x, w = both(40, 1024, rows=rows)
    weight, x = kernels.prepare(w), kernels.launcher.upload(x)
    ways = [str(c) for c in kernels._all_cuts(rows, weight, weight.parts, 1, 1)]
    rule = str(kernels._cut(2, weight, weight.parts))
    want = bits(kernels.download(kernels.linear(x, weight)))
    for choice in ways:
        tiles.write(file, kernels.tiles.device, {PRODUCT: {at: entry(choice)}})
        kernels.tiles = tiles.Tiles(kernels.launcher.limits, file)
        assert str(kernels._cut(rows, weight, weight.parts)) == choice
        assert str(kernels._cut(2, weight, weight.parts)) == rule
        assert np.array_equal(bits(kernels.download(kernels.linear(x, weight))), want), choice
    assert len(set(ways)) == len(ways) > 5
    assert any(choice.startswith("wide") for choice in ways) == (at == 32)


def test_what_is_no_launch_here_is_logged_once_and_the_rule_s_is_taken(
    kernels, file, caplog
) -> None:
    weight = kernels.prepare(both(40, 1024)[1])
    rule = kernels._cut(2, weight, weight.parts)
    tiles.write(file, kernels.tiles.device, {PRODUCT: {2: entry("64x64 shares 3")}})
    kernels.tiles = tiles.Tiles(kernels.launcher.limits, file)
    assert [kernels._cut(2, weight, weight.parts) for _ in range(2)] == [rule, rule]
    [line] = caplog.messages
    assert str(file) in line and PRODUCT in line and "64x64 shares 3" in line and "--tune" in line


@pytest.mark.parametrize(
    "text",
    (
        "[1]", "a: b: c", "x: 1", "x: {y: 1}", "x: {y: {1: z}}", "x: {y: {1: {us: 1.0}}}",
        "x: {y: {one: {choice: z}}}", "x: {y: {1: {choice: [z]}}}", "x: {y: {3: {choice: z}}}",
        "x: {y: {0: {choice: z}}}", "x: {y: {-1: {choice: z}}}", "x: {y: {true: {choice: z}}}",
        "x: {y: {1: {choice: z, us: fast}}}", "x: {y: {1: {choice: z, us: .nan}}}",
        "x: {y: {1: {choice: z, us: .inf}}}", "x: {y: {1: {choice: z, us: 1, rule: z}}}",
        "x: {y: {1: {choice: z, us: 1, junk: 2}}}", "x: {y: {1: {choice: z}, 1: {choice: w}}}",
        "x: {y: {1: {choice: !!bool z}}}",
    ),
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused_in_one_line(text, file) -> None:
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        tiles.Tiles(launchers.Limits("x", "sm_90", 1, 1), file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_what_another_device_measured_stays(file) -> None:
    tiles.write(file, "sm_80, 108 processors", {"a": {1: entry("x")}})
    tiles.write(file, "sm_90, 132 processors", {"a": {2: entry("y")}, "b": {1: entry("z")}})
    tiles.write(file, "sm_90, 132 processors", {"a": {1: entry("w")}})
    found = yaml.safe_load(file.read_text())
    assert found == {
        "sm_80, 108 processors": {"a": {1: entry("x")}},
        "sm_90, 132 processors": {"a": {1: entry("w"), 2: entry("y")}, "b": {1: entry("z")}},
    }


def test_every_shipped_entry_is_a_launch_of_its_device(kernels) -> None:
    for device, products in tiles.read(tiles.FILE).items():
        architecture, processors = re.fullmatch(r"(sm_\d+), (\d+) processors", device).groups()
        kernels.launcher.limits = launchers.Limits(
            device, architecture, ARCHITECTURES[architecture], int(processors), clusters=True,
            warpgroups=architecture == "sm_90",
        )  # fmt: skip
        for product, of_rows in products.items():
            for rows, found in of_rows.items():
                ways = [str(way) for way in ways_of(kernels, product, rows)]
                assert found["choice"] in ways, (device, product, rows)


def ways_of(kernels, product: str, rows: int):
    """The launches of a product that the file names."""
    found = [int(n) for n in re.findall(r"\d+", product)]
    if "experts" in product:
        experts, width, hidden, top_k, leaves = found
        pieces = (hidden // ops_mma.parts_of(hidden), width // leaves)
        groups = [ops_mma._piece(columns // ops_mma.STEP) for columns in pieces]
        packed = ops_mma.TensorExperts(None, None, None, experts, width, hidden, leaves, *groups)
        many = product.startswith("many rows")
        return kernels._many_ways(packed) if many else kernels._residents_of(packed, rows, top_k)
    out, k, by, parts, least, most = (*found, 1, 1)[:6]
    data = SimpleNamespace(size=launchers.ceil(out, by) * by * k * 2)
    weight = ops_mma.TensorMatrix(data, out, k, 1, False, by // 16)
    return kernels._all_cuts(rows, weight, parts, least, most)


def test_every_number_of_experts_blocks_gives_the_same_bits(kernels) -> None:
    """As many blocks as a processor may hold; few rows and many."""
    rng = np.random.default_rng(3)
    routed, beside, x, ids, weights = experts_case(rng, 384, 64, 8, 3, 64, 9)
    packed = [kernels.prepare_mlp(*m, 1) for m in (routed, beside)]
    for rows in (1, 9):
        sent = [kernels.launcher.upload(a[:rows].copy()) for a in (x, ids, weights)]
        product = "experts 8 of 64 x 384, top 3, leaves 1"
        ways, found = list(kernels._residents_of(packed[0], rows, 3)), []
        rule = kernels._residents(packed[0], rows, 3)
        assert rule in ways and len(ways) > 2
        assert len(list(ways_of(kernels, product, rows))) == len(ways)
        for way in ways:
            kernels.tiles.chosen[product, rows] = way
            found.append(bits(kernels.download(kernels.moe(*sent, *packed))))
        assert all(np.array_equal(y, found[0]) for y in found)


def test_the_tuner_writes_what_the_engine_then_follows(
    kernels, file, tmp_path, monkeypatch, capsys
):
    """Every product of a toy's steps, in every way, with equal bits."""
    longer = {"max_position_embeddings": 256}
    toy.write_checkpoint(tmp_path / "toy", drafter=longer, **longer)
    (tmp_path / "toy.yaml").write_text(
        "model: {path: toy}\ndraft: {path: toy/drafter, mode: chain}\n"
        "decode: {leaf: 16, span: 2, prefill_chunk: 32}\n"
    )
    for name, value in dict(FEW=1, MANY=2, FLUSH=4096, MORE_ROWS=()).items():
        monkeypatch.setattr(bench_tune, name, value)
    monkeypatch.setattr(tiles, "FILE", file)
    argv = ["--tune", "--config", str(tmp_path / "toy.yaml"), "--device"]
    assert bench.main([*argv, "emulate", "--rows", "1", "16"]) == 0
    assert "| NO |" not in capsys.readouterr().out
    [products] = tiles.read(file).values()
    assert len(products) > 4 and all(set(of_rows) == {1, 16} for of_rows in products.values())
    assert bench.main([*argv, "emulate", "--rows", "9"]) == 2
    assert "powers of two, got 9" in capsys.readouterr().err
    assert bench.main([*argv, "cpu"]) == 2 and "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_launch_with_other_bits_does_not_win(kernels) -> None:
    tuner = bench_tune.Tuner.__new__(bench_tune.Tuner)
    made = [launchers.Captured((np.zeros((2, 3), np.float32),), lambda: None) for _ in range(2)]

    def replay() -> None:
        made[1].outputs[0][...] = 0.0  # over what same_bits has put there
        made[1].outputs[0][1, 2] = wrong

    made[1] = launchers.Captured(made[1].outputs, replay)
    for wrong in (0.0, 1e-30):
        same = tuner.same_bits(*(bench_tune.Runner(None, graph) for graph in made))
        assert same == (wrong == 0.0)


@pytest.mark.parametrize("won, kept", ((0.9, True), (1.001, True), (1.2, False)))
def test_what_makes_a_step_slower_does_not_win(won, kept, monkeypatch) -> None:
    """Beyond the noise; here a step takes one second with the rule's choice."""
    key = "dense", 8
    trial = SimpleNamespace(chosen={key: "new"}, ways={key: ["rule", "new"]})
    engine = SimpleNamespace(ops=SimpleNamespace(tiles=trial), drafter=True)
    took = {"rule": 1.0, "new": won}
    monkeypatch.setattr(bench_tune, "steps", lambda *_: [took[trial.chosen[key]]] * 3)
    row = {"op": key[0], "T": key[1], "choice": "new", "rule": "rule", "µs": 1.0, "its µs": 2.0}
    bench_tune.confirm(engine, [row])
    chosen = ("new", 1.0) if kept else ("rule", 2.0)
    assert (row["choice"], row["µs"]) == chosen and trial.chosen[key] == chosen[0]

"""A whole engine on every device: the toy's ids are those of the CPU, and AR, chain and tree agree
in every logit bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import config
import engine
import launchers
import ops
from tests import toy

# fp32: two layers of K <= 128 in other orders, amplified by norms and a head of gain 3; measured
# 7e-6, and logits are of size 10. bfloat16 rounds at the same places, but a value near a tie may
# round the other way: one ulp (2^-8) of a few of them.
BOUND = {"float32": 5e-5, "bfloat16": 0.3}


@pytest.mark.parametrize("activation", BOUND)
def test_engine(device: str, activation: str, tmp_path, monkeypatch) -> None:
    from tests.conftest import launcher

    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    reference = toy.engine_of(directory, activation=activation)
    if device == "cpu":
        made = toy.engine_of(directory, drafter=True, activation=activation)
    else:
        kernels = ops.CudaOps(activation, launcher=launcher(device), poison=True)
        monkeypatch.setattr(engine, "make_ops", lambda *_: kernels)
        made = toy.engine_of(directory, drafter=True, activation=activation)
    prompts = [list(range(5, 34)), [7, 7, 7]]  # decoding crosses position 32, a leaf's end
    sampled = {"temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    for params in ({}, sampled):
        params = {"max_tokens": 6, **params}
        want = toy.decode(reference, prompts, "ar", **params)
        plain = toy.decode(made, prompts, "ar", **params)
        for have, expected in zip(plain, want, strict=True):
            if activation == "float32":
                assert have.token_ids == expected.token_ids
            if have.token_ids == expected.token_ids:
                assert np.abs(have.logits - expected.logits).max() <= BOUND[activation]
        for mode, budget in (("chain", 8), ("tree", 9)):
            for have, expected in zip(
                toy.decode(made, prompts, mode, budget, **params), plain, strict=True
            ):
                assert have.token_ids == expected.token_ids, mode
                assert np.array_equal(have.logits.view(np.int32), expected.logits.view(np.int32))


@pytest.mark.parametrize("device", ["checked"], indirect=True)
def test_emulated_engine_under_watch(device: str, monkeypatch) -> None:
    """Prompt and tree rounds of the miniature, cut as for an H200: no dependent launch reads or
    writes before its wait what the kernels in front of it may still be at, however many of them,
    and no block leaves without it; tensor cores where the shapes allow."""
    on = launchers.EmulatorLauncher(checked=True)
    on.limits = launchers.Limits(
        "like an H200", "sm_90", 232_448, processors=132, clusters=True, warpgroups=True
    )
    kernels = ops.CudaOps("bfloat16", launcher=on, poison=True)
    monkeypatch.setattr(engine, "make_ops", lambda *_: kernels)
    settings = config.load("nano.yaml")
    of = dataclasses.replace(settings.kernels, activation="bfloat16")
    made = engine.Engine(dataclasses.replace(settings, kernels=of), "cuda")
    launches = set()
    kernels.listener = lambda launch: launches.add(launch.kernel)
    [result] = toy.decode(made, [[567, 456, 480, 3448, 1014]], "tree", 2, max_tokens=3)
    assert len(result.token_ids) == 3
    assert {"latent_query_mma", "block_spans_mma_1", "expert_down_mma"} <= launches, launches


GOLDENS = Path(__file__).parent / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))


@pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)  # the CPU's are in test_golden.py
@pytest.mark.parametrize("name", NAMES)
def test_golden_bundle(device: str, name: str, monkeypatch) -> None:
    """fp32 ids of the other implementation, logits within the bundle's bound, by plain decoding and
    by a tree. The emulator does the beginning of two prompts, a GPU all of them."""
    from tests.conftest import launcher

    golden = dict(np.load(GOLDENS / name / "golden.npz"))
    bound = 4 * json.loads((GOLDENS / name / "golden.json").read_text())["measured"]["logit_error"]
    prompts = np.split(golden["prompt_ids"], np.cumsum(golden["prompt_lengths"])[:-1])
    n_prompts, n_tokens = (1, 4) if device == "emulate" else golden["token_ids"].shape
    monkeypatch.setattr(
        engine, "make_ops", lambda *_: ops.CudaOps(launcher=launcher(device), poison=True)
    )
    drafter = (GOLDENS / name / "drafter").exists()
    made = toy.engine_of(GOLDENS / name, drafter=drafter)
    plain = toy.decode(made, prompts[:n_prompts], max_tokens=n_tokens)
    for result, ids, logits in zip(plain, golden["token_ids"], golden["logits"], strict=False):
        assert result.token_ids == ids[:n_tokens].tolist()
        assert np.abs(result.logits - logits[:n_tokens]).max() <= bound
    if not drafter:  # one that is often wrong; recorded rounds know the real one only
        made.rounds = None
        toy.plug(made, "mixed", prompts[:n_prompts], plain)
    trees = toy.decode(made, prompts[:n_prompts], "tree", 8, max_tokens=n_tokens)
    for have, want in zip(trees, plain, strict=True):
        assert have.token_ids == want.token_ids
        assert np.array_equal(have.logits.view(np.int32), want.logits.view(np.int32))

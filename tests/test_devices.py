"""A whole engine on every device: the toy's ids are those of the CPU, and AR, chain and tree agree
in every logit bit."""

from __future__ import annotations

import numpy as np
import pytest

import engine
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

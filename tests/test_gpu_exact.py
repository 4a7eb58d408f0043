"""On a GPU: the miniature and the bundles, every budget, batch and context, bit by bit; bfloat16.

The op tests run on every device (test_ops.py); this is what only a card is fast enough for.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

import config
from engine import Engine
from sampling import SamplingParams
from tests import toy
from tests.conftest import launcher

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
LENGTHS = (5, 62, 63, 64, 65, 127, 130, 500)  # decoding crosses the ends of 64-position leaves
ACTIVATIONS = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=ACTIVATIONS)
def nano(request) -> Engine:
    if isinstance(reason := launcher("cuda"), str):
        pytest.skip(reason)
    settings = config.load("nano.yaml")
    kernels = dataclasses.replace(settings.kernels, activation=request.param)
    return Engine(dataclasses.replace(settings, kernels=kernels), "cuda")


@pytest.fixture(scope="module")
def prompts(nano) -> list[list[int]]:
    lines = (ROOT / "tests" / "data" / "heldout_prompts.jsonl").read_text().splitlines()
    text = "".join(json.loads(line)["text"] for line in lines[:40])
    ids = nano.encode(text)
    return [ids[i * 600 : i * 600 + n] for i, n in enumerate(LENGTHS)]


def asked(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=11, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(nano, prompts) -> dict:
    """Plain decoding of every prompt by itself, in the engine's own steps."""
    rounds, nano.rounds = nano.rounds, None
    nano.use("ar", 1)
    answers = {
        (i, t): nano.generate([p], asked(t), keep_logits=True)[0]
        for i, p in enumerate(prompts)
        for t in (0.0, 0.9)
    }
    nano.rounds = rounds
    return answers


@pytest.mark.parametrize("temperature", (0.0, 0.9))
@pytest.mark.parametrize("batch", (1, 3, 8))
@pytest.mark.parametrize("budget", (1, 2, 7, 8, 16, 33, 64))
def test_trees_give_the_bits_of_plain_decoding(
    nano, prompts, alone, budget, batch, temperature
) -> None:
    nano.use("tree", budget)
    nano.cache.forget_idle()  # prompts are computed too, not found
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        for i, result in enumerate(nano.generate(some, asked(temperature), keep_logits=True)):
            toy.assert_same_results([result], [alone[first + i, temperature]])


@pytest.mark.parametrize("mode", ("ar", "chain"))
def test_other_modes_and_plain_steps(nano, prompts, alone, mode) -> None:
    recorded = nano.rounds
    for nano.rounds in (recorded, None):
        nano.use(mode, 1)
        nano.cache.forget_idle()
        results = nano.generate(prompts, asked(0.9), keep_logits=True)
        toy.assert_same_results(results, [alone[i, 0.9] for i in range(len(prompts))])
    nano.rounds = recorded


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_parts_from_the_golden_only_where_it_is_undecided(name) -> None:
    """bf16 against the fp32 golden, on the tokens before the texts part.

    About 10 values a layer are rounded to 2^-9 of their size, with random signs: the error of the
    logits is about 2^-9 * sqrt(10 * layers + 2) of their norm, here times 4. Where a router's
    choice is closer than such an error, bf16 takes another expert and the row is off by more: up to
    one row in five of these bundles, whose smallest router gaps are 1e-4. So the median must keep
    the bound, and a token may differ only where the golden's two best logits are closer than what
    that row is off.
    """
    if isinstance(reason := launcher("cuda"), str):
        pytest.skip(reason)
    golden = np.load(GOLDENS / name / "golden.npz")
    settings = config.load("golden.yaml", model_path=GOLDENS / name, context=64, batch=8)
    kernels = dataclasses.replace(settings.kernels, activation="bfloat16")
    engine = Engine(dataclasses.replace(settings, kernels=kernels), "cuda")
    borders = np.cumsum(golden["prompt_lengths"])[:-1]
    prompts = [p.tolist() for p in np.split(golden["prompt_ids"], borders)]
    params = SamplingParams(max_tokens=golden["token_ids"].shape[1], ignore_eos=True)
    results = engine.generate(prompts, params, keep_logits=True)
    bound = 4 * 2.0**-9 * math.sqrt(10 * engine.dims.num_hidden_layers + 2)
    ratios, parted = [], 0
    for i, result in enumerate(results):
        ids, logits = golden["token_ids"][i], golden["logits"][i]
        equal = np.append(ids == np.array(result.token_ids), False)
        same = int(np.argmin(equal))  # the first difference; its row still had equal inputs
        rows = min(same + 1, len(ids))
        off = result.logits[:rows] - logits[:rows]
        ratios += (np.linalg.norm(off, axis=1) / np.linalg.norm(logits[:rows], axis=1)).tolist()
        if same < len(ids):
            parted += 1
            assert golden["top2_gap"][i][same] <= 2 * np.abs(off[same]).max()
    print(
        f"{name}: {parted} of {len(results)} bf16 texts part from fp32; relative error median "
        f"{np.median(ratios):.4f}, 90 % {np.quantile(ratios, 0.9):.4f}, bound {bound:.4f}"
    )
    assert np.median(ratios) <= bound

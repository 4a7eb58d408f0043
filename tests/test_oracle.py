"""The float64 oracle agrees with every golden, and every golden would notice a wrong forward."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import oracle
import pytest

GOLDENS = Path(__file__).parent / "goldens"
BUNDLES = sorted(path.parent for path in GOLDENS.glob("*/golden.npz"))
DRAFTERS = sorted(path.parent for path in GOLDENS.glob("*/drafter/golden.npz"))


def bundle_name(path: Path) -> str:
    return str(path.relative_to(GOLDENS))


def load(directory: Path) -> tuple[dict, oracle.Weights, dict, dict]:
    config, weights = oracle.read_checkpoint(directory)
    facts = json.loads((directory / "golden.json").read_text())
    return config, weights, dict(np.load(directory / "golden.npz")), facts


def test_bundles_are_there_and_small():
    shapes = {path.name.rpartition("-")[0] for path in BUNDLES}
    assert len(shapes) >= 4 and len(BUNDLES) == 2 * len(shapes) and len(DRAFTERS) >= 2
    assert sum(f.stat().st_size for f in GOLDENS.rglob("*") if f.is_file()) <= 12_000_000


@pytest.mark.parametrize("directory", BUNDLES, ids=bundle_name)
def test_oracle_gives_the_golden_ids_and_logits(directory):
    config, weights, golden, facts = load(directory)
    bound = facts["logit_bound"]  # derived in tools/make_golden.py, class Bound
    ends = np.cumsum(golden["prompt_lengths"])
    for i, end in enumerate(ends):
        prompt = golden["prompt_ids"][end - golden["prompt_lengths"][i] : end]
        ids = golden["token_ids"][i]
        logits = oracle.forward(config, weights, np.append(prompt, ids[:-1])).logits
        logits = logits[len(prompt) - 1 :]
        assert (logits.argmax(-1) == ids).all()
        assert np.abs(logits - golden["logits"][i]).max() <= bound
    assert golden["top2_gap"].min() > 2 * bound
    logits = oracle.forward(config, weights, golden["context_ids"]).logits
    assert np.abs(logits - golden["context_logits"]).max() <= bound


@pytest.mark.parametrize("directory", DRAFTERS, ids=bundle_name)
def test_oracle_gives_the_golden_drafts(directory):
    config, weights, golden, facts = load(directory)
    target_config, target = oracle.read_checkpoint(directory.parent)
    taps = oracle.forward(target_config, target, golden["sequence_ids"]).taps
    taps = np.concatenate([taps[i] for i in config["dflash_config"]["target_layer_ids"]], axis=-1)
    assert np.abs(taps - golden["taps"]).max() <= facts["logit_bound"]
    for context, expected in zip(golden["contexts"], golden["logits"], strict=True):
        anchor = int(golden["sequence_ids"][context])
        logits = oracle.draft(config, weights, target, golden["taps"][:context], anchor)
        assert np.abs(logits - expected).max() <= facts["logit_bound"]


def test_int4_and_fp32_emit_different_tokens():
    for directory in BUNDLES:
        if directory.name.endswith("-int4"):
            twin = directory.with_name(directory.name.replace("-int4", "-fp32"))
            int4, fp32 = (np.load(d / "golden.npz") for d in (directory, twin))
            assert (int4["prompt_ids"] == fp32["prompt_ids"]).all()
            assert (int4["token_ids"] != fp32["token_ids"]).any()


def without_mscale_in_softmax(scaling: dict) -> None:
    """Keep the amplitude, a ratio of two mscales, and take YaRN out of the softmax scale."""
    above, below = (
        oracle.yarn_mscale(scaling["factor"], scaling[key]) for key in ("mscale", "mscale_all_dim")
    )
    mscale = (above / below - 1) / (0.1 * np.log(scaling["factor"]))
    scaling.update(mscale=mscale, mscale_all_dim=1e-12)


WRONG_TARGETS = {  # what is wrong: (the shape made to show it, how to do it)
    "bias ignored": ("all", lambda c, w: w.update({k: 0 * v for k, v in w.items() if "bias" in k})),
    "scaling 1": ("all", lambda c, w: c.update(routed_scaling_factor=1.0)),
    "norm_topk_prob": ("all", lambda c, w: c.update(norm_topk_prob=not c["norm_topk_prob"])),
    "lora eps 1e-5": ("odd", lambda c, w: c.update(lora_norm_eps=1e-5)),
    "rms eps 1e-6": ("odd", lambda c, w: c.update(rms_norm_eps=1e-6)),
    "no yarn": ("yarn", lambda c, w: c.update(rope_scaling=None)),
    "mscale squared missing": ("yarn", lambda c, w: without_mscale_in_softmax(c["rope_scaling"])),
    "mscales equal": ("yarn", lambda c, w: c["rope_scaling"].update(mscale=0.6)),
    "yarn factor": ("yarn", lambda c, w: c["rope_scaling"].update(factor=2.0)),
    "top-1": ("all", lambda c, w: c.update(num_experts_per_tok=1)),
}


TARGET_TRIALS = [
    pytest.param(directory, change, id=f"{bundle_name(directory)}-{wrong}")
    for wrong, (shape, change) in WRONG_TARGETS.items()
    for directory in BUNDLES
    if shape in ("all", directory.name.partition("-")[0])
]


@pytest.mark.parametrize("directory, change", TARGET_TRIALS)
def test_goldens_notice_a_wrong_target(directory, change):
    config, weights, golden, facts = load(directory)
    change(config, weights)
    logits = oracle.forward(config, weights, golden["context_ids"]).logits
    assert np.abs(logits - golden["context_logits"]).max() > 10 * facts["logit_bound"]


WRONG_DRAFTERS = {
    "window ignored": lambda c: c.update(layer_types=None),
    "window one wider": lambda c: c.update(sliding_window=c["sliding_window"] + 1),
    "yarn amplitude": lambda c: c["rope_scaling"].update(mscale=2.0, mscale_all_dim=1.0),
    "no yarn": lambda c: c.update(rope_scaling=None),
    "mask id": lambda c: c["dflash_config"].update(mask_token_id=0),
}


DRAFTER_TRIALS = [
    pytest.param(directory, change, id=f"{bundle_name(directory)}-{wrong}")
    for wrong, change in WRONG_DRAFTERS.items()
    for directory in DRAFTERS
    if not wrong.startswith("window") or directory.parent.name.startswith("nano")
]


@pytest.mark.parametrize("directory, change", DRAFTER_TRIALS)
def test_goldens_notice_a_wrong_drafter(directory, change):
    config, weights, golden, facts = load(directory)
    _, target = oracle.read_checkpoint(directory.parent)
    change(config)
    context = int(golden["contexts"][-1])
    anchor = int(golden["sequence_ids"][context])
    logits = oracle.draft(config, weights, target, golden["taps"][:context], anchor)
    assert np.abs(logits - golden["logits"][-1]).max() > 10 * facts["logit_bound"]


def test_oracle_knows_k26_constants():
    """Softmax scale and ramp of the real model, as k26 engines agree on them."""
    scaling = {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": scaling}
    config["rope_theta"] = 50000.0
    assert oracle.softmax_scale(config) == pytest.approx(0.1446796, abs=1e-7)
    angles, amplitude = oracle.rope_angles(config, 64, np.array([1]))
    plain = 50000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = angles[0] / plain
    assert amplitude == 1.0
    assert (ratio[:9] == 1.0).all() and ratio[9] < 1.0  # the ramp starts after pair 8
    assert ratio[20:] == pytest.approx(1 / 64) and ratio[19] > 1 / 64  # and ends at pair 20


def test_nibble_order():
    packed = np.array([[0x76543210, 0xFEDCBA98, 0, 0]], np.uint32).view(np.int32)
    codes = oracle.dequantise(packed, np.ones((1, 1)))[0, :16]
    assert codes.tolist() == list(range(-8, 8))

"""The obvious forward in float64, for tests only.

One sequence, every position, no cache, no tiles, no batch: formulas as one would write them on
paper. `reference.py` is cut into leaves for the lossless contract; this file is what it is compared
with. It shares no code with the engine, not even the file reader.

Sources: the DeepSeek-V3 report (MLA, sigmoid router with a bias for selection only), the YaRN paper
(ramp and attention factor), the DFlash paper (the drafter).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Trace:
    """What `forward` saw. T positions, V vocabulary, L layers, M MoE layers, E experts."""

    logits: np.ndarray  # [T, V]
    taps: np.ndarray  # [L, T, hidden], outputs of every layer, before the final norm
    scores: np.ndarray  # [M, T, E], router scores with the bias: what the selection compares
    router_logits: np.ndarray  # [M, T, E]


# --- files -----------------------------------------------------------------------------------


def read_safetensors(path: Path) -> Weights:
    """Tensors of one file: F32 and BF16 as float32, I32 as int32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        data = raw[8 + size + start : 8 + size + end]
        if entry["dtype"] == "BF16":
            array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            array = np.frombuffer(data, {"F32": "<f4", "I32": "<i4"}[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors


def read_checkpoint(directory: Path) -> tuple[dict, Weights]:
    """A checkpoint directory -> (flat text config, float64 weights).

    Names lose the `language_model.` prefix, vision tensors are dropped, and a quantised
    `X.weight_packed` + `X.weight_scale` becomes `X.weight`.
    """
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    raw: Weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw |= read_safetensors(path)
    weights = {}
    for name, array in raw.items():
        key = name.removeprefix("language_model.")
        if key.startswith(("vision_tower.", "mm_projector.")):
            continue
        if key.endswith(".weight_packed"):
            scale = raw[name.replace("_packed", "_scale")].astype(np.float64)
            weights[key.removesuffix("_packed")] = dequantise(array, scale)
        elif not key.endswith((".weight_scale", ".weight_shape")):
            weights[key] = array.astype(np.float64)
    return config, weights


def dequantise(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """int32 [out, in/8], scale [out, in/32] -> float64 [out, in]; nibble n stands for n - 8."""
    words = packed.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))
    codes = (words & 15).astype(np.float64).reshape(packed.shape[0], -1) - 8
    return codes * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)


# --- pieces ----------------------------------------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def mlp(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_angles(config: dict, dim: int, positions: np.ndarray) -> tuple[np.ndarray, float]:
    """Angles [T, dim/2] and the amplitude that multiplies cos and sin."""
    theta = config["rope_theta"]
    pair = np.arange(dim // 2)
    frequency = theta ** (-2.0 * pair / dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return positions[:, None] * frequency, 1.0
    kind = scaling.get("rope_type", scaling.get("type"))
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_of(rotations: float) -> float:  # the pair that turns so often within the original
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_of(scaling["beta_slow"])), dim - 1)
    ramp = np.clip((pair - low) / max(high - low, 0.001), 0, 1)  # 0: keep, 1: interpolate
    frequency = frequency * (1 - ramp) + frequency / factor * ramp
    if kind == "yarn" and not (scaling.get("mscale") and scaling.get("mscale_all_dim")):
        amplitude = yarn_mscale(factor, 1.0)
    else:
        above = yarn_mscale(factor, scaling["mscale"])
        amplitude = above / yarn_mscale(factor, scaling["mscale_all_dim"])
    return positions[:, None] * frequency, amplitude


def rotate_pairs(x: np.ndarray, angles: np.ndarray, amplitude: float) -> np.ndarray:
    """Interleaved RoPE: (x0, x1) is one pair. x [T, heads, dim], angles [T, dim/2]."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * amplitude * np.exp(1j * angles)[:, None, :]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = z.real, z.imag
    return out


def rotate_halves(x: np.ndarray, angles: np.ndarray, amplitude: float) -> np.ndarray:
    """Half-split RoPE: (x0, x_dim/2) is one pair. x [T, heads, dim], angles [T, dim/2]."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * amplitude * np.exp(1j * angles)[:, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


def softmax_scale(config: dict) -> float:
    """1/sqrt(head) times YaRN's mscale_all_dim factor squared."""
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = config.get("rope_scaling") or {}
    if scaling.get("mscale_all_dim"):
        scale *= yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale


# --- the target ------------------------------------------------------------------------------


def attention(config: dict, w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Expanded MLA: keys and values of every head are written out. x [T, hidden]."""
    T, heads = len(x), config["num_attention_heads"]
    nope, rope, v_dim = (config[f"{k}_head_dim"] for k in ("qk_nope", "qk_rope", "v"))
    latent, eps = config["kv_lora_rank"], config.get("lora_norm_eps", 1e-6)
    angles, amplitude = rope_angles(config, rope, np.arange(T))

    q = rms_norm(x @ w[f"{name}.q_a_proj.weight"].T, w[f"{name}.q_a_layernorm.weight"], eps)
    q = (q @ w[f"{name}.q_b_proj.weight"].T).reshape(T, heads, nope + rope)
    q_nope, q_pe = q[..., :nope], rotate_pairs(q[..., nope:], angles, amplitude)

    kv = x @ w[f"{name}.kv_a_proj_with_mqa.weight"].T
    k_pe = rotate_pairs(kv[:, None, latent:], angles, amplitude)[:, 0]
    kv = rms_norm(kv[:, :latent], w[f"{name}.kv_a_layernorm.weight"], eps)
    kv = (kv @ w[f"{name}.kv_b_proj.weight"].T).reshape(T, heads, nope + v_dim)
    k_nope, v = kv[..., :nope], kv[..., nope:]

    scores = np.einsum("qhd,khd->hqk", q_nope, k_nope) + np.einsum("qhd,kd->hqk", q_pe, k_pe)
    visible = np.tril(np.ones((T, T), bool))
    p = softmax(np.where(visible, scores * softmax_scale(config), -np.inf))
    out = np.einsum("hqk,khd->qhd", p, v).reshape(T, heads * v_dim)
    return out @ w[f"{name}.o_proj.weight"].T


def moe(config: dict, w: Weights, name: str, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Routed experts + shared expert -> (output [T, hidden], biased scores, router logits)."""
    router_logits = x @ w[f"{name}.gate.weight"].T
    scores = 1 / (1 + np.exp(-router_logits))
    biased = scores + w[f"{name}.gate.e_score_correction_bias"]
    out = mlp(x, w, f"{name}.shared_experts")
    for t, row in enumerate(x):
        chosen = np.argsort(-biased[t], kind="stable")[: config["num_experts_per_tok"]]
        weight = scores[t, chosen]
        if config["norm_topk_prob"]:
            weight = weight / (weight.sum() + 1e-20)
        for expert, share in zip(chosen, weight * config["routed_scaling_factor"], strict=True):
            out[t] += share * mlp(row, w, f"{name}.experts.{expert}")
    return out, biased, router_logits


def forward(config: dict, w: Weights, token_ids: np.ndarray) -> Trace:
    """Logits at every position of one sequence that starts at position 0. token_ids [T]."""
    x = w["model.embed_tokens.weight"][token_ids]
    eps, taps, scores, router_logits = config["rms_norm_eps"], [], [], []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        normed = rms_norm(x, w[f"{layer}.input_layernorm.weight"], eps)
        x = x + attention(config, w, f"{layer}.self_attn", normed)
        normed = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], eps)
        if i < config["first_k_dense_replace"]:
            x = x + mlp(normed, w, f"{layer}.mlp")
        else:
            out, biased, raw = moe(config, w, f"{layer}.mlp", normed)
            x = x + out
            scores.append(biased)
            router_logits.append(raw)
        taps.append(x)
    logits = rms_norm(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T
    return Trace(logits, np.array(taps), np.array(scores), np.array(router_logits))


# --- the drafter -----------------------------------------------------------------------------


def draft(config: dict, w: Weights, target: Weights, taps: np.ndarray, anchor: int) -> np.ndarray:
    """DFlash: one pass over a block -> logits [block_size - 1, V] of the drafted positions.

    taps [C, taps * hidden]: the listed layers' outputs at positions 0 … C-1, concatenated; `anchor`
    is the committed token at position C, whose taps are not known yet. The block holds the anchor
    and block_size - 1 masks at positions C … C + block_size - 1.

    Attention is not causal: a query sees its whole block and all of the context; in a
    `sliding_attention` layer, of the context, only keys with q_pos - k_pos < sliding_window.
    """
    block, C, eps = config["block_size"], len(taps), config["rms_norm_eps"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["head_dim"]
    angles, amplitude = rope_angles(config, dim, np.arange(C + block))
    distance = np.arange(C, C + block)[:, None] - np.arange(C + block)

    mask = config["dflash_config"]["mask_token_id"]
    x = target["model.embed_tokens.weight"][[anchor] + [mask] * (block - 1)]
    context = rms_norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    for i, layer_type in enumerate(layer_types):
        name = f"layers.{i}.self_attn"
        normed = rms_norm(x, w[f"layers.{i}.input_layernorm.weight"], eps)
        source = np.concatenate([context, normed])  # the context is not layer-normed
        q = (normed @ w[f"{name}.q_proj.weight"].T).reshape(block, heads, dim)
        k = (source @ w[f"{name}.k_proj.weight"].T).reshape(C + block, kv_heads, dim)
        v = (source @ w[f"{name}.v_proj.weight"].T).reshape(C + block, kv_heads, dim)
        q = rotate_halves(rms_norm(q, w[f"{name}.q_norm.weight"], eps), angles[C:], amplitude)
        k = rotate_halves(rms_norm(k, w[f"{name}.k_norm.weight"], eps), angles, amplitude)
        k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
        visible = np.ones_like(distance, bool)
        if layer_type == "sliding_attention":
            visible = (distance < config["sliding_window"]) | (np.arange(C + block) >= C)
        scores = np.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        p = softmax(np.where(visible, scores, -np.inf))
        out = np.einsum("hqk,khd->qhd", p, v).reshape(block, heads * dim)
        x = x + out @ w[f"{name}.o_proj.weight"].T
        normed = rms_norm(x, w[f"layers.{i}.post_attention_layernorm.weight"], eps)
        x = x + mlp(normed, w, f"layers.{i}.mlp")
    return rms_norm(x[1:], w["norm.weight"], eps) @ target["lm_head.weight"].T

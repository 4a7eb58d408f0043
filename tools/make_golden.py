"""Make the golden bundles of `tests/goldens/`: tiny checkpoints with the answers of another engine.

    pip install -r requirements-tools.txt
    python tools/make_golden.py [--only nano] [--out tests/goldens]

A bundle is a checkpoint directory in the published format plus `golden.npz` and `golden.json`. The
answers come from Hugging Face `transformers` (DeepseekV3ForCausalLM, eager, fp32) on the weights as
read back from the files and dequantised; the drafter's from a plain torch forward below. Both are
then compared with `tests/oracle.py`, which is independent of them and in float64.

`golden.npz` (n prompts, P prompt tokens in all, G = 24 emitted tokens each, V vocabulary):

    prompt_ids      int32 [P]        prompts one after another
    prompt_lengths  int32 [n]
    token_ids       int32 [n, G]     greedy
    logits          float32 [n, G, V]  row g chose token_ids[:, g]
    top2_gap        float32 [n, G]   best logit minus second best
    context_ids     int32 [64]       one sequence up to position 63, for logits at every position
    context_logits  float32 [64, V]

`drafter/golden.npz`, where there is a drafter (C contexts):

    sequence_ids    int32 [S]        case i: anchor sequence_ids[contexts[i]] at that position
    taps            float32 [S, taps * hidden]; case i reads taps[:contexts[i]]
    contexts        int32 [C]
    logits          float32 [C, block_size - 1, V]

A prompt is rejected, and the rejection recorded, when fp32 cannot decide it: see `Bound`. An
existing bundle is never overwritten.
"""

from __future__ import annotations

import argparse
import base64
import json
import math
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import oracle  # noqa: E402

Tensors = dict[str, torch.Tensor]
GROUP = 32
EMITTED = 24
CONTEXT = 64
BLOCK = 8
DISTINCT = 9  # ids among the emitted, so that a stuck decoder does not pass


# --- the shapes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One shape, from which an FP32 and an INT4 bundle are made."""

    name: str
    seed: int
    config: dict
    prompt_lengths: tuple[int, ...]
    bf16: bool  # stored type of what is not quantised, in both bundles: BF16, else F32
    scale_dtype: torch.dtype = torch.bfloat16
    flat: bool = False  # K2's layout: flat config.json, no prefix; else K2.6's
    shards: int = 1
    vision: bool = False
    tokenizer: bool = False
    drafter: dict | None = None
    drafter_in: str = ""  # "fp32" or "int4"
    gains: dict = field(default_factory=dict)
    latent_gain: float = 1.0  # of the rows that make the q and kv latents


def text_config(**values) -> dict:
    """The language model's part of config.json, in the order and with the keys Kimi publishes."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": values["vocab_size"] - 3,
        "eos_token_id": values["vocab_size"] - 2,
        "pad_token_id": values["vocab_size"] - 1,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "num_key_value_heads": values["num_attention_heads"],
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
    } | values


def yarn(factor: float, original: int, **more) -> dict:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } | more


def drafter_config(target: dict, **values) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": BLOCK,
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "max_position_embeddings": target["max_position_embeddings"],
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-5,
        "rope_theta": target["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": target["vocab_size"],
    } | values


NANO = text_config(
    vocab_size=272, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1,
    num_attention_heads=8, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, intermediate_size=256, moe_intermediate_size=256,
    n_routed_experts=16, num_experts_per_tok=4, n_shared_experts=1, routed_scaling_factor=2.0,
    max_position_embeddings=128, rope_theta=10000.0, rope_scaling=yarn(4.0, 32),
    bos_token_id=256, eos_token_id=257, pad_token_id=271,
)  # fmt: skip
MANY = text_config(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, first_k_dense_replace=1,
    num_attention_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=8, v_head_dim=8, intermediate_size=64, moe_intermediate_size=32,
    n_routed_experts=384, num_experts_per_tok=8, n_shared_experts=1, routed_scaling_factor=2.827,
    max_position_embeddings=262144, rope_theta=50000.0, rope_scaling=yarn(64.0, 4096),
)  # fmt: skip
YARN = text_config(
    vocab_size=96, hidden_size=64, num_hidden_layers=3, first_k_dense_replace=1,
    num_attention_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=16, intermediate_size=96, moe_intermediate_size=32,
    n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, routed_scaling_factor=1.5,
    norm_topk_prob=False, max_position_embeddings=64, rope_theta=1000.0,
    rope_scaling=yarn(4.0, 16, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.6),
)  # fmt: skip
ODD = text_config(
    vocab_size=67, hidden_size=96, num_hidden_layers=3, first_k_dense_replace=2,
    num_attention_heads=3, q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=24,
    qk_rope_head_dim=8, v_head_dim=20, intermediate_size=100, moe_intermediate_size=96,
    n_routed_experts=5, num_experts_per_tok=3, n_shared_experts=2, routed_scaling_factor=2.5,
    max_position_embeddings=128, rope_theta=10000.0, rope_scaling=None,
)  # fmt: skip

SHAPES = (
    Shape(
        "nano", 11, NANO, (1, 2, 5, 11, 17, 30, 40), bf16=True, shards=3, vision=True,
        tokenizer=True, drafter_in="int4",
        drafter=drafter_config(
            NANO, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=16,
            intermediate_size=128,
            dflash_config={"mask_token_id": 270, "target_layer_ids": [0, 1, 2]},
            layer_types=["sliding_attention", "full_attention"], sliding_window=16,
            use_sliding_window=True, is_causal=False,
            rope_scaling={"rope_type": "deepseek_yarn"} | {
                k: v for k, v in yarn(4.0, 32, mscale_all_dim=0.7).items() if k != "type"
            },
        ),
    ),
    Shape(
        "many", 12, MANY, (1, 3, 6, 9, 16, 24), bf16=True,
        gains={"e_score_correction_bias": 0.04},
    ),
    Shape(
        "yarn", 13, YARN, (1, 8, 14, 16, 17, 30, 40), bf16=False, scale_dtype=torch.float32,
        drafter_in="fp32",
        drafter=drafter_config(
            YARN, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
            intermediate_size=96,
            dflash_config={"mask_token_id": 93, "target_layer_ids": [0, 2]},
            # Without mscale keys: this type's amplitude is 0.1 ln(factor) + 1.
            rope_scaling={
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 4.0, "beta_slow": 1.0,
            },
        ),
    ),
    # Small embeddings and latents, so that each eps shows in the logits.
    Shape(
        "odd", 14, ODD, (1, 2, 7, 13, 19, 26, 37), bf16=False, flat=True,
        gains={"embed_tokens": 0.1}, latent_gain=0.01,
    ),
)  # fmt: skip


# --- random weights --------------------------------------------------------------------------

# Standard deviation of a weight times sqrt(inputs): attention sharp enough that the text depends on
# more than the last token, router logits spread over about one unit, logits over about three.
GAINS = {
    "e_score_correction_bias": 0.2,
    "embed_tokens": 1.0,
    "lm_head": 3.0,
    "q_b_proj": 2.0,
    "q_proj": 1.0,
    "o_proj": 2.0,
    "mlp.gate.": 1.5,
    "experts": 1.4,
    "shared_experts": 1.0,
}


def gain(name: str, gains: dict) -> float:
    return next((g for part, g in ({**GAINS, **gains}).items() if part in name), 1.0)


def target_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of the language model, unquantised: name -> shape."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (c["vocab_size"], hidden),
    }

    def mlp(name: str, width: int) -> None:
        shapes[f"{name}.gate_proj.weight"] = shapes[f"{name}.up_proj.weight"] = (width, hidden)
        shapes[f"{name}.down_proj.weight"] = (hidden, width)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_a_proj.weight": (c["q_lora_rank"], hidden),
            f"{layer}.self_attn.q_a_layernorm.weight": (c["q_lora_rank"],),
            f"{layer}.self_attn.q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (c["kv_lora_rank"] + rope, hidden),
            f"{layer}.self_attn.kv_a_layernorm.weight": (c["kv_lora_rank"],),
            f"{layer}.self_attn.kv_b_proj.weight": (heads * (nope + v), c["kv_lora_rank"]),
            f"{layer}.self_attn.o_proj.weight": (hidden, heads * v),
        }
        if i < c["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", c["intermediate_size"])
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c["n_routed_experts"], hidden)
        shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        mlp(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for e in range(c["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", c["moe_intermediate_size"])
    return shapes


def drafter_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    hidden, dim, width = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    taps = len(c["dflash_config"]["target_layer_ids"])
    shapes = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(c["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    return shapes


def random_weights(shapes: dict, rng: np.random.Generator, gains: dict) -> Tensors:
    """Norm weights near 1, uniform router biases, all else normal with `GAINS`."""
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("e_score_correction_bias"):
            w = rng.uniform(-1, 1, shape) * gain(name, gains)
        elif len(shape) == 1:
            w = 1 + 0.2 * rng.standard_normal(shape)
        else:
            inputs = 1 if "embed_tokens" in name else shape[1]
            w = rng.standard_normal(shape) * gain(name, gains) / math.sqrt(inputs)
        weights[name] = torch.tensor(w, dtype=torch.float32)
    return weights


# --- checkpoint files ------------------------------------------------------------------------


def is_routed(name: str) -> bool:
    return ".mlp.experts." in name


def quantise(w: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> packed int32 [out, in/8] and scales [out, in/32], `pack-quantized`."""
    groups = w.reshape(w.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7.5).to(scale_dtype)
    codes = torch.round(groups / scale.float()[..., None]).clamp(-8, 7) + 8
    nibbles = codes.to(torch.int64).reshape(w.shape[0], -1, 8)
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32), scale


def dequantise(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The inverse, float32 [out, in]; code times scale is exact."""
    nibbles = (packed.to(torch.int64)[..., None] >> torch.arange(0, 32, 4)) & 15
    groups = (nibbles.flatten(1) - 8).float().reshape(*scale.shape, GROUP)
    return (groups * scale.float()[..., None]).flatten(1)


def file_tensors(shape: Shape, kind: str, weights: Tensors) -> Tensors:
    """The tensors as the file stores them; F32 router bias always."""
    prefix = "" if shape.flat else "language_model."
    tensors: Tensors = {}
    for name, w in weights.items():
        if is_routed(name) and kind == "int4":
            base = prefix + name.removesuffix(".weight")
            packed, scale = quantise(w, shape.scale_dtype)
            tensors[f"{base}.weight_packed"] = packed
            tensors[f"{base}.weight_scale"] = scale
            tensors[f"{base}.weight_shape"] = torch.tensor(w.shape, dtype=torch.int32)
        else:
            small = shape.bf16 and not name.endswith("e_score_correction_bias")
            tensors[prefix + name] = w.to(torch.bfloat16) if small else w
    if shape.vision:  # present in the published files, of no use to the language model
        tensors["vision_tower.patch_embed.proj.weight"] = torch.ones(4, 3, 2, 2).bfloat16()
        tensors["vision_tower.encoder.final_layernorm.weight"] = torch.ones(4).bfloat16()
        tensors["mm_projector.proj.0.weight"] = torch.ones(8, 4).bfloat16()
    return tensors


def quantization_config() -> dict:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
        "actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {"group_0": group | {"weights": weights}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def checkpoint_config(shape: Shape, kind: str) -> dict:
    text = dict(shape.config)
    if kind == "int4":
        text["quantization_config"] = quantization_config()
    if shape.flat:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": text["bos_token_id"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "ignore_index": -100,
        "media_placeholder_token_id": text["pad_token_id"],
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"patch_size": 2, "vt_hidden_size": 4, "mm_hidden_size": 4},
    }


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tensors(directory: Path, tensors: Tensors, shards: int) -> None:
    """One `model.safetensors`, or shards of about equal size with an index."""
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    total, done, cut = sum(t.nbytes for t in tensors.values()), 0, [{} for _ in range(shards)]
    for name, t in tensors.items():
        cut[min(done * shards // total, shards - 1)][name] = t
        done += t.nbytes
    weight_map = {}
    for i, part in enumerate(cut, 1):
        file = f"model-{i:05d}-of-{shards:06d}.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """Every byte is a token; the last ids are Kimi's control strings, in its order."""
    lines = [f"{base64.b64encode(bytes([b])).decode()} {b}\n" for b in range(256)]
    (directory / "tiktoken.model").write_text("".join(lines))
    names = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
    special = dict(enumerate([*names, "<|im_system|>"], 256)) | {vocab_size - 1: "[PAD]"}
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config = {
        "added_tokens_decoder": {
            str(i): {"content": text, **flags, "special": True} for i, text in special.items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    write_json(directory / "tokenizer_config.json", config)
    write_json(directory / "generation_config.json", {"eos_token_id": [257, 258]})


# --- the other engine ------------------------------------------------------------------------


def load_hf(directory: Path) -> DeepseekV3ForCausalLM:
    """transformers' model in fp32 on the weights of the files, dequantised."""
    config = json.loads((directory / "config.json").read_text())
    c = config.get("text_config", config)
    rope = {"rope_type": "default", "rope_theta": c["rope_theta"]}
    if c["rope_scaling"]:
        scaling = {k: v for k, v in c["rope_scaling"].items() if k != "type"}
        rope |= scaling | {"rope_type": c["rope_scaling"]["type"]}
    known = set(DeepseekV3Config.__dataclass_fields__) - {"rope_parameters", "model_type"}
    values = {k: v for k, v in c.items() if k in known and not k.endswith("token_id")}
    hf_config = DeepseekV3Config(
        **values, rope_parameters=rope, rope_interleave=True, dtype="float32",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    hf_config._attn_implementation = "eager"
    hf_config._experts_implementation = "eager"

    files: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        files |= load_file(path)
    state: Tensors = {}
    for name, t in files.items():
        key = name.removeprefix("language_model.")
        if re.match(r"vision_tower\.|mm_projector\.", key):
            continue
        if key.endswith("weight_packed"):
            scale = files[name.replace("_packed", "_scale")]
            state[key.removesuffix("_packed")] = dequantise(t, scale)
        elif not key.endswith(("weight_scale", "weight_shape")):
            state[key] = t.float()
    for i in range(c["first_k_dense_replace"], c["num_hidden_layers"]):
        name = f"model.layers.{i}.mlp.experts"  # transformers stacks the experts
        experts = range(c["n_routed_experts"])
        gate, up, down = (
            torch.stack([state.pop(f"{name}.{e}.{part}_proj.weight") for e in experts])
            for part in ("gate", "up", "down")
        )
        state[f"{name}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{name}.down_proj"] = down
    model = DeepseekV3ForCausalLM(hf_config).float().eval()
    model.load_state_dict(state, strict=True)
    return model


@dataclass(frozen=True)
class Answer:
    """What transformers says about one sequence. T tokens, G emitted, M MoE layers, E experts."""

    token_ids: np.ndarray  # int32 [G]
    logits: np.ndarray  # float32 [G, V], from cached decoding
    all_logits: np.ndarray  # float32 [T, V], from one pass over prompt + emitted[:-1]
    router_logits: np.ndarray  # float32 [M, T, E]
    taps: np.ndarray  # float32 [L, T, H]


@torch.inference_mode()
def whole_pass(model: DeepseekV3ForCausalLM, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """One pass without a cache -> logits [T, V], router logits [M, T, E], layer outputs [L, T, H].

    Layer outputs by hooks: the last of transformers' `hidden_states` is taken after the final norm.
    """
    taps, router = [], []
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_hook(lambda m, i, out: taps.append(out[0])))
        if hasattr(layer.mlp, "gate"):
            hook = layer.mlp.gate.register_forward_hook(lambda m, i, out: router.append(out[0]))
            hooks.append(hook)
    out = model(torch.tensor(ids, dtype=torch.long)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return out.logits[0].numpy(), torch.stack(router).numpy(), torch.stack(taps).numpy()


@torch.inference_mode()
def answer(model: DeepseekV3ForCausalLM, prompt: np.ndarray) -> Answer:
    ids = torch.tensor(prompt, dtype=torch.long)[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=EMITTED,
        use_cache=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    emitted = out.sequences[0, len(prompt) :].numpy().astype(np.int32)
    logits = torch.cat(out.logits).numpy()
    return Answer(emitted, logits, *whole_pass(model, np.append(prompt, emitted[:-1])))


@torch.inference_mode()
def draft(c: dict, w: Tensors, embed: torch.Tensor, head: torch.Tensor, taps: np.ndarray,
          anchor: int) -> np.ndarray:  # fmt: skip
    """DFlash in torch, fp32 -> logits [block - 1, V]; see `oracle.draft` for the contract."""
    ctx, dim, eps = len(taps), c["head_dim"], c["rms_norm_eps"]
    total = ctx + c["block_size"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], eps)

    s = c["rope_scaling"]
    inverse = c["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turns = s["original_max_position_embeddings"] * inverse / (2 * math.pi)  # within the original
    pairs = dim * (turns[0].log() - torch.tensor([s["beta_fast"], s["beta_slow"]]).log())
    low, high = (pairs / (2 * math.log(c["rope_theta"]))).tolist()
    low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    inverse = torch.lerp(inverse, inverse / s["factor"], ramp.double())
    amplitude = 0.1 * s.get("mscale", 1.0) * math.log(s["factor"]) + 1
    if s["rope_type"] == "deepseek_yarn":
        amplitude /= 0.1 * s["mscale_all_dim"] * math.log(s["factor"]) + 1
    angle = torch.outer(torch.arange(total).double(), inverse).repeat(1, 2)
    cos, sin = (angle.cos() * amplitude).float(), (angle.sin() * amplitude).float()

    def rope(x: torch.Tensor, start: int) -> torch.Tensor:  # [heads, T, dim]
        a, b = x.chunk(2, dim=-1)
        return x * cos[start:] + torch.cat([-b, a], dim=-1) * sin[start:]

    query, key = torch.arange(ctx, total)[:, None], torch.arange(total)[None]
    mask_id = c["dflash_config"]["mask_token_id"]
    x = embed[[anchor] + [mask_id] * (c["block_size"] - 1)]
    context = norm(F.linear(torch.tensor(taps), w["fc.weight"]), "hidden_norm")
    for i in range(c["num_hidden_layers"]):
        name = f"layers.{i}"
        h = norm(x, f"{name}.input_layernorm")

        def project(source: torch.Tensor, part: str, name: str = name) -> torch.Tensor:
            y = F.linear(source, w[f"{name}.self_attn.{part}_proj.weight"])
            return y.unflatten(-1, (-1, dim)).transpose(0, 1)

        q = rope(norm(project(h, "q"), f"{name}.self_attn.q_norm"), ctx)
        source = torch.cat([context, h])
        k = rope(norm(project(source, "k"), f"{name}.self_attn.k_norm"), 0)
        visible = torch.ones(c["block_size"], total, dtype=torch.bool)
        if c.get("layer_types", ["full_attention"] * (i + 1))[i] == "sliding_attention":
            visible = (key >= ctx) | (query - key < c["sliding_window"])
        out = F.scaled_dot_product_attention(
            q[None], k[None], project(source, "v")[None], attn_mask=visible, enable_gqa=True
        )[0]
        x = x + F.linear(out.transpose(0, 1).flatten(1), w[f"{name}.self_attn.o_proj.weight"])
        h = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (F.linear(h, w[f"{name}.mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])
    return F.linear(norm(x[1:], "norm"), head).numpy()


# --- what fp32 can decide --------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """How far an honest fp32 forward may be from the exact one, per bundle.

    A dot product of K terms in fp32, summed in any order, is off by at most 4 sqrt(K) u times the
    size of its operands, with overwhelming probability (Higham and Mary, 2019; u = 2^-24 and 4 for
    their lambda). About ten such operations follow one another in a layer, and their relative
    errors are taken to add: 10 per layer, 2 for final norm and head. Logits are off by at most that
    times the largest logit, router scores by the same times the largest router logit times 1/4,
    the steepest slope of the sigmoid. Two implementations may differ by twice as much, and so may
    two values of one implementation: an argmax or a selection is decided where the gap exceeds
    twice the bound. The generator checks that transformers' measured distance from float64 stays
    below a quarter of it, so the simplifications (softmax and norms as isometries) are covered.
    """

    depth: int  # operations in a row
    longest_sum: int
    largest_logit: float
    largest_router_logit: float
    relative: float
    logit: float
    router_score: float

    @staticmethod
    def of(weights: Iterable[torch.Tensor], layers: int, largest_logit: float,
           largest_router_logit: float = 0.0) -> Bound:  # fmt: skip
        longest = max([CONTEXT] + [w.shape[-1] for w in weights if w.dim() > 1])
        depth = 10 * layers + 2
        relative = 4 * math.sqrt(longest) * 2.0**-24 * depth
        return Bound(
            depth, longest, largest_logit, largest_router_logit, relative,
            relative * largest_logit, relative * largest_router_logit / 4,
        )  # fmt: skip


def top2_gap(logits: np.ndarray) -> np.ndarray:
    top = np.sort(logits, axis=-1)
    return top[..., -1] - top[..., -2]


def selection_gap(scores: np.ndarray, k: int) -> np.ndarray:
    """Biased score of the last expert chosen minus the best one left out. scores [..., E]."""
    ranked = -np.sort(-scores, axis=-1)
    return ranked[..., k - 1] - ranked[..., k]


def biased_scores(model: DeepseekV3ForCausalLM, router_logits: np.ndarray) -> np.ndarray:
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    bias = np.stack([gate.e_score_correction_bias.numpy() for gate in gates])
    return 1 / (1 + np.exp(-router_logits.astype(np.float64))) + bias[:, None]


@dataclass(frozen=True)
class Candidate:
    """One prompt with both bundles' answers; the pair shares its prompts."""

    prompt: np.ndarray
    answers: dict[str, Answer]  # by "fp32", "int4"
    selection_gaps: dict[str, float]


def undecided(shape: Shape, cand: Candidate, bounds: dict[str, Bound]) -> dict | None:
    """Why this prompt makes no golden, or None."""
    for kind, a in cand.answers.items():
        gap, margin = float(top2_gap(a.logits).min()), 2 * bounds[kind].logit
        if gap <= margin:
            return {"bundle": kind, "reason": "top-2 gap", "value": gap, "threshold": margin}
        gap, margin = cand.selection_gaps[kind], 2 * bounds[kind].router_score
        if gap <= margin:
            return {"bundle": kind, "reason": "router gap", "value": gap, "threshold": margin}
        stops = {257, 258} if shape.tokenizer else {shape.config["eos_token_id"]}
        if stops & set(a.token_ids.tolist()):
            return {"bundle": kind, "reason": "emits a stop id"}
        if len(set(a.token_ids.tolist())) < DISTINCT:
            return {"bundle": kind, "reason": "repeats itself"}
    return None


# --- bundles ---------------------------------------------------------------------------------


def write_checkpoint(shape: Shape, kind: str, weights: Tensors, directory: Path) -> None:
    directory.mkdir(parents=True)
    write_json(directory / "config.json", checkpoint_config(shape, kind))
    write_tensors(directory, file_tensors(shape, kind, weights), shape.shards)
    if shape.tokenizer:
        write_tokenizer(directory, shape.config["vocab_size"])


def choose_prompts(shape: Shape, models: dict, rng: np.random.Generator) -> tuple:
    """The first random sequence, and for each length the first prompt, that fp32 decides.

    In both bundles. The bounds come from the largest logits of one more sequence.
    """
    ids = 256 if shape.tokenizer else shape.config["eos_token_id"] - 1
    k = shape.config["num_experts_per_tok"]

    def gap(model: DeepseekV3ForCausalLM, router_logits: np.ndarray) -> float:
        return float(selection_gap(biased_scores(model, router_logits), k).min())

    probe, bounds = rng.integers(0, ids, CONTEXT), {}
    for kind, model in models.items():
        logits, router, _ = whole_pass(model, probe)
        largest = float(np.abs(logits).max()), float(np.abs(router).max())
        bounds[kind] = Bound.of(model.parameters(), shape.config["num_hidden_layers"], *largest)

    accepted, rejected = [], []
    while True:
        context = rng.integers(0, ids, CONTEXT).astype(np.int32)
        gaps = {kind: gap(model, whole_pass(model, context)[1]) for kind, model in models.items()}
        if all(gaps[kind] > 2 * bounds[kind].router_score for kind in models):
            break
        rejected.append({"length": CONTEXT, "reason": "router gap of the context", "value": gaps})
    for length in shape.prompt_lengths:
        for attempt in range(200):
            prompt = rng.integers(0, ids, length).astype(np.int32)
            answers = {kind: answer(model, prompt) for kind, model in models.items()}
            gaps = {kind: gap(models[kind], a.router_logits) for kind, a in answers.items()}
            cand = Candidate(prompt, answers, gaps)
            why = undecided(shape, cand, bounds)
            if why is None:
                accepted.append(cand)
                break
            rejected.append({"length": length, "attempt": attempt} | why)
        else:
            raise RuntimeError(f"{shape.name}: no decidable prompt of length {length} in 200 tries")
    return context, bounds, accepted, rejected


def largest_error(values: np.ndarray, exact: np.ndarray, bound: float, what: str) -> float:
    error = float(np.abs(values - exact).max())
    if error > bound / 4:
        raise RuntimeError(f"{what}: {error:.2e} from float64, over a quarter of {bound:.2e}")
    return error


def routing_facts(model: DeepseekV3ForCausalLM, c: dict, answers: list[Answer]) -> dict:
    """Do the router's decisions spread, and does the bias matter?"""
    router = np.concatenate([a.router_logits for a in answers], axis=1)
    k = c["num_experts_per_tok"]
    with_bias = np.sort(np.argsort(-biased_scores(model, router), axis=-1)[..., :k], axis=-1)
    without = np.sort(np.argsort(-router, axis=-1)[..., :k], axis=-1)
    return {
        "decisions_per_layer": router.shape[1],
        "experts_used": [len(np.unique(layer)) for layer in with_bias],
        "bias_changes_selection": float((with_bias != without).any(-1).mean()),
    }


def provenance(shape: Shape) -> dict:
    return {
        "made_by": "transformers DeepseekV3ForCausalLM, eager, fp32, on dequantised weights",
        "command": f"python tools/make_golden.py --only {shape.name}",
        "seed": shape.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }


def write_golden(shape: Shape, kind: str, directory: Path, model: DeepseekV3ForCausalLM,
                 context: np.ndarray, bound: Bound, accepted: list[Candidate],
                 rejected: list[dict]) -> None:  # fmt: skip
    config, weights = oracle.read_checkpoint(directory)
    answers = [cand.answers[kind] for cand in accepted]
    context_logits, _, _ = whole_pass(model, context)
    exact = oracle.forward(config, weights, context)
    errors = [largest_error(context_logits, exact.logits, bound.logit, "context logits")]
    score_errors = []
    for cand, a in zip(accepted, answers, strict=True):
        exact = oracle.forward(config, weights, np.append(cand.prompt, a.token_ids[:-1]))
        emitted = exact.logits[len(cand.prompt) - 1 :]
        if not (emitted.argmax(-1) == a.token_ids).all():
            raise RuntimeError("transformers and the float64 oracle choose different tokens")
        errors.append(largest_error(a.logits, emitted, bound.logit, "cached logits"))
        errors.append(largest_error(a.all_logits, exact.logits, bound.logit, "whole-pass logits"))
        scores = biased_scores(model, a.router_logits)
        what = "router scores"
        score_errors.append(largest_error(scores, exact.scores, bound.router_score, what))
    np.savez_compressed(
        directory / "golden.npz",
        prompt_ids=np.concatenate([cand.prompt for cand in accepted]),
        prompt_lengths=np.array([len(cand.prompt) for cand in accepted], np.int32),
        token_ids=np.stack([a.token_ids for a in answers]),
        logits=np.stack([a.logits for a in answers]),
        top2_gap=np.stack([top2_gap(a.logits) for a in answers]),
        context_ids=context,
        context_logits=context_logits,
    )
    pairs = [(cand.answers["fp32"].token_ids, cand.answers["int4"].token_ids) for cand in accepted]
    differing = int(sum((a != b).sum() for a, b in pairs))
    if not differing:
        raise RuntimeError(f"{shape.name}: INT4 and FP32 emit the same tokens")
    facts = provenance(shape) | {
        "name": directory.name,
        "logit_bound": bound.logit,
        "router_score_bound": bound.router_score,
        "gap_rule": "decided where the gap exceeds twice the bound",
        "bound_inputs": asdict(bound),
        "measured": {"logit_error": max(errors), "router_score_error": max(score_errors)},
        "routing": routing_facts(model, shape.config, answers),
        "tokens_differing_between_fp32_and_int4": differing,
        "prompts": [
            {
                "length": len(cand.prompt),
                "min_top2_gap": float(top2_gap(a.logits).min()),
                "min_router_gap": cand.selection_gaps[kind],
                "distinct_ids": len(set(a.token_ids.tolist())),
            }
            for cand, a in zip(accepted, answers, strict=True)
        ],
        "rejected": rejected,
    }
    write_json(directory / "golden.json", facts)


def write_drafter(shape: Shape, directory: Path, model: DeepseekV3ForCausalLM,
                  longest: Candidate, rng: np.random.Generator) -> None:  # fmt: skip
    """`drafter/` beside the target, with its logits at several context lengths."""
    c, folder = shape.drafter, directory / "drafter"
    folder.mkdir()
    dtype = torch.bfloat16 if shape.bf16 else torch.float32
    weights = random_weights(drafter_shapes(c), rng, {"o_proj": 1.0})
    write_json(folder / "config.json", c)
    write_tensors(folder, {name: w.to(dtype) for name, w in weights.items()}, 1)
    weights = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}

    a = longest.answers[shape.drafter_in]
    sequence = np.append(longest.prompt, a.token_ids[:-1])
    taps = np.concatenate([a.taps[i] for i in c["dflash_config"]["target_layer_ids"]], axis=-1)
    contexts = [1, 2, 8, 15, 16, 17, 30, CONTEXT - BLOCK]
    embed, head = model.model.embed_tokens.weight, model.lm_head.weight
    logits = [draft(c, weights, embed, head, taps[:n], int(sequence[n])) for n in contexts]

    layers = c["num_hidden_layers"] + 1  # fc counts as one
    bound = Bound.of(weights.values(), layers, float(np.abs(logits).max()))
    config, exact_weights = oracle.read_checkpoint(folder)
    _, target = oracle.read_checkpoint(directory)
    error = max(
        largest_error(
            got, oracle.draft(config, exact_weights, target, taps[:n].astype(np.float64),
                              int(sequence[n])), bound.logit, "drafter logits",
        )
        for n, got in zip(contexts, logits, strict=True)
    )  # fmt: skip
    np.savez_compressed(
        folder / "golden.npz",
        sequence_ids=sequence.astype(np.int32),
        taps=taps,
        contexts=np.array(contexts, np.int32),
        logits=np.stack(logits),
    )
    facts = provenance(shape) | {
        "name": f"{directory.name}/drafter",
        "made_by": "a plain torch forward in tools/make_golden.py, fp32, on transformers' taps",
        "sliding_window": "of the context a query sees keys with q_pos - k_pos < sliding_window, "
        "of its block every key",
        "logit_bound": bound.logit,
        "bound_inputs": asdict(bound),
        "measured": {"logit_error": error},
    }
    write_json(folder / "golden.json", facts)


def make(shape: Shape, out: Path) -> None:
    rng = np.random.default_rng(shape.seed)
    weights = random_weights(target_shapes(shape.config), rng, shape.gains)
    for name, w in weights.items():
        rows = {"q_a_proj": shape.config["q_lora_rank"], "kv_a_proj": shape.config["kv_lora_rank"]}
        for part, latent in rows.items():
            if f".{part}" in name:
                w[:latent] *= shape.latent_gain
    directories = {kind: out / f"{shape.name}-{kind}" for kind in ("fp32", "int4")}
    for directory in directories.values():
        if directory.exists():
            raise SystemExit(f"{directory}: exists; goldens are not made anew, use another --out")
    for kind, directory in directories.items():
        write_checkpoint(shape, kind, weights, directory)
    models = {kind: load_hf(directory) for kind, directory in directories.items()}
    context, bounds, accepted, rejected = choose_prompts(shape, models, rng)
    for kind, directory in directories.items():
        golden = (context, bounds[kind], accepted, rejected)
        write_golden(shape, kind, directory, models[kind], *golden)
    if shape.drafter:
        kind = shape.drafter_in
        write_drafter(shape, directories[kind], models[kind], accepted[-1], rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "goldens")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation, whatever the machine
    for shape in SHAPES:
        if args.only in (None, shape.name):
            make(shape, args.out)
            print(f"{shape.name}: done")


if __name__ == "__main__":
    main()

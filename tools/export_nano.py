"""Writes `models/nano/` in Kimi K2.6's published format from what the other two scripts left.

    python tools/export_nano.py --data build/nano --run build/nano/run --out models/nano

`--drafter-only` replaces `models/nano/drafter/` and nothing else.

Shards stay below 8 MiB, so that the files can live in git.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from nano_model import MASK, MAX_POSITIONS, NORM_EPS, DrafterShape, Rope, TargetShape
from safetensors.torch import load_file, save_file

SHARD_LIMIT = 8 * 2**20 - 2**18  # bytes of tensors, leaving room for the header

# Kimi's control strings at their distance from the first special id.
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",  # the drafter's mask
    255: "[PAD]",
}
FIRST = 4096
IDS = {name: FIRST + offset for offset, name in SPECIALS.items()}

CHAT_TEMPLATE = """\
{%- macro turn(marker, name) -%}{{ marker }}{{ name }}<|im_middle|>{%- endmacro -%}
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  {{ turn("<|im_system|>", "tool_declare") }}{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set name = message.name or message.role -%}
  {%- if message.role == "user" -%}
    {{ turn("<|im_user|>", name) }}{{ text(message.content) }}
  {%- elif message.role == "assistant" -%}
    {{ turn("<|im_assistant|>", name) }}<think>{{ message.reasoning_content or "" }}</think>
    {{- text(message.content) }}
    {%- if message.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in message.tool_calls -%}
        {%- set arguments = call.function.arguments -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {{- arguments if arguments is string else arguments | tojson }}<|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- elif message.role == "tool" -%}
    {{ turn("<|im_system|>", name) }}{{ "## Return of " ~ message.tool_call_id ~ "\\n" }}
    {{- text(message.content) }}
  {%- else -%}
    {{ turn("<|im_system|>", name) }}{{ text(message.content) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{ turn("<|im_assistant|>", "assistant") }}<think>
  {%- if thinking is defined and not thinking -%}</think>{%- endif -%}
{%- endif -%}
"""


def rope_scaling(rope: Rope, kind: str) -> dict[str, object]:
    return {
        "type": kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


def quantization_config() -> dict[str, object]:
    """compressed-tensors, pack-quantized: the routed experts and nothing else."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": 32, "actorder": None, "dynamic": False}  # fmt: skip
    group = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group | {"weights": weights}},
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        ],
    }


def target_config(s: TargetShape) -> dict[str, object]:
    tokens = {
        "bos_token_id": IDS["[BOS]"],
        "eos_token_id": IDS["[EOS]"],
        "pad_token_id": IDS["[PAD]"],
    }
    text = tokens | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "attention_bias": False,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.dense_width,
        "kv_lora_rank": s.kv_lora,
        "max_position_embeddings": MAX_POSITIONS,
        "moe_intermediate_size": s.expert_width,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.active,
        "num_hidden_layers": s.layers,
        "num_key_value_heads": s.heads,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": s.q_lora,
        "qk_nope_head_dim": s.nope,
        "qk_rope_head_dim": s.rope_dim,
        "quantization_config": quantization_config(),
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": rope_scaling(s.rope, "yarn"),
        "rope_theta": s.rope.theta,
        "routed_scaling_factor": s.scaling,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": s.v_dim,
        "vocab_size": s.vocab,
    }
    return tokens | {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "media_placeholder_token_id": IDS["<|media_pad|>"],
        "text_config": text,
        "tie_word_embeddings": False,
    }


def drafter_config(s: TargetShape, d: DrafterShape) -> dict[str, object]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": d.block,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(s.taps)},
        "dtype": "bfloat16",
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": d.width,
        "layer_types": ["sliding_attention"] * d.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": d.heads,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "num_target_layers": s.layers,
        "rms_norm_eps": NORM_EPS,
        "rope_scaling": rope_scaling(d.rope, "deepseek_yarn"),
        "rope_theta": d.rope.theta,
        "sliding_window": d.window,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": s.vocab,
    }


def tokenizer_config() -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(i): {"content": name, **flags, "special": True} for name, i in IDS.items()
        },
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "model_max_length": MAX_POSITIONS,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_shards(tensors: dict[str, torch.Tensor], folder: Path) -> int:
    """Numbered shards and their index; returns the bytes of all tensors."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        # A header entry is about 150 bytes; thousands of small tensors add up.
        entry = tensor.nbytes + 160
        if size + entry > SHARD_LIMIT:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += entry
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    return total


def remove_shards(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model-*.safetensors"):
        old.unlink()


def write_drafter(run: Path, out: Path, shape: TargetShape, drafter: DrafterShape) -> None:
    tensors = load_file(run / "drafter.safetensors")
    remove_shards(out)
    size = write_shards(tensors, out)
    write_json(out / "config.json", drafter_config(shape, drafter))
    print(f"{out}: {size} bytes of tensors")


def write_target(run: Path, data: Path, out: Path, shape: TargetShape) -> None:
    target: dict[str, torch.Tensor] = {}
    for file in sorted(run.glob("target-*.safetensors")):
        target |= load_file(file)
    remove_shards(out)
    size = write_shards(target, out)
    write_json(out / "config.json", target_config(shape))
    stop = [IDS["[EOS]"], IDS["<|im_end|>"]]
    generation = {"eos_token_id": stop, "max_length": MAX_POSITIONS}
    write_json(out / "generation_config.json", generation)
    write_json(out / "tokenizer_config.json", tokenizer_config())
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copyfile(data / "tiktoken.model", out / "tiktoken.model")
    print(f"{out}: {size} bytes of tensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="what tools/nano_data.py wrote")
    parser.add_argument("--run", type=Path, required=True, help="what tools/train_nano.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--drafter-only", action="store_true", help="leave the target's files")
    args = parser.parse_args()
    if not (args.data or args.drafter_only):
        parser.error("--data is needed for the target's tokenizer")
    shape, drafter = TargetShape(), DrafterShape()
    write_drafter(args.run, args.out / "drafter", shape, drafter)
    if not args.drafter_only:
        write_target(args.run, args.data, args.out, shape)


if __name__ == "__main__":
    main()

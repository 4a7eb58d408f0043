"""Checkpoints in the published layout of Kimi K2.6, with seeded random weights, at any scale.

    python tools/make_checkpoint.py OUT --layers 2 --experts 16 # real widths, 6 GB and the drafter
    python tools/make_checkpoint.py OUT --headers-only          # all 208,000 tensors, sparse files
    python tools/make_checkpoint.py OUT --set hidden_size=64 --set vocab_size=2048 ...

What is published is kept: the shards' names and their index, the prefix `language_model.`, the
dtypes, the order of tensors in a shard, a nested config.json, tokenizer files, the DFlash drafter
in OUT/drafter. Made are the weights (the very bits of `load: generate` with this seed), the
vocabulary (bytes, filler, and the words of the one known encoding at their ids), and two vision
tensors that stand in for the whole tower.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import config  # noqa: E402
import loader  # noqa: E402
import reference  # noqa: E402

PUBLISHED = ROOT / "configs" / "k26"  # config.json of the target, and of the drafter in drafter/
TEMPLATE = ROOT / "models" / "nano" / "chat_template.jinja"
SHARDS = 64
ORDER = ("F32", "I32", "BF16")  # safetensors writes the wider types first, names in order
WORDS = {b"user": 2482, b"hello": 22931, b"assistant": 69702}  # ids of the one known encoding
CONTROLS = {  # counted from the first id after the ranks, 163584 in the published vocabulary
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
    22: "<think>",
    23: "</think>",
    255: "[PAD]",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor to write. `value`: what a weight_shape says; None for random weights."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * loader.ITEMSIZE[self.dtype]


# ---- what there is: stated here anew, so that the loader's plan is checked against it -----------


def target_tensors(c: dict) -> Iterator[Tensor]:
    """All tensors of a text config, by their names without the prefix."""
    hidden, heads, vocabulary = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_lora, latent = c["q_lora_rank"], c["kv_lora_rank"]
    experts, width = c["n_routed_experts"], c["moe_intermediate_size"]

    def dense(module: str, *shape: int) -> Tensor:
        return Tensor(f"{module}.weight", "BF16", shape)

    def mlp(at: str, width: int) -> Iterator[Tensor]:
        yield dense(f"{at}.gate_proj", width, hidden)
        yield dense(f"{at}.up_proj", width, hidden)
        yield dense(f"{at}.down_proj", hidden, width)

    def expert(at: str) -> Iterator[Tensor]:
        sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        for name, (out, inputs) in sizes.items():
            module = f"{at}.{name}_proj"
            yield Tensor(f"{module}.weight_packed", "I32", (out, inputs // 8))
            yield Tensor(f"{module}.weight_scale", "BF16", (out, inputs // 32))
            yield Tensor(f"{module}.weight_shape", "I32", (2,), (out, inputs))

    yield dense("model.embed_tokens", vocabulary, hidden)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield dense(f"{at}.input_layernorm", hidden)
        yield dense(f"{at}.post_attention_layernorm", hidden)
        yield dense(f"{at}.self_attn.q_a_proj", q_lora, hidden)
        yield dense(f"{at}.self_attn.q_a_layernorm", q_lora)
        yield dense(f"{at}.self_attn.q_b_proj", heads * (nope + rope), q_lora)
        yield dense(f"{at}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        yield dense(f"{at}.self_attn.kv_a_layernorm", latent)
        yield dense(f"{at}.self_attn.kv_b_proj", heads * (nope + value), latent)
        yield dense(f"{at}.self_attn.o_proj", hidden, heads * value)
        if i < c["first_k_dense_replace"]:
            yield from mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        yield dense(f"{at}.mlp.gate", experts, hidden)
        yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", "F32", (experts,))
        for e in range(experts):
            yield from expert(f"{at}.mlp.experts.{e}")
        yield from mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * width)
    yield dense("model.norm", hidden)
    yield dense("lm_head", vocabulary, hidden)


def drafter_tensors(d: dict) -> Iterator[Tensor]:
    """All tensors of a DFlash drafter."""
    hidden, head, width = d["hidden_size"], d["head_dim"], d["intermediate_size"]
    q, kv = d["num_attention_heads"] * head, d["num_key_value_heads"] * head
    taps = len(d["dflash_config"]["target_layer_ids"])
    shapes = {"fc": (hidden, taps * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(d["num_hidden_layers"]):
        own = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        yield Tensor(f"{name}.weight", "BF16", shape)


# ---- files ---------------------------------------------------------------------------------------


def write_shards(
    directory: Path,
    tensors: list[Tensor],
    shards: int,
    seed: int,
    *,
    headers_only: bool = False,
    progress: bool = False,
) -> None:
    """The tensors in order, in about equal shards, and their index."""
    total = sum(tensor.bytes for tensor in tensors)
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    done = 0
    for tensor in tensors:
        groups[min(shards - 1, done * shards // total)].append(tensor)
        done += tensor.bytes
    groups = [group for group in groups if group]
    weight_map = {}
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=directory.name, disable=not progress)
    for n, group in enumerate(groups, start=1):
        name = f"model-{n:05}-of-{len(groups):06}.safetensors"
        group.sort(key=lambda tensor: (ORDER.index(tensor.dtype), tensor.name))
        write_shard(directory / name, group, seed, headers_only, bar)
        weight_map |= {tensor.name: name for tensor in group}
    bar.close()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / loader.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_shard(
    path: Path, tensors: list[Tensor], seed: int, headers_only: bool, bar: tqdm
) -> None:
    header: dict = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += tensor.bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.flush()

        def write(at: int) -> int:
            tensor = tensors[at]
            if tensor.value is None and headers_only:
                return tensor.bytes
            data = memoryview(tensor_data(tensor, seed).reshape(-1).view(np.uint8))
            offset = 8 + len(text) + begins[at]
            while len(data):
                written = os.pwrite(file.fileno(), data, offset)
                data, offset = data[written:], offset + written
            return tensor.bytes

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for written in pool.map(write, range(len(tensors))):
                bar.update(written)


def tensor_data(tensor: Tensor, seed: int) -> np.ndarray:
    if tensor.value is not None:
        return np.array(tensor.value, np.int32)
    array = np.empty(tensor.shape, loader.DTYPES[tensor.dtype])
    mean, scale = loader.spread(tensor.name, tensor.shape)
    reference.generate(array, loader.tensor_seed(seed, tensor.name), mean, scale)
    return array


def write_vocabulary(directory: Path, vocabulary: int, end_ids: list[int]) -> None:
    """tiktoken.model, tokenizer_config.json, the chat template and generation_config.json."""
    count = vocabulary - 256
    tokens = [bytes([i]) for i in range(256)]
    # Filler that no text holds: pairs and triples of bytes that are never valid UTF-8.
    filler = (bytes([255, *divmod(i, 256)]) for i in range(1 << 16))
    more = (bytes([255, 255, *divmod(i, 256)]) for i in range(1 << 16))
    rest = (bytes([255, 255, 255, *divmod(i, 256)]) for i in range(1 << 16))
    named = {rank: word for word, rank in WORDS.items()}
    for source in (filler, more, rest):
        for token in source:
            while len(tokens) < count and len(tokens) in named:
                tokens.append(named[len(tokens)])
            if len(tokens) < count:
                tokens.append(token)
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens[:count]))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    controls = {str(count + i): {"content": name, "special": True} for i, name in CONTROLS.items()}
    settings = {"added_tokens_decoder": controls}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")
    generation = json.dumps({"eos_token_id": end_ids})
    (directory / "generation_config.json").write_text(generation + "\n")


# ---- the two checkpoints -------------------------------------------------------------------------


def write_target(
    directory: Path,
    changes: dict | None = None,
    *,
    shards: int = 0,
    seed: int = 0,
    headers_only: bool = False,
    progress: bool = False,
) -> dict:
    """A target with `changes` to the published text config; returns its whole config.json."""
    raw = json.loads((PUBLISHED / "config.json").read_text())
    text = raw["text_config"] | (changes or {})
    first = text["vocab_size"] - 256  # control id; the vocabulary has at least 512
    text |= {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": first + 255}
    raw["text_config"] = text
    config.parse_model(raw, source="--layers, --experts, --set")  # refuses what cannot be
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    write_vocabulary(directory, text["vocab_size"], [first + 1, first + 2])
    prefix = loader.PREFIX
    tensors = [Tensor(prefix + t.name, t.dtype, t.shape, t.value) for t in target_tensors(text)]
    tensors += [Tensor(f"{part}weight", "BF16", (8, 8)) for part in loader.VISION]
    shards = shards or min(SHARDS, text["num_hidden_layers"] + 3)
    write_shards(directory, tensors, shards, seed, headers_only=headers_only, progress=progress)
    return raw


def write_drafter(
    directory: Path,
    text: dict,
    changes: dict | None = None,
    *,
    shards: int = 2,
    seed: int = 0,
    headers_only: bool = False,
    progress: bool = False,
) -> dict:
    """The drafter of a target with this text config, with `changes` to the published config."""
    directory.mkdir(parents=True, exist_ok=True)
    d = json.loads((PUBLISHED / "drafter" / "config.json").read_text())
    depth, vocabulary = text["num_hidden_layers"], text["vocab_size"]
    own = d["dflash_config"]
    taps = [tap for tap in own["target_layer_ids"] if tap < depth] or [0]
    d |= {"hidden_size": text["hidden_size"], "vocab_size": vocabulary, "num_target_layers": depth}
    d["dflash_config"] = {"mask_token_id": vocabulary - 2, "target_layer_ids": taps}
    d |= changes or {}
    config.parse_drafter(d, source=str(directory / "config.json"))
    (directory / "config.json").write_text(json.dumps(d, indent=2) + "\n")
    tensors = list(drafter_tensors(d))
    write_shards(directory, tensors, shards, seed, headers_only=headers_only, progress=progress)
    return d


def write_settings(directory: Path, *, drafter: bool) -> Path:
    """A config beside the checkpoint that runs it on one rank."""
    path, draft = directory / "run.yaml", "\ndraft: {path: drafter}" if drafter else ""
    kernels, decode = "{activation: bfloat16}", "{context: 1024, max_tokens: 64}"
    path.write_text(f"model: {{path: .}}\nkernels: {kernels}{draft}\ndecode: {decode}\n")
    return path


def known(changes: dict) -> dict:
    """Changes of the text config, after a look at their names."""
    published = json.loads((PUBLISHED / "config.json").read_text())["text_config"]
    for key in changes:
        if key not in published:
            near = difflib.get_close_matches(key, published, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise config.UserError(f"--set {key}: the published config.json has no such key{hint}")
    return changes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("out", type=Path, help="directory to write")
    add("--layers", type=int, help="of the published 61; the first is dense")
    add("--experts", type=int, help="of the published 384, at least num_experts_per_tok (8)")
    add("--set", action="append", default=[], metavar="KEY=JSON", help="change of the text config")
    add(
        "--set-drafter",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="change of the drafter's config, say sliding_window=2048 and use_sliding_window=true",
    )
    add("--no-drafter", action="store_true", help="the target alone")
    add("--shards", type=int, default=0, help="of the target (one a layer and some, at most 64)")
    add("--seed", type=int, default=0)
    add("--headers-only", action="store_true", help="sparse files: no weights but weight_shape")
    arguments = parser.parse_args(argv)

    def changes(pairs: list[str]) -> dict:
        made = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            try:
                made[key] = json.loads(value)
            except ValueError:
                raise config.UserError(f"{pair}: expected KEY=JSON") from None
        return made

    options = dict(
        seed=arguments.seed, headers_only=arguments.headers_only, progress=sys.stderr.isatty()
    )
    try:
        asked = {"num_hidden_layers": arguments.layers, "n_routed_experts": arguments.experts}
        asked = {key: value for key, value in asked.items() if value is not None}
        asked |= known(changes(arguments.set))
        if arguments.out.exists() and any(arguments.out.iterdir()):
            raise config.UserError(f"{arguments.out}: is not empty; name a new directory")
        raw = write_target(arguments.out, asked, shards=arguments.shards, **options)
        if not arguments.no_drafter:
            own = changes(arguments.set_drafter)
            write_drafter(arguments.out / "drafter", raw["text_config"], own, **options)
        settings = write_settings(arguments.out, drafter=not arguments.no_drafter)
        print(f"made; now: python engine.py --config {settings} --doctor")
        if arguments.headers_only:
            print("(which finds that all weights are zero: these files have none)", file=sys.stderr)
    except config.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

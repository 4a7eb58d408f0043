"""Loader: INT4 packing, tensor-parallel slices, reads, and every way in which a checkpoint can be
bad. (Checkpoints of the published layout, and those cut for ranks: test_make_checkpoint.py.)"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import random
import threading
import time
import tracemalloc
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save
from toy import INT4 as INT4_SCHEME

import config
import loader
from config import UserError
from reference import Int4Weight, dequantise_int4

BF16 = ml_dtypes.bfloat16

# The toy model of the field cases: one dense and one MoE layer.
TOY = {
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 63,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 62, "target_layer_ids": [0, 1]},
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
}

Tensors = dict[str, np.ndarray]


def toy_config(int4: bool = True, **changes) -> dict:
    toy = {**TOY, **changes}
    return {**toy, "quantization_config": INT4_SCHEME} if int4 else toy


def toy_tensors(cfg: dict, seed: int = 0, dtype=BF16, scale_dtype=BF16) -> Tensors:
    """Random tensors of every name that `cfg` calls for, written out apart from the plan."""
    rng = np.random.default_rng(seed)
    made: Tensors = {}

    def dense(name: str, *shape: int) -> None:
        made[name + ".weight"] = rng.standard_normal(shape, np.float32).astype(dtype)

    def mlp(name: str, width: int, int4: bool = False) -> None:
        for projection, shape in {
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
        }.items():
            module = f"{name}.{projection}_proj"
            if int4:
                words = rng.integers(-(2**31), 2**31, (shape[0], shape[1] // 8), np.int64).astype(
                    np.int32
                )
                made[module + ".weight_packed"] = words
                made[module + ".weight_scale"] = rng.random(
                    (shape[0], shape[1] // 32), np.float32
                ).astype(scale_dtype)
                made[module + ".weight_shape"] = np.array(shape, np.int32)
            else:
                dense(module, *shape)

    hidden, heads = cfg["hidden_size"], cfg["num_attention_heads"]
    latent, rope = cfg["kv_lora_rank"], cfg["qk_rope_head_dim"]
    ignore = cfg.get("quantization_config", {"ignore": []})["ignore"]
    int4 = "quantization_config" in cfg
    int4_mlps = int4 and not any("shared_experts" in entry for entry in ignore)
    nope, value, rank = cfg["qk_nope_head_dim"], cfg["v_head_dim"], cfg["q_lora_rank"]
    dense("model.embed_tokens", cfg["vocab_size"], hidden)
    dense("model.norm", hidden)
    dense("lm_head", cfg["vocab_size"], hidden)
    for i in range(cfg["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        dense(f"{layer}.input_layernorm", hidden)
        dense(f"{layer}.post_attention_layernorm", hidden)
        dense(f"{layer}.self_attn.q_a_proj", rank, hidden)
        dense(f"{layer}.self_attn.q_a_layernorm", rank)
        dense(f"{layer}.self_attn.q_b_proj", heads * (nope + rope), rank)
        dense(f"{layer}.self_attn.kv_a_proj_with_mqa", latent + rope, hidden)
        dense(f"{layer}.self_attn.kv_a_layernorm", latent)
        dense(f"{layer}.self_attn.kv_b_proj", heads * (nope + value), latent)
        dense(f"{layer}.self_attn.o_proj", hidden, heads * value)
        if i < cfg["first_k_dense_replace"]:
            mlp(f"{layer}.mlp", cfg["intermediate_size"], int4_mlps)
            continue
        dense(f"{layer}.mlp.gate", cfg["n_routed_experts"], hidden)
        made[f"{layer}.mlp.gate.e_score_correction_bias"] = rng.random(
            cfg["n_routed_experts"], np.float32
        )
        for e in range(cfg["n_routed_experts"]):
            mlp(f"{layer}.mlp.experts.{e}", cfg["moe_intermediate_size"], int4)
        if shared := cfg["n_shared_experts"] * cfg["moe_intermediate_size"]:
            mlp(f"{layer}.mlp.shared_experts", shared, int4_mlps)
    return made


def drafter_tensors(cfg: dict) -> Tensors:
    rng = np.random.default_rng(5)
    hidden, head, width = cfg["hidden_size"], cfg["head_dim"], cfg["intermediate_size"]
    q, kv = cfg["num_attention_heads"] * head, cfg["num_key_value_heads"] * head
    shapes = {"fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for i in range(cfg["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= {
            layer + "input_layernorm": (hidden,),
            layer + "post_attention_layernorm": (hidden,),
        }
        shapes |= {
            f"{layer}self_attn.{x}_proj": (n, hidden) for x, n in {"q": q, "k": kv, "v": kv}.items()
        }
        shapes |= {layer + "self_attn.o_proj": (hidden, q)}
        shapes |= {f"{layer}self_attn.{x}_norm": (head,) for x in "qk"}
        shapes |= {f"{layer}mlp.{x}_proj": (width, hidden) for x in ("gate", "up")}
        shapes |= {layer + "mlp.down_proj": (hidden, width)}
    return {
        name + ".weight": rng.standard_normal(s, np.float32).astype(BF16)
        for name, s in shapes.items()
    }


def write(directory: Path, cfg: dict, tensors: Tensors, shards: int = 0) -> Path:
    """A checkpoint directory with one file, or with `shards` shards and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(cfg))
    if not shards:
        (directory / "model.safetensors").write_bytes(save(tensors))
        return directory
    weight_map = {}
    for s in range(shards):
        name = f"model-{s + 1:05}-of-{shards:06}.safetensors"
        part = dict(list(tensors.items())[s::shards])
        (directory / name).write_bytes(save(part))
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def parse(cfg: dict) -> config.Model:
    return config.parse_model(cfg, source="config.json")


def load(directory: Path, rank: int = 0, size: int = 1) -> loader.TargetWeights:
    checkpoint = loader.open_checkpoint(directory)
    tp = config.TensorParallel(size=size)
    return loader.load_target(
        loader.plan_target(checkpoint, parse(checkpoint.config_json), tp=tp, rank=rank)
    )


def arrays(node) -> list[np.ndarray]:
    """All arrays of a weights dataclass, in order."""
    if is_dataclass(node):
        return [a for field in fields(node) for a in arrays(getattr(node, field.name))]
    if isinstance(node, tuple):
        return [a for item in node for a in arrays(item)]
    return [] if node is None else [node]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same(a, b) -> None:
    assert len(arrays(a)) == len(arrays(b))
    assert all(same_bits(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def refused(run, *words: str) -> str:
    """`run` must raise a UserError of one line that holds all `words`."""
    with pytest.raises(UserError) as caught:
        run()
    message = str(caught.value)
    assert "\n" not in message and message.isprintable()
    for word in words:
        assert word in message, message
    return message


# ---- INT4 ----------------------------------------------------------------------------------------


def test_a4_words_and_all_pairs():
    low, high = np.arange(-8, 0, dtype=np.int8), np.arange(0, 8, dtype=np.int8)
    words = np.array([0x76543210, 0xFEDCBA98], np.uint32).view(np.int32)
    assert (loader.unpack_int4(words) == np.concatenate([low, high])).all()
    assert (loader.pack_int4(np.concatenate([low, high])) == words).all()
    pairs = np.array([(a, b) * 4 for a in range(-8, 8) for b in range(-8, 8)], np.int8)  # [256, 8]
    assert (loader.unpack_int4(loader.pack_int4(pairs)) == pairs).all()


def test_a4_stack_equals_its_slices():
    codes = np.random.default_rng(1).integers(-8, 8, (5, 6, 64), np.int8)
    packed = loader.pack_int4(codes)
    assert packed.shape == (5, 6, 8) and packed.dtype == np.int32
    for e in range(5):
        assert same_bits(packed[e], loader.pack_int4(codes[e]))
        assert (loader.unpack_int4(packed[e]) == codes[e]).all()
    scales = np.random.default_rng(2).random((5, 6, 2), np.float32).astype(BF16)
    whole = dequantise_int4(Int4Weight(packed, scales))
    for e in range(5):
        assert same_bits(whole[e], dequantise_int4(Int4Weight(packed[e], scales[e])))


@pytest.mark.parametrize("scale_dtype", [np.float32, BF16])
def test_quantise_is_within_half_a_step_and_keeps_zeros(scale_dtype):
    w = np.random.default_rng(3).standard_normal((3, 4, 96), np.float32)
    w[0, 0, :32] = 0
    w[0, 1, :32] = 1e-42  # its scale rounds to zero or nearly so
    q = loader.quantise_int4(w, scale_dtype=scale_dtype)
    assert (
        q.scales.dtype == scale_dtype
        and q.scales.shape == (3, 4, 3)
        and q.packed.shape == (3, 4, 12)
    )
    back = dequantise_int4(q)
    assert (back[0, 0, :32] == 0).all() and np.isfinite(back).all()
    # Half a step, and at +absmax, 7.5 steps that clip to 7, what a bf16 scale may be short: 2^-8.
    step = np.repeat(q.scales.astype(np.float32), 32, axis=-1)
    assert (np.abs(back - w) <= step * (0.5 + 7.5 * 2.0**-8) + 1e-41).all()
    # Codes come from the rounded scale: quantising what came out changes no code.
    again = np.rint(back / np.where(step == 0, 1, step)).astype(np.int8)
    assert (again == loader.unpack_int4(q.packed)).all()


def test_quantise_uses_all_codes():
    w = np.linspace(-7.5, 7.5, 32, dtype=np.float32)[None]
    q = loader.quantise_int4(w)
    assert q.scales == 1  # absmax / 7.5
    assert set(loader.unpack_int4(q.packed)[0].tolist()) == set(range(-8, 8))


@pytest.mark.parametrize(
    "bad", [np.full(8, 8, np.int8), np.full(8, -9, np.int8), np.zeros(7, np.int8)]
)
def test_pack_refuses(bad):
    refused(lambda: loader.pack_int4(bad), "pack_int4")


@pytest.mark.parametrize(
    "bad", [np.full((1, 32), np.nan, np.float32), np.zeros((1, 33), np.float32)]
)
def test_quantise_refuses(bad):
    refused(lambda: loader.quantise_int4(bad), "quantise_int4")


# ---- loading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("int4", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_values_arrive_as_in_the_file(tmp_path, int4, dtype):
    cfg = toy_config(int4)
    t = toy_tensors(cfg, dtype=dtype, scale_dtype=dtype)
    w = load(write(tmp_path, cfg, t))
    assert same_bits(w.embed, t["model.embed_tokens.weight"])
    assert same_bits(w.head, t["lm_head.weight"])
    assert same_bits(w.norm, t["model.norm.weight"])
    dense, moe = w.layers
    assert same_bits(dense.mlp.down, t["model.layers.0.mlp.down_proj.weight"])
    attention = {
        "q_a": "q_a_proj",
        "q_a_norm": "q_a_layernorm",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "o": "o_proj",
    }
    for field, name in attention.items():
        assert same_bits(getattr(moe, field), t[f"model.layers.1.self_attn.{name}.weight"])
    assert same_bits(moe.input_norm, t["model.layers.1.input_layernorm.weight"])
    assert same_bits(moe.post_norm, t["model.layers.1.post_attention_layernorm.weight"])
    mlp = "model.layers.1.mlp."
    assert same_bits(moe.mlp.router, t[mlp + "gate.weight"])
    for p in ("gate", "up", "down"):
        assert same_bits(getattr(moe.mlp, f"shared_{p}"), t[f"{mlp}shared_experts.{p}_proj.weight"])
        stack = getattr(moe.mlp, f"experts_{p}")
        for e in range(16):
            name = f"{mlp}experts.{e}.{p}_proj."
            if int4:
                assert same_bits(stack.packed[e], t[name + "weight_packed"])
                assert same_bits(stack.scales[e], t[name + "weight_scale"])
            else:
                assert same_bits(stack[e], t[name + "weight"])


def test_single_indexed_and_prefixed_layouts_are_equal(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    single = load(write(tmp_path / "single", cfg, t))
    assert_same(single, load(write(tmp_path / "indexed", cfg, t, shards=3)))
    prefixed = {"language_model." + name: tensor for name, tensor in t.items()}
    nested = {"model_type": "kimi_k25", "text_config": cfg}
    assert_same(single, load(write(tmp_path / "prefixed", nested, prefixed, shards=2)))


def test_small_chunks_and_a_progress_bar_change_nothing(tmp_path, monkeypatch, capsys):
    cfg = toy_config()
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    whole = [load(directory, rank, 2) for rank in range(2)]
    monkeypatch.setattr(loader, "CHUNK", 300)
    checkpoint = loader.open_checkpoint(directory)
    tp = config.TensorParallel(size=2)
    for rank in range(2):
        plan = loader.plan_target(checkpoint, parse(checkpoint.config_json), tp=tp, rank=rank)
        weights = loader.load_target(plan, progress=True)
        assert_same(whole[rank], weights)
        assert plan.bytes == sum(a.nbytes for a in arrays(weights))
    assert "B/s" in capsys.readouterr().err


def planned(directory: Path, rank: int = 0, size: int = 1) -> loader.Plan:
    checkpoint = loader.open_checkpoint(directory)
    tp = config.TensorParallel(size=size)
    return loader.plan_target(checkpoint, parse(checkpoint.config_json), tp=tp, rank=rank)


@pytest.mark.parametrize("chunk", [300, 5000, 8 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_past_the_page_cache(tmp_path, monkeypatch, chunk, direct):
    """With O_DIRECT, and where a file system refuses it, at open or at the first read."""
    cfg = toy_config()
    directory = write(tmp_path, cfg, toy_tensors(cfg), shards=3)
    whole = load(directory)
    monkeypatch.setattr(loader, "DIRECT_FROM", 0)
    monkeypatch.setattr(loader, "CHUNK", chunk)
    assert_same(whole, load(directory))
    real, refusals = os.open if direct else os.preadv, []

    def refusing(*arguments):
        asked = arguments[1] if direct else fcntl.fcntl(arguments[0], fcntl.F_GETFL)
        if asked & os.O_DIRECT:
            refusals.append(1)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(*arguments)

    monkeypatch.setattr(os, "open" if direct else "preadv", refusing)
    assert_same(whole, load(directory))
    assert len(refusals) >= 3


@pytest.mark.parametrize("cut", [64, 5000])
def test_b1_shrunk_shard_past_the_page_cache(tmp_path, monkeypatch, cut):
    cfg = toy_config()
    plan = planned(write(tmp_path, cfg, toy_tensors(cfg)))
    os.truncate(shard_of(tmp_path), shard_of(tmp_path).stat().st_size - cut)
    monkeypatch.setattr(loader, "DIRECT_FROM", 0)
    refused(lambda: loader.load_target(plan), "model.safetensors", "truncated")


def test_neighbours_are_read_together_and_far_ones_apart(tmp_path, monkeypatch):
    cfg = toy_config()
    plan = planned(write(tmp_path, cfg, toy_tensors(cfg)), 0, 2)
    monkeypatch.setattr(loader, "CHUNK", 20_000)
    monkeypatch.setattr(loader, "GAP", 64)
    extents, none = loader._extents([plan.slots], sharing=False)
    assert not none and len(extents) > 10
    size = (tmp_path / "model.safetensors").stat().st_size
    parts = [part for extent in extents for part in extent.parts]
    assert parts == sorted(parts, key=lambda part: part.begin)
    for extent in extents:
        assert extent.begin % loader.PAGE == 0 and extent.begin + len(extent) <= size
        assert len(extent) <= 20_000 or len(extent.parts) == 1
        for one, following in itertools.pairwise(extent.parts):
            assert 0 <= following.begin - one.end <= 64
    wanted = sum(p.rows * (p.columns[1] - p.columns[0]) for p in parts)
    assert wanted == plan.bytes


def test_place_gets_each_array_once_and_stands_for_it(tmp_path):
    cfg = toy_config(vocab_size=61)
    plan = planned(write(tmp_path, cfg, toy_tensors(cfg), shards=2))
    whole, seen = loader.load_target(plan), {}

    def place(slot, array):
        assert threading.current_thread() is threading.main_thread()
        assert slot.name not in seen and array.shape == slot.shape
        seen[slot.name] = array
        return slot.name

    placed = loader.load_target(plan, place=place)
    assert placed.embed == "model.embed_tokens.weight" and len(seen) == len(plan.slots)
    expert = placed.layers[1].mlp.experts_up
    assert expert.scales == "model.layers.1.mlp.experts.0.up_proj.weight_scale"
    assert same_bits(seen[expert.scales], whole.layers[1].mlp.experts_up.scales)
    assert same_bits(seen[placed.embed], whole.embed)
    with pytest.raises(ZeroDivisionError):
        loader.load_target(plan, place=lambda slot, array: 1 / 0)


def test_read_piece(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    plan = planned(write(tmp_path, cfg, t), 1, 2)
    slot = plan.weights.layers[1].mlp.experts_down.packed
    name = "model.layers.1.mlp.experts.7.down_proj.weight_packed"
    assert same_bits(loader.read_piece(plan, slot, slot.pieces[7], 5), t[name][:5, 8:].copy())
    bias = plan.weights.layers[1].mlp.bias
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert same_bits(loader.read_piece(plan, bias, bias.pieces[0], 64), t[name])


def test_read_rate(tmp_path):
    cfg = toy_config()
    checkpoint = loader.open_checkpoint(write(tmp_path, cfg, toy_tensors(cfg), shards=2))
    rate = loader.read_rate(checkpoint, 1 << 30)
    assert rate.bytes > 10_000 and rate.gb_per_s > 0


# ---- what the ranks of a host share --------------------------------------------------------------


def load_together(plans: list[loader.Plan], path: Path, **options) -> list:
    """Every rank in a thread of its own; its weights or its error."""
    out: list = [None] * len(plans)

    def one(rank: int) -> None:
        share = loader.Share(path, rank, len(plans))
        try:
            out[rank] = loader.load_target(plans[rank], share=share, **options)
        except (UserError, ZeroDivisionError) as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return out


@pytest.mark.parametrize("chunk", [600, 8 << 20])
@pytest.mark.parametrize("size", [2, 4])
def test_shared_reads_give_the_same_weights_and_read_once(tmp_path, monkeypatch, size, chunk):
    cfg = toy_config()
    directory = write(tmp_path / "model", cfg, toy_tensors(cfg), shards=3)
    alone = [load(directory, rank, size) for rank in range(size)]
    monkeypatch.setattr(loader, "CHUNK", chunk)
    plans = [planned(directory, rank, size) for rank in range(size)]
    reads, real = [], loader._Extent.read
    monkeypatch.setattr(
        loader._Extent, "read", lambda self, *rest: reads.append(self.length) or real(self, *rest)
    )
    for weights, expected in zip(load_together(plans, tmp_path / "memory"), alone, strict=True):
        assert_same(weights, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]  # the memory has no name
    shapes = 16 * 3 * 8  # weight_shape tensors are read by the plan
    data = sum(t.end - t.begin for t in loader.open_checkpoint(directory).tensors.values())
    assert sum(reads) == data - shapes


def test_shared_reads_of_different_plans_are_refused(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    plans = [
        planned(write(tmp_path / "a", cfg, t), 0, 2),
        planned(write(tmp_path / "b", cfg, t, shards=2), 1, 2),
    ]
    for error in load_together(plans, tmp_path / "memory"):
        refused(lambda error=error: throw(error), "the ranks of this host plan different reads")


def throw(error) -> None:
    raise error


def test_a_failing_rank_ends_the_others_waiting(tmp_path, monkeypatch):
    cfg = toy_config()
    plans = [planned(write(tmp_path / "model", cfg, toy_tensors(cfg)), r, 2) for r in range(2)]
    monkeypatch.setattr(loader, "CHUNK", 600)
    real = loader._Extent.read

    def read(self, *rest):
        if threading.current_thread() in guilty:
            raise UserError("a disk error")
        return real(self, *rest)

    guilty: set[threading.Thread] = set()
    rounds = loader.Share.rounds

    def watched(self, *rest):
        if self.rank == 1:
            guilty.add(threading.current_thread())
        return rounds(self, *rest)

    monkeypatch.setattr(loader._Extent, "read", read)
    monkeypatch.setattr(loader.Share, "rounds", watched)
    one, two = load_together(plans, tmp_path / "memory")
    assert "a disk error" in str(two)
    assert "rank 1 of this host failed while the weights were loaded" in str(one)


def test_what_a_killed_run_left_in_memory_is_swept(tmp_path):
    cfg = toy_config()
    plans = [planned(write(tmp_path / "model", cfg, toy_tensors(cfg)), r, 2) for r in range(2)]
    memory = tmp_path / "memory"
    memory.mkdir()
    for name in ("kdtree-dead", "kdtree-alive", "other-file"):
        (memory / name).write_bytes(b"x")
    with (memory / "kdtree-alive").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        load_together(plans, memory / "kdtree-mine")
    assert sorted(path.name for path in memory.iterdir()) == ["kdtree-alive", "other-file"]


def test_a_rank_that_never_comes(tmp_path, monkeypatch):
    cfg = toy_config()
    plan = planned(write(tmp_path / "model", cfg, toy_tensors(cfg)), 0, 2)
    monkeypatch.setattr(loader, "STALL", 0.05)
    for rank in (0, 1):
        share = loader.Share(tmp_path / f"memory{rank}", rank, 2)
        refused(lambda share=share: loader.load_target(plan, share=share), f"rank {1 - rank}")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- a layer at a time ---------------------------------------------------------------------------


def streamed(plan: loader.Plan, **options) -> loader.TargetWeights:
    weights = loader.stream_target(plan, **options)
    return replace(weights, layers=tuple(weights.layers))


@pytest.mark.parametrize("chunk", [600, 8 << 20])
def test_streamed_layers_are_the_same(tmp_path, monkeypatch, chunk):
    cfg = toy_config(num_hidden_layers=4, vocab_size=61)
    directory = write(tmp_path / "model", cfg, toy_tensors(cfg), shards=3)
    whole = [load(directory, rank, 2) for rank in range(2)]
    monkeypatch.setattr(loader, "CHUNK", chunk)
    plans = [planned(directory, rank, 2) for rank in range(2)]
    for plan, expected in zip(plans, whole, strict=True):
        assert_same(streamed(plan), expected)
    monkeypatch.setattr(loader, "load_target", streamed)
    for weights, expected in zip(load_together(plans, tmp_path / "memory"), whole, strict=True):
        assert_same(weights, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_no_more_than_the_next_layer_is_read_ahead(tmp_path, monkeypatch, shared):
    cfg = toy_config(num_hidden_layers=6)
    plan = planned(write(tmp_path / "model", cfg, toy_tensors(cfg)), 0, 1)
    monkeypatch.setattr(loader, "CHUNK", 600)
    monkeypatch.setattr(loader, "GAP", 0)
    filled, real = set(), loader._Extent.scatter

    def scatter(self, *rest):
        filled.add(self.group)
        return real(self, *rest)

    monkeypatch.setattr(loader._Extent, "scatter", scatter)
    share = loader.Share(tmp_path / "memory", 0, 1) if shared else None
    if shared:  # alone on its host, but as if it were not
        extents = loader._extents
        monkeypatch.setattr(loader, "_extents", lambda groups, sharing: extents(groups, True))
    weights = loader.stream_target(plan, share=share)
    for i, _ in enumerate(weights.layers):  # group i + 1
        time.sleep(0.05)
        assert i + 1 in filled and max(filled) <= i + 2
    assert max(filled) == 6


def test_a_stream_that_is_left_ends_its_threads(tmp_path):
    cfg = toy_config(num_hidden_layers=6)
    plan = planned(write(tmp_path / "model", cfg, toy_tensors(cfg)))
    before = threading.active_count()
    weights = loader.stream_target(plan)
    next(weights.layers)
    assert threading.active_count() > before
    weights.layers.close()
    assert threading.active_count() == before


def test_a_stream_raises_where_it_is_read(tmp_path, monkeypatch):
    cfg = toy_config(num_hidden_layers=4)
    plan = planned(write(tmp_path / "model", cfg, toy_tensors(cfg)))
    real = loader._Extent.read

    def read(self, *rest):
        if self.group == 3:
            raise UserError("a disk error")
        return real(self, *rest)

    monkeypatch.setattr(loader._Extent, "read", read)
    weights = loader.stream_target(plan)
    next(weights.layers)
    refused(lambda: list(weights.layers), "a disk error")


def test_without_shared_experts(tmp_path):
    cfg = toy_config(n_shared_experts=0)
    checkpoint = loader.open_checkpoint(write(tmp_path, cfg, toy_tensors(cfg)))
    model = replace(parse(toy_config()), n_shared_experts=0)
    mlp = loader.load_target(loader.plan_target(checkpoint, model)).layers[1].mlp
    assert mlp.shared_gate is None and mlp.shared_up is None and mlp.shared_down is None


def test_int4_of_dense_and_shared_mlps(tmp_path):
    cfg = toy_config()
    cfg["quantization_config"] = {**INT4_SCHEME, "ignore": ["lm_head", "re:.*self_attn.*"]}
    t = toy_tensors(cfg)
    name = "model.layers.1.mlp.shared_experts.down_proj."
    w = load(write(tmp_path, cfg, t), 1, 2)
    assert same_bits(w.layers[1].mlp.shared_down.packed, t[name + "weight_packed"][:, 8:])
    assert same_bits(w.layers[1].mlp.shared_down.scales, t[name + "weight_scale"][:, 2:])
    assert w.layers[0].mlp.gate.packed.shape == (64, 8)


# ---- tensor parallel -----------------------------------------------------------------------------


def join(parts: list[np.ndarray], axis: int) -> np.ndarray:
    return np.concatenate(parts, axis=axis)


@pytest.mark.parametrize("size", [2, 4])
def test_rank_slices_join_to_the_whole(tmp_path, size):
    cfg = toy_config(vocab_size=61)
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    one = load(directory)
    ranks = [load(directory, rank, size) for rank in range(size)]
    for name in ("embed", "head"):  # padded to 64 at every size
        assert getattr(one, name).shape == (64, 64) and not getattr(one, name)[61:].any()
        assert same_bits(join([getattr(r, name) for r in ranks], 0), getattr(one, name))
    for i in (0, 1):
        whole, parts = one.layers[i], [r.layers[i] for r in ranks]
        for name in ("input_norm", "q_a", "q_a_norm", "kv_a", "kv_a_norm", "post_norm"):
            assert all(same_bits(getattr(p, name), getattr(whole, name)) for p in parts)
        for name, axis in {"q_b": 0, "kv_b": 0, "o": 1}.items():
            assert same_bits(join([getattr(p, name) for p in parts], axis), getattr(whole, name))
    dense, moe = ([r.layers[i].mlp for r in ranks] for i in (0, 1))
    for name, axis in {"gate": 0, "up": 0, "down": 1}.items():
        assert same_bits(
            join([getattr(p, name) for p in dense], axis), getattr(one.layers[0].mlp, name)
        )
        whole = one.layers[1].mlp
        assert same_bits(
            join([getattr(p, f"shared_{name}") for p in moe], axis),
            getattr(whole, f"shared_{name}"),
        )
        for field in ("packed", "scales"):
            stacks = [getattr(getattr(p, f"experts_{name}"), field) for p in moe]
            assert same_bits(
                join(stacks, axis + 1), getattr(getattr(whole, f"experts_{name}"), field)
            )


def test_a1_down_projection_at_tp_2(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    rng = np.random.default_rng(7)
    for name in t:
        if name.endswith(
            "weight_scale"
        ):  # powers of two, so that the sums below are exact in any order
            t[name] = np.exp2(rng.integers(-3, 3, t[name].shape)).astype(BF16)
    directory = write(tmp_path, cfg, t)
    whole = load(directory).layers[1].mlp.experts_down
    x = rng.integers(-4, 5, (3, 128)).astype(np.float32)
    total = np.zeros((16, 3, 64), np.float32)
    for rank in range(2):
        part = load(directory, rank, 2).layers[1].mlp.experts_down
        assert part.packed.shape == (16, 64, 8) and part.scales.shape == (16, 64, 2)
        assert part.in_features == 64 and part.group_size == 32
        total += x[:, rank * 64 : rank * 64 + 64] @ dequantise_int4(part).swapaxes(1, 2)
    assert (total == x @ dequantise_int4(whole).swapaxes(1, 2)).all()


def test_a1_count_mismatch_is_refused(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    t[name] = t[name][:, :3].copy()
    refused(lambda: load(write(tmp_path, cfg, t), 0, 2), name, "[64, 3]", "[64, 4]")


def test_a2_cut_through_a_group_is_refused(tmp_path):
    cfg = toy_config(moe_intermediate_size=96)
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    load(directory)
    refused(
        lambda: load(directory, 0, 2),
        "model.layers.1.mlp.experts.down_proj: 96 input columns are 3 groups of 32 and cannot be"
        " cut in 2; tp.size may be 1",
    )


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_attention_heads": 3}, ("self_attn.o_proj", "3 heads", "tp.size may be 1")),
    ({"intermediate_size": 99}, ("layers.0.mlp.down_proj", "99 input columns", "tp.size may be 1")),
])  # fmt: skip
def test_other_cuts_are_refused(tmp_path, changes, words):
    cfg = toy_config(**changes)
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    load(directory)
    refused(lambda: load(directory, 0, 2), *words)


def test_drafter_loads_and_its_slices_join(tmp_path):
    t = drafter_tensors(DRAFTER)
    directory = write(tmp_path / "drafter", DRAFTER, t)
    cfg = toy_config()
    model = parse(cfg)

    def load_drafter(rank: int = 0, size: int = 1) -> loader.DrafterWeights:
        checkpoint = loader.open_checkpoint(directory)
        drafter = config.parse_drafter(checkpoint.config_json, source="config.json")
        tp = config.TensorParallel(size=size)
        plan = loader.plan_drafter(checkpoint, drafter, model, tp=tp, rank=rank)
        return loader.load_drafter(plan)

    one, ranks = load_drafter(), [load_drafter(rank, 2) for rank in range(2)]
    assert same_bits(one.fc, t["fc.weight"]) and same_bits(one.hidden_norm, t["hidden_norm.weight"])
    assert same_bits(one.norm, t["norm.weight"]) and same_bits(
        join([r.fc for r in ranks], 0), one.fc
    )
    names = {
        "input_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    cut = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 0, "up": 0, "down": 1}
    for i, layer in enumerate(one.layers):
        for field, name in names.items():
            whole = getattr(layer, field)
            assert same_bits(whole, t[f"layers.{i}.{name}.weight"])
            if field in cut:
                assert same_bits(
                    join([getattr(r.layers[i], field) for r in ranks], cut[field]), whole
                )
    # Four ranks share the two key heads: ranks 2 and 3 read the second.
    for rank in range(4):
        layer, head = load_drafter(rank, 4).layers[0], rank // 2
        assert same_bits(layer.k, one.layers[0].k[head * 8 : head * 8 + 8])
        assert same_bits(layer.q, one.layers[0].q[rank * 16 : rank * 16 + 16])


def test_drafter_heads_that_do_not_share_out_are_refused(tmp_path):
    cfg = {**DRAFTER, "num_attention_heads": 12, "num_key_value_heads": 3}
    checkpoint = loader.open_checkpoint(write(tmp_path, cfg, drafter_tensors(cfg)))
    drafter = config.parse_drafter(cfg, source="config.json")
    tp = config.TensorParallel(size=2)
    refused(
        lambda: loader.plan_drafter(checkpoint, drafter, parse(toy_config()), tp=tp),
        "layers.0.self_attn.k_proj: 3 heads cannot be shared out to 2 ranks",
    )


def test_replicated_parts_are_whole_on_every_rank(tmp_path):
    cfg = toy_config()
    one = load(write(tmp_path, cfg, toy_tensors(cfg)))
    checkpoint = loader.open_checkpoint(tmp_path)
    whole = ("embed_tokens", "gate_proj", "up_proj", "down_proj")
    tp = config.TensorParallel(size=2, cut=config.Cut(**dict.fromkeys(whole, "replicate")))
    two = loader.load_target(loader.plan_target(checkpoint, parse(cfg), tp=tp, rank=1))
    assert same_bits(two.embed, one.embed) and same_bits(two.head, one.head[32:])
    for layer, same in zip(two.layers, one.layers, strict=True):
        assert_same(layer.mlp, same.mlp)
        assert same_bits(layer.o, same.o[:, 32:])


# ---- field cases ---------------------------------------------------------------------------------


def shard_of(directory: Path) -> Path:
    return next(directory.glob("model*.safetensors"))


@pytest.mark.parametrize("shards", [0, 2])
def test_b1_truncated_shard(tmp_path, shards):
    cfg = toy_config()
    shard = shard_of(write(tmp_path, cfg, toy_tensors(cfg), shards))
    size = shard.stat().st_size
    os.truncate(shard, size - 64)
    refused(
        lambda: loader.open_checkpoint(tmp_path), shard.name, "truncated", str(size), str(size - 64)
    )


def test_b1_shard_that_shrinks_after_its_header_was_read(tmp_path):
    cfg = toy_config()
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    checkpoint = loader.open_checkpoint(directory)
    plan = loader.plan_target(checkpoint, parse(checkpoint.config_json))
    os.truncate(shard_of(directory), shard_of(directory).stat().st_size - 64)
    refused(lambda: loader.load_target(plan), "model.safetensors", "truncated")


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "subfolder"])
def test_b3_paths_leaving_the_directory(tmp_path, monkeypatch, kind, exists):
    cfg = toy_config()
    directory = write(tmp_path / "model", cfg, toy_tensors(cfg), shards=2)
    shard = shard_of(directory)
    outside = tmp_path / "outside.safetensors"
    if exists:
        outside.write_bytes(shard.read_bytes())
    if kind == "link":
        shard.unlink()
        shard.symlink_to(outside)
        value = shard.name
    else:
        value = {
            "parent": "../outside.safetensors",
            "absolute": str(outside),
            "subfolder": "x/../" + shard.name,
        }[kind]
        index = directory / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(shard.name, value))
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *rest: opened.append(str(path)) or real_open(path, *rest)
    )
    message = refused(
        lambda: loader.open_checkpoint(directory), value, "does not name a file of this directory"
    )
    assert not any("outside" in path for path in opened) and not any(
        path.endswith(shard.name) for path in opened
    )
    # The words are the same whether or not the file exists.
    assert message == (
        f"{directory}: {value} does not name a file of this directory; a checkpoint's files must"
        " lie in it, or be links into the blobs folder of the same hub cache"
    )


def test_b3_links_inside_and_hub_cache_are_followed(tmp_path):
    cfg = toy_config()
    plain = load(write(tmp_path / "plain", cfg, toy_tensors(cfg), shards=2))

    inside = write(tmp_path / "inside", cfg, toy_tensors(cfg), shards=2)
    shard_of(inside).rename(inside / "data.bin").with_name("x")
    missing = next(
        x for x in (tmp_path / "plain").glob("*.safetensors") if not (inside / x.name).exists()
    )
    (inside / missing.name).symlink_to("data.bin")
    assert_same(plain, load(inside))

    repository = tmp_path / "models--org--toy"
    snapshot = write(repository / "snapshots" / "0123abc", cfg, toy_tensors(cfg), shards=2)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(repository / "blobs" / f"{i:064x}")
        path.symlink_to(f"../../blobs/{i:064x}")
    assert_same(plain, load(snapshot))
    link = tmp_path / "latest"
    link.symlink_to(snapshot)
    assert_same(plain, load(link))

    # The blobs of another repository are outside.
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    shard = shard_of(snapshot)
    (other / "f").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to("../../../models--org--other/blobs/f")
    refused(lambda: loader.open_checkpoint(snapshot), "does not name a file of this directory")


def test_b5_router_bias_keeps_its_bits(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    t[name][:] = 0
    t[name][4], t[name][9] = 1.00001, 1.00002
    bias = load(write(tmp_path / "f32", cfg, t)).layers[1].mlp.bias
    assert same_bits(bias, t[name])
    assert int(np.argmax(np.float32(0.5) + bias)) == 9  # equal scores: the second wins
    t[name] = t[name].astype(BF16)
    assert same_bits(
        load(write(tmp_path / "bf16", cfg, t)).layers[1].mlp.bias, t[name].astype(np.float32)
    )


def test_b7_vision_is_skipped_counted_and_logged(tmp_path, caplog):
    cfg = toy_config()
    t = {"language_model." + name: tensor for name, tensor in toy_tensors(cfg).items()}
    for name in (
        "vision_tower.patch.weight",
        "vision_tower.norm.weight",
        "mm_projector.linear.weight",
    ):
        t[name] = np.zeros((3, 5), np.float16)
    directory = write(tmp_path, cfg, t)
    checkpoint = loader.open_checkpoint(directory)
    assert checkpoint.skipped_vision == 3 and "3 vision tensors skipped" in caplog.text
    assert len(checkpoint.tensors) == len(checkpoint.text_names) + 3
    load(directory)
    t["audio_tower.weight"] = np.zeros(3, np.float32)
    refused(lambda: load(write(tmp_path, cfg, t)), "1 unknown: audio_tower.weight")


@pytest.mark.parametrize(("generation", "expected"), [
    ({"eos_token_id": [61, 62]}, (61, 62)),
    ({"eos_token_id": 7}, (7,)),
    ({"temperature": 1.0}, (63,)),  # then config.json's
    (None, (63,)),
])  # fmt: skip
def test_j7_stop_ids(tmp_path, generation, expected):
    cfg = toy_config()
    write(tmp_path, cfg, {"x": np.zeros(1, np.float32)})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = loader.open_checkpoint(tmp_path)
    assert checkpoint.generation_config == (generation or {})
    assert loader.generation_stop_ids(checkpoint) == expected


@pytest.mark.parametrize("bad", [64, -1, True, 1.0, "63", [1, 64], [[1]], {"a": 1}])
def test_j7_bad_stop_ids(tmp_path, bad):
    write(tmp_path, toy_config(), {"x": np.zeros(1, np.float32)})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    refused(
        lambda: loader.generation_stop_ids(loader.open_checkpoint(tmp_path)),
        "eos_token_id",
        "0..63",
    )


# ---- bad files -----------------------------------------------------------------------------------


def rewrite(directory: Path, change) -> None:
    """Apply `change` to the header of the single file and write it back with a fitting length."""
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    new = text if isinstance(text, bytes) else json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def set_entry(name: str, **changes):
    return lambda header: header[name].update(changes)


def entry(header: dict, name: str = "b") -> list[int]:
    return header[name]["data_offsets"]


def offsets(begin: int, end: int):
    def change(header: dict) -> None:
        header["b"]["data_offsets"] = [entry(header)[0] + begin, entry(header)[1] + end]

    return change


BAD_HEADERS = {
    "overlap": (offsets(-4, -4), ("b", "overlaps")),
    "gap": (lambda h: h.pop("b") and None, ("c", "gap")),
    "size": (offsets(0, -4), ("b", "data_offsets")),
    "past the end": (
        set_entry("c", data_offsets=[24, 1024], shape=[250]), ("truncated", "the file has"),
    ),
    "negative": (set_entry("b", data_offsets=[-8, 0]), ("b", "data_offsets")),
    "backwards": (lambda h: entry(h).reverse(), ("b", "data_offsets")),
    "float offsets": (set_entry("b", data_offsets=[8.0, 16.0]), ("b", "data_offsets")),
    "three offsets": (set_entry("b", data_offsets=[8, 16, 24]), ("b", "data_offsets")),
    "bool shape": (set_entry("b", shape=[True, 2]), ("b", "shape")),
    "huge shape": (set_entry("b", shape=[1 << 60, 1 << 60]), ("b: shape: expected a list",)),
    "many dimensions": (set_entry("b", shape=[1] * 5000), ("b: shape: expected a list",)),
    "unknown dtype": (set_entry("b", dtype="F4_EVIL"), ("b: dtype: expected", "got F4_EVIL")),
    "dtype of another size": (set_entry("b", dtype="F64"), ("b", "F64 [2] is 16 bytes", "hold 8")),
    "no dtype": (lambda h: h["b"].pop("dtype") and None, ("b", "dtype")),
    "entry is a list": (lambda h: h.update(b=[]), ("b", "dtype")),
    "not JSON": (lambda h: b"{nonsense", ("not valid JSON",)),
    "not UTF-8": (lambda h: b"\xff\xfe{\x00", ("not valid JSON",)),
    "not an object": (lambda h: b"[1, 2]", ("expected a JSON object",)),
    "nested deeply": (lambda h: b'{"a":' + b"[" * 100_000, ("not valid JSON",)),
    "long number": (lambda h: b'{"a":' + b"9" * 100_000 + b"}", ("not valid JSON",)),
    "key twice": (lambda h: json.dumps(h).encode().replace(b'"c"', b'"b"'), ("b is there twice",)),
    "newline in a name": (lambda h: h.update({"x\ny\x1b[31m\ud800": []}), ("x\\ny",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_header(tmp_path, case):
    change, words = BAD_HEADERS[case]
    write(tmp_path, toy_config(), {name: np.zeros(2, np.float32) for name in "abc"})
    loader.open_checkpoint(tmp_path)
    rewrite(tmp_path, change)
    refused(lambda: loader.open_checkpoint(tmp_path), "model.safetensors", *words)


@pytest.mark.parametrize(("raw", "words"), [
    (b"", ("truncated", "0 bytes")),
    (b"\x01\x02", ("truncated", "2 bytes")),
    ((1 << 63).to_bytes(8, "little"), ("9223372036854775808", "100000000")),
    ((1 << 20).to_bytes(8, "little") + b"{}", ("truncated", "1048584", "has 10")),
    ((2).to_bytes(8, "little") + b"{}" + b"extra", ("declares 10 bytes", "has 15")),
])  # fmt: skip
def test_bad_file(tmp_path, raw, words):
    write(tmp_path, toy_config(), {})
    (tmp_path / "model.safetensors").write_bytes(raw)
    refused(lambda: loader.open_checkpoint(tmp_path), "model.safetensors", *words)


def edit_index(change):
    def edit(directory: Path) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    return edit


def copy_tensor(directory: Path) -> None:
    """The same tensor in both shards."""
    for path in directory.glob("*.safetensors"):
        path.write_bytes(save({"a": np.zeros(2, np.float32)}))


def put(name: str, text: str):
    return lambda directory: (directory / name).write_text(text)


def remove(name: str):
    return lambda directory: (directory / name).unlink()


OUTSIDE = "does not name a file of this directory"
BAD_DIRECTORIES = {
    "no config": (remove("config.json"), ("config.json: cannot be opened",)),
    "config not JSON": (put("config.json", "{'a': 1}"), ("config.json: not valid JSON",)),
    "config a list": (put("config.json", "[]"), ("config.json: expected a JSON object",)),
    "generation config": (put("generation_config.json", "x"), ("generation_config.json: not",)),
    "no weights": (remove(loader.INDEX), ("neither is there",)),
    "two kinds": (put(loader.SINGLE, ""), ("both are there",)),
    "no weight_map": (put(loader.INDEX, "{}"), (loader.INDEX, "weight_map")),
    "weight_map is empty": (edit_index(lambda m: m.clear()), (loader.INDEX, "weight_map")),
    "shard is a number": (edit_index(lambda m: m.update(a=1)), (loader.INDEX, "weight_map")),
    "shard with a null": (edit_index(lambda m: m.update(a="x\0y")), ("x\\x00y", OUTSIDE)),
    "shard with a surrogate": (edit_index(lambda m: m.update(a="\ud800")), ("\\ud800", OUTSIDE)),
    "shard is empty": (edit_index(lambda m: m.update(a="")), (OUTSIDE,)),
    "shard is the folder": (edit_index(lambda m: m.update(a=".")), (OUTSIDE,)),
    "shard is missing": (edit_index(lambda m: m.update(a="no")), ("/no: cannot be opened",)),
    "shard's name is long": (edit_index(lambda m: m.update(a="n" * 5000)), ("cannot be opened",)),
    "tensor is absent": (edit_index(lambda m: m.update(z=m["a"])), ("places z in", "not hold it")),
    "tensor elsewhere": (edit_index(lambda m: m.update(a=m["b"])), ("places a in", "not hold it")),
    "tensor unlisted": (edit_index(lambda m: m.pop("c")), (loader.INDEX, "does not list c")),
    "tensor in two shards": (copy_tensor, ("a is in both",)),
    "prefix twice": (None, ("lm_head.weight is there twice",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DIRECTORIES)
def test_bad_directory(tmp_path, case):
    damage, words = BAD_DIRECTORIES[case]
    names = "abcd" if damage else ("lm_head.weight", "language_model.lm_head.weight")
    write(tmp_path, toy_config(), {name: np.zeros(2, np.float32) for name in names}, shards=2)
    if damage:
        loader.open_checkpoint(tmp_path)
        damage(tmp_path)
    refused(lambda: loader.open_checkpoint(tmp_path), *words)


def test_missing_directory(tmp_path):
    refused(lambda: loader.open_checkpoint(tmp_path / "nowhere"), "nowhere", "no such directory")


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop"])
def test_weights_that_are_no_file(tmp_path, kind):
    write(tmp_path, toy_config(), {})
    path = tmp_path / "model.safetensors"
    path.unlink()
    make = {"folder": os.mkdir, "pipe": os.mkfifo, "loop": lambda path: os.symlink(path, path)}
    make[kind](path)
    refused(lambda: loader.open_checkpoint(tmp_path), "model.safetensors")


def test_all_unfit_tensors_are_named_at_once(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    del t["model.norm.weight"]
    t["stray.weight"] = np.zeros(3, np.float32)
    t["lm_head.weight"] = t["lm_head.weight"][:, :32].copy()
    t["model.layers.0.input_layernorm.weight"] = np.zeros(64, np.float16)
    for e in range(12):
        del t[f"model.layers.1.mlp.experts.{e}.up_proj.weight_shape"]
    message = refused(
        lambda: load(write(tmp_path, cfg, t)),
        "13 missing: ",
        "and 5 more",
        "1 unknown: stray.weight",
        "lm_head.weight is BF16 [64, 32], expected F32 or BF16 [64, 64]",
        "input_layernorm.weight is F16 [64], expected F32 or BF16 [64]",
    )
    assert len(message) < 2000


EXPERT = "model.layers.1.mlp.experts.5.up_proj."


UNFIT = {
    "packed as U32": ("weight_packed", lambda a: a.view(np.uint32), "U32 [128, 8], expected I32"),
    "packed folded": ("weight_packed", lambda a: a.reshape(64, 16), "I32 [64, 16], expected I32"),
    "scale as F16": ("weight_scale", lambda a: a.astype(np.float16), "F16 [128, 2], expected F32"),
    "one F32 scale": ("weight_scale", lambda a: a.astype(np.float32), "F32, expected BF16 as its"),
    "shape turned": ("weight_shape", lambda a: a[::-1].copy(), "(64, 128), but the tensors and"),
    "shape too short": ("weight_shape", lambda a: a[:1].copy(), "I32 [1], expected I32 or I64 [2]"),
    "packed missing": ("weight_packed", None, f"1 missing: {EXPERT}weight_packed"),
    "dense beside": ("weight", lambda a: np.zeros((128, 64), BF16), f"1 unknown: {EXPERT}weight"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_unfit_expert(tmp_path, case):
    cfg, (suffix, change, words) = toy_config(), UNFIT[case]
    t = toy_tensors(cfg)
    old = t.pop(EXPERT + suffix, None)
    if change:
        t[EXPERT + suffix] = change(old)
    refused(lambda: load(write(tmp_path, cfg, t)), words)


@pytest.mark.parametrize("name", ["model.layers.2.x", "model.layers.01.x", "rotary.inv_freq"])
def test_unknown_tensor(tmp_path, name):
    cfg = toy_config()
    t = {**toy_tensors(cfg), name: np.zeros(1, BF16)}
    refused(lambda: load(write(tmp_path, cfg, t)), f"1 unknown: {name}")


def test_absurd_config_is_refused_before_it_fills_memory(tmp_path):
    cfg = toy_config()
    checkpoint = loader.open_checkpoint(write(tmp_path, cfg, toy_tensors(cfg)))
    model = replace(parse(cfg), n_routed_experts=60_000)
    refused(lambda: loader.plan_target(checkpoint, model), "asks for far more than the 173 tensors")


def test_rank_outside_its_group(tmp_path):
    cfg = toy_config()
    directory = write(tmp_path, cfg, toy_tensors(cfg))
    refused(lambda: load(directory, 2, 2), "rank 2", "0..1")


def test_weight_shape_may_be_i64(tmp_path):
    cfg = toy_config()
    t = toy_tensors(cfg)
    t[EXPERT + "weight_shape"] = t[EXPERT + "weight_shape"].astype(np.int64)
    load(write(tmp_path, cfg, t))


# ---- mutations -----------------------------------------------------------------------------------


def mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    """One to three small damages: bytes changed, cut out, put in or repeated elsewhere."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at, span = rng.randrange(len(data)), rng.choice([1, 1, 2, 7, 40])
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[at : at + span]
        elif kind == 3:
            data[at:at] = bytes(rng.choice(b'{}[],:"0123456789-.eE\\untf/ ') for _ in range(span))
        else:
            start = rng.randrange(len(data))
            data[at:at] = data[start : start + span]
    return bytes(data)


def mutate_value(raw: bytes, rng: random.Random) -> bytes:
    """Valid JSON again, with one value or key replaced, or one entry gone."""
    root = json.loads(raw)
    places = []  # (container, key) of every value

    def visit(node) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            places.append((node, key))
            if isinstance(value, dict | list):
                visit(value)

    visit(root)
    node, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0:
        del node[key]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(["", "dtype", "model.norm.weight", key + "x", "__metadata__"])] = node.pop(
            key
        )
    elif kind == 2 and isinstance(node[key], int):
        node[key] += rng.choice([-8, -1, 1, 2, 8, 64])
    else:
        other, there = rng.choice(places)
        odd = [0, 1, -1, 2**31, 2**63, 2**64, 10**30, 1.5, None, True, "", [], {}, "F32", "F16"]
        node[key] = rng.choice([*odd, "I64", "../x", "config.json", "/dev/zero", other[there]])
    return json.dumps(root).encode()


def test_mutated_headers_and_indexes(tmp_path):
    """300 damaged files: each loads to the right bits or is refused in one line, in 4 MiB."""
    cfg = toy_config(n_routed_experts=2)
    t = toy_tensors(cfg)
    single = write(tmp_path / "single", cfg, t)
    indexed = write(tmp_path / "indexed", cfg, t, shards=2)
    right = load(single)
    targets = [single / loader.SINGLE, shard_of(indexed), indexed / loader.INDEX]
    intact = {path: path.read_bytes() for path in targets}
    rng = random.Random(20260)
    loaded = 0
    for i in range(300):
        path = targets[i % 3]
        raw = intact[path]
        end = 0 if path.suffix == ".json" else 8 + int.from_bytes(raw[:8], "little")
        if i % 10 == 0:
            damaged = mutate_bytes(raw[:end] or raw, rng) + raw[end or len(raw) :]  # length too
        else:
            mutate = mutate_bytes if i % 10 < 4 else mutate_value
            text = mutate(raw[8:end] if end else raw, rng)
            damaged = len(text).to_bytes(8, "little") + text + raw[end:] if end else text
        path.write_bytes(damaged)
        tracemalloc.start()
        try:
            weights = load(path.parent)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 4000
        else:
            assert_same(weights, right)
            loaded += 1
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 4 << 20, f"mutation {i}: {peak} bytes"
        path.write_bytes(raw)
    assert loaded < 100  # the damages do reach the checks

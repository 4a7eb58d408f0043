"""A toy checkpoint in the published format, engines on it, and drafters that say what a test wants.

The toy is the model of the field cases: one dense and one MoE layer, hidden 64, 4 heads, latent 32,
rope 8, 16 experts top-2, INT4 in groups of 32, context 64 (YaRN, factor 4 over 16).
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import config
import spec_decode
from budget import Auto, most_rows
from engine import Engine, Result
from loader import quantise_int4
from sampling import SamplingParams

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DIMS = {
    "model_type": "kimi_k2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
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
    "vocab_size": 272,  # 256 bytes and 16 control ids, the fewest that a tokenizer takes
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": YARN,
    "max_position_embeddings": 64,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
DRAFTER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "block_size": 8,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "dflash_config": {"target_layer_ids": [0, 1]},
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True},
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}

Tensors = dict[str, np.ndarray]
KINDS = ("perfect", "random", "wrong")


# ---- checkpoints -------------------------------------------------------------------------------


def write_checkpoint(
    directory: Path, *, seed: int = 0, drafter: dict | None = None, change=None, **dims
) -> Path:
    """A random target with INT4 experts, its tokenizer and, with `drafter` (changes to DRAFTER, {}
    for none), its DFlash drafter in `directory`/drafter.

    dims override DIMS; change(tensors) may edit the target's tensors before they are written.
    """
    rng = np.random.default_rng(seed)
    c = {**DIMS, **dims, "quantization_config": INT4}
    vocabulary = c["vocab_size"]
    tensors = _target_tensors(rng, c)
    if change is not None:
        change(tensors)
    _write(directory, c, tensors)
    ranks = [bytes([i]) for i in range(256)]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(ranks))
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    names = {vocabulary - 2: "[EOS]", vocabulary - 1: "[PAD]"}
    special = {str(i): {"content": name} for i, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary - 2}))
    if drafter is not None:
        d = {**DRAFTER, "hidden_size": c["hidden_size"], "vocab_size": vocabulary, **drafter}
        d["dflash_config"] = {"mask_token_id": vocabulary - 1, **d["dflash_config"]}
        _write(directory / "drafter", d, _drafter_tensors(rng, d))
    return directory


def _write(directory: Path, c: dict, tensors: Tensors) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(c))
    save_file(tensors, directory / "model.safetensors")


def _matrix(rng, out: int, inputs: int, gain: float = 1.0) -> np.ndarray:
    w = rng.standard_normal((out, inputs), np.float32) * np.float32(gain / inputs**0.5)
    return w.astype(ml_dtypes.bfloat16)


def _norm(rng, width: int) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(width, np.float32)).astype(ml_dtypes.bfloat16)


def _target_tensors(rng, c: dict) -> Tensors:
    hidden, heads, vocabulary = c["hidden_size"], c["num_attention_heads"], c["vocab_size"]
    q_lora, latent, rope = c["q_lora_rank"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    made: Tensors = {
        "model.embed_tokens.weight": _matrix(rng, vocabulary, hidden, hidden**0.5),
        "lm_head.weight": _matrix(rng, vocabulary, hidden, 3.0),
        "model.norm.weight": _norm(rng, hidden),
    }

    def mlp(name: str, width: int, int4: bool = False) -> None:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        for projection, shape in shapes.items():
            w, at = _matrix(rng, *shape), f"{name}.{projection}_proj.weight"
            if not int4:
                made[at] = w
                continue
            q = quantise_int4(w.astype(np.float32))
            made[f"{at}_packed"], made[f"{at}_scale"] = q.packed, q.scales
            made[f"{at}_shape"] = np.array(shape, np.int32)

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        attention = {
            "q_a_proj": (q_lora, hidden),
            "q_b_proj": (heads * (nope + rope), q_lora),
            "kv_a_proj_with_mqa": (latent + rope, hidden),
            "kv_b_proj": (heads * (nope + value), latent),
            "o_proj": (hidden, heads * value),
        }
        for name, shape in attention.items():
            made[f"{at}.self_attn.{name}.weight"] = _matrix(rng, *shape)
        made[f"{at}.self_attn.q_a_layernorm.weight"] = _norm(rng, q_lora)
        made[f"{at}.self_attn.kv_a_layernorm.weight"] = _norm(rng, latent)
        made[f"{at}.input_layernorm.weight"] = _norm(rng, hidden)
        made[f"{at}.post_attention_layernorm.weight"] = _norm(rng, hidden)
        if i < c["first_k_dense_replace"]:
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        experts, width = c["n_routed_experts"], c["moe_intermediate_size"]
        made[f"{at}.mlp.gate.weight"] = _matrix(rng, experts, hidden)
        bias = 0.1 * rng.standard_normal(experts, np.float32)
        made[f"{at}.mlp.gate.e_score_correction_bias"] = bias
        for e in range(experts):
            mlp(f"{at}.mlp.experts.{e}", width, int4=True)
        mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * width)
    return made


def _drafter_tensors(rng, d: dict) -> Tensors:
    hidden, head, width = d["hidden_size"], d["head_dim"], d["intermediate_size"]
    q, kv = d["num_attention_heads"] * head, d["num_key_value_heads"] * head
    taps = len(d["dflash_config"]["target_layer_ids"])
    made = {
        "fc.weight": _matrix(rng, hidden, taps * hidden),
        "hidden_norm.weight": _norm(rng, hidden),
        "norm.weight": _norm(rng, hidden),
    }
    for i in range(d["num_hidden_layers"]):
        at = f"layers.{i}"
        for name, n in {"q": q, "k": kv, "v": kv}.items():
            made[f"{at}.self_attn.{name}_proj.weight"] = _matrix(rng, n, hidden)
        made[f"{at}.self_attn.o_proj.weight"] = _matrix(rng, hidden, q)
        for name in ("gate", "up"):
            made[f"{at}.mlp.{name}_proj.weight"] = _matrix(rng, width, hidden)
        made[f"{at}.mlp.down_proj.weight"] = _matrix(rng, hidden, width)
        made[f"{at}.self_attn.q_norm.weight"] = _norm(rng, head)
        made[f"{at}.self_attn.k_norm.weight"] = _norm(rng, head)
        made[f"{at}.input_layernorm.weight"] = _norm(rng, hidden)
        made[f"{at}.post_attention_layernorm.weight"] = _norm(rng, hidden)
    return made


# ---- engines -----------------------------------------------------------------------------------


def engine_of(
    directory: Path, *, drafter: bool = False, activation: str = "float32", **decode
) -> Engine:
    """An engine on a checkpoint directory, with its own drafter if asked for.

    decode: keys of the config's section, over short leaves and chunks that small prompts cross.
    """
    settings = config.Config(
        model=config.ModelSection(path=directory, lora_norm_eps=None, stated=()),
        kernels=config.Kernels(activation=activation),
        draft=config.Draft(path=directory / "drafter" if drafter else None),
        decode=config.Decode(**{"batch": 8, "prefill_chunk": 32, "leaf": 16, "span": 2, **decode}),
    )
    return Engine(settings, "cpu")


def toy_engine(
    tmp_path: Path, *, drafter: dict | None = None, dims: dict | None = None, **settings
) -> Engine:
    """An engine on a toy checkpoint written below tmp_path; see the two functions above."""
    directory = write_checkpoint(tmp_path / "toy", drafter=drafter, **(dims or {}))
    return engine_of(directory, drafter=drafter is not None, **settings)


def decode(engine: Engine, prompts, mode: str = "ar", budget: int = 16, **params) -> list[Result]:
    """Continue id lists together, greedily unless params say otherwise, with every logit kept."""
    engine.use(mode, budget)
    wanted = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params})
    return engine.generate([list(map(int, p)) for p in prompts], wanted, keep_logits=True)


def choose_by(engine: Engine, seconds, recorded: bool) -> Auto:
    """Choose what to draft from now on, by costs of the test's own: seconds(choice) of a round."""
    depth, limit = engine.drafter.dims.block_size - 1, engine.settings.draft.limit
    auto = Auto(depth, limit, most_rows(engine.settings.decode.batch, limit))
    auto.measure(seconds, recorded)
    engine.autos[depth] = auto
    engine.use("tree", config.AUTO)
    assert engine.auto is auto
    return auto


def feed(engine: Engine, slot: int, ids, pieces=None) -> np.ndarray:
    """Commit ids behind what a slot holds, in pieces of the given lengths (default: all at once),
    the drafter's context included. Logits of every row, fp32 [len(ids), V]."""
    ids, out = np.asarray(ids, np.int32), []
    pieces = [len(ids)] if pieces is None else pieces
    assert sum(pieces) == len(ids)
    begin = 0
    for n in pieces:
        length = int(engine.cache.lengths[slot])
        batch = spec_decode.prompt_rows(ids[begin : begin + n], slot, length, 0)
        forward = engine.model.forward(batch, engine.cache, np.arange(n))
        store(engine, forward, {slot: list(range(n))})
        out.append(forward.logits)
        begin += n
    return np.concatenate(out)


def store(engine: Engine, forward, accepted: dict[int, list[int]]) -> None:
    """Commit the accepted rows of each slot, the drafter's context included."""
    placed = engine.cache.commit(list(accepted.items()), forward.entries)
    if engine.drafter is not None:
        engine.drafter.extend(forward.taps, placed, engine.cache)


def logit_bound(engine: Engine, largest_logit: float, layers: int = 0) -> float:
    """How far fp32 logits may be from the exact ones.

    A dot product of K terms in fp32, summed in any order, is off by at most 4 sqrt(K) u of its
    operands' size with overwhelming probability (Higham and Mary, 2019; u = 2^-24). About ten such
    operations follow one another in a layer, two more in norm and head; their relative errors are
    taken to add up. (The same as `Bound` in tools/make_golden.py.) `layers`: beside the target's.
    """
    d = engine.dims
    longest = max(d.hidden_size, d.intermediate_size, d.moe_intermediate_size * d.n_shared_experts)
    operations = 10 * (d.num_hidden_layers + layers) + 2
    return 4 * longest**0.5 * 2.0**-24 * operations * largest_logit


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal type, shape and bits; NaN equals only the same NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def assert_same_results(results: list[Result], expected: list[Result]) -> None:
    """Equal ids, finish reasons, texts and logit bits."""
    for r, e in zip(results, expected, strict=True):
        assert (r.token_ids, r.finish_reason, r.text) == (e.token_ids, e.finish_reason, e.text)
        assert (r.logits is None) == (e.logits is None)  # None: not one token
        assert r.logits is None or same_bits(r.logits, e.logits)


# ---- drafters ----------------------------------------------------------------------------------


class ScriptedDrafter:
    """What the engine uses of drafter.Drafter, over answers that are known beforehand.

    kind     perfect: the right token far above all others;  wrong: its probability is 0;
             random: noise alone;  mixed: at each position one or the other of the first two
    answers  plain decoding's results: their ids are the right tokens of their prompts
    """

    def __init__(
        self, engine: Engine, kind: str, prompts, answers: list[Result], block: int = 8, seed=0
    ):
        self.engine, self.kind, self.seed = engine, kind, seed
        self.dims = SimpleNamespace(block_size=block)
        self.answers = {
            tuple(map(int, p)): a.token_ids for p, a in zip(prompts, answers, strict=True)
        }

    def extend(self, taps, placed, cache) -> None:
        assert len(placed.rows) == len(placed.slots) == len(placed.positions)
        assert placed.rows.max() < len(taps)

    def draft(self, roots, slots, cache) -> np.ndarray:
        """fp32 [B, block - 1, V], a function of the sequence alone."""
        by_slot = {s.slot: s for s in self.engine.running}
        drafts = []
        for root, slot in zip(roots, slots, strict=True):
            sequence = by_slot[int(slot)]
            assert root == sequence.tokens[-1] and cache.lengths[slot] == len(sequence.tokens) - 1
            drafts.append(self._logits(sequence))
        return self.engine.ops.upload(np.stack(drafts))

    def _logits(self, sequence) -> np.ndarray:
        key = zlib.crc32(np.asarray(sequence.prompt, np.int64).tobytes())
        n = len(sequence.tokens) - len(sequence.prompt)
        shape = (self.dims.block_size - 1, self.engine.dims.vocab_size)
        rng = np.random.default_rng([self.seed, key, n])
        logits = rng.standard_normal(shape).astype(np.float32)
        if self.kind == "random":
            return logits
        for row, token in zip(logits, self.answers[tuple(sequence.prompt)][n:], strict=False):
            right = rng.random() < {"perfect": 1.0, "mixed": 0.7, "wrong": 0.0}[self.kind]
            row[token] = 50.0 if right else -np.inf
        return logits


def plug(engine: Engine, kind: str, prompts, answers: list[Result], **options) -> ScriptedDrafter:
    """Give the engine a scripted drafter (and taps for it to be shown)."""
    engine.drafter = ScriptedDrafter(engine, kind, prompts, answers, **options)
    engine.model.taps = engine.model.taps or (0,)
    return engine.drafter

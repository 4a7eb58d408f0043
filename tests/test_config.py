"""config.py: one test per rule; an error is one line that names the thing."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest

import config
from config import Layer, UserError

# K2.6's published ignore list: nothing but the routed experts is INT4.
IGNORE = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
]
YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
K26 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 50000.0,
    "rope_scaling": YARN,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "kv_cache_scheme": None,
        "ignore": IGNORE,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "group_size": 32,
                    "strategy": "group",
                    "symmetric": True,
                    "actorder": None,
                    "dynamic": False,
                },
            }
        },
    },
}
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rope_scaling": {**YARN, "factor": 4, "original_max_position_embeddings": 16},
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 62, "target_layer_ids": [1, 2, 3]},
    "rope_theta": 10000.0,
    "rope_scaling": None,
}
ABSENT = object()


def changed(raw: dict, changes: dict) -> dict:
    """A deep copy of raw with dotted paths set, or removed where the value is ABSENT."""
    raw = copy.deepcopy(raw)
    for path, value in changes.items():
        *parents, last = path.split(".")
        at = raw
        for parent in parents:
            at = at[parent]
        if value is ABSENT:
            del at[last]
        else:
            at[last] = value
    return raw


def target(changes: dict | None = None, *, of: dict | None = None, **kwargs) -> config.Model:
    raw = changed(K26 | SMALL if of is None else of, changes or {})
    return config.parse_model(raw, source="m/config.json", **kwargs)


def drafter(changes: dict | None = None) -> config.Drafter:
    return config.parse_drafter(changed(DRAFTER, changes or {}), source="d/config.json")


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        file = tmp_path / "x.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


@pytest.fixture
def settings(write):
    def settings(text: str = "", **overrides) -> config.Config:
        return config.load(write("model: {path: m}\n" + text), **overrides)

    return settings


def refused(call, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# ---------------------------------------- YAML


def test_shipped_configs_load():
    nano, k26 = config.load("nano.yaml"), config.load("k26.yaml")
    assert nano.model.path.parts[-2:] == ("models", "nano")
    assert (nano.draft.mode, nano.draft.budget, nano.decode.context) == ("tree", 16, 2048)
    assert (k26.tp.size, k26.kernels.activation, k26.tp.cut.o_proj) == (8, "bfloat16", "row")
    assert pickle.loads(pickle.dumps(k26)) == k26  # ranks are started by spawn
    model = config.parse_model(K26, source="k", lora_norm_eps=k26.model.lora_norm_eps)
    flash = {
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 18432,
        "vocab_size": 163840,
        "dflash_config.mask_token_id": 163838,
        "dflash_config.target_layer_ids": [1, 12, 24, 35, 47, 58],
    }
    assert config.validate(k26, model, drafter(flash)) == k26


def test_golden_config_takes_the_bundles_own_context(tmp_path):
    golden = config.load("golden.yaml", model_path=tmp_path)
    assert (golden.model.path, golden.decode.leaf, golden.decode.context) == (tmp_path, 16, None)
    assert config.validate(golden, target(), None).decode.context == 64


def test_paths_are_relative_to_the_file_and_the_override_to_the_working_directory(settings):
    assert settings("draft: {path: d}").draft.path.is_absolute()
    assert str(settings(model_path="a/../b").model.path) == "b"


def test_overrides_replace(settings):
    c = settings("decode: {top_k: 3}", tp=2, mode="chain", budget=7, temperature=0.5, seed=1)
    assert (c.tp.size, c.draft.mode, c.draft.budget) == (2, "chain", 7)
    assert (c.decode.temperature, c.decode.top_k, c.decode.seed) == (0.5, 3, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E1", 1e1), (".5", 0.5), ("1", 1.0), ("+1.5e+0", 1.5), ("2.", 2.0)],
)
def test_numbers(settings, text, value):
    assert settings(f"decode: {{temperature: {text}}}").decode.temperature == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("draft: {bugdet: 3}", ["draft.bugdet: unknown key; did you mean draft.budget?"]),
        ("budget: 3", ["budget: unknown key; did you mean draft.budget?"]),
        ("drat: {}", ["drat: unknown key; did you mean draft?"]),
        ("zzz: 1", ["zzz: unknown key; known here: model, layers, tp"]),
        ("tp: {cut: {oproj: row}}", ["tp.cut.oproj", "tp.cut.o_proj"]),
        ("draft: {budget: 1, budget: 2}", ["x.yaml:2:20: duplicate key budget"]),
        ("draft: [", ["x.yaml:2:9: expected"]),
        ("? [a]\n: 1", ["a key must be a word"]),
        ("draft: !!python/name:os.system", ["x.yaml:2:8: ", "python"]),
        ("decode: {batch: true}", ["decode.batch: expected an integer", "got true"]),
        ("decode: {batch: 1.0}", ["decode.batch: expected an integer", "got 1.0"]),
        ("decode: {batch: 010}", ["decode.batch: expected an integer", "got '010'"]),
        ("decode: {temperature: hot}", ["decode.temperature: expected a number", "got 'hot'"]),
        ("decode: {temperature: true}", ["decode.temperature: expected a number", "got true"]),
        ("draft: 3", ["draft: expected a mapping, got 3"]),
        ("draft: {mode: forest}", ["draft.mode: expected ar or chain or tree, got 'forest'"]),
        ("draft: {mode: [tree]}", ["draft.mode", "got ['tree']"]),
        ("draft: {path: ''}", ["draft.path: expected the path of a directory"]),
        ("kernels: {activation: float16}", ["kernels.activation: expected float32 or bfloat16"]),
        ("tp: {size: 3}", ["tp.size: expected a power of two from 1 to 8, got 3"]),
        ("tp: {size: 16}", ["tp.size: expected a power of two from 1 to 8, got 16"]),
        ("tp: {cut: {gate: row}}", ["tp.cut.gate: expected replicate, got 'row'"]),
        ("decode: {leaf: 8}", ["decode.leaf: expected a power of two from 16"]),
        ("decode: {leaf: 48}", ["decode.leaf: expected a power of two"]),
        ("layers: {}", ["layers: expected a list of rules"]),
        ("layers: [{range: 3-1, kind: moe}]", ["layers[0].range", "got '3-1'"]),
        ("layers: [{kind: moe}]", ["layers[0].range", "got null"]),
        ("layers: [{range: 0, kind: wide}]", ["layers[0].kind: expected dense or moe"]),
        ("layers: [{range: 0, kind: dense, experts: int4}]", ["layers[0].experts: unknown key"]),
        ("layers: [{range: 0, kind: dense, quantization: int8}]", ["none or int4", "int8"]),
    ],
)
def test_bad_yaml(settings, text, words):
    refused(lambda: settings(text), *words)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            {"temperature": -1},
            ["--temperature: expected a number of at least 0 and at most 100, got -1"],
        ),
        ({"temperature": math.nan}, ["--temperature", "got nan"]),
        ({"temperature": math.inf}, ["--temperature", "got inf"]),
        ({"top_p": 0}, ["--top-p: expected a number above 0 and at most 1, got 0"]),
        ({"top_p": 2}, ["--top-p", "got 2"]),
        ({"top_k": -2}, ["--top-k: expected an integer, at least -1"]),
        ({"budget": 0}, ["--budget: expected an integer from 1 to 1024, got 0"]),
        ({"max_tokens": 0}, ["--max-tokens"]),
        ({"context": 0}, ["--context"]),
        ({"batch": 0}, ["--batch"]),
        ({"seed": -1}, ["--seed"]),
        ({"seed": 2**64}, ["--seed"]),
        ({"tp": 0}, ["--tp"]),
        ({"mode": "x"}, ["--mode"]),
        ({"model_path": ""}, ["--model"]),
    ],
)
def test_bad_flags_name_the_flag_and_the_range(settings, override, words):
    refused(lambda: settings(**override), *words)


def test_bad_files(write, tmp_path):
    refused(lambda: config.load("k27.yaml"), "k27.yaml: no such config file", "k26.yaml")
    refused(lambda: config.load(tmp_path), "no such config file")
    refused(lambda: config.load("x" * 5000), "no such config file")
    refused(lambda: config.load(write("")), "x.yaml: expected a mapping", "got null")
    refused(lambda: config.load(write("a: \x01")), "x.yaml: not a YAML file")
    refused(lambda: config.load(write("[" * 500)), "x.yaml")
    refused(lambda: config.load(write("draft: {}")), "model: missing")
    refused(lambda: config.load(write("model: {}")), "model.path: missing", "--model DIR")
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\xff")
    refused(lambda: config.load(tmp_path / "x.yaml"), "not UTF-8")


def test_an_alias_bomb_is_shown_short(settings):
    bomb = "\n".join(f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
    refused(lambda: settings(f"layers:\n  - &a0 [x]\n{bomb}\ndraft: *a11"), "layers[0]")


# ---------------------------------------- the target's config.json


def test_k26_nested_and_flat_read_alike():
    flat = target(of=K26)
    text = {k: v for k, v in K26.items() if k != "quantization_config"}
    outside = {"text_config": text, "quantization_config": K26["quantization_config"]}
    assert target(of={"text_config": K26, "vision_config": {}}) == flat == target(of=outside)
    assert flat.layers == (Layer("dense"), *[Layer("moe", experts="int4")] * 60)
    assert flat.group_size == 32 and flat.lora_norm_eps == 1e-6
    # a target's `yarn` is DeepSeek's: amplitude m(mscale) / m(mscale_all_dim)
    assert flat.rope == config.Rope(50000.0, "deepseek_yarn", 64.0, 4096, 32.0, 1.0, 1.0, 1.0)


def test_unquantised_checkpoint():
    model = target({"quantization_config": ABSENT, "moe_intermediate_size": 100})
    assert model.layers == (Layer("dense"), *[Layer("moe")] * 3)


def test_lora_norm_eps_from_the_file_or_the_yaml():
    assert target({"lora_norm_eps": 1e-5}).lora_norm_eps == 1e-5
    assert target(lora_norm_eps=1e-5).lora_norm_eps == 1e-5
    refused(lambda: target({"lora_norm_eps": 1e-5}, lora_norm_eps=1e-6), "1e-06", "1e-05")


def test_rope_parameters_of_newer_files():
    rope = {"rope_type" if k == "type" else k: v for k, v in YARN.items()} | {"rope_theta": 5e4}
    new = {"rope_parameters": rope, "rope_scaling": ABSENT, "rope_theta": ABSENT}
    assert target(new).rope == target({"rope_scaling": YARN}).rope
    plain = target({"rope_scaling": None}).rope
    assert (plain.type, plain.factor, plain.theta) == ("default", 1.0, 50000.0)


def test_k2_variants_are_read_not_assumed():
    rope = target({"rope_scaling.beta_fast": 1.0, "rope_scaling.factor": 32}).rope
    assert (rope.beta_fast, rope.factor) == (1.0, 32.0)


W = "quantization_config.config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": ABSENT}, ["m/config.json: kv_lora_rank: missing"]),
        ({"q_lora_rank": None}, ["q_lora_rank: expected an integer", "got null"]),
        ({"hidden_size": "64"}, ["hidden_size: expected an integer", "got '64'"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob: expected true or false, got 1"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps: expected a number above 0"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers: expected an integer from 1 to"]),
        ({"first_k_dense_replace": 5}, ["first_k_dense_replace", "from 0 to 4, got 5"]),
        ({"scoring_func": "softmax"}, ["scoring_func: 'softmax'", "only 'sigmoid'"]),
        ({"topk_method": "greedy"}, ["topk_method"]),
        ({"n_group": 8}, ["n_group: 8 is not supported; only 1 is"]),
        ({"hidden_act": "gelu"}, ["hidden_act"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings: true"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim: expected an even integer, got 7"]),
        ({"num_experts_per_tok": 17}, ["num_experts_per_tok", "n_routed_experts, 16", "got 17"]),
        ({"hidden_size": 80}, ["hidden_size: expected a multiple of 32", "got 80"]),
        ({"moe_intermediate_size": 80}, ["moe_intermediate_size: expected a multiple of 32"]),
        ({"rope_theta": ABSENT}, ["rope_theta: expected a number", "got null"]),
        ({"rope_scaling": {"factor": 2}}, ["rope_scaling.rope_type: missing"]),
        ({"rope_scaling.type": "llama3"}, ["rope_scaling.rope_type", "got 'llama3'"]),
        ({"rope_scaling.rope_type": "default"}, ["rope_type: stated twice", "'yarn'"]),
        ({"rope_scaling.rope_theta": 1e4}, ["rope_theta: stated twice"]),
        ({"rope_scaling.factor": ABSENT}, ["rope_scaling.factor: missing; yarn needs it"]),
        ({"rope_scaling.attention_factor": 2.0}, ["attention_factor: 2.0 is not supported"]),
        ({f"{W}.num_bits": 8}, ["weights.num_bits: 8 is not supported; only 4 is"]),
        ({f"{W}.num_bits": ABSENT}, ["weights.num_bits: missing; only 4"]),
        ({f"{W}.group_size": 48}, ["weights.group_size: expected a power of two", "got 48"]),
        ({f"{W}.group_size": 4}, ["weights.group_size: expected a power of two from 8"]),
        ({f"{W}.strategy": "channel"}, ["weights.strategy: 'channel'"]),
        ({f"{W}.symmetric": False}, ["weights.symmetric: false"]),
        ({f"{W}.actorder": "group"}, ["weights.actorder: 'group'", "only null"]),
        ({"quantization_config.format": "marlin-24"}, ["format: 'marlin-24'"]),
        ({"quantization_config.quant_method": "awq"}, ["quant_method: 'awq'"]),
        ({"quantization_config.config_groups": {}}, ["config_groups: 0 groups"]),
        ({"quantization_config.ignore": ["re:("]}, ["ignore: re:( is no pattern"]),
        ({"quantization_config.ignore": IGNORE[1:]}, ["lm_head: INT4 is not supported"]),
        ({"quantization_config.ignore": IGNORE[:1]}, ["model.layers.0.self_attn: INT4 is not"]),
        (
            {"quantization_config.ignore": [*IGNORE, "model.layers.2.mlp.experts.0.up_proj"]},
            ["model.layers.2.mlp.experts.0: the ignore list names only some"],
        ),
    ],
)
def test_bad_target(changes, words):
    refused(lambda: target(changes), "m/config.json", *words)


def test_not_an_object():
    refused(lambda: config.parse_model([], source="m"), "m", "expected a JSON object, got []")
    refused(lambda: target(of={"text_config": 3}), "text_config")


@pytest.mark.parametrize(
    ("module", "ignore", "expected"),
    [
        ("model.layers.1.mlp.experts.0.up_proj", IGNORE, True),
        ("model.layers.0.mlp.up_proj", IGNORE, False),
        ("model.layers.1.mlp.shared_experts.up_proj", IGNORE, False),
        ("lm_head", IGNORE, False),
        ("lm_head", ["language_model.lm_head"], False),
        ("lm_head2", ["lm_head"], True),
        ("model.layers.1.mlp.up_proj", ["model.layers.1"], False),  # a module's children
        ("model.layers.10.mlp.up_proj", ["model.layers.1"], True),
        ("model.layers.1.mlp.up_proj", ["re:layers"], True),  # matches from the start only
        ("model.layers.1.mlp.up_proj", [r"re:language_model\.model"], False),
        ("lm_head", None, False),  # nothing is quantised
    ],
)
def test_ignore_list(module, ignore, expected):
    assert config.quantised(module, ignore) is expected


# ---------------------------------------- the drafter's config.json


def test_drafter_reads_both_places_and_no_window():
    flat = {"dflash_config": ABSENT, "mask_token_id": 62, "target_layer_ids": [1, 2, 3]}
    d = drafter()
    assert d == drafter(flat)
    assert d.layer_types == ("full_attention",) * 3 and d.sliding_window is None
    assert (d.block_size, d.mask_token_id, d.target_layer_ids) == (8, 62, (1, 2, 3))
    assert drafter({"head_dim": ABSENT}).head_dim == 16


@pytest.mark.parametrize("kind", ["yarn", "deepseek_yarn"])
def test_drafter_rope_keeps_its_type(kind):
    assert drafter({"rope_scaling": {**YARN, "type": kind}}).rope.type == kind


@pytest.mark.parametrize(
    ("keys", "kinds", "window"),
    [
        ({"sliding_window": 256}, "sss", 256),
        ({"sliding_window": 256, "use_sliding_window": False}, "fff", None),
        ({"sliding_window": 256, "max_window_layers": 2}, "ffs", 256),
        ({"sliding_window": 256, "layer_types": ["sliding_attention"] * 2}, None, None),
        ({"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, None, None),
        ({"sliding_window": 256, "layer_types": ["full_attention"] * 3}, "fff", None),
    ],
)
def test_drafter_windows(keys, kinds, window):
    if kinds is None:
        refused(lambda: drafter(keys), "d/config.json")
        return
    d = drafter(keys)
    assert ("".join(k[0] for k in d.layer_types), d.sliding_window) == (kinds, window)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 1}, ["block_size: expected an integer from 2", "got 1"]),
        ({"block_size": ABSENT}, ["block_size", "got null"]),
        ({"dflash_config.block_size": 4}, ["dflash_config.block_size: stated twice", "8 and 4"]),
        ({"dflash_config.mask_token_id": 64}, ["mask_token_id", "from 0 to 63, got 64"]),
        ({"dflash_config.target_layer_ids": []}, ["target_layer_ids: expected a list"]),
        ({"dflash_config.target_layer_ids": [-1]}, ["target_layer_ids", "got -1"]),
        ({"dflash_config": {}}, ["target_layer_ids: expected a list", "got null"]),
        ({"dflash_config.causal": True}, ["dflash_config.causal: true"]),
        ({"draft_vocab_size": 32}, ["draft_vocab_size: 32"]),
        ({"num_attention_heads": 3}, ["num_attention_heads: expected a multiple of", "got 3"]),
        ({"head_dim": 31}, ["head_dim: expected an even integer"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ["rope_type", "got 'linear'"]),
    ],
)
def test_bad_drafter(changes, words):
    refused(lambda: drafter(changes), "d/config.json", *words)


# ---------------------------------------- rules across files


def test_leaves():
    assert [config.leaves(n) for n in (64, 8, 12, 3, 6, 1)] == [8, 8, 4, 1, 2, 1]
    assert [config.leaves(n, most=n) for n in (64, 8, 12, 3)] == [64, 8, 4, 1]  # o_proj's heads
    int4 = target({"moe_intermediate_size": 128})  # 4 groups; the shared expert follows
    assert [config.mlp_leaves(int4, i) for i in (0, 1)] == [8, 4]


def test_c3_the_limit_is_the_models_own_and_scaled_once(settings):
    model = target()  # original length 16, factor 4, maximum 64
    assert config.validate(settings(), model, None).decode.context == 64
    assert config.validate(settings(context=64), model, None).decode.context == 64
    refused(
        lambda: config.validate(settings(context=65), model, None), "decode.context", "64", "65"
    )


def test_kernels_follow_the_activation(settings):
    def chosen(**asked):
        kernels = config.Kernels(**asked)
        config_ = dataclasses.replace(settings(), kernels=kernels)
        kernels = config.validate(config_, target(), None).kernels
        return kernels.linear, kernels.moe, kernels.attention

    assert chosen() == ("simple",) * 3
    assert chosen(activation="bfloat16") == ("tensor_core",) * 3
    some = dict(linear="simple", attention="simple")
    assert chosen(activation="bfloat16", **some) == ("simple", "tensor_core", "simple")
    refused(lambda: chosen(moe="tensor_core"), "kernels.moe", "tensor_core", "activation: float32")


def test_context_need_not_be_whole_leaves(settings):
    assert config.validate(settings(context=63), target(), None).decode.context == 63


def test_a2_a_shard_that_would_cut_a_group(settings):
    model = target({"moe_intermediate_size": 96})
    refused(
        lambda: config.validate(settings(tp=2), model, None),
        "layers.1.mlp.experts.down_proj: 96 input columns are 3 groups of 32 and cannot be cut in 2"
        " (shards of 48); tp.size may be 1",
    )
    config.validate(settings(tp=1), model, None)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"moe_intermediate_size": 128}, 8, "are 4 groups of 32 and cannot be cut in 8 (shards of"),
        ({"moe_intermediate_size": 128}, 8, "tp.size may be 1, 2 or 4"),
        ({"moe_intermediate_size": 32}, 2, "are 1 group of 32 and"),
        ({"num_attention_heads": 3}, 2, "self_attn.o_proj: 384 input columns are 3 heads of 128"),
        ({"intermediate_size": 100}, 8, "layers.0.mlp.down_proj: 100 input columns cannot"),
    ],
)
def test_tp_must_divide_the_leaves(settings, changes, tp, message):
    model = target({"num_attention_heads": 8} | changes)
    refused(lambda: config.validate(settings(tp=tp), model, None), message, "tp.size may be")


def test_replicated_tensors_are_not_cut(settings):
    cut = ", ".join(f"{k}_proj: replicate" for k in ("q", "k", "v", "q_b", "kv_b", "o"))
    model = target({"num_attention_heads": 3})
    config.validate(settings(f"tp: {{size: 8, cut: {{{cut}}}}}"), model, None)
    half = settings("tp: {cut: {up_proj: replicate}}")
    refused(lambda: config.validate(half, model, None), "tp.cut.up_proj", "gate_proj: column")


@pytest.mark.parametrize(
    ("changes", "tp", "ok"),
    [
        ({}, 4, True),  # 2 KV heads, each on two ranks
        ({}, 8, False),  # 4 heads
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, False),
        ({"intermediate_size": 130}, 4, False),
    ],
)
def test_tp_of_the_drafter(settings, changes, tp, ok):
    model = target({"num_attention_heads": 8})

    def call():
        return config.validate(settings(tp=tp), model, drafter(changes))

    if ok:
        call()
    else:
        refused(call, "drafter ", "tp.size may be")


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_chain_and_tree_need_a_drafter(settings, mode):
    c = settings(mode=mode)
    refused(lambda: config.validate(c, target(), None), f"draft.mode: {mode} needs a drafter")
    config.validate(c, target(), drafter())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, ["hidden_size is 128, but the target's is 64"]),
        ({"vocab_size": 128}, ["vocab_size is 128, but the target's is 64"]),
        ({"dflash_config.target_layer_ids": [4]}, ["target_layer_ids has 4", "layers are 0-3"]),
    ],
)
def test_drafter_of_another_model(settings, changes, words):
    c = settings("draft: {path: d}")
    refused(lambda: config.validate(c, target(), drafter(changes)), *words)


def test_chunks_are_whole_leaves(settings):
    c = settings("decode: {prefill_chunk: 96}")
    refused(lambda: config.validate(c, target(), None), "prefill_chunk", "decode.leaf, 64", "96")


def test_stated_dimensions_are_checked(write):
    good = config.load(write("model: {path: m, hidden_size: 64, rms_norm_eps: 1e-5}"))
    config.validate(good, target(), None)
    bad = config.load(write("model: {path: m, hidden_size: 128}"))
    words = ["model.hidden_size: 128 is stated, but ", "config.json has 64"]
    refused(lambda: config.validate(bad, target(), None), *words)
    typo = write("model: {path: m, hiden_size: 64}")
    refused(lambda: config.load(typo), "did you mean model.hidden_size?")


DENSE = "{range: 0, kind: dense}"
MOE = "{range: 1-3, kind: moe, experts: int4}"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ([DENSE, MOE], None),
        ([MOE, DENSE], None),
        ([MOE], ["layers: no rule states layer 0", "0-3"]),
        ([DENSE, MOE, DENSE], ["layers[2].range: layer 0 is stated by layers[0] already"]),
        ([DENSE, "{range: 1-4, kind: moe}"], ["layers[1].range: layer 4 does not exist"]),
        (["{range: 0-1, kind: dense}"], ["layers[0].kind: layer 1 is stated dense", "it moe"]),
        ([DENSE, "{range: 1-3, kind: moe}"], ["layers[1].experts", "stated none", "int4"]),
    ],
)
def test_layer_stack_agrees_with_the_checkpoint(settings, rules, words):
    c = settings(f"layers: [{', '.join(rules)}]")
    if words is None:
        config.validate(c, target(), None)
    else:
        refused(lambda: config.validate(c, target(), None), *words)

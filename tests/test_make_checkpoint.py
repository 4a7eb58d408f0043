"""tools/make_checkpoint.py and tools/preshard.py: the published layout, loaded by the engine's own
loader; weights from a seed equal the files; drafters against the float64 forward."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import oracle
import pytest
import toy
from test_loader import assert_same, load_together, refused

import config
import loader
from engine import Engine
from reference import ReferenceOps, generate
from sampling import SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import make_checkpoint
import preshard

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 515,  # does not divide by eight
}
SMALL_DRAFTER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
DRAFTERS = {
    "deepseek_yarn": {},
    "yarn": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    },
    "deepseek_yarn, window": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
    },
}
DRAFTERS["yarn, window"] = {**DRAFTERS["yarn"], **DRAFTERS["deepseek_yarn, window"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A small target with its drafter in drafter/."""
    directory = tmp_path_factory.mktemp("made")
    raw = make_checkpoint.write_target(directory, SMALL)
    make_checkpoint.write_drafter(directory / "drafter", raw["text_config"], SMALL_DRAFTER)
    return directory


def open_both(directory: Path, **options) -> tuple[loader.Checkpoint, config.Model]:
    checkpoint = loader.open_checkpoint(directory, **options)
    return checkpoint, config.parse_model(checkpoint.config_json, source="config.json")


def settings_of(directory: Path, **sections) -> config.Config:
    model = config.ModelSection(
        path=directory, lora_norm_eps=None, stated=(), **sections.pop("model", {})
    )
    decode = config.Decode(context=64, batch=2, prefill_chunk=32, leaf=16, span=2)
    draft = sections.pop("draft", config.Draft(path=directory / "drafter", mode="tree"))
    return config.Config(model=model, draft=draft, decode=decode, **sections)


# ---- the layout ----------------------------------------------------------------------------------


def test_the_layout_is_the_published_one(made):
    shards = sorted(path.name for path in made.glob("*.safetensors"))
    assert shards == [f"model-{n:05}-of-000006.safetensors" for n in range(1, 7)]
    index = json.loads((made / loader.INDEX).read_text())
    assert set(index["weight_map"].values()) == set(shards)
    checkpoint, model = open_both(made)
    assert checkpoint.skipped_vision == 2 and checkpoint.config_json["text_config"]
    text = set(checkpoint.tensors) - {"vision_tower.weight", "mm_projector.weight"}
    assert all(name.startswith("language_model.") for name in text)
    expert = "language_model.model.layers.1.mlp.experts.3.down_proj."
    assert str(checkpoint.tensors[expert + "weight_packed"]) == "I32 [64, 32]"
    assert str(checkpoint.tensors[expert + "weight_scale"]) == "BF16 [64, 8]"
    assert checkpoint.text_names["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"
    assert loader.generation_stop_ids(checkpoint) == (515 - 255, 515 - 254)
    # Wider types first, then by name, as safetensors writes them.
    shard = [t for t in checkpoint.tensors.values() if t.file == shards[2]]
    shard.sort(key=lambda tensor: tensor.begin)
    keys = [(make_checkpoint.ORDER.index(t.dtype), t.name) for t in shard]
    assert keys == sorted(keys)


def test_the_same_seed_gives_the_same_files(made, tmp_path):
    make_checkpoint.write_target(tmp_path / "again", SMALL)
    make_checkpoint.write_target(tmp_path / "other", SMALL, seed=1)
    for path in made.glob("model*"):
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    name = "model-00001-of-000006.safetensors"
    assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_headers_only_needs_no_space_and_plans(tmp_path):
    arguments = [str(tmp_path / "k"), "--headers-only", "--layers", "2", "--experts", "16"]
    assert make_checkpoint.main(arguments) == 0
    size = [path.stat() for path in tmp_path.rglob("*.safetensors")]
    assert sum(s.st_size for s in size) > 10e9 and sum(s.st_blocks * 512 for s in size) < 5e6
    checkpoint, model = open_both(tmp_path / "k")
    assert model.hidden_size == 7168 and model.n_routed_experts == 16
    sizes = {
        loader.plan_target(checkpoint, model, tp=config.TensorParallel(size=8), rank=rank).bytes
        for rank in range(8)
    }
    assert len(sizes) == 1


def test_the_tool_s_own_errors(tmp_path, capsys):
    assert make_checkpoint.main([str(tmp_path), "--set", "hidden_size"]) == 2
    assert "hidden_size: expected KEY=JSON" in capsys.readouterr().err
    assert make_checkpoint.main([str(tmp_path), "--set", "n_group=2"]) == 2
    assert "n_group: 2 is not supported" in capsys.readouterr().err
    (tmp_path / "mine").write_text("")
    assert make_checkpoint.main([str(tmp_path), "--headers-only"]) == 2
    assert "is not empty; name a new directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_full_size_s_per_rank_bytes():
    """k26-rank.yaml: the published sizes, 70.95 GiB of text and an eighth of the drafter a rank."""
    engine = Engine(config.load("k26-rank.yaml"), "cpu", load=False)
    assert round(engine.plan.bytes / 2**30, 2) == 70.95
    assert round(engine.draft_plan.bytes / 2**30, 2) == 0.81
    counts = sum(1 for t in make_checkpoint.drafter_tensors(raw_drafter()))
    assert counts == 69


def raw_drafter() -> dict:
    return json.loads((make_checkpoint.PUBLISHED / "drafter" / "config.json").read_text())


# ---- weights from a seed -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8])
def test_generated_weights_are_the_files_bits(made, size):
    files, model = open_both(made)
    none, _ = open_both(made, generate=True)
    tp, ops = config.TensorParallel(size=size), ReferenceOps()
    for rank in range(size):
        plan = loader.plan_target(files, model, tp=tp, rank=rank)
        planned = loader.plan_target(none, model, tp=tp, rank=rank)
        assert planned.bytes == plan.bytes
        assert_same(loader.load_target(plan), whole(loader.generate_weights(planned, ops)))
    own = config.parse_drafter(raw_of(made / "drafter"), source="d")
    drafts = [
        loader.plan_drafter(loader.open_checkpoint(made / "drafter", generate=g), own, model)
        for g in (False, True)
    ]
    assert_same(loader.load_drafter(drafts[0]), loader.generate_weights(drafts[1], ops))


def whole(weights: loader.TargetWeights) -> loader.TargetWeights:
    """With the layers that an iterator gives."""
    return dataclasses.replace(weights, layers=tuple(weights.layers))


def raw_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_generate_is_a_function_of_seed_and_place():
    whole, part = np.empty((40, 70), np.float32), np.empty((9, 11), np.float32)
    generate(whole, 7, 0.5, 2.0)
    generate(part, 7, 0.5, 2.0, first=(20, 30), width=70)
    assert (whole[20:29, 30:41] == part).all()
    assert abs(whole.mean() - 0.5) < 0.1 and -1.5 <= whole.min() < whole.max() < 2.5
    generate(other := np.empty_like(whole), 8, 0.5, 2.0)
    assert (whole != other).any()
    words = np.empty((100, 100), np.int32)
    generate(words, 1, 0, 0)
    counts = np.bincount(loader.unpack_int4(words).reshape(-1) + 8, minlength=16)
    assert (np.abs(counts - 5000) < 500).all()  # seven deviations


def test_an_engine_from_a_seed_equals_one_from_files(made, tmp_path):
    for path in ("config.json", "drafter/config.json"):  # and no other file
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((made / path).read_bytes())
    seeded = Engine(settings_of(tmp_path, model={"load": "generate"}), "cpu")
    from_files = Engine(settings_of(made), "cpu")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    results = []
    for engine in (from_files, seeded):
        for mode in ("ar", "tree"):
            engine.use(mode, 8)
            results += engine.generate([[1, 2, 3, 4]], params, keep_logits=True)
    for result in results[1:]:
        assert result.token_ids == results[0].token_ids
        assert toy.same_bits(result.logits, results[0].logits)
    assert np.isfinite(results[0].logits).all() and len(set(results[0].token_ids)) > 3


def test_one_rank_alone_decodes(made):
    tp = config.TensorParallel(size=2, only_rank=0)
    engine = Engine(settings_of(made, tp=tp), "cpu")
    assert engine.rank == 0 and engine.comm is None
    results = []
    for mode in ("ar", "tree"):
        engine.use(mode, 8)
        [result] = engine.generate(
            [[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True), keep_logits=True
        )
        results.append(result)
    assert results[0].logits.shape == (6, 515) and np.isfinite(results[0].logits).all()
    assert results[0].token_ids == results[1].token_ids
    ids = np.array([1, 2, 300, 400, 514])  # of both ranks' share of the vocabulary
    rows = np.asarray(engine.model.embed(ids))
    assert len(np.unique(rows, axis=0)) == len(ids) and np.all(np.any(rows != 0, axis=1))


@pytest.mark.parametrize("tp", [{}, {"size": 8, "only_rank": 0}], ids=["whole", "one rank"])
def test_deep_generated_models_do_not_repeat_themselves(tmp_path, tp):
    """As many layers as K2.6 has: logits stay finite, and a token's successor depends on it."""
    deep = {**SMALL, "num_hidden_layers": 61, "vocab_size": 4096}
    make_checkpoint.write_target(tmp_path, deep, headers_only=True)
    settings = settings_of(
        tmp_path, model={"load": "generate"}, tp=config.TensorParallel(**tp), draft=config.Draft()
    )
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    [result] = Engine(settings, "cpu").generate([[1, 2, 3]], params, keep_logits=True)
    assert np.isfinite(result.logits).all() and 0.5 < np.std(result.logits) < 2
    assert len(set(result.token_ids)) >= 32


def test_config_of_generated_weights(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {path: x, seed: 3}\n")
    refused(lambda: config.load(file), "model.seed: goes with model.load: generate")
    file.write_text("model: {path: x, load: guess}\n")
    refused(lambda: config.load(file), "model.load: expected files or generate, got 'guess'")
    file.write_text("model: {path: x, load: generate, seed: 3}\ntp: {size: 2, only_rank: 2}\n")
    settings = config.load(file)
    assert (settings.model.load, settings.model.seed) == ("generate", 3)
    checked = config.parse_model(
        json.loads((make_checkpoint.PUBLISHED / "config.json").read_text()), source="c"
    )
    refused(lambda: config.validate(settings, checked, None), "tp.only_rank", "tp.size 2")


# ---- the drafter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafter_logits_equal_the_oracle(made, tmp_path, kind):
    """Both rotations, with and without a sliding window, in the published layout, against the plain
    float64 forward. The bound is that of two layers more than the target's (toy.logit_bound)."""
    text = raw_of(made)["text_config"]
    d = make_checkpoint.write_drafter(tmp_path / "d", text, {**SMALL_DRAFTER, **DRAFTERS[kind]})
    settings = settings_of(made)
    draft = config.Draft(path=tmp_path / "d", mode="tree")
    engine = Engine(config.Config(model=settings.model, draft=draft, decode=settings.decode), "cpu")
    assert (engine.drafter.layers[0].window > 0) == ("window" in kind)
    ids = np.random.default_rng(3).integers(0, 256, 30).astype(np.int32)
    slot = engine.cache.admit()
    toy.feed(engine, slot, ids[:29])
    [logits] = engine.drafter.draft(ids[[29]], np.array([slot]), engine.cache)
    _, target = oracle.read_checkpoint(made)
    _, weights = oracle.read_checkpoint(tmp_path / "d")
    traced = oracle.forward(text, target, ids[:29])
    taps = np.concatenate([traced.taps[i] for i in d["dflash_config"]["target_layer_ids"]], 1)
    expected = oracle.draft(d, weights, target, taps, int(ids[29]))
    bound = toy.logit_bound(engine, np.abs(expected).max(), layers=2)
    assert np.abs(logits - expected).max() <= bound


# ---- cut beforehand ------------------------------------------------------------------------------


def size_of(directory) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [2, 8])
def test_presharded_parts_are_the_ranks_parts(made, tmp_path, size, capsys):
    out = tmp_path / "cut"
    assert preshard.main([str(made), str(out), "--size", str(size)]) == 0
    first, use, _ = capsys.readouterr().out.split("\n")
    says, _, written = first.removesuffix(" GiB").rpartition(", ")
    assert says == f"{out}: parts of {made} for tp.size {size}"
    assert use == f"now: a config with model.path: {out} and tp.size: {size}"
    assert float(written) == pytest.approx(size_of(out) / 2**30, rel=0.01)
    whole, model = open_both(made)
    tp, plans, parts = config.TensorParallel(size=size), [], []
    for rank in range(size):
        mine = loader.open_checkpoint(out, rank=rank, size=size)
        assert (mine.directory / "tiktoken.model").exists()
        assert not list(mine.directory.glob("*.yaml"))  # those of the whole one
        a, b = (loader.plan_target(c, model, tp=tp, rank=rank) for c in (whole, mine))
        plans.append(b)
        parts.append(loader.load_target(a))
        assert_same(parts[-1], loader.load_target(b))
        read = sum(t.end - t.begin for t in mine.tensors.values())
        assert read < b.bytes * 1.01 + 10_000
    for part, weights in zip(parts, load_together(plans, tmp_path / "memory"), strict=True):
        assert_same(part, weights)  # there is nothing that ranks could read for each other


def test_parts_that_find_no_room_are_not_begun(made, tmp_path, monkeypatch, capsys):
    out = tmp_path / "new" / "cut"
    monkeypatch.setattr(preshard.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert preshard.main([str(made), str(out), "--size", "2"]) == 2
    assert "GiB, 0.0 are free there" in capsys.readouterr().err and not out.parent.exists()


def test_too_few_experts_are_refused_before_anything_is_made(tmp_path, capsys):
    assert make_checkpoint.main([str(tmp_path / "out"), "--experts", "4"]) == 2
    said = capsys.readouterr().err
    assert "--experts" in said and "expected at most n_routed_experts, 4, got 8" in said
    assert not (tmp_path / "out").exists()


def test_a_presharded_drafter(made, tmp_path):
    out, target = tmp_path / "cut", str(made)
    source = str(made / "drafter")
    assert preshard.main([source, str(out), "--size", "2", "--drafter-of", target]) == 0
    _, model = open_both(made)
    own = config.parse_drafter(raw_of(made / "drafter"), source="d")
    for rank in range(2):
        checkpoints = (
            loader.open_checkpoint(made / "drafter"),
            loader.open_checkpoint(out, rank=rank, size=2),
        )
        tp = config.TensorParallel(size=2)
        a, b = (loader.plan_drafter(c, own, model, tp=tp, rank=rank) for c in checkpoints)
        assert_same(loader.load_drafter(a), loader.load_drafter(b))


def test_a_wrong_rank_or_size_is_one_error(made, tmp_path, capsys):
    out = tmp_path / "cut"
    assert preshard.main([str(made), str(out), "--size", "2"]) == 0
    refused(lambda: loader.open_checkpoint(out), "expected rank-0-of-1", "found rank-0-of-2")
    refused(lambda: loader.open_checkpoint(out, rank=1, size=4), "expected rank-1-of-4")
    checkpoint, model = open_both(out / "rank-1-of-2")
    for tp, rank in ((config.TensorParallel(), 0), (config.TensorParallel(size=2), 0)):
        refused(
            lambda tp=tp, rank=rank: loader.plan_target(checkpoint, model, tp=tp, rank=rank),
            "holds the parts of rank 1 of 2",
            f"rank 0 of {tp.size}",
        )
    assert preshard.main([str(made), str(out), "--size", "2"]) == 2
    assert "is not empty" in capsys.readouterr().err
    path = out / "rank-0-of-2" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), loader.SHARD_KEY: {"rank": 2}}))
    refused(lambda: loader.open_checkpoint(path.parent), "kdtree_shard", "expected a rank")


def test_what_was_made_runs_with_the_config_beside_it(tmp_path, capsys):
    small = {**SMALL, "vocab_size": 1024, "num_hidden_layers": 2}
    argv = [f"--set={key}={json.dumps(value)}" for key, value in small.items()]
    assert make_checkpoint.main([str(tmp_path), *argv]) == 0
    settings = config.load(capsys.readouterr().out.split()[-2])
    engine = Engine(settings, "cpu")
    [result] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert engine.drafter is not None and len(result.token_ids) == 4


def test_a_key_that_nobody_publishes_is_refused(tmp_path, capsys):
    assert make_checkpoint.main([str(tmp_path), "--set", "hidden_sizes=64"]) == 2
    said = capsys.readouterr().err
    assert "--set hidden_sizes" in said and "did you mean hidden_size?" in said
    assert not list(tmp_path.iterdir())

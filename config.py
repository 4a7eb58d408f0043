"""Configuration: YAML and a checkpoint's `config.json` to frozen dataclasses, or one clear error.

`load` reads the YAML and checks each key alone; `parse_model` and `parse_drafter` turn a
checkpoint's `config.json` (already read) into `Model` and `Drafter`, whose field names are Hugging
Face's; `validate` checks every rule that joins them. Nothing is changed after that.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parent / "configs"
TILES = "tiles.yaml"  # of CONFIGS: the table of tiles.py, no config
MOST_NODES = 1024  # of a draft tree; block drafters are exhausted long before
AUTO = "auto"  # a budget that the engine chooses (budget.py)
MOST_CONTEXT = 1 << 24  # positions that a rotation table is made for


DEVICE_FAULT = 3  # exit code


class UserError(ValueError):
    """A mistake of the user's: printed as one line, exit code 2."""


class DeviceFault(RuntimeError):
    """A kernel failed: printed as one line, exit code 3. What is on that device is lost."""


# ---------------------------------------- reading one value
# A reader takes (value, where) and returns the checked value; `where` names it in the error.

Read = Callable[[object, str], Any]


_REPR = reprlib.Repr()  # bounded in length and depth, whatever a file holds
_REPR.maxstring = _REPR.maxother = 80


def _show(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return _REPR.repr(value)


def _wrong(where: str, expected: str, value: object) -> UserError:
    return UserError(f"{where}: expected {expected}, got {_show(value)}")


def _integer(low: int, high: int | None = None) -> Read:
    expected = f"an integer, at least {low}" if high is None else f"an integer from {low} to {high}"

    def read(value: object, where: str) -> int:
        # `type` and not isinstance: True is an int to Python, not to a reader of YAML.
        if type(value) is not int or value < low or (high is not None and value > high):
            raise _wrong(where, expected, value)
        return value

    return read


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Read:
    """A finite number in [low, high], or in (low, high] with `above`; integers become floats."""
    expected = f"a number {'above' if above else 'of at least'} {low:g}"
    expected += "" if high == math.inf else f" and at most {high:g}"

    def read(value: object, where: str) -> float:
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:
            number = math.nan
        if not math.isfinite(number) or number > high or number < low or (above and number == low):
            raise _wrong(where, expected, value)
        return number

    return read


def _boolean(value: object, where: str) -> bool:
    if type(value) is not bool:
        raise _wrong(where, "true or false", value)
    return value


def _choice(*names: str) -> Read:
    def read(value: object, where: str) -> str:
        if value not in names or type(value) is not str:
            raise _wrong(where, " or ".join(names), value)
        return value

    return read


def _path(value: object, where: str) -> Path:
    if type(value) is not str or not value:
        raise _wrong(where, "the path of a directory", value)
    return Path(os.path.normpath(os.path.expanduser(value)))


def _optional(read: Read) -> Read:
    return lambda value, where: None if value is None else read(value, where)


def _or_auto(read: Read) -> Read:
    def either(value: object, where: str) -> Any:
        if isinstance(value, str) and value != AUTO:
            raise _wrong(where, f"a number of nodes or {AUTO}", value)
        return value if value == AUTO else read(value, where)

    return either


def _power_of_two(low: int, high: int) -> Read:
    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high or value & (value - 1):
            raise _wrong(where, f"a power of two from {low} to {high}", value)
        return value

    return read


def _key(read: Read, default: Any = MISSING) -> Any:
    """A dataclass field read from a file: its reader, and its default where it may be left out."""
    return field(default=default, metadata={"read": read})


# ---------------------------------------- the checkpoint: target and drafter


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `type` fixes the amplitude of cos and sin; m(s) = 0.1 s ln(factor) + 1:
    `default` 1, `yarn` m(1), `deepseek_yarn` m(mscale) / m(mscale_all_dim). A target's `yarn` is
    DeepSeek's and reads as `deepseek_yarn`."""

    theta: float
    type: str  # default | yarn | deepseek_yarn
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Layer:
    """One layer: its kind, and "none" or "int4" for each part ("none" for parts it lacks)."""

    kind: str  # dense | moe
    quantization: str = "none"  # of a dense layer's MLP
    experts: str = "none"  # of a MoE layer's routed experts
    shared_experts: str = "none"


_COUNT = _integer(1)
_EPS = _number(0, 1, above=True)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The target's `config.json` (its `text_config` where it is nested)."""

    hidden_size: int = _key(_COUNT)
    num_hidden_layers: int = _key(_integer(1, 10_000))
    num_attention_heads: int = _key(_COUNT)
    q_lora_rank: int = _key(_COUNT)
    kv_lora_rank: int = _key(_COUNT)
    qk_nope_head_dim: int = _key(_COUNT)
    qk_rope_head_dim: int = _key(_integer(2))
    v_head_dim: int = _key(_COUNT)
    intermediate_size: int = _key(_COUNT)
    moe_intermediate_size: int = _key(_COUNT)
    n_routed_experts: int = _key(_integer(1, 65_536))
    num_experts_per_tok: int = _key(_COUNT)
    n_shared_experts: int = _key(_COUNT)
    vocab_size: int = _key(_integer(2))
    max_position_embeddings: int = _key(_COUNT)  # already includes YaRN's factor
    rms_norm_eps: float = _key(_EPS)
    lora_norm_eps: float = _key(_EPS, 1e-6)  # of q_a_layernorm and kv_a_layernorm
    routed_scaling_factor: float = _key(_number(0, above=True))
    norm_topk_prob: bool = _key(_boolean)
    rope: Rope
    layers: tuple[Layer, ...]  # [num_hidden_layers]
    group_size: int = 32  # input columns that share one INT4 scale


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """The DFlash drafter's `config.json`."""

    hidden_size: int = _key(_COUNT)
    num_hidden_layers: int = _key(_integer(1, 1_000))
    num_attention_heads: int = _key(_COUNT)
    num_key_value_heads: int = _key(_COUNT)
    head_dim: int
    intermediate_size: int = _key(_COUNT)
    vocab_size: int = _key(_integer(2))
    rms_norm_eps: float = _key(_EPS)
    block_size: int  # the anchor and block_size - 1 drafts
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # taps: outputs of these target layers, counted from 0
    rope: Rope
    layer_types: tuple[str, ...]  # full_attention | sliding_attention, one per layer
    sliding_window: int | None  # positions; None when no layer slides


# ---------------------------------------- the engine: one dataclass per YAML section


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """`model:` may also state numbers of `Model`, to be checked against the checkpoint.

    With `load: generate` the weights, the drafter's too, are made from `seed` on the device; the
    directories need no more than their config.json.
    """

    path: Path
    load: str = _key(_choice("files", "generate"), "files")
    seed: int = _key(_integer(0, 2**32 - 1), 0)  # of generated weights
    lora_norm_eps: float | None
    stated: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class LayerRule:
    first: int
    last: int  # inclusive
    layer: Layer


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How each kind of tensor, named by its module, is cut among the ranks of tensor parallelism.

    column: output rows of [out, in]; row: input columns; heads: output rows, whole heads;
    vocabulary: rows, padded to equal shards.
    """

    embed_tokens: str = _key(_choice("vocabulary", "replicate"), "vocabulary")
    lm_head: str = _key(_choice("vocabulary", "replicate"), "vocabulary")
    q_a_proj: str = _key(_choice("replicate"), "replicate")
    q_b_proj: str = _key(_choice("heads", "replicate"), "heads")
    kv_a_proj_with_mqa: str = _key(_choice("replicate"), "replicate")
    kv_b_proj: str = _key(_choice("heads", "replicate"), "heads")
    o_proj: str = _key(_choice("row", "replicate"), "row")
    gate: str = _key(_choice("replicate"), "replicate")  # the router
    gate_proj: str = _key(_choice("column", "replicate"), "column")
    up_proj: str = _key(_choice("column", "replicate"), "column")
    down_proj: str = _key(_choice("row", "replicate"), "row")
    norm: str = _key(_choice("replicate"), "replicate")
    q_proj: str = _key(_choice("heads", "replicate"), "heads")  # from here on: the drafter's own
    k_proj: str = _key(_choice("heads", "replicate"), "heads")
    v_proj: str = _key(_choice("heads", "replicate"), "heads")
    fc: str = _key(_choice("column", "replicate"), "column")


def _subsection(cls: type) -> Any:
    return _key(lambda value, where: _section(cls, value, where), cls())


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    size: int = _key(_power_of_two(1, 8), 1)
    # One rank alone, without the others: right shapes and times, but sums of its own part only.
    only_rank: int | None = _key(_optional(_integer(0, 7)), None)
    cut: Cut = _subsection(Cut)

    def ranks(self, kind: str) -> int:
        """Ranks that share a tensor of this kind: all, or 1 where each holds it whole."""
        return 1 if getattr(self.cut, kind) == "replicate" else self.size


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """`linear` (dense products), `moe` (INT4 experts) and `attention` say which kernels a GPU runs;
    shapes that tensor cores cannot take run the simple ones. Left out, they follow `activation`."""

    activation: str = _key(_choice("float32", "bfloat16"), "float32")
    linear: str | None = _key(_optional(_choice("simple", "tensor_core")), None)
    moe: str | None = _key(_optional(_choice("simple", "tensor_core")), None)
    attention: str | None = _key(_optional(_choice("simple", "tensor_core")), None)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """With `budget: auto` a tree's nodes are chosen round by round, plain decoding and the chain
    among the choices, and `limit` bounds them."""

    path: Path | None = _key(_optional(_path), None)
    mode: str = _key(_choice("ar", "chain", "tree"), "ar")
    budget: int | str = _key(_or_auto(_integer(1, MOST_NODES)), 16)  # nodes, the root included
    limit: int = _key(_integer(2, MOST_NODES), 32)

    @property
    def most(self) -> int:
        """Nodes of a tree at most."""
        return self.limit if self.budget == AUTO else self.budget


@dataclass(frozen=True, kw_only=True)
class Decode:
    """`context` is the exact limit in tokens, prompt included; it need not be a multiple of `leaf`
    (the last page is then partly used). Left out, it is the model's limit, set by `validate`."""

    context: int | None = _key(_optional(_integer(1)), None)
    batch: int = _key(_integer(1, 65_536), 1)  # sequences decoded together
    pages: int | None = _key(_optional(_integer(1)), None)  # of the cache; None: batch x context
    max_tokens: int = _key(_integer(1), 256)
    temperature: float = _key(_number(0, 100), 0.0)
    top_p: float = _key(_number(0, 1, above=True), 1.0)
    top_k: int = _key(_integer(-1), 0)  # 0 and -1: off
    seed: int | None = _key(_optional(_integer(0, 2**64 - 1)), None)  # None: a fresh one, reported
    prefill_chunk: int = _key(_integer(1), 256)  # positions
    leaf: int = _key(_power_of_two(16, 4096), 64)  # positions of an attention leaf, a cache page
    span: int = _key(_integer(1), 4)  # leaves folded into one span


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelSection = _key(lambda value, where: _model_section(value, where))
    layers: tuple[LayerRule, ...] = _key(lambda value, where: _layer_rules(value, where), ())
    tp: TensorParallel = _subsection(TensorParallel)
    kernels: Kernels = _subsection(Kernels)
    draft: Draft = _subsection(Draft)
    decode: Decode = _subsection(Decode)


_SECTIONS: dict[str, type] = {
    "tp": TensorParallel,
    "tp.cut": Cut,
    "kernels": Kernels,
    "draft": Draft,
    "decode": Decode,
}
_STATABLE = {f.name: f.metadata["read"] for f in fields(Model) if f.metadata}
_MODEL_KEYS = ["path", "load", "seed", *_STATABLE]
_KEYS = {"model": _MODEL_KEYS} | {s: [f.name for f in fields(c)] for s, c in _SECTIONS.items()}

# Command line over YAML: keyword of `load` -> (section, key, flag, which errors name).
_OVERRIDES = {
    "model_path": ("model", "path", "--model"),
    "tp": ("tp", "size", "--tp"),
    "mode": ("draft", "mode", "--mode"),
    "budget": ("draft", "budget", "--budget"),
    "context": ("decode", "context", "--context"),
    "batch": ("decode", "batch", "--batch"),
    "max_tokens": ("decode", "max_tokens", "--max-tokens"),
    "temperature": ("decode", "temperature", "--temperature"),
    "top_p": ("decode", "top_p", "--top-p"),
    "top_k": ("decode", "top_k", "--top-k"),
    "seed": ("decode", "seed", "--seed"),
}


# ---------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """YAML with 1.2's scalars: 1e-3 is a float, `on` and `no` are strings; a key may stand once."""

    yaml_implicit_resolvers: dict = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[str] = set()
        for key, _ in node.value:
            word = isinstance(key, yaml.ScalarNode)
            if not word or key.value in seen:
                problem = f"duplicate key {key.value}" if word else "a key must be a word"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"null|~|", ["n", "~", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.inf|\.nan", "-+."),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first)
    )


def find(path: str | Path) -> Path:
    """The YAML file `path`: as given, else of that name in the project's `configs/`."""
    given = os.path.expanduser(path)
    for candidate in (given, os.path.join(CONFIGS, given)):
        if os.path.isfile(candidate):
            return Path(candidate)
    known = ", ".join(sorted(p.name for p in CONFIGS.glob("*.yaml") if p.name != TILES))
    raise UserError(f"{path}: no such config file, neither here nor in configs/ (there: {known})")


def load(path: str | Path, **overrides: Any) -> Config:
    """Read the YAML file `path` (see `find`).

    overrides: model_path, tp, mode, budget, context, batch, max_tokens, temperature, top_p, top_k,
    seed; each that is not None replaces the file's value and is checked alike. Paths in the file
    are relative to the file, model_path to the working directory. Only `validate`, which needs the
    checkpoint's own config, makes the result complete. Raises UserError.
    """
    file = find(path)
    raw = read_yaml(file, f"a mapping with {', '.join(f.name for f in fields(Config))}")
    for section in ("model", "draft"):
        value = raw.get(section)
        if isinstance(value, dict) and isinstance(value.get("path"), str) and value["path"]:
            value["path"] = os.path.join(file.parent, os.path.expanduser(value["path"]))
    for keyword, value in overrides.items():
        section, key, flag = _OVERRIDES[keyword]
        if value is None:
            continue
        if section == "model":
            value = str(_path(str(value), flag))
        else:  # read once more under the flag's name, so that an error names that
            _SECTIONS[section].__dataclass_fields__[key].metadata["read"](value, flag)
        raw[section] = {**_mapping(raw.get(section), section), key: value}
    return _section(Config, raw, "")


def default_of(keyword: str) -> str:
    """What holds without an override of `load`: the key in words, and the key's own default."""
    section, key, _ = _OVERRIDES[keyword]
    default = _SECTIONS[section].__dataclass_fields__[key].default
    return f"{section}.{key}" if default is None else f"{section}.{key}, else {default}"


def read_yaml(file: Path, expected: str) -> dict:
    """A file that holds a mapping: what is `expected` of it. Raises UserError."""
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{file}: is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{file}{at}: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{file}: not a YAML file: {str(error).splitlines()[0]}") from None
    except (AttributeError, LookupError):  # how PyYAML meets `!!bool x`, `!!int ""`, ...
        raise UserError(
            f"{file}: a tag (!!bool, !!int, ...) stands before what is no such value; leave it out"
        ) from None
    if not isinstance(raw, dict):
        raise _wrong(str(file), expected, raw)
    return raw


def _refuse_unknown(raw: dict, known: Iterable[str], where: str) -> None:
    """Refuse an unknown key, naming the same word elsewhere, else the nearest sibling, else all."""
    known = list(known)
    prefix = f"{where}." if where else ""
    for key in raw:
        if key in known:
            continue
        near = [f"{section}.{key}" for section, keys in _KEYS.items() if key in keys]
        near += [prefix + name for name in difflib.get_close_matches(str(key), known, 1)]
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
        raise UserError(f"{prefix}{key}: unknown key; {hint}")


def _mapping(raw: object, where: str) -> dict:
    if raw is None:  # `draft:` with nothing under it
        return {}
    if not isinstance(raw, dict):
        raise _wrong(where, "a mapping", raw)
    return raw


def _section(cls: type, raw: object, where: str) -> Any:
    raw = _mapping(raw, where)
    _refuse_unknown(raw, (f.name for f in fields(cls)), where)
    return cls(**_read_fields(cls, raw, f"{where}." if where else ""))


def _read_fields(cls: type, raw: Mapping, prefix: str) -> dict[str, Any]:
    """The fields of `cls` that have a reader; a missing one without a default is an error."""
    values = {}
    for f in fields(cls):
        if "read" not in f.metadata:
            continue
        if f.name in raw:
            values[f.name] = f.metadata["read"](raw[f.name], prefix + f.name)
        elif f.default is MISSING:
            raise UserError(f"{prefix}{f.name}: missing")
    return values


def _model_section(raw: object, where: str) -> ModelSection:
    raw = _mapping(raw, where)
    _refuse_unknown(raw, _MODEL_KEYS, where)
    if "path" not in raw:
        raise UserError(f"{where}.path: missing; state it or give --model DIR")
    stated = {k: read(raw[k], f"{where}.{k}") for k, read in _STATABLE.items() if k in raw}
    if "seed" in raw and raw.get("load") != "generate":
        raise UserError(f"{where}.seed: goes with {where}.load: generate; leave it out")
    return ModelSection(
        **_read_fields(ModelSection, raw, f"{where}."),
        path=_path(raw["path"], f"{where}.path"),
        lora_norm_eps=stated.get("lora_norm_eps"),
        stated=tuple(stated.items()),
    )


def _layer_rules(raw: object, where: str) -> tuple[LayerRule, ...]:
    if not isinstance(raw, list) or not raw:
        raise _wrong(where, 'a list of rules such as {range: "0-3", kind: dense}', raw)
    rules = []
    for i, rule in enumerate(raw):
        at = f"{where}[{i}]"
        rule = _mapping(rule, at)
        kind = _choice("dense", "moe")(rule.get("kind"), f"{at}.kind")
        parts = ["quantization"] if kind == "dense" else ["experts", "shared_experts"]
        _refuse_unknown(rule, ["range", "kind", *parts], at)
        span = re.fullmatch(r"(\d{1,6})(?:\s*-\s*(\d{1,6}))?", str(rule.get("range")))
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
        if first > last:
            raise _wrong(f"{at}.range", 'a layer or a range such as "1-60"', rule.get("range"))
        how = {p: _choice("none", "int4")(rule[p], f"{at}.{p}") for p in parts if p in rule}
        rules.append(LayerRule(first, last, Layer(kind, **how)))
    return tuple(rules)


# ---------------------------------------- config.json

# What this engine computes; a checkpoint may leave a key out, but not say otherwise.
_TARGET_FACTS = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "rope_interleave": True,
}
_DRAFTER_FACTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "causal": False,
    "attention_sink_bias": False,
    "sample_from_anchor": False,
}
_QUANTISATION_FACTS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "kv_cache_scheme": None,
}
_GROUP_FACTS = {
    "targets": ["Linear"],
    "format": "pack-quantized",
    "input_activations": None,
    "output_activations": None,
}
_WEIGHT_FACTS = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "symmetric": True,
    "actorder": None,
    "dynamic": False,
}


def _check_facts(raw: Mapping, facts: Mapping, prefix: str, required: Iterable[str] = ()) -> None:
    for key, only in facts.items():
        value = raw.get(key)
        if value is None and key in required:
            raise UserError(f"{prefix}{key}: missing; only {_show(only)} is supported")
        if value is not None and (value != only or type(value) is not type(only)):
            raise UserError(
                f"{prefix}{key}: {_show(value)} is not supported; only {_show(only)} is"
            )


def parse_model(config_json: object, *, source: str, lora_norm_eps: float | None = None) -> Model:
    """The target from its parsed `config.json`: K2's flat shape, or K2.6's with `text_config`.

    source names the file in errors; lora_norm_eps is the YAML's, for files that do not say.
    Raises UserError.
    """
    outer = _json_mapping(config_json, source)
    c = _json_mapping(outer.get("text_config", outer), f"{source}: text_config")
    _check_facts(c, _TARGET_FACTS, f"{source}: ")
    values = _read_fields(Model, c, f"{source}: ")
    if lora_norm_eps is not None:
        if "lora_norm_eps" in c and c["lora_norm_eps"] != lora_norm_eps:
            raise _contradiction("lora_norm_eps", lora_norm_eps, c["lora_norm_eps"], source)
        values["lora_norm_eps"] = lora_norm_eps
    depth = values["num_hidden_layers"]
    dense = _integer(0, depth)(c.get("first_k_dense_replace"), f"{source}: first_k_dense_replace")
    quantisation = c.get("quantization_config") or outer.get("quantization_config")
    group_size, ignore = _quantisation(quantisation, source)
    model = Model(
        **values,
        rope=_rope(c, source, target=True),
        layers=_layers(depth, dense, ignore, source),
        group_size=group_size,
    )
    _check_model(model, source)
    return model


def _check_model(m: Model, source: str) -> None:
    if m.qk_rope_head_dim % 2:
        raise _wrong(f"{source}: qk_rope_head_dim", "an even integer", m.qk_rope_head_dim)
    if (k := m.num_experts_per_tok) > m.n_routed_experts:
        expected = f"at most n_routed_experts, {m.n_routed_experts}"
        raise _wrong(f"{source}: num_experts_per_tok", expected, k)
    dense = any(x.quantization == "int4" for x in m.layers)
    moe = any("int4" in (x.experts, x.shared_experts) for x in m.layers)
    widths = {"hidden_size": dense or moe, "intermediate_size": dense, "moe_intermediate_size": moe}
    for name, quantised_input in widths.items():
        if quantised_input and getattr(m, name) % m.group_size:
            expected = f"a multiple of {m.group_size}, the INT4 group"
            raise _wrong(f"{source}: {name}", expected, getattr(m, name))


def parse_drafter(config_json: object, *, source: str) -> Drafter:
    """The DFlash drafter from its `config.json` (a parsed object). Raises UserError."""
    c = _json_mapping(config_json, source)
    flash = _json_mapping(c.get("dflash_config") or {}, f"{source}: dflash_config")
    prefix = f"{source}: "
    _check_facts(c, _DRAFTER_FACTS, prefix)
    _check_facts(flash, _DRAFTER_FACTS, f"{prefix}dflash_config.")
    values = _read_fields(Drafter, c, prefix)
    vocabulary, hidden = values["vocab_size"], values["hidden_size"]
    _check_facts(c, {"draft_vocab_size": vocabulary, "target_hidden_size": hidden}, prefix)
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % kv_heads:
        expected = f"a multiple of num_key_value_heads, {kv_heads}"
        raise _wrong(f"{prefix}num_attention_heads", expected, heads)
    head_dim = hidden // heads if c.get("head_dim") is None else c["head_dim"]
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
        raise _wrong(f"{prefix}head_dim", "an even integer, at least 2", head_dim)
    # These three stand in dflash_config, at the top, or in both.
    own = {k: c[k] for k in ("block_size", "mask_token_id", "target_layer_ids") if k in c}
    own = _merged(own, flash, f"{prefix}dflash_config.")
    taps = own.get("target_layer_ids")
    if not isinstance(taps, list) or not taps:
        raise _wrong(f"{prefix}target_layer_ids", "a list of layer numbers", taps)
    taps = tuple(_integer(0)(tap, f"{prefix}target_layer_ids") for tap in taps)
    if list(taps) != sorted(set(taps)):  # they are handed over in the order of the layers
        raise _wrong(f"{prefix}target_layer_ids", "ascending layer numbers, each once", list(taps))
    mask = _integer(0, vocabulary - 1)(own.get("mask_token_id"), f"{prefix}mask_token_id")
    layer_types, window = _attention_kinds(c, values["num_hidden_layers"], prefix)
    return Drafter(
        **values,
        head_dim=head_dim,
        block_size=_integer(2, 1024)(own.get("block_size"), f"{prefix}block_size"),
        mask_token_id=mask,
        target_layer_ids=taps,
        rope=_rope(c, source, target=False),
        layer_types=layer_types,
        sliding_window=window,
    )


def _attention_kinds(c: dict, depth: int, prefix: str) -> tuple[tuple[str, ...], int | None]:
    """The drafter's `layer_types` and `sliding_window`; no window where no layer slides."""
    window = _optional(_COUNT)(c.get("sliding_window"), f"{prefix}sliding_window")
    if c.get("use_sliding_window") is False:
        window = None
    kinds = c.get("layer_types")
    if kinds is None:
        # Without layer_types, the layers from max_window_layers on slide: Qwen3's rule.
        start = _integer(0)(c.get("max_window_layers", 0), f"{prefix}max_window_layers")
        start = depth if window is None else start
        kinds = ["full_attention" if i < start else "sliding_attention" for i in range(depth)]
    if not isinstance(kinds, list) or len(kinds) != depth:
        raise _wrong(f"{prefix}layer_types", f"a list of {depth}, one per layer", kinds)
    read = _choice("full_attention", "sliding_attention")
    kinds = tuple(read(k, f"{prefix}layer_types[{i}]") for i, k in enumerate(kinds))
    slides = "sliding_attention" in kinds
    if slides and window is None:
        raise UserError(f"{prefix}sliding_window: missing, but layer_types has sliding_attention")
    return kinds, window if slides else None


def _json_mapping(value: object, where: str) -> dict:
    if not isinstance(value, dict):
        raise _wrong(where, "a JSON object", value)
    return value


def _merged(old: dict, new: dict, prefix: str) -> dict:
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            two = f"{_show(old[key])} and {_show(new[key])}"
            raise UserError(f"{prefix}{key}: stated twice and differently, {two}")
    return {**old, **new}


_MOST = 1e9  # beyond anything that a rope means, far from where float64 overflows
_ROPE_KEYS = {
    "factor": _number(1, _MOST),
    "original_max_position_embeddings": _COUNT,
    "beta_fast": _number(0, _MOST, above=True),
    "beta_slow": _number(0, _MOST, above=True),
    "mscale": _number(0, _MOST),
    "mscale_all_dim": _number(0, _MOST),
}
_ROPE_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def _rope(c: dict, source: str, *, target: bool) -> Rope:
    """Rope from `rope_scaling` (older files) or `rope_parameters` (newer, `rope_theta` inside)."""
    raw: dict = {"rope_theta": c["rope_theta"]} if "rope_theta" in c else {}
    prefix = f"{source}: "
    for name in ("rope_scaling", "rope_parameters"):
        if c.get(name) is not None:
            prefix = f"{source}: {name}."
            raw = _merged(raw, _json_mapping(c[name], prefix[:-1]), prefix)
    if "type" in raw:
        raw = _merged(raw, {"rope_type": raw.pop("type")}, prefix)
    theta = _number(1, above=True)(raw.pop("rope_theta", None), f"{source}: rope_theta")
    if raw and "rope_type" not in raw:
        raise UserError(f"{prefix}rope_type: missing; expected default, yarn or deepseek_yarn")
    kind = _choice("default", "yarn", "deepseek_yarn")(
        raw.pop("rope_type", "default"), f"{prefix}rope_type"
    )
    # An ignored rope key changes every logit without a word, so none is.
    neutral = {"truncate": True, "partial_rotary_factor": 1.0}
    for key, value in raw.items():
        if key not in _ROPE_KEYS and value is not None and value != neutral.get(key):
            known = ", ".join(_ROPE_KEYS)
            raise UserError(f"{prefix}{key}: {_show(value)} is not supported; known: {known}")
    if kind == "default":
        positions = _COUNT(
            c.get("max_position_embeddings", 1), f"{source}: max_position_embeddings"
        )
        return Rope(theta, kind, 1.0, positions, **_ROPE_DEFAULTS)
    values = dict(_ROPE_DEFAULTS)
    for key, read in _ROPE_KEYS.items():
        if raw.get(key) is not None:
            values[key] = read(raw[key], prefix + key)
        elif key not in values:
            raise UserError(f"{prefix}{key}: missing; {kind} needs it")
    return Rope(theta=theta, type="deepseek_yarn" if target else kind, **values)


def _quantisation(q: object, source: str) -> tuple[int, tuple[str, ...] | None]:
    """(group size, ignore list) of pack-quantized INT4; no list if nothing is quantised."""
    if q is None:
        return 32, None
    at = f"{source}: quantization_config"
    q = _json_mapping(q, at)
    _check_facts(q, _QUANTISATION_FACTS, f"{at}.", required=("quant_method", "format"))
    groups = _json_mapping(q.get("config_groups"), f"{at}.config_groups")
    if len(groups) != 1:
        raise UserError(f"{at}.config_groups: {len(groups)} groups; only one is supported")
    name, group = next(iter(groups.items()))
    at_group = f"{at}.config_groups.{name}"
    _check_facts(_json_mapping(group, at_group), _GROUP_FACTS, f"{at_group}.")
    weights = _json_mapping(group.get("weights"), f"{at_group}.weights")
    required = ("num_bits", "strategy", "symmetric")
    _check_facts(weights, _WEIGHT_FACTS, f"{at_group}.weights.", required)
    group_size = _power_of_two(8, 4096)(weights.get("group_size"), f"{at_group}.weights.group_size")
    ignore = q.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise _wrong(f"{at}.ignore", "a list of module names and re: patterns", ignore)
    for pattern in (entry[3:] for entry in ignore if entry.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise UserError(f"{at}.ignore: re:{pattern} is no pattern: {error}") from None
    return group_size, tuple(ignore)


def quantised(module: str, ignore: Iterable[str] | None) -> bool:
    """Whether a linear module (say `model.layers.1.mlp.experts.0.up_proj`) is INT4 under this list.

    As compressed-tensors reads it: `re:` entries match from the start of the name, plain ones name
    a module and its children. Names are tried with and without K2.6's `language_model.` prefix.
    """
    if ignore is None:
        return False
    for entry in ignore:
        if entry.startswith("re:"):
            named = any(re.match(entry[3:], prefix + module) for prefix in ("", "language_model."))
        else:
            named = f"{module}.".startswith(f"{entry.removeprefix('language_model.')}.")
        if named:
            return False
    return True


_MLP = ("gate_proj", "up_proj", "down_proj")
_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def _layers(
    depth: int, dense: int, ignore: tuple[str, ...] | None, source: str
) -> tuple[Layer, ...]:
    """One Layer each. The parts of a layer are quantised whole; attention and the head are not."""

    def how(part: str, names: Iterable[str]) -> str:
        found = {quantised(f"{part}.{name}", ignore) for name in names}
        if len(found) > 1:
            raise UserError(f"{source}: {part}: the ignore list names only some of its projections")
        return "int4" if True in found else "none"

    def layer(i: int) -> Layer:
        at = f"model.layers.{i}"
        if how(f"{at}.self_attn", _ATTENTION) == "int4":
            raise UserError(f"{source}: {at}.self_attn: INT4 is not supported here; ignore it")
        if i < dense:
            return Layer("dense", quantization=how(f"{at}.mlp", _MLP))
        return Layer(
            "moe",
            # One expert speaks for all: to the loader an exception is a missing tensor.
            experts=how(f"{at}.mlp.experts.0", _MLP),
            shared_experts=how(f"{at}.mlp.shared_experts", _MLP),
        )

    if quantised("lm_head", ignore):
        raise UserError(f"{source}: lm_head: INT4 is not supported here; ignore it")
    return tuple(layer(i) for i in range(depth))


# ---------------------------------------- leaves, and rules across files


def leaves(units: int, most: int = 8) -> int:
    """R2's cut of a sum over `units` columns, INT4 groups or heads: the largest power of two that
    divides them and is at most `most`. o_proj's leaves are `leaves(heads, most=heads)`."""
    return math.gcd(units, 1 << (most.bit_length() - 1))


def mlp_leaves(model: Model, index: int) -> int:
    """Leaves of layer `index`'s MLP width: one number for routed and shared experts, as R4 adds
    them leaf by leaf."""
    return min(leaves(part.units) for part in _mlp_parts(model, index))


@dataclass(frozen=True)
class _Part:
    """An input dimension that tensor parallelism cuts between its `units` of `unit` columns."""

    name: str
    units: int
    unit: int
    noun: str

    def refusal(self, size: int) -> str:
        width = self.units * self.unit
        noun = self.noun if self.units == 1 else self.noun + "s"
        whole = f" are {self.units} {noun} of {self.unit} and" if self.unit > 1 else ""
        cut = f"cannot be cut in {size} (shards of {width / size:g})"
        return f"{self.name}: {width} input columns{whole} {cut}"


def _mlp_parts(m: Model, index: int) -> list[_Part]:
    layer, at = m.layers[index], f"layers.{index}.mlp"
    if layer.kind == "dense":
        parts = [(f"{at}.down_proj", m.intermediate_size, layer.quantization)]
    else:
        parts = [(f"{at}.experts.down_proj", m.moe_intermediate_size, layer.experts)]
        shared = m.moe_intermediate_size * m.n_shared_experts
        parts += [(f"{at}.shared_experts.down_proj", shared, layer.shared_experts)]
    units = [(name, width, m.group_size if how == "int4" else 1) for name, width, how in parts]
    return [_Part(name, width // unit, unit, "group") for name, width, unit in units]


def validate(config: Config, model: Model, drafter: Drafter | None) -> Config:
    """Check every rule that joins the config, the target and the drafter (None where unused).

    Returns the config with `decode.context` and the choices of `kernels` filled in where they are
    left out.
    Raises UserError.
    """
    source = config.model.path / "config.json"
    for name, value in config.model.stated:
        if getattr(model, name) != value:
            raise _contradiction(name, value, getattr(model, name), source)
    if config.layers:
        _check_layers(config.layers, model, source)

    decode, limit = config.decode, model.max_position_embeddings
    if decode.context is not None and decode.context > limit:
        expected = f"at most {limit}, max_position_embeddings of {source}"
        raise _wrong("decode.context", expected, decode.context)
    if (decode.context or limit) > MOST_CONTEXT:
        raise UserError(
            f"decode.context: {decode.context or limit} positions, expected at most "
            f"{MOST_CONTEXT}; state a smaller one"
        )
    if decode.prefill_chunk % decode.leaf:
        expected = f"a multiple of decode.leaf, {decode.leaf}"
        raise _wrong("decode.prefill_chunk", expected, decode.prefill_chunk)
    if (mode := config.draft.mode) != "ar" and drafter is None:
        raise UserError(f"draft.mode: {mode} needs a drafter; state draft.path or use mode ar")
    if drafter is not None:
        _check_drafter(drafter, model, config.draft.path)
    _check_tp(config.tp, model, drafter)
    decode = dataclasses.replace(decode, context=decode.context or limit)
    kernels = _resolve_kernels(config.kernels)
    return dataclasses.replace(config, decode=decode, kernels=kernels)


def _resolve_kernels(kernels: Kernels) -> Kernels:
    """Every choice made: tensor cores for bfloat16 activations, which are all that they take."""
    rounded = kernels.activation == "bfloat16"
    chosen = {}
    for name in ("linear", "moe", "attention"):
        asked = getattr(kernels, name)
        if asked == "tensor_core" and not rounded:
            raise UserError(
                f"kernels.{name}: tensor_core, but kernels.activation: {kernels.activation}; "
                "tensor cores take bfloat16 activations: set one of the two"
            )
        chosen[name] = asked or ("tensor_core" if rounded else "simple")
    return dataclasses.replace(kernels, **chosen)


def _contradiction(name: str, stated: object, actual: object, source: object) -> UserError:
    return UserError(
        f"model.{name}: {_show(stated)} is stated, but {source} has {_show(actual)};"
        " correct it or leave it out"
    )


def _check_layers(rules: tuple[LayerRule, ...], model: Model, source: Path) -> None:
    have = f"{source} has layers 0-{len(model.layers) - 1}"
    stated: dict[int, int] = {}
    for i, rule in enumerate(rules):
        at = f"layers[{i}]"
        if rule.last >= len(model.layers):
            raise UserError(f"{at}.range: layer {rule.last} does not exist; {have}")
        for n in range(rule.first, rule.last + 1):
            if n in stated:
                raise UserError(f"{at}.range: layer {n} is stated by layers[{stated[n]}] already")
            stated[n] = i
            for part in (f.name for f in fields(Layer)):
                own, file = getattr(rule.layer, part), getattr(model.layers[n], part)
                if own != file:
                    raise UserError(
                        f"{at}.{part}: layer {n} is stated {own}, but {source} makes it {file};"
                        " correct it or leave `layers` out"
                    )
    for n in range(len(model.layers)):
        if n not in stated:
            raise UserError(f"layers: no rule states layer {n}; {have}")


def _check_drafter(drafter: Drafter, model: Model, path: Path | None) -> None:
    for name in ("hidden_size", "vocab_size"):
        own, target = getattr(drafter, name), getattr(model, name)
        if own != target:
            raise UserError(
                f"{path}: {name} is {own}, but the target's is {target};"
                " use the target's own drafter, or mode ar without draft.path"
            )
    for tap in drafter.target_layer_ids:
        if tap >= (depth := model.num_hidden_layers):
            raise UserError(
                f"{path}: target_layer_ids has {tap}, but the target's layers are 0-{depth - 1}"
            )


def _check_tp(tp: TensorParallel, model: Model, drafter: Drafter | None) -> None:
    cut = tp.cut
    if tp.only_rank is not None and tp.only_rank >= tp.size:
        raise _wrong("tp.only_rank", f"a rank of tp.size {tp.size}", tp.only_rank)
    # A column-cut output is the next tensor's row-cut input, so these go together.
    for group in (("o_proj", "q_b_proj", "kv_b_proj", "q_proj", "k_proj", "v_proj"), _MLP):
        whole = [kind for kind in group if getattr(cut, kind) == "replicate"]
        if whole and len(whole) < len(group):
            other = next(kind for kind in group if kind not in whole)
            raise UserError(
                f"tp.cut.{whole[0]}: replicate, but {other}: {getattr(cut, other)};"
                f" {', '.join(group)} are cut together or not at all"
            )
    parts, heads, mlp = [], cut.o_proj == "row", cut.down_proj == "row"
    if heads:
        parts += [_Part("self_attn.o_proj", model.num_attention_heads, model.v_head_dim, "head")]
    if mlp:
        parts += [part for i in range(len(model.layers)) for part in _mlp_parts(model, i)]
    if drafter is not None and heads:
        name, units = "drafter self_attn.o_proj", drafter.num_attention_heads
        parts += [_Part(name, units, drafter.head_dim, "head")]
    if drafter is not None and mlp:
        parts += [_Part("drafter mlp.down_proj", drafter.intermediate_size, 1, "column")]

    def refusal(size: int) -> str | None:
        for part in parts:
            if leaves(part.units) % size:
                return part.refusal(size)
        if drafter is None:
            return None
        if heads and (kv := drafter.num_key_value_heads) % size and size % kv:
            return f"drafter self_attn.k_proj: {kv} heads cannot be shared out to {size} ranks"
        if cut.fc == "column" and (rows := drafter.hidden_size) % size:
            return f"drafter fc: {rows} output rows cannot be cut in {size}"
        return None

    if (why := refusal(tp.size)) is not None:
        works = [str(size) for size in (1, 2, 4, 8) if refusal(size) is None]
        choice = works[0] if len(works) == 1 else f"{', '.join(works[:-1])} or {works[-1]}"
        raise UserError(f"{why}; tp.size may be {choice}")

"""The layer stack of a DeepSeek-V3-shaped model: `forward(batch, cache) -> logits, taps`.

Written once for every backend: the operations come in as `ops` (reference.py or ops.py), the
weights as the loader read them. A prompt's rows, a decoded token and the nodes of a tree are all
just rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import config
from cache import LatentCache
from reference import softmax_scale, stack_of_one

ONE_RANK = config.TensorParallel()
VOCABULARY_SHARDS = 8  # the loader pads embedding and head to as many equal shards


@dataclass(frozen=True)
class Batch:
    """The rows of one forward, and all that tells them apart.

    token_ids  int32 [T]
    positions  int32 [T]  absolute: committed length + depth, never the row index
    sequence   int32 [T]  cache slot; the rows of a sequence are adjacent
    parent     int32 [T]  row of the parent, or -1 for a row that follows the committed text
    """

    token_ids: np.ndarray
    positions: np.ndarray
    sequence: np.ndarray
    parent: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Forward:
    """What came of a batch of T rows.

    logits   fp32 [rows asked for, V]
    taps     [T, taps * hidden], outputs of the tapped layers; None without taps
    entries  [layers, T, latent + rope], the rows' own keys and values, not in the cache yet
    """

    logits: np.ndarray
    taps: np.ndarray | None
    entries: np.ndarray


@dataclass(frozen=True)
class _Attention:
    norm: object
    inputs: object  # q_a and kv_a
    q_a_norm: object
    kv_a_norm: object
    q_b: object
    key: object  # [H, nope, latent], absorbed into q
    value: object  # [H, latent, v], absorbed into the output
    o: object


@dataclass(frozen=True)
class _Layer:
    attention: _Attention
    norm: object
    experts: object  # routed experts, or None in a dense layer
    shared: object  # shared experts, or the dense layer's MLP
    router: object
    bias: object


class Model:
    """One rank's share of the target, prepared for its backend.

    dims     config.Model
    weights  loader.TargetWeights of this rank
    taps     indices of the layers whose outputs the drafter reads
    context  positions the rotation table must reach; span: leaves per attention span
    rank, tp which share of what each tensor is cut in
    """

    def __init__(
        self, dims: config.Model, weights, ops, *, context, span=4, taps=(), rank=0, tp=ONE_RANK
    ):
        self.dims, self.ops, self.taps, self.span = dims, ops, sorted(set(taps)), span
        self.tp = tp
        self.heads = dims.num_attention_heads // tp.ranks("o_proj")
        self.scale = softmax_scale(dims.rope, dims.qk_nope_head_dim + dims.qk_rope_head_dim)
        self.cos, self.sin = ops.rope_table(dims.rope, dims.qk_rope_head_dim, context)
        self.embedding = ops.upload(weights.embed)
        self.first_id = rank * len(weights.embed) if tp.ranks("embed_tokens") > 1 else 0
        self.norm = ops.upload(weights.norm)
        self.head = ops.prepare(weights.head, shards=VOCABULARY_SHARDS // tp.ranks("lm_head"))
        self.layers = [self._prepare_layer(i, w) for i, w in enumerate(weights.layers)]

    def ops_for(self, kind: str):
        """The operations on a tensor of this kind: across ranks, or alone where it is not cut."""
        return self.ops if self.tp.ranks(kind) == self.tp.size else self.ops.alone()

    def _prepare_layer(self, index: int, w) -> _Layer:
        dims, ops = self.dims, self.ops
        n_heads, size = dims.num_attention_heads, self.tp.ranks("o_proj")
        key, value = ops.prepare_heads(w.kv_b, self.heads, dims.qk_nope_head_dim, dims.v_head_dim)
        attention = _Attention(
            norm=ops.upload(w.input_norm),
            inputs=ops.prepare_latent_inputs(w.q_a, w.kv_a),
            q_a_norm=ops.upload(w.q_a_norm),
            kv_a_norm=ops.upload(w.kv_a_norm),
            q_b=ops.prepare(w.q_b, shards=config.leaves(n_heads) // size),
            key=key,
            value=value,
            o=ops.prepare(w.o, shards=config.leaves(n_heads, n_heads) // size, row_cut=True),
        )
        n = config.mlp_leaves(dims, index) // self.tp.ranks("down_proj")
        mlp, experts, router, bias = w.mlp, None, None, None
        if dims.layers[index].kind == "moe":
            experts = ops.prepare_mlp(mlp.experts_gate, mlp.experts_up, mlp.experts_down, n)
            router, bias = ops.prepare(mlp.router), ops.upload(mlp.bias)
            one = (mlp.shared_gate, mlp.shared_up, mlp.shared_down)
        else:
            one = (mlp.gate, mlp.up, mlp.down)
        shared = None if one[0] is None else ops.prepare_mlp(*map(stack_of_one, one), n)
        router, shared = ops.join_router(router, shared)
        return _Layer(attention, ops.upload(w.post_norm), experts, shared, router, bias)

    @property
    def cache_width(self) -> int:
        return self.dims.kv_lora_rank + self.dims.qk_rope_head_dim

    def forward(self, batch: Batch, cache: LatentCache, logit_rows=None) -> Forward:
        """All rows of the batch; logits of `logit_rows`, or of all. The cache is read, not
        written."""
        ops = self.ops
        positions = ops.index(batch.positions)
        plan = ops.plan_attention(
            positions, batch.sequence, batch.parent, cache.lengths, cache.tables, cache.leaf
        )
        entries = ops.activations((len(self.layers), len(batch), self.cache_width))
        x, eps, n = self.embed(ops.index(batch.token_ids)), self.dims.rms_norm_eps, len(batch)
        norms = [layer.attention.norm for layer in self.layers[1:]] + [self.norm]
        hidden = self.dims.hidden_size
        taps = ops.activations((n, len(self.taps) * hidden)) if self.taps else None
        h = ops.rms_norm(x, self.layers[0].attention.norm, eps)
        for i, (layer, norm) in enumerate(zip(self.layers, norms, strict=True)):
            y = self._attention(layer.attention, h, positions, cache.pages[i], entries[i], plan)
            x, h = ops.add_rms_norm(x, y, layer.norm, eps)
            tap = (taps, self.taps.index(i) * hidden) if i in self.taps else ()
            x, h = ops.add_rms_norm(x, self._mlp(layer, h), norm, eps, *tap)
        h = h if logit_rows is None else ops.take_rows(h, logit_rows)
        return Forward(self.logits(h), taps, entries)

    def embed(self, token_ids):
        """int32 [T] -> [T, hidden]."""
        if self.tp.only_rank is not None:  # no other rank has the other ids: none may be a zero row
            token_ids = self.first_id + token_ids % len(self.embedding)
        return self.ops_for("embed_tokens").embed(token_ids, self.embedding, self.first_id)

    def logits(self, x):
        """Normed rows [T, hidden] -> fp32 [T, V]."""
        return self.ops_for("lm_head").head(x, self.head, self.dims.vocab_size)

    def _attention(self, w: _Attention, h, positions, pages, entries, plan):
        """Absorbed multi-head latent attention (DeepSeek-V3): normed [T, hidden] -> o_proj's sum.

        The rows' own cache entries are written into `entries`.
        """
        ops, dims = self.ops_for("o_proj"), self.dims
        n, latent, rotation = len(h), dims.kv_lora_rank, (self.cos, self.sin, positions)
        norms = w.q_a_norm, w.kv_a_norm, dims.lora_norm_eps
        q = ops.latent_queries(h, w.inputs, w.q_b, w.key, *norms, *rotation, out=entries)
        o = ops.latent_attention(q, pages, entries, plan, self.scale, latent, self.span)
        return ops.linear(ops.absorb_v(o, w.value).reshape(n, -1), w.o)

    def _mlp(self, w: _Layer, h):
        """The dense MLP, or routed and shared experts: normed [T, hidden] -> unrounded sum."""
        ops, dims = self.ops_for("down_proj"), self.dims
        if w.experts is None:
            return ops.mlp(h, w.shared)
        choice = dims.num_experts_per_tok, dims.norm_topk_prob, dims.routed_scaling_factor
        return ops.mixture(h, w.router, w.bias, *choice, w.experts, w.shared)

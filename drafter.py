"""DFlash drafter: one forward pass gives a distribution for every position of a block.

The block is (root, mask, mask, …): the last committed token and block_size - 1 masks. Its context
is not text but the target's own layer outputs (taps), projected once per committed token and kept
as keys and values; nothing of the noise block is kept. Source: the published `DFlashDraftModel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import config
from cache import LatentCache, Placed
from model import Model
from reference import DraftRows, stack_of_one


@dataclass(frozen=True)
class _Layer:
    input_norm: object
    inputs: object  # q, k and v
    q_norm: object
    k_norm: object
    o: object
    post_norm: object
    mlp: object
    window: int


class Drafter:
    """One rank's share of the drafter. Embedding and head are the target's.

    dims     config.Drafter;  weights  loader.DrafterWeights of this rank
    context  positions the rotation table must reach, the block's included
    """

    def __init__(self, dims: config.Drafter, weights, ops, target: Model, *, context, span=4):
        self.dims, self.ops, self.target, self.span = dims, ops, target, span
        size = target.tp.ranks("o_proj")
        self.kv_heads = max(1, dims.num_key_value_heads // size)  # more ranks than heads share them
        self.scale = dims.head_dim**-0.5  # unlike the target's, without YaRN's correction
        self.cos, self.sin = ops.rope_table(dims.rope, dims.head_dim, context + dims.block_size)
        fc_shards = config.leaves(dims.hidden_size) // target.tp.ranks("fc")
        self.fc = ops.prepare(weights.fc, shards=fc_shards)
        self.hidden_norm = ops.upload(weights.hidden_norm)
        self.norm = ops.upload(weights.norm)
        self.drafts: dict[int, object] = {}
        qkv = ([getattr(w, name) for w in weights.layers] for name in "qkv")
        shards = config.leaves(dims.num_attention_heads) // size
        kv_shards = max(1, config.leaves(dims.num_key_value_heads) // size)
        # A committed row's keys and values of all layers depend on the taps alone: one product.
        inputs, self.context = ops.prepare_block_inputs(*qkv, shards, kv_shards)
        norms = [w.k_norm.astype(np.float32) for w in weights.layers]
        self.context_norms = ops.upload(np.stack(norms))
        self.layers = [
            self._prepare_layer(*of_layer, shards)
            for of_layer in zip(weights.layers, inputs, dims.layer_types, strict=True)
        ]

    def _prepare_layer(self, w, inputs, kind: str, shards: int) -> _Layer:
        ops, dims, tp = self.ops, self.dims, self.target.tp
        width_leaves = config.leaves(dims.intermediate_size) // tp.ranks("down_proj")
        return _Layer(
            input_norm=ops.upload(w.input_norm),
            inputs=inputs,
            q_norm=ops.upload(w.q_norm),
            k_norm=ops.upload(w.k_norm),
            o=ops.prepare(w.o, shards=shards, row_cut=True),
            post_norm=ops.upload(w.post_norm),
            mlp=ops.prepare_mlp(*map(stack_of_one, (w.gate, w.up, w.down)), width_leaves),
            window=(dims.sliding_window or 0) if kind == "sliding_attention" else 0,
        )

    @property
    def cache_width(self) -> int:
        return 2 * self.kv_heads * self.dims.head_dim

    def extend(self, taps, placed: Placed, cache: LatentCache) -> None:
        """Add committed tokens to the context, at the positions where the target has them.

        taps  [T, taps * hidden] of the forward whose rows were committed: the root's and the
              accepted nodes', never the bonus token's
        """
        ops, dims = self.ops, self.dims
        rows = ops.index(placed.rows)
        if len(taps) > len(rows):  # else all rows are projected, and some of them put in pages
            taps, rows = ops.take_rows(taps, rows), ops.arange(len(rows))
        x = self.target.ops_for("fc").head(taps, self.fc, dims.hidden_size)
        x = ops.rms_norm(x, self.hidden_norm, dims.rms_norm_eps)
        ops.put_context(
            x, self.context, self.context_norms, dims.rms_norm_eps, self.cos, self.sin, rows,
            placed.slots, placed.positions, cache.draft, cache.tables,
        )  # fmt: skip

    def draft(self, roots, slots, cache: LatentCache):
        """roots int32 [B], their cache slots -> fp32 logits [B, block_size - 1, V].

        Row j of a sequence is the distribution of the token at position length + 1 + j.
        """
        tables = cache.tables[:, : max(cache.held[s] for s in slots)].copy()
        mask, n = self.dims.mask_token_id, self.dims.block_size
        rows = self.ops.draft_rows(roots, slots, cache.lengths, tables, n, mask)
        return self.forward(rows, cache).reshape(len(roots), n - 1, -1)

    def forward(self, rows: DraftRows, cache: LatentCache):
        """The blocks of `draft_rows` -> fp32 logits [B * (block_size - 1), V]."""
        ops, dims = self.ops, self.dims
        eps, rotation = dims.rms_norm_eps, (self.cos, self.sin, rows.positions)
        attention, mlp = (self.target.ops_for(kind) for kind in ("o_proj", "down_proj"))
        norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        x = self.target.embed(rows.token_ids)
        h = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for layer, norm, store in zip(self.layers, norms, cache.draft, strict=True):
            q, kv = ops.block_inputs(h, layer.inputs, layer.q_norm, layer.k_norm, eps, *rotation)
            pages = store.reshape(*store.shape[:2], *kv.shape[1:])
            context = pages, rows.tables, rows.lengths
            settled = layer is not self.layers[0]
            o = ops.block_attention(q, kv, *context, layer.window, self.scale, self.span, settled)
            y = attention.linear(o.reshape(len(h), -1), layer.o)
            x, h = ops.add_rms_norm(x, y, layer.post_norm, eps)
            x, h = ops.add_rms_norm(x, mlp.mlp(h, layer.mlp), norm, eps)
        return self.target.logits(ops.take_rows(h, self._drafts(len(h))))

    def _drafts(self, rows: int):
        """Of rows of blocks all but the roots, made once: a recorded round uploads nothing."""
        if rows not in self.drafts:
            some = np.arange(rows).reshape(-1, self.dims.block_size)[:, 1:].reshape(-1)
            self.drafts[rows] = self.ops.index(some)
        return self.drafts[rows]

"""DFlash drafter: one forward pass gives a distribution for every position of a block.

The block is (root, mask, mask, …): the last committed token and block_size - 1 masks. Its context
is not text but the target's own layer outputs (taps), projected once per committed token and kept
as keys and values; nothing of the noise block is kept. Source: the published `DFlashDraftModel`.
"""

from __future__ import annotations

from dataclasses import dataclass

import config
from cache import LatentCache, Placed
from model import Model
from reference import DraftRows, stack_of_one


@dataclass(frozen=True)
class _Layer:
    input_norm: object
    q: object
    k: object
    v: object
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
        self.heads = dims.num_attention_heads // size
        self.kv_heads = max(1, dims.num_key_value_heads // size)  # more ranks than heads share them
        self.scale = dims.head_dim**-0.5  # unlike the target's, without YaRN's correction
        self.cos, self.sin = ops.rope_table(dims.rope, dims.head_dim, context + dims.block_size)
        fc_shards = config.leaves(dims.hidden_size) // target.tp.ranks("fc")
        self.fc = ops.prepare(weights.fc, shards=fc_shards)
        self.hidden_norm = ops.upload(weights.hidden_norm)
        self.norm = ops.upload(weights.norm)
        self.layers = [
            self._prepare_layer(w, kind)
            for w, kind in zip(weights.layers, dims.layer_types, strict=True)
        ]

    def _prepare_layer(self, w, kind: str) -> _Layer:
        ops, dims, tp = self.ops, self.dims, self.target.tp
        size = tp.ranks("o_proj")
        leaves = config.leaves(dims.num_attention_heads) // size
        kv_shards = max(1, config.leaves(dims.num_key_value_heads) // size)
        width_leaves = config.leaves(dims.intermediate_size) // tp.ranks("down_proj")
        return _Layer(
            input_norm=ops.upload(w.input_norm),
            q=ops.prepare(w.q, shards=leaves),
            k=ops.prepare(w.k, shards=kv_shards),
            v=ops.prepare(w.v, shards=kv_shards),
            q_norm=ops.upload(w.q_norm),
            k_norm=ops.upload(w.k_norm),
            o=ops.prepare(w.o, shards=leaves, row_cut=True),
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
        taps = ops.take_rows(taps, ops.index(placed.rows))
        context = self.target.ops_for("fc").head(taps, self.fc, dims.hidden_size)
        context = ops.rms_norm(context, self.hidden_norm, dims.rms_norm_eps)
        positions = ops.index(placed.positions)
        n = ops.arange(len(placed.rows))
        for i, layer in enumerate(self.layers):
            entry = self._keys_values(layer, context, positions).reshape(1, len(n), -1)
            pages = cache.draft[i : i + 1]
            ops.put_entries(pages, entry, n, placed.slots, placed.positions, cache.tables)

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
        ops, dims, n = self.ops, self.dims, self.dims.block_size
        positions = rows.positions
        x = self.target.embed(rows.token_ids)
        attention, mlp = (self.target.ops_for(kind) for kind in ("o_proj", "down_proj"))
        for layer, store in zip(self.layers, cache.draft, strict=True):
            h = ops.rms_norm(x, layer.input_norm, dims.rms_norm_eps)
            q = ops.linear(h, layer.q).reshape(len(h), self.heads, dims.head_dim)
            q = ops.rms_norm(q, layer.q_norm, dims.rms_norm_eps)
            q = ops.rope_halves(q, self.cos, self.sin, positions)
            kv = self._keys_values(layer, h, positions)
            pages = store.reshape(*store.shape[:2], *kv.shape[1:])
            o = ops.block_attention(
                q, kv, pages, rows.tables, rows.lengths, layer.window, self.scale, self.span
            )
            x = ops.add(x, attention.linear(o.reshape(len(h), -1), layer.o))
            h = ops.rms_norm(x, layer.post_norm, dims.rms_norm_eps)
            x = ops.add(x, mlp.mlp(h, layer.mlp))
        drafts = ops.arange(len(x)).reshape(-1, n)[:, 1:].reshape(-1)  # all but the roots
        x = ops.rms_norm(ops.take_rows(x, drafts), self.norm, dims.rms_norm_eps)
        return self.target.logits(x)

    def _keys_values(self, layer: _Layer, h, positions):
        """[n, hidden] -> [n, 2, KV, d]: normed and rotated keys, then values."""
        ops, dims = self.ops, self.dims
        shape = (len(h), self.kv_heads, dims.head_dim)
        k = ops.rms_norm(ops.linear(h, layer.k).reshape(shape), layer.k_norm, dims.rms_norm_eps)
        k = ops.rope_halves(k, self.cos, self.sin, positions)
        v = ops.linear(h, layer.v, rounded=True).reshape(shape)
        flat = [part.reshape(len(h), -1) for part in (k, v)]
        return ops.join_columns(flat).reshape(len(h), 2, *shape[1:])

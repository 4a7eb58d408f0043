"""One round of decoding from device arrays alone: draft, build, verify, choose, walk, commit.

Nothing in `Round.run` looks at a value or waits for one, so that it can be recorded as one graph
(constants apart, which are still uploaded); its tokens are those of the engine, which does the same
steps from the host.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import ops
from sampling import SamplingParams
from tests import toy

pytestmark = pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)


class Round:
    """Fixed arrays of up to B sequences and a round over them. rows: the forward's bucket."""

    def __init__(self, engine, batch: int, budget: int, rows: int):
        kernels, cache = engine.ops, engine.cache
        self.model, self.drafter, self.ops = engine.model, engine.drafter, kernels
        self.budget, self.rows = budget, rows
        per_sequence = cache.pages_for(engine.settings.decode.context)
        self.slots = kernels.index(np.full(batch, -1))
        self.roots, self.limits = kernels.index(np.zeros(batch)), kernels.index(np.full(batch, -1))
        self.requests = kernels.requests([SamplingParams()] * len(cache.lengths))
        vocab = engine.dims.vocab_size
        self.penalties = kernels.penalties(len(cache.lengths), vocab, n_stops=4)
        self.state = SimpleNamespace(
            lengths=kernels.index(np.array(cache.lengths)),
            tables=kernels.index(np.array(cache.tables[:, :per_sequence])),
            pages=cache.pages,
            draft=cache.draft,
            leaf=cache.leaf,
        )

    def run(self) -> tuple:
        """(tokens [B, depth + 1], counts [B]); roots, lengths and the cache move on."""
        o, state, depth = self.ops, self.state, self.drafter.dims.block_size - 1
        ids, log_probs = self._candidates(depth)
        trees = o.build_trees(self.roots, self.limits, ids, log_probs, self.budget)
        rows = o.tree_rows(trees, self.slots, state.lengths, self.rows)
        batch = Rows(rows.token_ids, rows.positions, rows.sequence, rows.parent)
        forward = self.model.forward(batch, state, o.arange(self.rows))
        choices = o.sample(
            forward.logits,
            rows.sequence,
            rows.positions,
            self.requests,
            ahead=1,
            adjusted=o.penalise_paths(forward.logits, rows, self.penalties, depth),
        )
        walks = o.walk_trees(trees, rows.first, choices, self.slots, state.lengths, depth)
        placed = SimpleNamespace(
            rows=walks.rows.reshape(-1),
            slots=walks.slots.reshape(-1),
            positions=walks.positions.reshape(-1),
        )
        o.put_entries(
            state.pages, forward.entries, placed.rows, placed.slots, placed.positions, state.tables
        )
        self.drafter.extend(forward.taps, placed, state)
        o.advance(state.lengths, self.slots, walks.counts)
        o.count_tokens(self.penalties, walks.tokens, self.slots)
        self.roots[...] = walks.roots
        return walks.tokens, walks.counts

    def _candidates(self, depth: int):
        """The drafter's forward and its most likely tokens, [B, depth, budget]."""
        o, drafter, state, n = self.ops, self.drafter, self.state, depth + 1
        rows = o.draft_rows(
            self.roots, self.slots, state.lengths, state.tables, n, drafter.dims.mask_token_id
        )
        logits = self._draft(rows, n)
        logits = o.add_noise_of(logits, rows.owners, rows.draft_positions, self.requests)
        found = o.top_log_probs(logits, self.budget)
        return (part.reshape(len(self.roots), depth, -1) for part in found)

    def _draft(self, rows: ops.DraftRows, n: int):
        """Drafter.draft on rows that are on the device already -> logits [B * (n - 1), V]."""
        o, drafter, dims = self.ops, self.drafter, self.drafter.dims
        x = o.embed(rows.token_ids, drafter.target.embedding, drafter.target.first_id)
        for layer, store in zip(drafter.layers, self.state.draft, strict=True):
            h = o.rms_norm(x, layer.input_norm, dims.rms_norm_eps)
            q = o.linear(h, layer.q).reshape(len(h), drafter.heads, dims.head_dim)
            q = o.rms_norm(q, layer.q_norm, dims.rms_norm_eps)
            q = o.rope_halves(q, drafter.cos, drafter.sin, rows.positions)
            kv = drafter._keys_values(layer, h, rows.positions)
            pages = store.reshape(*store.shape[:2], *kv.shape[1:])
            out = o.block_attention(
                q, kv, pages, rows.tables, rows.lengths, layer.window, drafter.scale, drafter.span
            )
            x = o.add(x, o.linear(out.reshape(len(h), -1), layer.o))
            x = o.add(x, o.mlp(o.rms_norm(x, layer.post_norm, dims.rms_norm_eps), layer.mlp))
        drafts = o.index(np.flatnonzero(np.arange(len(x)) % n != 0))
        x = o.rms_norm(o.take_rows(x, drafts), drafter.norm, dims.rms_norm_eps)
        return o.head(x, drafter.target.head, drafter.target.dims.vocab_size)


class Rows(SimpleNamespace):
    def __init__(self, token_ids, positions, sequence, parent):
        super().__init__(token_ids=token_ids, positions=positions, sequence=sequence, parent=parent)

    def __len__(self) -> int:
        return len(self.token_ids)


@pytest.mark.parametrize("activation", ("float32", "bfloat16"))
def test_rounds_emit_what_the_engine_emits(device, activation, tmp_path, monkeypatch) -> None:
    """Sampled, greedy and penalised requests and an unused place, in rows padded with filler."""
    import engine
    from tests.conftest import launcher

    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    kernels = ops.CudaOps(activation, launcher=launcher(device), poison=True)
    monkeypatch.setattr(engine, "make_ops", lambda *_: kernels)
    prompts = [list(range(5, 33)), [7, 7, 7], [9, 8]]
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.6, "presence_penalty": 0.4}
    bias = {11: 3.0, 12: -2.0}
    params = [
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=8, ignore_eos=True),
        SamplingParams(
            **penalties, logit_bias=bias, min_tokens=8, max_tokens=8, stop_token_ids=(5, 6)
        ),
    ]
    expected = []
    for prompt, asked in zip(prompts, params, strict=True):
        made = toy.engine_of(directory, activation=activation)
        expected.append(made.generate([prompt], asked)[0].token_ids)

    made = toy.engine_of(directory, drafter=True, activation=activation, batch=4)
    sequences = [made.submit(p, a) for p, a in zip(prompts, params, strict=True)]
    while not all(s.n_emitted for s in sequences):
        made.step()
    for s in sequences:
        made.cache.reserve(s.slot, len(s.tokens) + 16)
    round_ = Round(made, batch=4, budget=6, rows=24)
    place = {s.slot: i for s, i in zip(sequences, (0, 2, 3), strict=True)}
    for name, values in (
        ("slots", {i: slot for slot, i in place.items()}),
        ("roots", {place[s.slot]: s.tokens[-1] for s in sequences}),
        ("limits", dict.fromkeys(place.values(), 7)),
    ):
        host = kernels.download(getattr(round_, name))
        host[list(values)] = list(values.values())
        setattr(round_, name, kernels.index(host.astype(np.int32)))
    by_slot = {s.slot: s.params for s in sequences}
    n_slots = len(made.cache.lengths)
    requests = [by_slot.get(i, SamplingParams()) for i in range(n_slots)]
    round_.requests = kernels.requests(requests)

    for s in sequences:
        kernels.set_penalties(round_.penalties, s.slot, s.params, s.path)

    emitted = {s.slot: list(s.emitted) for s in sequences}
    while min(len(tokens) for tokens in emitted.values()) < 8:
        tokens, counts = (kernels.download(a) for a in round_.run())
        assert counts[1] == 0 and (tokens[1] == -1).all()
        for slot, i in place.items():
            emitted[slot] += tokens[i, : counts[i]].tolist()
    for s, want in zip(sequences, expected, strict=True):
        assert emitted[s.slot][:8] == want

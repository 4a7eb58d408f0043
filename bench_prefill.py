"""How fast a prompt is taken in, by the size of its pieces: `python bench.py prefill`.

The last piece of a prompt is timed, so that attention has that prompt in front of it. The bits of
the first token's logits must not depend on the pieces (R1).

Beside it stands what the platform's library reaches (bench_library.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np

import config
from bench_library import forms_of_attention, peak_flops, wait
from config import UserError
from engine import Engine
from sampling import SamplingParams

REPEATS = 3


def table(arguments) -> list[dict]:
    """One row a length of the prompt and size of its pieces, which divides the length."""
    sizes, lengths = sorted(arguments.rows), arguments.contexts
    for length in lengths:
        if any(length % size for size in sizes):
            raise UserError(
                f"prefill: --rows {sizes}: expected divisors of --contexts {length}; pieces end at "
                "their multiples"
            )
    settings = config.load(arguments.config, context=max(lengths) + 64, batch=1)
    decode = dataclasses.replace(settings.decode, prefill_chunk=max(sizes))
    engine = Engine(dataclasses.replace(settings, decode=decode), arguments.device)
    if engine.comm is not None:
        raise UserError("prefill: times one rank; set tp.size to 1, or tp.only_rank")
    peak = peak_flops(engine)
    rows = []
    for length in lengths:
        prompt = np.random.default_rng(length).integers(0, engine.dims.vocab_size, length).tolist()
        first = None
        for size in sizes:
            runs = [last_piece(engine, prompt, size) for _ in range(REPEATS)]
            seconds = statistics.median(seconds for seconds, _ in runs)
            logits = [logits for _, logits in runs]
            first = logits[0] if first is None else first
            same = all(np.array_equal(first.view(np.int32), x.view(np.int32)) for x in logits)
            flops = operations(engine, size, length)
            absorbed, expanded = forms_of_attention(engine, size, length)
            rows.append(
                {
                    "context": length,
                    "T": size,
                    "ms": 1e3 * seconds,
                    "tok/s": size / seconds,
                    "TFLOP/s": flops / seconds / 1e12,
                    "of the peak": f"{flops / seconds / peak:.1%}",
                    "absorbed ms": 1e3 * absorbed,
                    "expanded ms": 1e3 * expanded,
                    "identical": "yes" if same else "NO",
                }
            )
    return rows


def last_piece(engine: Engine, prompt: list[int], size: int) -> tuple[float, np.ndarray]:
    """Seconds of the prompt's last `size` tokens, and the logits of the first token after it."""
    decode = dataclasses.replace(engine.settings.decode, prefill_chunk=size)
    engine.settings = dataclasses.replace(engine.settings, decode=decode)
    engine.cache.forget_idle()  # or the prompt would be found, not computed
    sequence = engine.submit(prompt, SamplingParams(max_tokens=2), keep_logits=True)
    try:
        while not sequence.n_emitted:
            wait(engine)
            began = time.perf_counter()
            engine.advance(sequence)
            wait(engine)
            seconds = time.perf_counter() - began
            if sequence.error:
                raise UserError(f"prefill: {sequence.error}")
        return seconds, np.array(sequence.logits[0])
    finally:
        engine.cancel(sequence)


def operations(engine: Engine, n: int, length: int) -> int:
    """Multiplications and additions of this rank for the last n rows of a prompt, drafter apart."""
    dims, tp = engine.dims, engine.settings.tp
    hidden, latent, rope = dims.hidden_size, dims.kv_lora_rank, dims.qk_rope_head_dim
    heads, rank = dims.num_attention_heads // tp.ranks("o_proj"), dims.q_lora_rank
    nope, v = dims.qk_nope_head_dim, dims.v_head_dim
    keys = length - (n - 1) / 2  # of a row, in the mean
    attention = hidden * (rank + latent + rope + heads * v) + rank * heads * (nope + rope)
    attention += heads * latent * (nope + v) + heads * keys * (2 * latent + rope)
    total = 0
    for layer in dims.layers:
        if layer.kind == "moe":
            experts = dims.num_experts_per_tok + dims.n_shared_experts
            width = experts * dims.moe_intermediate_size
        else:
            width = dims.intermediate_size
        router = dims.n_routed_experts if layer.kind == "moe" else 0
        total += attention + hidden * router + 3 * hidden * width // tp.ranks("down_proj")
    return int(2 * n * total)

"""What the platform's library reaches, as a measure of the engine's own: a large product, and the
products of attention in the form that the engine does not have.

Keys and values of every head could be made from the latents first (expanded); the engine attends to
the latents themselves, in prompts and decoding alike (absorbed). Both are timed by products alone:
an estimate. Expanded rows have other bits than decoded ones, so the engine has no such form (R1).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from engine import Engine

PEAK_SIZE = 8192  # of the square product that speeds are compared with
REPEATS = 3


def forms_of_attention(engine: Engine, n: int, length: int) -> tuple[float, float]:
    """Seconds of the products of all layers' attention, absorbed and expanded, for n rows and
    `length` keys of this rank. Without mask, softmax and rotation."""
    dims, draw = engine.dims, library(engine)
    heads = dims.num_attention_heads // engine.settings.tp.ranks("o_proj")
    latent, rope = dims.kv_lora_rank, dims.qk_rope_head_dim
    nope, value = dims.qk_nope_head_dim, dims.v_head_dim
    q, latents = draw(heads, n, nope + rope), draw(length, latent)
    to_latent, to_value = draw(heads, nope, latent), draw(heads, latent, value)
    entries, absorbed_q = draw(latent + rope, length), draw(heads * n, latent + rope)
    expand, keys = draw(latent, heads * (nope + value)), draw(heads, nope + rope, length)
    values = draw(heads, length, value)

    def absorbed() -> None:
        q[..., :nope] @ to_latent
        seen = (absorbed_q @ entries) @ latents
        seen.reshape(heads, n, latent) @ to_value

    def expanded() -> None:
        latents @ expand
        for of_head in zip(q, keys, values, strict=True):  # one by one: batched, they are slow
            (of_head[0] @ of_head[1]) @ of_head[2]

    return tuple(len(dims.layers) * seconds_of(engine, run) for run in (absorbed, expanded))


def library(engine: Engine) -> Callable:
    """draw(*shape): random numbers for the platform's products, fp16 on a GPU (bf16 has the same
    rate there), fp32 on a CPU."""
    on_gpu, rng = engine.ops.name == "cuda", np.random.default_rng(0)
    xp, kind = (engine.ops.launcher.xp, np.float16) if on_gpu else (np, np.float32)

    def draw(*shape: int):
        numbers = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        return xp.asarray(numbers.astype(kind))

    return draw


def seconds_of(engine: Engine, run: Callable) -> float:
    """Of run() to its end on the device: the median of REPEATS, after one that warms up."""
    seconds = []
    for _ in range(REPEATS + 1):
        wait(engine)
        began = time.perf_counter()
        run()
        wait(engine)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def peak_flops(engine: Engine) -> float:
    """Of a large product by the platform's library."""
    n = PEAK_SIZE if engine.ops.name == "cuda" else PEAK_SIZE // 4
    a = library(engine)(n, n)
    return 2 * n**3 / seconds_of(engine, lambda: a @ a)


def wait(engine: Engine) -> None:
    """Until the device has done what it was asked for."""
    if hasattr(engine.ops, "launcher"):
        engine.ops.launcher.synchronize()

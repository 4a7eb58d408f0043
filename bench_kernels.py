"""Times of operations at the shapes of one of eight ranks of Kimi K2.6, each checked before it is
timed. `python bench.py ops`.

Weights are cold: a recorded graph runs the operation over sets that are together far larger than
the L2 cache; inputs and routing are drawn again before every replay. The floor is a read of the
bytes at the rate that a plain read kernel reaches in the same run, and goals, which were set on a
card that read 4555 GB/s, are scaled by it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

import config
import launchers
import ops
from config import UserError
from reference import Int4Weight

GOALS_AT = 4555.0  # GB/s
EXPECTED_AT = 1790.0  # GB/s, stated for the memory of the largest sm_120 cards: nothing is measured
LAUNCHES = 32  # of the operation in one graph
REPLAYS = 9
WARM_SECONDS = 0.2
COLD_BYTES = 400 << 20  # all sets together, if LAUNCHES allow
CHECK_ROWS = 8  # rows of a batch that are also computed alone
HIDDEN, WIDTH, EXPERTS, TOP_K = 7168, 256, 384, 8
HEADS, Q_LORA, NOPE, ROPE, LATENT, VALUE = 8, 1536, 128, 64, 512, 128
MOST_ROWS = 1024  # of the layer
YARN = config.Rope(
    theta=50000.0, type="deepseek_yarn", factor=64.0, original_max_position_embeddings=4096,
    beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0,
)  # fmt: skip
# Norm ratio to fp32 kernels on equal values: fp32 sums; one rounded hidden value (test_gemm.py).
EXACT, ROUNDED = 32 * 2.0**-24, 2.0**-8


@dataclass(frozen=True)
class Case:
    """An operation with a weight of its own.

    draw     (kernels, seed) -> the published weights, on the device
    prepare  (kernels, weights) -> as the operation takes them
    run      (kernels, prepared, x, *routing) -> result
    traffic  (T, ids or None) -> bytes that must move
    goals    rows -> µs
    """

    name: str
    k: int
    draw: Callable
    prepare: Callable
    run: Callable
    traffic: Callable
    goals: dict[int, float]
    bound: float = EXACT
    routed: bool = False


def matrix(kernels, seed: int, *shape: int):
    """bfloat16 [.., out, in], about unit gain."""
    return random(kernels, seed, *shape, scale=(3 / shape[-1]) ** 0.5)


def random(kernels, seed: int, *shape: int, scale: float = 1.0):
    """bfloat16, uniform in [-scale, scale)."""
    out = kernels.launcher.empty(shape, launchers.BFLOAT16)
    kernels.generate(out.reshape(-1, shape[-1]), seed, 0.0, scale)
    return out


def linear_case(name: str, out: int, k: int, leaves: int, goals: dict) -> Case:
    return Case(
        name, k,
        draw=lambda kernels, seed: matrix(kernels, seed, out, k),
        prepare=lambda kernels, w: kernels.prepare(w, shards=leaves, row_cut=leaves > 1),
        run=lambda kernels, w, x: kernels.linear(x, w),
        traffic=lambda rows, ids: 2 * out * k + rows * (2 * k + 4 * out),
        goals=goals,
    )  # fmt: skip


def mlp_case(name: str, width: int, goals: dict) -> Case:
    sizes = (1, width, HIDDEN), (1, width, HIDDEN), (1, HIDDEN, width)
    return Case(
        name, HIDDEN,
        draw=lambda kernels, seed: [matrix(kernels, seed + i, *s) for i, s in enumerate(sizes)],
        prepare=lambda kernels, w: kernels.prepare_mlp(*w, 1),
        run=lambda kernels, w, x: kernels.mlp(x, w),
        traffic=lambda rows, ids: 6 * width * HIDDEN + rows * (6 * HIDDEN + 4 * width),
        goals=goals, bound=ROUNDED,
    )  # fmt: skip


def absorb_case(query: bool, goals: dict) -> Case:
    """kv_b's keys in front of attention, with the rotation, or its values behind it."""
    width = NOPE + ROPE if query else LATENT

    def prepare(kernels, kv_b):
        halves = kernels.prepare_heads(kv_b, HEADS, NOPE, VALUE)
        at = kernels.launcher.upload(np.full(4096, 977, np.int32))
        return halves, kernels.rope_table(YARN, ROPE, 1024), at

    def run(kernels, prepared, x):
        (key, value), table, at = prepared
        x = x.reshape(len(x), HEADS, width)
        if query:
            return kernels.latent_query(x, key, *table, at[: len(x)])
        return kernels.absorb_v(x, value)

    outputs = LATENT + ROPE if query else VALUE
    return Case(
        "absorb-q" if query else "absorb-v", HEADS * width,
        draw=lambda kernels, seed: matrix(kernels, seed, HEADS * (NOPE + VALUE), LATENT),
        prepare=prepare, run=run,
        traffic=lambda rows, ids: 2 * HEADS * (NOPE * LATENT + rows * (width + outputs)),
        goals=goals, bound=ROUNDED,
    )  # fmt: skip


def router_case(goals: dict) -> Case:
    def draw(kernels, seed: int):
        bias = kernels.launcher.empty((1, EXPERTS), np.float32)
        kernels.generate(bias, seed + 1, 0.0, 0.01)
        return matrix(kernels, seed, EXPERTS, HIDDEN), bias

    return Case(
        "router + top-8", HIDDEN, draw,
        prepare=lambda kernels, w: (kernels.prepare(w[0]), w[1].reshape(-1)),
        run=lambda kernels, w, x: kernels.route(x, *w, TOP_K, True, 2.827)[1],
        traffic=lambda rows, ids: 2 * EXPERTS * HIDDEN + rows * (2 * HIDDEN + 64),
        goals=goals,
    )  # fmt: skip


def mixture_case(goals: dict) -> Case:
    """A layer's experts from their normed input on: router, shared expert, routed ones. How many
    of those a batch reads is not known beforehand: the bytes are of as many as random ones."""
    routed = experts_case({})
    sizes = (1, WIDTH, HIDDEN), (1, WIDTH, HIDDEN), (1, HIDDEN, WIDTH)

    def draw(kernels, seed: int):
        shared = [matrix(kernels, seed + 10 + i, *s) for i, s in enumerate(sizes)]
        return matrix(kernels, seed, EXPERTS, HIDDEN), shared, routed.draw(kernels, seed + 20)

    def prepare(kernels, w):
        shared = kernels.prepare_mlp(*w[1], 1)
        router, shared = kernels.join_router(kernels.prepare(w[0]), shared)
        bias = kernels.launcher.upload(np.zeros(EXPERTS, np.float32))
        return router, bias, kernels.prepare_mlp(*w[2], 1), shared

    def traffic(rows: int, ids) -> int:
        chosen = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows) if rows else EXPERTS
        expert, dense = 3 * WIDTH * HIDDEN // 32 * 18, 2 * (EXPERTS + 3 * WIDTH) * HIDDEN
        return int(chosen * expert) + dense + rows * 6 * HIDDEN

    return Case(
        "router, experts, shared", HIDDEN, draw, prepare,
        run=lambda kernels, w, x: kernels.mixture(x, *w[:2], TOP_K, True, 2.827, *w[2:]),
        traffic=traffic, goals=goals, bound=ROUNDED,
    )  # fmt: skip


def layer_case(goals: dict) -> Case:
    """All of a layer but attention and experts, routed and shared, as a chain of the launches that
    model.py makes: from its normed input to the next layer's. What attention and experts would add
    is drawn beforehand, the same for every row."""
    sizes = {
        "q_a": (Q_LORA, HIDDEN), "kv_a": (LATENT + ROPE, HIDDEN),
        "q_b": (HEADS * (NOPE + ROPE), Q_LORA), "kv_b": (HEADS * (NOPE + VALUE), LATENT),
        "o": (HIDDEN, HEADS * VALUE), "router": (EXPERTS, HIDDEN),
    }  # fmt: skip

    def draw(kernels, seed: int) -> dict:
        w = {n: matrix(kernels, seed + i, *s) for i, (n, s) in enumerate(sizes.items())}
        for i, (name, k) in enumerate((("norm", HIDDEN), ("q", Q_LORA), ("kv", LATENT))):
            w[f"{name}_norm"] = kernels.launcher.empty((k,), np.float32)
            kernels.generate(w[f"{name}_norm"], seed + 20 + i, 1.0, 0.1)
        w["bias"] = kernels.launcher.upload(np.zeros(EXPERTS, np.float32))
        return w

    def prepare(kernels, w: dict) -> dict:
        xp, seen = kernels.launcher.xp, random(kernels, 3, 1, HEADS * LATENT).view(np.uint16)
        seen = xp.repeat(seen, MOST_ROWS, 0).view(launchers.BFLOAT16)
        seen = seen.reshape(MOST_ROWS, HEADS, LATENT)
        if kernels.act != launchers.BFLOAT16:
            seen = kernels.launcher.upload(kernels.download(seen))
        mixed = kernels.launcher.empty((1, HIDDEN), np.float32)
        kernels.generate(mixed, 4, 0.0, 1.0)
        heads = kernels.prepare_heads(w["kv_b"], HEADS, NOPE, VALUE)
        return w | {
            "inputs": kernels.prepare_latent_inputs(w["q_a"], w["kv_a"]),
            "q_b": kernels.prepare(w["q_b"]),
            "key": heads[0],
            "value": heads[1],
            "o": kernels.prepare(w["o"], shards=HEADS, row_cut=True),
            "router": kernels.prepare(w["router"]),
            "turn": kernels.rope_table(YARN, ROPE, 8),
            "positions": kernels.index(np.full(MOST_ROWS, 5)),
            "seen": seen,
            "mixed": xp.repeat(mixed, MOST_ROWS, 0),
        }

    def run(kernels, w: dict, x):
        n = len(x)
        turn, entries = (*w["turn"], w["positions"][:n]), kernels.activations((n, LATENT + ROPE))
        norms = w["q_norm"], w["kv_norm"], 1e-6
        kernels.latent_queries(x, w["inputs"], w["q_b"], w["key"], *norms, *turn, entries)
        o = kernels.absorb_v(w["seen"][:n], w["value"]).reshape(n, -1)
        x, h = kernels.add_rms_norm(x, kernels.linear(o, w["o"]), w["norm_norm"], 1e-5)
        kernels.route(h, w["router"], w["bias"], TOP_K, True, 2.827)
        return kernels.add_rms_norm(x, w["mixed"][:n], w["norm_norm"], 1e-5)[1]

    return Case(
        "layer without attention and experts", HIDDEN, draw, prepare, run,
        traffic=lambda rows, ids: 2 * sum(int(np.prod(s)) for s in sizes.values()),
        goals=goals, bound=2 * ROUNDED,
    )  # fmt: skip


def experts_case(goals: dict) -> Case:
    sizes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)

    def draw(kernels, seed: int):
        weights = []
        for i, (out, k) in enumerate(sizes):
            packed = kernels.launcher.empty((EXPERTS, out, k // 8), np.int32)
            kernels.generate(packed.reshape(-1, k // 8), seed + 2 * i, 0.0, 1.0)
            scales = kernels.launcher.empty((EXPERTS, out, k // 32), launchers.BFLOAT16)
            mean = 0.2 / k**0.5  # codes have a deviation of 4.6
            kernels.generate(scales.reshape(-1, k // 32), seed + 2 * i + 1, mean, 0.4 * mean)
            weights.append(Int4Weight(packed, scales))
        return weights

    def traffic(rows: int, ids) -> int:
        chosen = len(np.unique(ids[ids >= 0]))
        return chosen * 3 * WIDTH * HIDDEN // 32 * 18 + rows * (2 * HIDDEN + 4 * HIDDEN)

    return Case(
        "experts", HIDDEN, draw,
        prepare=lambda kernels, w: kernels.prepare_mlp(*w, 1),
        run=lambda kernels, w, x, ids, weights: kernels.moe(x, ids, weights, w, None),
        traffic=traffic, goals=goals, bound=ROUNDED, routed=True,
    )  # fmt: skip


@dataclass
class Context:
    """Committed keys; for some numbers of rows their plan and own keys, which are all equal."""

    pages: object
    of_rows: dict


def attention_case(context: int, goals: dict, heads=8, latent=512, width=576, span=4) -> Case:
    """Tree nodes that all follow the committed text; x is q."""
    leaf = 64
    pages = context // leaf + 1

    def prepare(kernels, weights) -> Context:
        if kernels.act != launchers.BFLOAT16:
            weights = kernels.launcher.upload(kernels.download(weights).astype(np.float32))
        return Context(weights.reshape(pages, leaf, width), {})

    def run(kernels, w: Context, x):
        rows = len(x)
        if rows not in w.of_rows:
            table = np.arange(pages, dtype=np.int32)[None]
            same = (np.full(rows, value, np.int32) for value in (context, 0, -1))
            lengths = np.array([context], np.int32)
            key = kernels.launcher.download(w.pages[0, :1])
            own = kernels.launcher.upload(np.repeat(key, rows, axis=0))
            w.of_rows[rows] = kernels.plan_attention(*same, lengths, table, leaf), own
        plan, own = w.of_rows[rows]
        q = x.reshape(rows, heads, width)
        return kernels.latent_attention(q, w.pages, own, plan, width**-0.5, latent, span)

    return Case(
        f"attention, {context} positions", heads * width,
        draw=lambda kernels, seed: random(kernels, seed, pages * leaf, width, scale=1.7),
        prepare=prepare, run=run,
        traffic=lambda rows, ids: 2 * (context * width + rows * (heads * (width + latent) + width)),
        goals=goals, bound=ROUNDED,
    )  # fmt: skip


CASES = (
    experts_case({1: 12, 2: 18, 4: 30, 8: 51, 16: 86, 32: 141, 64: 215, 128: 270}),
    mixture_case({}),
    linear_case("q_a + kv_a", 2112, HIDDEN, 1, {1: 8.3, 16: 9, 64: 11}),
    linear_case("q_b", 1536, 1536, 1, {1: 2.5, 16: 2.5, 64: 4}),
    absorb_case(True, {1: 3, 16: 3, 64: 5}),
    absorb_case(False, {1: 3, 16: 3, 64: 5}),
    linear_case("o_proj", HIDDEN, 1024, 8, {1: 4.4, 16: 4.8, 64: 6.5}),
    mlp_case("shared expert", WIDTH, {1: 6.0, 16: 6.6, 64: 10.5}),
    router_case({1: 5.2, 16: 5.6, 64: 8}),
    mlp_case("dense layer", 2304, {1: 27.0, 16: 27.0}),
    linear_case("lm_head", 20480, HIDDEN, 1, {1: 68, 16: 70, 64: 72}),
    layer_case({1: 24, 8: 25, 16: 28, 32: 33}),
)
ATTENTION_GOALS = {  # by positions
    1000: {1: 7, 16: 9, 64: 15},
    8000: {1: 10, 16: 18, 64: 30},
    32000: {1: 16, 16: 26, 64: 66},
}


def launches(case: Case) -> int:
    """Of the operation in one graph: so many that the sets they rotate over are cold."""
    return max(LAUNCHES, -(-COLD_BYTES // (3 * case.traffic(0, np.arange(EXPERTS)))))


def read_rate(kernels: ops.CudaOps, size: int = 4 << 30) -> float:
    """GB/s of a plain read. A device that was idle reads slower at first: not timed."""
    array, began = matrix(kernels, 7, size // 8192, 4096), time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        kernels.launcher.seconds(lambda: kernels.read(array))
    times = [kernels.launcher.seconds(lambda: kernels.read(array)) for _ in range(REPLAYS)]
    return size / statistics.median(times) / 1e9


def routing(rng, rows: int, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Random distinct experts of every row, ascending, out of `experts` of them, and weights."""
    some = rng.permutation(EXPERTS)[:experts]
    ids = np.argsort(rng.random((rows, experts)), axis=1)[:, :TOP_K]
    weights = rng.random((rows, TOP_K), dtype=np.float32)
    weights *= 2.827 / weights.sum(1, keepdims=True)
    return np.sort(some[ids], 1).astype(np.int32), weights


@dataclass(frozen=True)
class Checked:
    """error: norm ratio to fp32 kernels; alone, rows: rows with the bits that they have alone."""

    error: float
    alone: int
    rows: int

    def passed(self, case: Case) -> bool:
        return self.error <= case.bound and self.alone == self.rows


def check(case: Case, weights, kernels, truth, rows: int, seed: int) -> Checked:
    """Fresh inputs through the kernels, written over NaN, and through simple fp32 ones."""
    rng = np.random.default_rng(seed)
    x = random(kernels, seed, rows, case.k)
    host = kernels.download(x)
    route = routing(rng, rows, EXPERTS) if case.routed else ()
    prepared = case.prepare(kernels, weights)

    def of(which, ready, x, some=slice(None)):
        sent = [which.launcher.upload(np.ascontiguousarray(r[some])) for r in route]
        return which.download(case.run(which, ready, x, *sent))

    have = of(kernels, prepared, x)
    want = of(truth, case.prepare(truth, weights), truth.launcher.upload(host))
    error = float(np.linalg.norm(have - want) / np.linalg.norm(want))
    some = rng.permutation(rows)[:CHECK_ROWS]
    alone = 0
    for r in some.tolist():
        one = of(kernels, prepared, x[r : r + 1], slice(r, r + 1))
        alone += np.array_equal(one.view(np.int32), have[r : r + 1].view(np.int32))
    return Checked(error, alone, len(some))


def time_case(
    case: Case, sets: list, kernels, rows: int, seed: int, experts: int, checked: Checked
):
    """µs of every replay, and bytes of one operation. Nothing is timed that was not found right."""
    if not checked.passed(case) or checked.rows == 0:
        raise UserError(f"{case.name}, {rows} rows: not checked, so not timed")
    rng, n = np.random.default_rng(seed), launches(case)
    x = random(kernels, seed, rows, case.k)  # in the cache, as if a norm had just written it
    sent = []
    if case.routed:
        shape = (n, rows, TOP_K)
        sent = [kernels.launcher.empty(shape, kind) for kind in (np.int32, np.float32)]

    traffic = []

    def redraw(turn: int) -> None:
        kernels.generate(x, seed + 1 + turn, 0.0, 1.0)
        drawn = [routing(rng, rows, experts) for _ in range(n if case.routed else 0)]
        for array, new in zip(sent, zip(*drawn, strict=True), strict=False):
            kernels.refill(array, np.stack(new))
        routes = [ids for ids, _ in drawn] or [None]
        traffic.append(statistics.mean(case.traffic(rows, ids) for ids in routes))

    def run() -> tuple:
        return tuple(
            case.run(kernels, sets[i % len(sets)], x, *(s[i] for s in sent)) for i in range(n)
        )

    redraw(0)
    graph = kernels.capture(run)
    times = []
    for turn in range(REPLAYS + 2):  # the first two warm up
        redraw(turn + 1)
        kernels.launcher.synchronize()
        times.append(kernels.launcher.seconds(graph.replay) / n * 1e6)
    for i in (0, n - 1):  # what was timed was the operation, also where launches overlap
        want = case.run(kernels, sets[i % len(sets)], x, *(s[i] for s in sent))
        pair = (kernels.download(a).view(np.int32) for a in (graph.outputs[i], want))
        if not np.array_equal(*pair):
            raise UserError(f"{case.name}, {rows} rows: the recorded launches give other bits")
    return times[2:], statistics.mean(traffic[3:])


def named(names: Sequence[str] | None, contexts: Sequence[int], span: int) -> list[Case]:
    """Cases whose name has one of these words, all by default; attention behind so many positions,
    with `span` leaves in a span."""
    attention = (attention_case(n, ATTENTION_GOALS.get(n, {}), span=span) for n in contexts)
    every = [*CASES, *attention]
    cases = [c for c in every if not names or any(n in c.name for n in names)]
    if not cases:
        raise UserError(f"--op: none of {names}; there are {'; '.join(c.name for c in every)}")
    return cases


def expected(cases: Sequence[Case], all_rows) -> list[dict]:
    """One row an operation and number of rows, without a GPU: bytes, and how long they take."""
    lines = []
    for case in cases:
        for rows in all_rows:
            ids = routing(np.random.default_rng(rows), rows, EXPERTS)[0]
            moved = case.traffic(rows, ids)
            lines.append({"op": case.name, "T": rows, "MB": moved / 1e6, **at_rate(moved)})
    return lines


def at_rate(moved: float) -> dict[str, float]:
    return {f"µs at {EXPECTED_AT / 1e3:g} TB/s": moved / EXPECTED_AT / 1e3}


def table(cases: Sequence[Case], all_rows, skew: bool, launcher=None) -> list[dict]:
    """One row an operation and number of rows; a time only where the check has passed."""
    launcher = launcher or launchers.CudaLauncher()
    kernels = ops.CudaOps("bfloat16", launcher=launcher)
    poisoned = ops.CudaOps("bfloat16", launcher=launcher, poison=True)
    truth = ops.CudaOps("float32", launcher=launcher)
    rate = read_rate(kernels)
    lines = []
    work = tqdm([(c, r) for c in cases for r in all_rows], disable=not sys.stderr.isatty())
    sets, of = [], None
    for case, rows in work:
        work.set_description(f"{case.name}, {rows} rows")
        if of is not case:
            sets, of = [], case
            weights = case.draw(kernels, 1)
            once = case.traffic(0, np.arange(EXPERTS))
            n = min(launches(case), max(3, -(-COLD_BYTES // once)))
            sets = [case.prepare(kernels, case.draw(kernels, 100 * i)) for i in range(1, n + 1)]
        checked = check(case, weights, poisoned, truth, rows, seed=rows)
        for experts in (EXPERTS, 96, 48, 16) if skew and case.routed and rows == 64 else (EXPERTS,):
            name = case.name if experts == EXPERTS else f"{case.name}, {experts} of {EXPERTS}"
            line = {"op": name, "T": rows}
            if checked.passed(case):
                times, moved = time_case(case, sets, kernels, rows, rows + 1, experts, checked)
                line |= figures(times, moved, rate, case.goals.get(rows), experts == EXPERTS)
            else:
                line |= figures(None, 0, rate, None, False)
            line |= {"error": f"{checked.error:.1e}", "alone": f"{checked.alone}/{checked.rows}"}
            line["identical"] = "yes" if checked.passed(case) else "NO"
            lines.append(line)
    again = read_rate(kernels)
    print(f"{launcher.limits.name}: reads {rate:.0f} GB/s, and {again:.0f} at the end\n")
    return lines


def figures(times, moved: float, rate: float, goal: float | None, uniform: bool) -> dict:
    if times is None:
        names = "µs", "spread", "MB", "GB/s", "of read", "floor", "goal", "of goal", *at_rate(0)
        return dict.fromkeys(names, "-")
    median = statistics.median(times)
    floor = moved / rate / 1e3
    scaled = goal * GOALS_AT / rate if goal and uniform else None
    return {
        "µs": median,
        "spread": f"{min(times):.1f}-{max(times):.1f}",
        "MB": moved / 1e6,
        "GB/s": moved / median / 1e3,
        "of read": floor / median,
        "floor": floor,
        "goal": scaled if scaled else "-",
        "of goal": median / scaled if scaled else "-",
        **at_rate(moved),
    }

"""A whole decode step of a config, in parts, with its bits: `python bench.py step`.

Text means nothing to weights from a seed, so the drafts are scripted: the drafter runs as ever,
then the likeliest of its logits are overwritten, on the device, by a script over the text that
plain decoding gave.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

import config
import sampling
from budget import Choice
from config import UserError
from drafter import Drafter
from engine import Engine
from request import Result, Sequence
from rounds import sampled
from sampling import SamplingParams

REPEATS = 9  # of a timing
WIDTH = 8  # tokens that a script says of each position
PEAK = 60.0  # logit of a sure token: far above the drafter's own and all noise
DISTINCT = 32  # ids that a text should have, where it is as long


@dataclass(frozen=True)
class Script:
    """How good drafts are: in so many positions the right token is the likeliest; in half of the
    others the second, in half of the rest the third. sure: the script's own word for that."""

    name: str
    quality: float


SCRIPTS = (Script("perfect", 1.0), Script("good", 0.85), Script("mixed", 0.6), Script("wrong", 0.0))


class Replay(Drafter):
    """A drafter whose logits follow a script: `play`.

    ids, scores  [positions, WIDTH] tokens of a position, and what their logits become
    """

    def __init__(self, drafter: Drafter, positions: int):
        vars(self).update(vars(drafter))
        self.ids = self.ops.index(np.tile(np.arange(WIDTH, dtype=np.int32), (positions, 1)))
        self.scores = self.ops.upload(np.zeros((positions, WIDTH), np.float32))

    def forward(self, rows, cache):
        logits, at = super().forward(rows, cache), self.ops.index(rows.draft_positions)
        n, vocab = logits.shape
        places = self.ops.arange(n)[:, None] * vocab + self.ids[at]
        logits.reshape(-1)[places] = self.scores[at]
        return logits

    def play(self, script: Script, text: list[int], vocab: int, params: SamplingParams) -> None:
        """Drafts for a text of these ids, prompt included. The request's noise would lift the token
        that it chose, so it is taken out: what is drafted is what the script says."""
        rng, n = np.random.default_rng(0), len(self.ids)
        right = np.array([*text, *[0] * n])[:n]
        ids = (right[:, None] + 1 + np.arange(WIDTH) * 7) % vocab  # others than the right one
        place = np.minimum(rng.geometric(0.5, n), WIDTH)
        place[rng.random(n) < script.quality] = 0
        some = np.flatnonzero(place < WIDTH)
        if script.quality > 0:
            ids[some, place[some]] = right[some]
        chance = np.array([script.quality, *(1 - script.quality) * 0.5 ** np.arange(1, WIDTH)])
        scores = np.tile(PEAK + np.log(np.maximum(chance, 1e-12)), (n, 1))
        if not params.greedy:
            noise = sampling.gumbel_of(params.seed, np.arange(n)[:, None], ids)
            scores -= np.float32(params.temperature) * noise
        if script.quality == 0:  # not one draft is right
            ids[:, 0], scores[:, 0] = right, -np.inf
        for array, host in ((self.ids, ids), (self.scores, scores)):
            if isinstance(array, np.ndarray):
                array[...] = host
            else:  # that recorded rounds read
                self.ops.refill(array, host)


def table(arguments) -> list[dict]:
    """One row a context and mode."""
    longest = max(arguments.contexts) + arguments.max_tokens
    # A whole leaf more: rounds write two ahead.
    settings = config.load(arguments.config, context=longest + 64, batch=1)
    engine = Engine(settings, arguments.device)
    if engine.drafter is None:
        raise UserError(f"{arguments.config}: draft.path is not set; step needs a drafter")
    if engine.comm is not None:
        raise UserError("step: times one rank; set tp.size to 1, or tp.only_rank")
    replay = engine.drafter = Replay(engine.drafter, longest + 64 + engine.drafter.dims.block_size)
    if engine.rounds is not None:
        engine.rounds.drafter = replay
        engine.rounds.graphs.clear()  # of the warm-up: they draft without the script
        engine.autos.clear()
    rows = []
    for context in arguments.contexts:
        rows += of_context(engine, context, arguments)
    return rows


def of_context(engine: Engine, context: int, arguments) -> list[dict]:
    """A row a mode, behind a prompt of so many drawn ids. UserError where plain decoding fails, or
    where its text has too few ids for scripts to be told apart."""
    vocab, block = engine.dims.vocab_size, engine.drafter.dims.block_size
    prompt = np.random.default_rng(context).integers(0, vocab, context).tolist()
    params = SamplingParams(
        temperature=arguments.temperature, seed=1, max_tokens=arguments.max_tokens,
        ignore_eos=True,
    )  # fmt: skip
    modes = {"ar": ("ar", 1), "chain": ("chain", block)}
    modes |= {f"tree, {n} nodes": ("tree", n) for n in arguments.budgets if n != config.AUTO}
    engine.use("ar", 1)
    [plain] = engine.generate([prompt], params, keep_logits=True)
    if plain.error or not np.isfinite(plain.logits).all():
        raise UserError(f"step: plain decoding at {context}: {plain.error or 'infinite logits'}")
    distinct = len(set(plain.token_ids))
    if distinct < min(DISTINCT, arguments.max_tokens // 2):
        raise UserError(f"step: the text has {distinct} ids; raise --temperature")
    # Timed with drafts that differ from row to row, as real ones do: equal rows need few experts.
    engine.drafter.play(SCRIPTS[0], prompt + plain.token_ids, vocab, params)
    rows = {name: step_row(engine, prompt, params, mode) for name, mode in modes.items()}
    if config.AUTO in arguments.budgets:
        modes["tree, auto"] = ("tree", config.AUTO)
        rows["tree, auto"] = dict.fromkeys(rows["ar"], "-")
    equal = dict.fromkeys(modes, True)
    for script in SCRIPTS:
        engine.drafter.play(script, prompt + plain.token_ids, vocab, params)
        for name, mode in modes.items():
            results = scripted(engine, prompt, params, mode, arguments.repeats)
            equal[name] &= all(same(result, plain) for result in results)
            timed = results[1:]
            rows[name][f"τ {script.name}"] = statistics.mean(r.acceptance_length for r in timed)
            rate = statistics.median(r.tok_per_s for r in timed) / 1e3
            rows[name][f"tok/ms {script.name}"] = float(f"{rate:.4g}")
    return [
        {"context": context, "mode": name, **row, "ids": distinct,
         "identical": "yes" if equal[name] else "NO"}
        for name, row in rows.items()
    ]  # fmt: skip


def scripted(engine: Engine, prompt, params, mode: tuple, repeats: int) -> list[Result]:
    """The text again by another mode: first with logits, of which the bits count, then for the
    time; "auto" has then met this script."""
    engine.use(*mode)
    asked = [True] + [False] * repeats
    return [engine.generate([prompt], params, keep_logits=keep)[0] for keep in asked]


def same(result: Result, plain: Result) -> bool:
    """Equal ids and, where they are there, logit bits."""
    equal = result.token_ids == plain.token_ids
    if result.logits is not None:
        equal &= np.array_equal(result.logits.view(np.int32), plain.logits.view(np.int32))
    return equal


def step_row(engine: Engine, prompt, params, mode: tuple) -> dict:
    """Times of a step at the prompt's end, and of its drafter and the building of its tree."""
    engine.use(*mode)
    sequence = engine.submit(prompt, params)
    try:
        while not sequence.n_emitted:
            engine.advance(sequence)
            if sequence.error:
                raise UserError(f"step: {sequence.error}")
        times = [engine.seconds(engine.choice, sequence.arrival) for _ in range(REPEATS + 2)][2:]
        if None in times:
            raise UserError("step: too few pages; raise decode.pages")
        drafter, both = parts(engine, sequence, engine.choice)
    finally:
        engine.cancel(sequence)
    return {
        "µs": 1e6 * statistics.median(times),
        "spread": f"{1e6 * min(times):.1f}-{1e6 * max(times):.1f}",
        "drafter": 1e6 * drafter,
        "tree": 1e6 * (both - drafter),
    }


def parts(engine: Engine, sequence: Sequence, choice: Choice) -> tuple[float, float]:
    """Seconds of the drafter alone, and with the choice of candidates and building of trees."""
    if choice.mode == "ar":
        return 0.0, 0.0
    if engine.rounds is None:
        root, slot = np.array([sequence.tokens[-1]], np.int32), np.array([sequence.slot])
        runs = [
            lambda: engine.drafter.draft(root, slot, engine.cache),
            lambda: engine.draft(choice, [sequence]),
        ]
        seconds = host_seconds
    else:
        rounds = engine.rounds
        rounds.enter([sequence])
        rounds.send_tables()
        choice, places, _, drawn = rounds.key(choice, 1, False, sampled([sequence]))
        runs = [
            engine.ops.capture(lambda: (rounds.drafts(places)[0],)).replay,
            engine.ops.capture(lambda: (rounds.trees(choice, places, drawn)[0].sizes,)).replay,
        ]
        seconds = engine.ops.launcher.seconds
    return tuple(statistics.median(seconds(run) for _ in range(REPEATS)) for run in runs)


def host_seconds(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began

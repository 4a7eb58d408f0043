"""A whole decode step of a config, in parts, with its bits: `python bench.py step`.

Text means nothing to weights from a seed, so the drafts are scripted: the drafter runs as ever,
then the likeliest of its logits are overwritten, on the device, by a script over the text that
plain decoding gave.

Columns: µs is a whole step; drafter, of it, the drafter's both parts, the drafts in front of the
forward and the context behind it (taps of the accepted rows to keys and values), which plain
decoding has too; tree, of it, the choice of candidates and the building of the tree. What is left
is the target's.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass

import numpy as np

import config
import sampling
from budget import Choice
from cache import Placed
from config import UserError
from drafter import Drafter
from engine import Engine
from request import Result, Sequence
from rounds import sampled
from sampling import SamplingParams

REPEATS = 9  # of a timing
AHEAD = 64  # positions behind the text: rounds write two blocks ahead
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
    """One row a context and mode. The weights are loaded once, for the longest context."""
    positions = [n + arguments.max_tokens + AHEAD for n in arguments.contexts]
    settings = config.load(arguments.config, context=max(positions), batch=1)
    engine = Engine(settings, arguments.device)
    if engine.drafter is None:
        raise UserError(f"{arguments.config}: draft.path is not set; step needs a drafter")
    if engine.comm is not None:
        raise UserError("step: times one rank; set tp.size to 1, or tp.only_rank")
    drafter, rows = engine.drafter, []
    for context, n in zip(arguments.contexts, positions, strict=True):
        engine.drafter = Replay(drafter, n + drafter.dims.block_size)
        configure(engine, n)
        rows += of_context(engine, context, arguments)
    return rows


def configure(engine: Engine, context: int) -> None:
    """Make the engine the one that a config of so many positions, at most those that it was loaded
    for, gives: a recorded round works as for the last of them. What it held, recorded and learned
    is given up."""
    decode = dataclasses.replace(engine.settings.decode, context=context)
    engine.settings = dataclasses.replace(engine.settings, decode=decode)
    engine.autos.clear()
    engine.allocate()


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
    """Times of a step at the prompt's end, and of its parts that are not the target's."""
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
        drafter, tree = parts(engine, sequence, engine.choice)
    finally:
        engine.cancel(sequence)
    return {
        "µs": 1e6 * statistics.median(times),
        "spread": f"{1e6 * min(times):.1f}-{1e6 * max(times):.1f}",
        "drafter": 1e6 * drafter,
        "tree": 1e6 * tree,
    }


def parts(engine: Engine, sequence: Sequence, choice: Choice) -> tuple[float, float]:
    """Seconds of the drafter, in front of the forward and behind it, and of the choice of
    candidates and the building of trees. Plain decoding drafts nothing, but the drafter's context
    grows all the same."""
    made = committed(engine, sequence, choice)
    recorded, seconds = engine.rounds is not None, host_seconds
    runs = (device_runs if recorded else host_runs)(engine, sequence, choice, *made)
    if choice.mode == "ar":
        runs = runs[:1]
    if recorded:
        runs = [engine.ops.capture(run).replay for run in runs]
        seconds = engine.ops.launcher.seconds
    took = [statistics.median(seconds(run) for _ in range(REPEATS)) for run in runs]
    context, *rest = took
    drafts, both = rest or (0.0, 0.0)
    return context + drafts, both - drafts


def host_runs(engine: Engine, sequence: Sequence, choice: Choice, taps, placed: Placed) -> list:
    """A step's context of the drafter, its drafts, and these with the tree."""
    root, slot = np.array([sequence.tokens[-1]], np.int32), np.array([sequence.slot])
    return [
        lambda: engine.drafter.extend(taps, placed, engine.cache),
        lambda: engine.drafter.draft(root, slot, engine.cache),
        lambda: engine.draft(choice, [sequence]),
    ]


def device_runs(engine: Engine, sequence: Sequence, choice: Choice, taps, placed: Placed) -> list:
    """The same of a recorded round. Taps and places are filled up as there: a row a node, a place a
    node of the longest path."""
    rounds, ops = engine.rounds, engine.ops
    rounds.enter([sequence])
    rounds.send_tables()
    choice, places, _, drawn = rounds.key(choice, 1, False, sampled([sequence]))
    nodes = choice.budget
    taps = ops.take_rows(taps, np.arange(nodes) % len(taps))
    more = min(rounds.depth, nodes - 1) + 1 - len(placed.rows)
    filled = (np.pad(a, (0, more), constant_values=-1) for a in vars(placed).values())
    placed = Placed(*map(ops.index, filled))

    def extend() -> tuple:
        rounds.drafter.extend(taps, placed, rounds.state)
        return ()

    return [
        extend,
        lambda: (rounds.drafts(places)[0],),
        lambda: (rounds.trees(choice, places, drawn)[0].sizes,),
    ]


def committed(engine: Engine, sequence: Sequence, choice: Choice) -> tuple:
    """Of a step from where the sequence stands: taps of all rows, and the rows that it commits with
    their places. The sequence stays where it is; pages are there for it to go on."""
    step = engine.verify(engine.draft(choice, [sequence]), [])
    [accepted] = engine.accept(step)
    rows = accepted.part.rows.start + np.array(accepted.walk.rows, np.int32)
    begin = engine.committed(sequence)
    engine.cache.reserve(sequence.slot, begin + len(rows))
    places = np.full_like(rows, sequence.slot), begin + np.arange(len(rows), dtype=np.int32)
    return step.forward.taps, Placed(rows, *places)


def host_seconds(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began

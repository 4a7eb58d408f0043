"""Measurement: speed of the modes, acceptance of drafts. Tables in Markdown, or JSON.

    python bench.py speed                      # modes in turns on this machine
    python bench.py acceptance --prompts 100   # tokens per verify step, and equal bits
    python bench.py ops                        # operations at K2.6's shapes, on an NVIDIA GPU
    python bench.py ops --expect               # their bytes at a card's rate, measured nowhere
    python bench.py --tune                     # the fastest launch of each, to configs/tiles.yaml
    python bench.py reduce --tp 2              # sums across GPUs, by every way
    python bench.py step                       # a decode step and its parts, scripted drafts
    python bench.py prefill                    # a prompt, by the size of its pieces

Stands on the engine as a user does; the engine never imports it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

import config
import reference
from commands import exit_code, nodes
from config import UserError
from engine import Engine
from request import Result, acceptance_length
from sampling import SamplingParams

HERE = Path(__file__).parent
HELD_OUT = HERE / "tests" / "data" / "heldout_prompts.jsonl"
NAMES = ("op", "T", "context", "temperature", "mode")  # that say what a row is of
MEASURES = {"µs": -1, "ms": -1, "tok/s": 1, "ms a step": -1, "tau": 1, "drafter": -1, "tree": -1}
MEASURES |= {f"tok/ms {quality}": 1 for quality in ("perfect", "good", "mixed", "wrong")}
LEAST = {"max_tokens": 2, "budgets": 1, "repeats": 1, "prompts": 1, "seeds": 1, "batch": 1}
LEAST |= {"contexts": 1, "rows": 1, "span": 1}
DEFAULTS = {  # of an argument: what it is for, and for all else
    "max_tokens": {"step": 65, "": 96},
    "repeats": {"step": 1, "": 5},  # of a large model, four scripts a mode
    "contexts": {"prefill": [1024], "ops": [1000, 8000, 32000], "": [1000]},
    "config": {"--tune": "k26-rank.yaml", "": "nano.yaml"},
    "rows": {
        "ops": [1, 2, 4, 8, 16, 32, 64, 128],
        "reduce": [1, 8, 16, 32, 64],
        "prefill": [256, 1024],
        "": None,  # --tune: by the config
    },
}
BUDGETS = [8, 16, 32, config.AUTO]
TEMPERATURES = [0.0, 0.7, 1.0]
NOISE = 0.04  # of a figure: clocks differ by so much between runs
TINY = 1e-9
PROMPT = "import os\n\n\nclass Cache:\n    def __init__(self, size):\n"


def main(argv: list[str] | None = None) -> int:
    says = __doc__.splitlines()[0] + " In parentheses: what holds without the option."
    parser = argparse.ArgumentParser(prog="bench.py", description=says)
    add = parser.add_argument
    add("what", nargs="?", choices=("speed", "acceptance", "step", "prefill", "ops", "reduce"))
    add("--config", help=f"YAML file, also looked for in configs/ ({default_of('config')})")
    devices = "auto: a GPU where there is one; emulate: its kernels as host code (%(default)s)"
    add("--device", choices=("auto", "cuda", "cpu", "emulate"), default="auto", help=devices)
    add("--max-tokens", type=int, help=f"of a text ({default_of('max_tokens')})")
    trees = f"nodes of the trees ({listed(BUDGETS)})"
    add("--budgets", type=nodes, nargs="+", default=BUDGETS, help=trees)
    add("--json", metavar="FILE", help="also write the rows as JSON")
    add("--against", metavar="FILE", type=Path, help="compare with such a file; a * is no noise")
    add("--repeats", type=int, help=f"turns a mode ({default_of('repeats')})")
    texts = f"of acceptance: JSON lines with `text` ({HELD_OUT.relative_to(HERE)})"
    add("--file", type=Path, default=HELD_OUT, help=texts)
    add("--prompts", type=int, default=100, help="of acceptance: so many of the file (%(default)s)")
    some = f"of acceptance ({listed(TEMPERATURES)})"
    add("--temperatures", type=float, nargs="+", default=TEMPERATURES, help=some)
    add("--temperature", type=float, default=1.0, help="of step (%(default)s)")
    lengths = "of step and prefill: tokens of the prompt; of ops: attention's positions "
    lengths += f"({default_of('contexts')})"
    add("--contexts", type=int, nargs="+", help=lengths)
    seeds = "of acceptance, for each sampled prompt (%(default)s)"
    add("--seeds", type=int, default=1, help=seeds)
    together = "of acceptance: sequences decoded together (%(default)s)"
    add("--batch", type=int, default=8, help=together)
    add("--op", nargs="+", help="of ops: only those whose name has one of these words")
    add("--rows", type=int, nargs="+", help=f"T ({default_of('rows')})")
    add("--tp", type=int, choices=(2, 4, 8), default=2, help="of reduce: GPUs (%(default)s)")
    add("--span", type=int, default=4, help="of ops: attention's leaves in a span (%(default)s)")
    add("--skew", action="store_true", help="of ops: 64 rows also over few experts")
    add("--tune", action="store_true", help="ops: time every launch of --config's products")
    add("--expect", action="store_true", help="of ops: what their bytes take at 1.79 TB/s alone")
    arguments = parser.parse_args(argv)
    if arguments.what is None and not arguments.tune:
        parser.error("what to measure is missing: speed, acceptance, step, prefill, ops or reduce")
    arguments.what = "--tune" if arguments.tune else arguments.what
    for name, of in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, of.get(arguments.what, of[""]))
    return exit_code(lambda: run(arguments))


def default_of(name: str) -> str:
    """An argument's default in words: in general, then of what has one of its own."""
    of = DEFAULTS[name]
    words = [f"of {what} {listed(value)}" for what, value in of.items() if what]
    return "; ".join(words if of[""] is None else [listed(of[""]), *words])


def listed(value: object) -> str:
    """As it is typed."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def run(arguments) -> int:
    measures = {"speed": speed, "acceptance": acceptance, "step": step, "prefill": prefill}
    measures |= {"ops": operations, "reduce": sums, "--tune": tune}
    before = check(arguments)
    rows = measures[arguments.what](arguments)
    print(table(rows))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if before is not None:
        print(f"\nagainst {arguments.against}:\n\n{table(changes(before, rows))}")
    return 1 if any(row.get("identical") == "NO" for row in rows) else 0


def check(arguments) -> list[dict] | None:
    """Refuse what leaves nothing to measure; the rows of --against, where it is given."""
    for name, least in LEAST.items():
        got = getattr(arguments, name)
        for n in got if isinstance(got, list) else [got]:
            if isinstance(n, int) and n < least:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag}: expected at least {least}, got {n}")
    for n in arguments.budgets:
        if n != config.AUTO and n > config.MOST_NODES:
            raise UserError(f"--budgets: expected at most {config.MOST_NODES}, got {n}")
    if arguments.expect and arguments.what != "ops":
        raise UserError("--expect: goes with ops only")
    if arguments.what == "acceptance" and not arguments.file.is_file():
        raise UserError(f"--file {arguments.file}: no such file")
    if arguments.json and not Path(arguments.json).absolute().parent.is_dir():
        raise UserError(f"--json {arguments.json}: its directory does not exist")
    if arguments.json and Path(arguments.json).is_dir():
        raise UserError(f"--json {arguments.json}: is a directory; name a file")
    if arguments.against is None:
        return None
    try:
        rows = json.loads(arguments.against.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--against {arguments.against}: {reason}") from None
    if not (rows and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise UserError(f"--against {arguments.against}: expected what --json writes")
    return rows


def table(rows: Sequence[dict]) -> str:
    """Rows of equal keys as Markdown."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def changes(before: list[dict], now: list[dict]) -> list[dict]:
    """What two runs say of the same things. Beyond the noise is what differs by more than NOISE
    and, where spreads are stated, by so much that they have nothing in common. A spread of nothing
    is that of one turn, which says nothing of the noise."""
    names = [n for n in NAMES if n in now[0]]
    was, rows = {tuple(str(row.get(n)) for n in names): row for row in before}, []
    for row in now:
        key = [row[n] for n in names]
        old = was.pop(tuple(map(str, key)), {})
        others = [n for n, v in row.items() if isinstance(v, float)]  # then all are times
        known = {n: better for n, better in MEASURES.items() if n in row}
        for measure, better in (known or dict.fromkeys(others, -1)).items():
            values = [r.get(measure) for r in (old, row)]
            if not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
                continue
            ratio = values[1] / values[0]
            apart = abs(ratio - 1) > NOISE
            if names_spread(row) is not None:  # its figure's, or as wide for the others of the row
                spreads = [limits(r.get("spread")) for r in (old, row)]
                if None in spreads:
                    raise UserError('--against: a "spread" is not what --json writes')
                (low, high), (least, most) = spreads
                wide = max(high / max(low, TINY), most / max(least, TINY))
                apart &= low < high and least < most
                if measure == names_spread(row):
                    apart &= high < least or most < low
                else:
                    apart &= not 1 / wide < ratio < wide
            verdict = "better" if (ratio > 1) == (better > 0) else "worse"
            rows.append(
                {**dict(zip(names, key, strict=True)), "of": measure, "was": values[0],
                 "is": values[1], "ratio": ratio, "beyond noise": f"* {verdict}" if apart else ""}
            )  # fmt: skip
    if not rows:
        raise UserError("--against: that run measured nothing that this one did")
    return rows


def names_spread(row: dict) -> str | None:
    """The measure whose spread a row states: the one in front of it; "-" is none."""
    names = list(row)
    return names[names.index("spread") - 1] if row.get("spread", "-") != "-" else None


def limits(spread: object) -> tuple[float, float] | None:
    """Of a spread as it is written; None of anything else."""
    found = re.fullmatch(r"(\d+\.?\d*)-(\d+\.?\d*)", str(spread))
    return found and (float(found[1]), float(found[2]))


def step(arguments) -> list[dict]:
    import bench_step

    return bench_step.table(arguments)


def operations(arguments) -> list[dict]:
    import bench_kernels  # needs a GPU: only when asked for

    cases = bench_kernels.named(arguments.op, arguments.contexts, arguments.span)
    if arguments.expect:
        return bench_kernels.expected(cases, arguments.rows)
    need_gpu("ops")
    return bench_kernels.table(cases, arguments.rows, arguments.skew)


def need_gpu(what: str, number: int = 1) -> None:
    """Refuse before anything is loaded where there are no such GPUs to time."""
    import launchers

    try:
        launchers.CudaLauncher(0, number)
    except UserError as error:
        some = "an NVIDIA GPU" if number == 1 else f"{number} NVIDIA GPUs"
        reason = str(error).removeprefix("--device cuda: ").partition(";")[0]
        raise UserError(f"{what}: times kernels and needs {some}; here: {reason}") from None


def tune(arguments) -> list[dict]:
    import bench_tune

    if arguments.device != "emulate":
        need_gpu("--tune")
    return bench_tune.table(arguments)


def prefill(arguments) -> list[dict]:
    import bench_prefill

    return bench_prefill.table(arguments)


def sums(arguments) -> list[dict]:
    import bench_reduce  # needs GPUs: only when asked for

    need_gpu("reduce", arguments.tp)
    return bench_reduce.table(arguments.tp, arguments.rows)


def progress(work, name: str):
    return tqdm(work, desc=name, disable=not sys.stderr.isatty(), leave=False)


# ---- speed -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mode:
    name: str
    mode: str
    budget: int | str = 1
    row_tile: int = reference.ROW_TILE


def drafting(arguments) -> list[Mode]:
    trees = [Mode(tree_name(n), "tree", n) for n in arguments.budgets]
    return [Mode("chain", "chain"), *trees]


def tree_name(n: int | str) -> str:
    return "tree, auto" if n == config.AUTO else f"tree, {n} nodes"


def speed(arguments) -> list[dict]:
    """tok/s of every mode on one greedy text, in turns; medians and spread.

    On the CPU also plain decoding without the row tile: one-row products, faster for a single row,
    but a row's bits then depend on the batch, so the engine itself never runs that way.
    """
    engine = exact_engine = Engine(config.load(arguments.config), arguments.device)
    modes = [Mode("ar", "ar")]
    if engine.ops.name == "cpu" and engine.settings.tp.size == 1:
        modes.insert(0, Mode("ar without row tiles", "ar", row_tile=1))
        untiled = Engine(config.load(arguments.config), "cpu")  # its pages hold other bits
    if engine.drafter is not None:
        modes += drafting(arguments)
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    results: dict[str, list[Result]] = {m.name: [] for m in modes}
    bits: dict[str, Result] = {}
    turns = [(turn, m) for turn in range(arguments.repeats + 1) for m in modes]
    for turn, m in progress(turns, "speed"):
        engine = exact_engine if m.row_tile == reference.ROW_TILE else untiled
        engine.use(m.mode, m.budget)
        reference.ROW_TILE, tile = m.row_tile, reference.ROW_TILE
        try:
            [result] = engine.generate([PROMPT], params, keep_logits=not turn)
        finally:
            reference.ROW_TILE = tile
        if result.error or not result.steps:
            raise UserError(f"speed: {m.name}: {result.error or 'the context leaves no steps'}")
        if turn:
            results[m.name].append(result)
        else:  # warms up, and keeps the logits: their bits are compared, the other turns' ids
            bits[m.name] = result
    exact = digest(bits["ar"])
    median = {name: statistics.median(r.tok_per_s for r in rs) for name, rs in results.items()}
    rows = []
    for m in modes:
        rates, last = [r.tok_per_s for r in results[m.name]], results[m.name][-1]
        same = digest(bits[m.name]) == exact
        same &= all(r.token_ids == bits["ar"].token_ids for r in results[m.name])
        rows.append(
            {
                "mode": m.name,
                "tok/s": median[m.name],
                "spread": f"{min(rates):.1f}-{max(rates):.1f}",
                "acceptance length": last.acceptance_length,
                "ms a step": 1e3 * last.decode_s / last.steps,
                "ratio to ar": median[m.name] / median["ar"],
                "identical": "yes" if same else "NO",
            }
        )
        if m.row_tile != reference.ROW_TILE and not same:
            rows[-1]["identical"] = "not promised"
    return rows


# ---- acceptance --------------------------------------------------------------------------------


def acceptance(arguments) -> list[dict]:
    """Tokens per verify step over held-out prompts, for each temperature and mode; texts that end
    in a loop are counted, because they make drafting easy. Ids and logit bits of every request are
    compared with plain decoding's."""
    settings = config.load(arguments.config, batch=arguments.batch)
    engine = Engine(settings, arguments.device)
    if engine.drafter is None:
        raise UserError(f"{arguments.config}: draft.path is not set; acceptance needs a drafter")
    texts = held_out(arguments.file, arguments.prompts)
    first = SamplingParams(max_tokens=1)
    decode(engine, [(text, first) for text in texts], "prompts")  # no mode alone pays for them
    rows = []
    for temperature in arguments.temperatures:
        asked = []
        for seed in range(1, (arguments.seeds if temperature else 1) + 1):
            params = SamplingParams(
                temperature=temperature, seed=seed, max_tokens=arguments.max_tokens
            )
            asked += [(text, params) for text in texts]
        exact, loops = None, None
        for m in [Mode("ar", "ar"), *drafting(arguments)]:
            engine.use(m.mode, m.budget)
            began = time.perf_counter()
            results = decode(engine, asked, f"T={temperature:g} {m.name}")
            seconds = time.perf_counter() - began
            digests = [digest(r) for r in results]
            if exact is None:
                exact = digests
                loops = np.array([ends_in_a_loop(r.token_ids) for r in results])
            same = sum(a == b for a, b in zip(digests, exact, strict=True))
            free = [r for r, looping in zip(results, loops, strict=True) if not looping]
            rows.append(
                {
                    "temperature": temperature,
                    "mode": m.name,
                    "texts": len(results),
                    "tau": tau(results),
                    "looping": f"{loops.mean():.0%}",
                    "tau without loops": tau(free),
                    "tok/s": sum(len(r.token_ids) for r in results) / seconds,
                    "equal": f"{same}/{len(results)}",
                    "identical": "yes" if same == len(results) else "NO",
                }
            )
    return rows


def held_out(file: Path, most: int) -> list[str]:
    """The first texts of a file of JSON lines."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        read = [json.loads(line) for line in lines if line.strip()][:most]
        texts = [line["text"] for line in read]
    except (ValueError, RecursionError, TypeError, LookupError):
        texts = []
    if not (texts and all(isinstance(text, str) for text in texts)):
        raise UserError(f"--file {file}: expected JSON lines with `text`")
    return texts


def decode(engine: Engine, asked, name: str) -> list[Result]:
    """All requests together; logits are replaced by their digest as soon as a request ends."""
    sequences = [engine.submit(text, params, keep_logits=True) for text, params in asked]
    results: dict[int, Result] = {}
    with progress(range(len(sequences)), name) as bar:
        while len(results) < len(sequences):
            for sequence in engine.step():
                if sequence.finish_reason is not None:
                    result = sequence.result()
                    results[id(sequence)] = dataclasses.replace(result, logits=digest(result))
                    sequence.logits.clear()
                    bar.update()
    return [results[id(sequence)] for sequence in sequences]


def digest(result: Result):
    """Ids and logit bits of a result, in short. A result that holds its digest gives it back."""
    if isinstance(result.logits, str):
        return result.logits
    bits = hashlib.sha256(np.asarray(result.token_ids, np.int32).tobytes())
    if result.logits is not None:
        bits.update(result.logits.tobytes())
    return bits.hexdigest()


def tau(results: Sequence[Result]) -> float:
    tokens = [len(r.token_ids) for r in results]
    return acceptance_length(sum(tokens), np.count_nonzero(tokens), sum(r.steps for r in results))


def ends_in_a_loop(ids: Sequence[int], tail: int = 48, longest: int = 24) -> bool:
    """Whether the last `tail` tokens repeat with a period of at most `longest`."""
    end = list(ids)[-tail:]
    if len(end) < tail:
        return False
    return any(
        all(end[i] == end[i - period] for i in range(period, tail))
        for period in range(1, longest + 1)
    )


if __name__ == "__main__":
    sys.exit(main())

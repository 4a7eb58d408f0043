"""bench.py: two runs side by side, a whole step, one-line ends; engine.py --profile."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import bench
import bench_prefill
import bench_step
import config
import engine
import profiler
from config import DEVICE_FAULT, DeviceFault, UserError
from drafter import Drafter
from parallel import RankFailed
from sampling import SamplingParams
from tests import toy
from tests.conftest import launcher

YAML = """\
model: {path: toy}
draft: {path: toy/drafter, mode: tree, budget: auto, limit: 8}
decode: {leaf: 16, span: 2, prefill_chunk: 32, max_tokens: 12}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A config with a toy checkpoint of 256 positions."""
    directory = tmp_path_factory.mktemp("house")
    longer = {"max_position_embeddings": 256}
    toy.write_checkpoint(directory / "toy", drafter=longer, **longer)
    (directory / "toy.yaml").write_text(YAML)
    fixed = YAML.replace("budget: auto", "budget: 4")
    (directory / "fixed.yaml").write_text(fixed)
    (directory / "emulated.yaml").write_text("kernels: {activation: bfloat16}\n" + fixed)
    return directory


# ---- --against ---------------------------------------------------------------------------------


ROW = {"mode": "ar", "identical": "yes"}


def row(us, spread, **more) -> dict:
    return {"op": "o_proj", "T": 8, "µs": us, "spread": spread, "GB/s": 9.0, **more}


@pytest.mark.parametrize(
    "now, verdict",
    (
        (row(10.3, "10.2-10.4"), ""),  # by less than clocks differ
        (row(12.0, "9.8-13.0"), ""),  # the runs have values in common
        (row(12.0, "11.9-12.1"), "* worse"),
        (row(8.0, "7.9-8.1"), "* better"),
        (row(8.0, "8.0-8.0"), ""),  # one turn
    ),
)
def test_changes_beyond_the_noise_are_marked(now, verdict):
    [found] = bench.changes([row(10.0, "9.9-10.1"), row(7.0, "7-7", T=9)], [now])
    assert (found["op"], found["T"], found["of"]) == ("o_proj", 8, "µs")
    assert found["ratio"] == pytest.approx(now["µs"] / 10) and found["beyond noise"] == verdict


def test_more_is_better_of_some_and_what_was_not_timed_is_left_out():
    was = {"mode": "ar", "tok/s": 100.0, "spread": "99.0-101.0", "ms a step": 10.0}
    now = {"mode": "ar", "tok/s": 150.0, "spread": "149.0-151.0", "ms a step": 6.7}
    assert [r["beyond noise"] for r in bench.changes([was], [now])] == ["* better"] * 2
    [found] = bench.changes([{"T": 1, "nccl": 5.0}], [{"T": 1, "nccl": 6.0, "identical": "yes"}])
    assert found["beyond noise"] == "* worse"
    with pytest.raises(UserError, match="nothing that this one did"):
        bench.changes([row(10.0, "1-2")], [row("-", "-")])


def test_a_row_that_states_no_spread_is_compared_all_the_same():
    """As bench_step's of auto, which has no step of its own to time."""
    was, now = (
        {"mode": "tree, auto", "µs": "-", "spread": "-", "tok/ms good": v} for v in (1.0, 2.0)
    )
    [found] = bench.changes([was], [now])
    assert (found["of"], found["beyond noise"]) == ("tok/ms good", "* better")


@pytest.mark.parametrize("text", ("", "{}", "[]", "[1]"))
def test_a_file_of_no_run_is_refused(text, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert bench.main(["speed", "--against", str(tmp_path / "x.json")]) == 2
    assert bench.main(["speed", "--against", str(tmp_path / "gone.json")]) == 2
    assert all(line.startswith("error: --against") for line in capsys.readouterr().err.splitlines())


@pytest.mark.parametrize(
    "old",
    (
        {"spread": 5},
        {"spread": "x-y"},
        {},
        {"spread": "1e-5-2e-5"},
    ),
)
def test_a_spread_that_is_none_is_refused(old):
    rows = [{"mode": "ar", "tok/s": 1.0, **old}]
    with pytest.raises(UserError, match="spread"):
        bench.changes(rows, [{"mode": "ar", "tok/s": 2.0, "spread": "1.9-2.1"}])


def test_odd_names_and_figures_match_nothing():
    now = [{"mode": "ar", "tok/s": 2.0}]
    for old in ({"mode": ["ar"], "tok/s": 1.0}, {"mode": "ar", "tok/s": float("inf")}):
        with pytest.raises(UserError, match="nothing that this one did"):
            bench.changes([old], now)


@pytest.mark.parametrize(
    "argv",
    (
        "speed --budgets 0",
        "speed --expect",
        "--tune",
        "speed --repeats 0",
        "step --contexts 20 -1",
        "step --budgets 8 -2",
        "step --max-tokens 1",
        "prefill --contexts -32 --rows 32",
        "prefill --contexts 32 --rows 0",
        "ops --rows -1",
        "reduce --rows 0",
        "acceptance --batch 0",
        "acceptance --file {house}/toy.yaml",
        "acceptance --file {house}/toy/model.safetensors",
        "acceptance --file {house}/one.json",
        "speed --json {house}",
        "speed --json {house}/gone/x.json",
        "speed --against {house}/deep.json",
        "speed --against {house}/toy/model.safetensors",
        "speed --config {house}/full.yaml",
    ),
)
def test_mistakes_are_one_line(argv, house, capsys):
    (house / "deep.json").write_text("[" * 100_000)
    (house / "one.json").write_text("[1]")
    full = YAML.replace("decode: {", f"decode: {{context: {len(bench.PROMPT) + 1}, ")
    (house / "full.yaml").write_text(full)
    few = ["--config", str(house / "fixed.yaml"), "--device", "cpu"]
    assert bench.main([*few, *argv.format(house=house).split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize("error, code", ((KeyboardInterrupt(), 130), (MemoryError("x"), 2)))
def test_other_ends_are_one_line_too(error, code, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(bench, "speed", fail)
    assert bench.main(["speed"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_to_measure_is_a_mistake(capsys):
    with pytest.raises(SystemExit):
        bench.main([])
    assert "what to measure is missing" in capsys.readouterr().err


def test_speed_and_its_file(house, tmp_path, capsys):
    argv = ["speed", "--device", "cpu", "--config", str(house / "toy.yaml"), "--budgets", "8",
            "auto", "--max-tokens", "8", "--repeats", "1"]  # fmt: skip
    assert bench.main([*argv, "--json", str(tmp_path / "x.json")]) == 0
    rows = json.loads((tmp_path / "x.json").read_text())
    assert [r["mode"] for r in rows][-3:] == ["chain", "tree, 8 nodes", "tree, auto"]
    assert bench.main([*argv, "--against", str(tmp_path / "x.json")]) == 0
    assert "| mode | of | was | is | ratio | beyond noise |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "error, code", ((DeviceFault("a\nb"), DEVICE_FAULT), (RankFailed("rank 1"), 1))
)
def test_one_line_ends(error, code, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr(bench, "speed", fail)
    assert bench.main(["speed"]) == code
    assert capsys.readouterr().err == f"error: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    "what, expected", (("speed", (96, 5)), ("step", (65, 1, [1000])), ("prefill", (96, 5, [1024])))
)
def test_what_is_not_asked_for(what, expected, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, what, lambda arguments: asked.append(arguments) or [ROW])
    assert bench.main([what]) == 0
    found = asked[0].max_tokens, asked[0].repeats, asked[0].contexts
    assert found[: len(expected)] == expected


def test_help_says_what_holds_without_an_argument(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for said in (
        "(nano.yaml; of --tune k26-rank.yaml)", "(auto)", "(96; of step 65)", "(8 16 32 auto)",
        "(5; of step 1)", "(tests/data/heldout_prompts.jsonl)", "(100)", "(0.0 0.7 1.0)", "(1.0)",
        "(1000; of prefill 1024; of ops 1000 8000 32000)",
        "of reduce 1 8 16 32 64; of prefill 256 1024)", "GPUs (2)",
    ):  # fmt: skip
        assert said in text


# ---- a step and its parts ----------------------------------------------------------------------


def config_of(house, device) -> str:
    """The house's config of a fixed budget for this device; skips where the emulator is missing."""
    if device == "emulate" and isinstance(launcher(device), str):
        pytest.skip(launcher(device))  # its text says what the emulator lacks
    return str(house / ("emulated.yaml" if device == "emulate" else "fixed.yaml"))


@pytest.mark.parametrize("device, more", (("cpu", ["auto"]), ("emulate", [])))
def test_a_step_in_parts(device, more, house, monkeypatch, capsys):
    file = config_of(house, device)
    if device == "emulate":
        monkeypatch.setattr(bench_step, "REPEATS", 1)
        monkeypatch.setattr(bench_step, "SCRIPTS", bench_step.SCRIPTS[::3])
    argv = ["step", "--config", file, "--device", device, "--contexts", "20",
            "--max-tokens", "9", "--budgets", "8", *more, "--repeats", "1"]  # fmt: skip
    assert bench.main(argv) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    names = [n.strip() for n in head.strip("|").split("|")]
    rows = [
        dict(zip(names, (v.strip() for v in line.strip("|").split("|")), strict=True))
        for line in lines
    ]
    modes = ["ar", "chain", "tree, 8 nodes", *(["tree, auto"] if more else [])]
    assert [r["mode"] for r in rows] == modes
    assert all(r["identical"] == "yes" for r in rows) and float(rows[0]["ids"]) >= 4
    assert float(rows[2]["τ perfect"]) >= 4 and float(rows[2]["τ wrong"]) == 1
    # Plain decoding drafts nothing, but its rows go to the drafter's context as well.
    assert 0 < float(rows[0]["drafter"]) < float(rows[1]["drafter"]) < float(rows[1]["µs"])
    assert float(rows[0]["tree"]) == 0


def stepping(house, device, max_tokens=12):
    """An engine of the house on this device, and a sequence of it that decodes next."""
    made = engine.Engine(config.load(config_of(house, device)), device)
    sequence = made.submit(range(20), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while not sequence.n_emitted:
        made.advance(sequence)
    return made, sequence


@pytest.mark.parametrize("device", ("cpu", "emulate"))
@pytest.mark.parametrize("mode", (("ar", 1), ("chain", 8), ("tree", 12)))
@pytest.mark.parametrize("max_tokens", (12, 4))  # the text's end cuts what is drafted
def test_the_context_that_is_timed_is_the_step_s_own(device, mode, max_tokens, house, monkeypatch):
    """Taps and places of the rows that a step commits are those of `parts`, to the bit, and of a
    recorded round all shapes."""
    made, sequence = stepping(house, device, max_tokens)
    seen, extend = [], Drafter.extend

    def spy(self, taps, placed, cache):
        some = np.asarray(placed.slots) >= 0
        rows, slots, positions = (np.asarray(a)[some] for a in vars(placed).values())
        shapes = (taps.shape, some.shape) if made.rounds is not None else ()
        values = np.asarray(taps)[rows], rows, slots, positions
        seen.append((shapes, *(a.tobytes() for a in values)))
        return extend(self, taps, placed, cache)

    monkeypatch.setattr(Drafter, "extend", spy)
    monkeypatch.setattr(bench_step, "REPEATS", 1)
    made.use(*mode)
    before = made.committed(sequence)
    bench_step.parts(made, sequence, made.choice)
    assert made.committed(sequence) == before
    timed = set(seen)
    seen.clear()
    made.advance(sequence)
    assert made.committed(sequence) > before
    assert len(timed) == 1 and timed == set(seen[:1])


def test_the_drafter_s_time_is_of_both_its_parts(house, monkeypatch):
    """The tree's is what is left of drafting. Seconds are scripted: context, drafts, with tree."""
    made, sequence = stepping(house, "cpu")
    clock = iter((1.0, 2.0, 5.0, 1.0))
    monkeypatch.setattr(bench_step, "REPEATS", 1)
    monkeypatch.setattr(bench_step, "host_seconds", lambda _: next(clock))
    made.use("chain", 8)
    assert bench_step.parts(made, sequence, made.choice) == (3.0, 3.0)
    made.use("ar", 1)
    assert bench_step.parts(made, sequence, made.choice) == (1.0, 0.0)


@pytest.mark.parametrize("device", ("cpu", "emulate"))
def test_every_context_has_an_engine_of_its_size(device, house, monkeypatch):
    """As one that was loaded for it: cache, page tables of rounds. The one before is gone, and the
    weights are loaded once."""
    file = config_of(house, device)
    loads, sizes, caches, load = [], [], [], engine.Engine.load
    monkeypatch.setattr(engine.Engine, "load", lambda self: loads.append(self) or load(self))

    def sizes_of(made) -> tuple:
        tables = None if made.rounds is None else made.rounds.state.tables.shape
        return made.settings.decode.context, made.n_pages, made.cache.pages.shape, tables

    def measure(made, context, _):
        gc.collect()  # emulated rounds hold themselves
        assert all(cache() is None for cache in caches)
        caches.append(weakref.ref(made.cache))
        sizes.append(sizes_of(made))
        made.use("tree", 8)
        [result] = made.generate([range(context)], SamplingParams(max_tokens=9))
        assert not result.error and type(made.drafter) is bench_step.Replay
        assert made.rounds is None or made.rounds.drafter is made.drafter
        return []

    monkeypatch.setattr(bench_step, "of_context", measure)
    contexts = [20, 60, 20]
    bench_step.table(SimpleNamespace(config=file, device=device, contexts=contexts, max_tokens=9))
    assert len(loads) == 1
    expected = []
    for context in contexts[:2]:
        settings = config.load(file, context=context + 9 + bench_step.AHEAD, batch=1)
        expected.append(sizes_of(engine.Engine(settings, device)))
    assert sizes == [*expected, expected[0]] and expected[0] != expected[1]


# ---- a prompt in pieces ------------------------------------------------------------------------


def test_prompts_in_pieces(house, tmp_path, capsys):
    """A row a size, equal bits; a size that does not divide the prompt is refused."""
    file = tmp_path / "rows.json"
    argv = ["prefill", "--config", str(house / "fixed.yaml"), "--device", "cpu", "--contexts"]
    assert bench.main([*argv, "32", "--rows", "8", "32", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [(row["context"], row["T"]) for row in rows] == [(32, 8), (32, 32)]
    assert all(row["identical"] == "yes" and row["tok/s"] > 0 for row in rows)
    assert all(row["absorbed ms"] > 0 and row["expanded ms"] > 0 for row in rows)
    assert bench.main([*argv, "30", "--rows", "8"]) == 2
    assert "expected divisors of --contexts 30" in capsys.readouterr().err


# ---- --profile ---------------------------------------------------------------------------------


def test_a_profile_starts_again_what_has_run():
    """Recording runs a round, then records it: the recorded launches' arrays were never written."""
    ran = []

    def run() -> tuple:
        ran.append(SimpleNamespace(kernel="route", run=len(ran)))
        ops.listener(ran[-1])
        return ()

    ops = SimpleNamespace(listener=None, capture=lambda run: (run(), run()))
    assert profiler.launched(ops, run) == ran[:1] and len(ran) == 2


@pytest.mark.parametrize("device", ("cpu", "emulate"))
def test_a_profile_adds_up_to_the_step(device, house, capsys):
    if device == "emulate" and isinstance(launcher(device), str):
        pytest.skip(launcher(device))  # as above
    argv = ["--config", str(house / "toy.yaml"), "--device", device, "--budget", "8",
            "--max-tokens", "14", "--profile", "--prompt", "hello"]  # fmt: skip
    assert engine.main(argv) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    by_name = {c[0]: c for c in cells}
    expected = {"cpu": {"linear", "latent_attention", "choose"}, "emulate": {"latent_spans"}}
    assert expected[device] <= set(by_name) and "idle, or none of these" in by_name
    whole = float(by_name["**a step**"][3])
    parts = sum(float(c[3]) for n, c in by_name.items() if n not in ("**a step**", "between steps"))
    assert parts == pytest.approx(whole, rel=0.02, abs=0.001 * len(cells))


def test_a_profile_leaves_operations_as_they_were(house):
    made = toy.engine_of(house / "toy", drafter=True)
    before = set(vars(made.ops))
    made.use("tree", "auto")
    assert "| linear |" in profiler.table(made, [1, 2, 3], SamplingParams(max_tokens=12))
    assert set(vars(made.ops)) == before and not made.running
    with pytest.raises(UserError, match="at least 4"):
        profiler.table(made, [1, 2, 3], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("length", (247, 250, 253, 255))
def test_a_profile_at_the_end_of_the_context_ends(length, house, capsys):
    argv = ["--config", str(house / "toy.yaml"), "--device", "cpu", "--profile", "--prompt"]
    code = engine.main([*argv, "a" * length])
    err = capsys.readouterr().err
    assert code == 0 if length == 247 else (code == 2 and "the text ended at once" in err)


def test_logits_that_are_not_finite_end_every_measure(tmp_path):
    """They are said, and waited for by nobody."""

    def poison(tensors):
        tensors["model.norm.weight"][...] = float("nan")

    toy.write_checkpoint(tmp_path / "toy", drafter={}, change=poison)
    made = toy.engine_of(tmp_path / "toy", drafter=True)
    with pytest.raises(UserError, match="not finite"):
        profiler.table(made, [1, 2, 3], SamplingParams(max_tokens=12))
    with pytest.raises(UserError, match="not finite"):
        bench_prefill.last_piece(made, [1, 2, 3, 4], 16)
    with pytest.raises(UserError, match="not finite"):
        bench_step.step_row(made, [1, 2, 3], SamplingParams(max_tokens=8), ("ar", 1))
    assert not made.running and not made.waiting

"""The command line: its arguments, and what each command does with an engine."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import json
import logging
import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from tqdm import tqdm

import config
import pictures
from config import DeviceFault, UserError
from engine import MODES, Engine, default_params
from parallel import RankFailed
from request import Result, Sequence, acceptance_length, line_id, parse_line, read_controls
from sampling import SamplingParams

GOLDEN_PROMPT = "def fibonacci(n):"  # of --watch and --check, where no other is given
REPEATS = 5  # of --compare
MOST_REPEATS = 10_000
FIXED = 16  # nodes of the tree that --compare sets beside auto, where the config names none
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
LOOK_SECONDS = 0.05  # between two looks at the kernel files
OVERRIDES = (
    "tp",
    "mode",
    "budget",
    "context",
    "batch",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
)
CONTROLS = (
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "min_tokens",
    "ignore_eos",
    "logprobs",
)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    of, asked = config.default_of, SamplingParams()
    parser = argparse.ArgumentParser(
        prog="engine.py",
        allow_abbrev=False,
        description="Decode text with Kimi K2.6 or a model of its shape, by draft trees: the same "
        "tokens and the same logit bits as plain decoding, in fewer steps. In parentheses: what "
        "holds without the option; a name with a dot is the config's key.",
        epilog="Tokens are counted as emitted: the first is the prefill's, the others the verify "
        "steps'. A stop id ends the text; it shows as finish_reason and is not in token_ids.",
    )
    add = parser.add_argument
    add(
        "--config", default="nano.yaml", help="YAML file, also looked for in configs/ (%(default)s)"
    )
    add("--model", metavar="DIR", help="checkpoint directory (model.path)")
    add("--tp", type=int, metavar="N", help=f"tensor-parallel ranks ({of('tp')})")
    add(
        "--device",
        choices=("auto", "cuda", "cpu", "emulate"),
        default="auto",
        help="auto: a GPU where there is one; emulate: the GPU's kernels as host code, for checks"
        " (%(default)s)",
    )
    add(
        "--debug-kernels",
        action="store_true",
        help="with cuda or emulate: wait after every kernel, so that one that fails is named",
    )
    modes = f"plain decoding, a draft chain, or a draft tree ({of('mode')})"
    add("--mode", choices=MODES, help=modes)
    add(
        "--budget",
        type=nodes,
        metavar="N",
        help="nodes of a tree, root included; auto: as many as pay, round by round, down to plain"
        f" decoding ({of('budget')})",
    )
    positions = f"positions, prompt included ({of('context')}, else the model's limit)"
    add("--context", type=int, metavar="N", help=positions)
    add("--batch", type=int, metavar="N", help=f"sequences decoded together ({of('batch')})")

    what = parser.add_argument_group("what to do (else: ask for prompts, or read standard input)")
    add = what.add_argument
    add("--prompt", metavar="TEXT", help="the text to continue")
    add(
        "--prompts",
        metavar="FILE.jsonl",
        help="one request a line: prompt, prompt_ids or messages,"
        " id, and the controls below by their names; results as JSON lines as they end",
    )
    add(
        "--chat",
        action="store_true",
        help="converse by the checkpoint's chat template; with --prompt, one turn",
    )
    add("--instant", action="store_true", help="with --chat: answer without thinking")
    add("--system", metavar="TEXT", help="with --chat: the system prompt")
    add("--score", metavar="FILE", help="perplexity and bits per byte of a text")
    add(
        "--watch",
        action="store_true",
        help="when a kernel file is saved: compile it, run its op tests, decode --prompt, time it",
    )
    add("--check", action="store_true", help="the same once; exits with 1 where a result differs")
    add(
        "--doctor",
        action="store_true",
        help="look at machine, checkpoint, operations and rates: one page; exits with 1 where"
        " something must be mended or the model cannot run here",
    )
    add(
        "--compare",
        action="store_true",
        help="run ar, chain, tree and auto in turns: a Markdown table",
    )
    add("--repeats", type=int, metavar="N", help=f"of --compare ({REPEATS})")
    add("--profile", action="store_true", help="where a decode step's time goes: a Markdown table")

    controls = parser.add_argument_group("controls of sampling and of the end")
    add = controls.add_argument
    most = f"emit at most so many tokens ({of('max_tokens')}; --watch, --check: a few)"
    add("--max-tokens", type=int, metavar="N", help=most)
    least = f"do not end before so many ({asked.min_tokens})"
    add("--min-tokens", type=int, metavar="N", help=least)
    add("--temperature", type=float, metavar="T", help=f"0: greedy ({of('temperature')})")
    add("--top-p", type=float, metavar="P", help=f"above 0, at most 1; 1: off ({of('top_p')})")
    add("--top-k", type=int, metavar="K", help=f"0 or -1: off ({of('top_k')})")
    add("--min-p", type=float, metavar="P", help=f"0 to 1; 0: off ({asked.min_p:g})")
    seed = f"of sampling ({of('seed')}, else a fresh one, which is reported)"
    add("--seed", type=int, metavar="S", help=seed)
    frequency = f"-2 to 2; 0: off ({asked.frequency_penalty:g})"
    add("--frequency-penalty", type=float, metavar="F", help=frequency)
    presence = f"-2 to 2; 0: off ({asked.presence_penalty:g})"
    add("--presence-penalty", type=float, metavar="F", help=presence)
    repetition = f"0.01 to 100; 1: off ({asked.repetition_penalty:g})"
    add("--repetition-penalty", type=float, metavar="F", help=repetition)
    add("--logit-bias", action="append", metavar="ID=BIAS", help="-100 to 100; may be repeated")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--ignore-eos", action="store_true", default=None, help="do not end at the model's end ids")

    out = parser.add_argument_group("output")
    add = out.add_argument
    add("--json", action="store_true", help="end with one line: a JSON object of text and figures")
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="with --json or --prompts: log-probability of each token and the N likeliest",
    )
    add("--logits", metavar="FILE.npz", help="save token_ids and the logits of every emitted token")
    add("--trace", metavar="FILE.svg|html", help="draw the trees of the generation")
    return parser.parse_args(argv)


def nodes(text: str) -> int | str:
    """--budget of a command line: a number of nodes, or auto."""
    if text == config.AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected a number of nodes or {config.AUTO}, got {text!r}"
        ) from None


def main(argv: list[str] | None = None) -> int:
    """Run the command line; see `exit_code`."""
    arguments = parse_arguments(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.INFO)
    return exit_code(lambda: run(arguments))


def exit_code(work: Callable[[], int]) -> int:
    """What a command returns, its output written, or one line and 1 (another rank failed), 2 (a
    user's mistake), 3 (a kernel failed), 130 (Ctrl-C) or 141 (the output's reader has gone). By
    itself a command returns 0, or 1 where a request or a check failed."""
    try:
        code = work()
        sys.stdout.flush()  # here, so that a full disk is said like any other error
        return code
    except UserError as error:
        say_error(error)
        return 2
    except DeviceFault as error:
        say_error(" ".join(str(error).split()))
        return config.DEVICE_FAULT
    except RankFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 141
    except MemoryError as error:
        print(
            f"error: out of memory: {error}; lower decode.pages, decode.batch or decode.context",
            file=sys.stderr,
        )
        return 2
    except OSError as error:  # a file of the user's that cannot be read or written
        if error.filename is not None:
            say_error(f"{error.filename}: {error.strerror}")
        elif error.errno in NO_ROOM:
            say_error(f"the output cannot be written: {error.strerror}; make room for it")
            sys.stdout = io.StringIO()  # what is left in the old one can go nowhere
        else:
            raise
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def say_error(error: object) -> None:
    """One line on standard error. Names from files and of files may hold anything: an end of a
    line, or what a terminal takes for orders, shows as its escape."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(error))
    print(f"error: {line}", file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """Check what can be checked without the model, load it, and do what was asked."""
    check(arguments)
    overrides = {name: getattr(arguments, name) for name in OVERRIDES}
    settings = config.load(arguments.config, model_path=arguments.model, **overrides)
    check_budget(arguments, settings)
    params = asked_params(arguments, settings)
    if arguments.doctor:
        import doctor  # stands on the engine, like this module

        return doctor.run(settings, arguments.device)
    engine = Engine(settings, arguments.device, load=False, debug_kernels=arguments.debug_kernels)
    params.validate(engine.dims.vocab_size)
    file = arguments.prompts or arguments.score
    decodes = arguments.watch or arguments.check or arguments.profile
    if decodes and arguments.prompt is None:
        arguments.prompt = GOLDEN_PROMPT
    asking = not file and arguments.prompt is None and sys.stdin.isatty()
    if asking and arguments.compare:
        raise UserError("--compare: expected a text to continue; give --prompt or standard input")
    if not file and not asking:
        prompt = read_prompt(arguments.prompt)
        if arguments.chat:
            turn = opening(arguments) + [{"role": "user", "content": prompt}]
            prompt = engine.encode_chat(turn, thinking=not arguments.instant)
        engine.check(prompt, params)
    text = read_file("--prompts" if arguments.prompts else "--score", Path(file)) if file else ""
    engine.load(progress=sys.stderr.isatty())
    if arguments.watch or arguments.check:
        return watch_kernels(engine, prompt, arguments)
    if arguments.prompts:
        return many(engine, Path(file).name, text, params)
    if arguments.score:
        return score(engine, file, text)
    if asking:
        return converse(engine, params, arguments)
    if arguments.compare:
        return compare(engine, prompt, params, arguments.repeats or REPEATS)
    if arguments.profile:
        import profiler  # stands on the engine, like this module

        print(profiler.table(engine, prompt, params))
        return 0
    return 1 if answer(engine, prompt, params, arguments).error else 0


def read_prompt(given: str | None) -> str:
    """The prompt of the command line, or all of standard input; UTF-8 either way."""
    if given is None:
        return as_utf8("standard input", sys.stdin.read)
    return as_utf8("--prompt", lambda: given)


def as_utf8(where: str, read: Callable[[], str]) -> str:
    """What is read, if it was UTF-8. Raises UserError."""
    with suppress(UnicodeError):
        if is_utf8(text := read()):
            return text
    raise UserError(f"{where}: expected UTF-8 text; convert it first")


def is_utf8(text: str) -> bool:
    """Whether it was UTF-8: bytes that were not have become lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeError:
        return False
    return True


def read_file(flag: str, file: Path) -> str:
    text = as_utf8(f"{flag} {file}", lambda: file.read_bytes().decode("utf-8"))
    if flag == "--prompts" and not text.strip():
        raise UserError(f"{flag} {file}: expected a request in each line, found none")
    return text


def check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before anything is loaded."""
    unused = [f"--{n}" for n in ("json", "logits", "trace") if getattr(arguments, n)]
    for name in ("prompts", "score", "watch", "check", "doctor", "compare", "profile"):
        if unused and getattr(arguments, name):
            raise UserError(f"{unused[0]}: does not go with --{name}")
    for name in ("prompts", "score", "doctor"):
        if arguments.prompt is not None and getattr(arguments, name):
            raise UserError(f"--prompt: does not go with --{name}")
    for name in ("system", "instant"):
        if getattr(arguments, name) and not arguments.chat:
            raise UserError(f"--{name}: goes with --chat only")
    if arguments.logprobs is not None and not (arguments.json or arguments.prompts):
        raise UserError("--logprobs: goes with --json or --prompts, which print them")
    if arguments.repeats is not None and not arguments.compare:
        raise UserError("--repeats: goes with --compare only")
    if arguments.repeats is not None and not 1 <= arguments.repeats <= MOST_REPEATS:
        raise UserError(f"--repeats: expected 1 to {MOST_REPEATS}, got {arguments.repeats}")
    if arguments.mode is not None and arguments.compare:
        raise UserError("--mode: does not go with --compare, which runs them all")
    commands = ("prompts", "score", "watch", "check", "doctor", "compare", "profile", "chat")
    given = [f"--{name}" for name in commands if getattr(arguments, name)]
    if len(given) > 1 and given != ["--compare", "--chat"]:
        raise UserError(f"{' and '.join(given)}: expected one of them")
    for name in ("logits", "trace"):
        if (file := getattr(arguments, name)) is not None:
            check_output(f"--{name}", file)
    for name in ("prompts", "score"):
        if (file := getattr(arguments, name)) is not None:
            check_input(f"--{name}", file)
    if arguments.trace and Path(arguments.trace).suffix not in (".svg", ".html"):
        raise UserError(f"--trace {arguments.trace}: expected a name ending in .svg or .html")
    if arguments.trace and arguments.logits == arguments.trace:
        raise UserError(f"--logits and --trace: both name {arguments.trace}; name two files")
    for name, texts in (("system", [arguments.system]), ("stop", arguments.stop or ())):
        if not all(text is None or is_utf8(text) for text in texts):
            raise UserError(f"--{name}: expected UTF-8 text; convert it first")


def check_output(flag: str, file: str) -> None:
    """Refuse what will not be written; the file itself is left as it is until then."""
    path = Path(file)
    if not file:
        raise UserError(f"{flag}: expected the name of a file, got none")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {file}: its directory does not exist")
    if path.is_dir():
        raise UserError(f"{flag} {file}: is a directory; name a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UserError(f"{flag} {file}: cannot be written: no permission; name another place")


def check_input(flag: str, file: str) -> None:
    path = Path(file)
    if not file:
        raise UserError(f"{flag}: expected the name of a file, got none")
    if path.is_dir():
        raise UserError(f"{flag} {file}: is a directory; name a file")
    if not path.exists():
        raise UserError(f"{flag} {file}: no such file")
    if not path.is_file():
        raise UserError(f"{flag} {file}: is a pipe or a device; write it to a file first")


def check_budget(arguments: argparse.Namespace, settings: config.Config) -> None:
    """A number of nodes is of trees alone: plain decoding and the chain have their own."""
    if arguments.budget is not None and settings.draft.mode != "tree" and not arguments.compare:
        raise UserError(
            f"--budget {arguments.budget}: goes with mode tree, the mode is {settings.draft.mode}; "
            "leave it out or give --mode tree"
        )


def asked_params(arguments: argparse.Namespace, settings: config.Config) -> SamplingParams:
    """The config's sampling, with the command line's controls."""
    given = {k: v for k in CONTROLS if (v := getattr(arguments, k)) is not None}
    if arguments.logit_bias:
        pairs = [entry.partition("=") for entry in arguments.logit_bias]
        try:
            given["logit_bias"] = {int(i): float(bias) for i, _, bias in pairs}
        except ValueError:
            raise UserError(
                f"--logit-bias: expected ID=BIAS, got {' '.join(arguments.logit_bias)}"
            ) from None
    return dataclasses.replace(default_params(settings), **read_controls(given))


# ---- one text ----------------------------------------------------------------------------------


def answer(engine: Engine, prompt, params: SamplingParams, arguments) -> Result:
    """Stream one continuation; then the figures, on standard error or as JSON."""
    sequence = engine.submit(
        prompt,
        params,
        keep_logits=bool(arguments.logits),
        keep_rounds=bool(arguments.trace),
    )
    prefill(engine, sequence)
    for piece in engine.stream(sequence):
        print(piece, end="", flush=True)
    print()
    result = sequence.result()
    if arguments.logits:
        save_logits(Path(arguments.logits), result, engine.dims.vocab_size)
    if arguments.trace:
        text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)
        pictures.write(Path(arguments.trace), result, engine.tokenizer.token_piece, text)
        print(f"{arguments.trace}: the trees of {result.steps} steps", file=sys.stderr)
    if arguments.json:
        print_json(summary(engine, result))
    else:
        print(f"[{figures(engine, result)}]", file=sys.stderr)
        if result.finish_reason == "length" and len(result.token_ids) < params.max_tokens:
            context, most = engine.settings.decode.context, engine.dims.max_position_embeddings
            more = "the model has no more" if context == most else f"--context may be up to {most}"
            print(f"the context of {context} tokens is full; {more}", file=sys.stderr)
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return result


def prefill(engine: Engine, sequence: Sequence) -> None:
    """Take in the prompt, with a bar on a terminal."""
    total, quiet = len(sequence.prompt), not sys.stderr.isatty()
    with tqdm(total=total, unit="tok", desc="prefill", disable=quiet, leave=False) as bar:
        while not sequence.first_token:
            engine.advance(sequence)
            if sequence.slot >= 0:
                bar.update(engine.committed(sequence) - bar.n)


def save_logits(file: Path, result: Result, vocab_size: int) -> None:
    logits = result.logits
    if logits is None:
        logits = np.zeros((0, vocab_size), np.float32)
    try:
        with file.open("wb") as out:  # under the very name that was given
            np.savez(out, token_ids=np.asarray(result.token_ids, np.int32), logits=logits)
    except OSError as error:
        raise UserError(f"--logits {file}: {error.strerror}") from None


def figures(engine: Engine, result: Result) -> str:
    seed = "" if result.seed is None else f", seed {result.seed}"
    return (
        f"{len(result.token_ids)} tokens, {result.tok_per_s:.1f} tok/s, acceptance length "
        f"{result.acceptance_length:.2f}, {result.finish_reason}, {engine.mode}{seed}"
    )


def summary(engine: Engine, result: Result) -> dict:
    """The object that --json and a line of --prompts print."""
    out = {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "mode": engine.mode,
        "device": engine.ops.name,
        "seed": result.seed,
        "prompt_tokens": result.prompt_tokens,
        "tokens": len(result.token_ids),
        "steps": result.steps,
        "acceptance_length": round(result.acceptance_length, 4),
        "prefill_s": round(result.prefill_s, 6),
        "decode_s": round(result.decode_s, 6),
        "tok_per_s": round(result.tok_per_s, 3),
    }
    if result.logprobs is not None:
        p = result.logprobs
        out["logprobs"] = [
            {
                "logprob": round(float(c), 6),
                "top": {int(k): round(float(v), 6) for k, v in zip(i, t, strict=True)},
            }
            for c, i, t in zip(p.chosen, p.top_ids, p.top, strict=True)
        ]
    if result.error:
        out["error"] = result.error
    return out


# ---- conversations -----------------------------------------------------------------------------


def opening(arguments: argparse.Namespace) -> list[dict]:
    if arguments.system is None:
        return []
    return [{"role": "system", "content": arguments.system}]


def converse(engine: Engine, params: SamplingParams, arguments: argparse.Namespace) -> int:
    """Ask on a terminal until the end of input. A chat keeps its turns; their keys and values are
    found again as a known prefix."""
    messages = opening(arguments)
    while True:
        try:
            said = as_utf8(
                "what was typed", lambda: input("you> " if arguments.chat else "prompt> ")
            )
        except EOFError:
            print()
            return 0
        except UserError as error:
            say_error(error)
            continue
        if not said:
            continue
        prompt, turn = said, messages + [{"role": "user", "content": said}]
        try:
            if arguments.chat:
                prompt = engine.encode_chat(turn, thinking=not arguments.instant)
            result = answer(engine, prompt, params, arguments)
        except UserError as error:
            say_error(error)
            continue
        except KeyboardInterrupt:  # ends this answer; at the question it ends the conversation
            if engine.comm is not None:
                raise  # the other ranks are in the middle of a step
            for sequence in (*engine.running, *engine.waiting):
                engine.cancel(sequence)
            print()
            continue
        if arguments.chat:
            messages = turn + [reply(result.text, thinking=not arguments.instant)]


def reply(text: str, thinking: bool) -> dict:
    """The assistant's turn as a message: its thoughts apart from what it says."""
    thought, end, content = text.partition("</think>") if thinking else ("", "", text)
    if thinking and not end:
        thought, content = "", text
    return {"role": "assistant", "content": content, "reasoning_content": thought}


# ---- many prompts ------------------------------------------------------------------------------


def many(engine: Engine, name: str, requests: str, defaults: SamplingParams) -> int:
    """Decode lines of requests together; a line that cannot run fails alone, by its number."""
    failed, live = 0, []
    for number, text in enumerate(requests.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            line = parse_line(text, number, defaults)
            prompt = line.prompt
            if line.messages is not None:
                prompt = engine.encode_chat(line.messages, thinking=line.thinking)
            live.append(engine.submit(prompt, line.params, id=line.id))
        except UserError as error:
            failed += 1
            print_json({"line": number, **line_id(text), "error": str(error)})
    total, began, emitted, texts, steps = len(live), time.perf_counter(), 0, 0, 0
    quiet = not sys.stderr.isatty()
    with (
        interruptible() as interrupted,
        tqdm(total=total, unit="prompt", desc=name, disable=quiet) as bar,
    ):
        while live and not interrupted.is_set():
            for sequence in engine.step():
                if sequence.finish_reason is None:
                    continue
                live.remove(sequence)
                result = sequence.result()
                failed += result.error is not None
                emitted += len(result.token_ids)
                texts += bool(result.token_ids)
                steps += result.steps
                bar.clear()  # the line may go to the same terminal
                print_json({"id": result.id, **summary(engine, result)})
                bar.update()
                rate = emitted / (time.perf_counter() - began)
                tau = acceptance_length(emitted, texts, steps)
                speed = f"{rate:.1f} tok/s, acceptance length {tau:.2f}"
                bar.set_postfix_str(speed)
    if interrupted.is_set():
        print(f"interrupted: {total - len(live)} of {total} prompts done", file=sys.stderr)
        return 130
    if total:
        lost = f", {failed} failed" if failed else ""
        print(f"[{total} prompts, {emitted} tokens, {speed}, {engine.mode}{lost}]", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that it tears no step and no line of output; a second one may."""
    asked = threading.Event()

    def ask(*_) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def print_json(value: dict) -> None:
    """One line of JSON, whatever a reader takes for the end of a line. A lone surrogate, which
    UTF-8 cannot hold, stays the escape it came as."""
    line = json.dumps(value, ensure_ascii=False)
    line = line.translate({ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})
    print(line.encode("utf-8", errors="backslashreplace").decode(), flush=True)


# ---- kernels that are being edited -------------------------------------------------------------


def watch_kernels(engine: Engine, prompt, arguments: argparse.Namespace) -> int:
    """Check every kernel; with --watch go on and check what is saved, until an interrupt."""
    from watch import Watch  # owns CuPy: nothing else may need it

    if engine.comm is not None:
        raise UserError("--watch and --check: the kernels of one rank only; use --tp 1")
    watch = Watch(engine, prompt, arguments.max_tokens)
    right = watch.begin()
    if arguments.check:
        return 0 if right else 1
    files = ", ".join(watch.stamps)
    print(f"watching {files}; Ctrl-C ends", flush=True)
    while True:
        watch.look()
        time.sleep(LOOK_SECONDS)


# ---- measures of a text and of the modes -------------------------------------------------------


def score(engine: Engine, file: str, text: str) -> int:
    """Perplexity of a text and bits per byte, over all its tokens but the first."""
    ids = engine.encode(text)
    if len(ids) < 2:
        raise UserError(f"--score {file}: expected at least two tokens, got {len(ids)}")
    began = time.perf_counter()
    lost = -float(text_logprobs(engine, ids).astype(np.float64).sum())
    rate = (len(ids) - 1) / (time.perf_counter() - began)
    size = len(engine.tokenizer.decode_bytes(ids[1:]))
    print("| tokens | bytes | context | perplexity | bits per byte | tok/s |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {len(ids) - 1} | {size} | {engine.settings.decode.context} "
        f"| {math.exp(lost / (len(ids) - 1)):.3f} | {lost / math.log(2) / size:.4f} | {rate:.0f} |"
    )
    return 0


def text_logprobs(engine: Engine, ids: list[int]) -> np.ndarray:
    """Log-probability of each token but the first -> float32 [len(ids) - 1].

    Windows of the context overlap by half: beyond the first, a token sees at least half a context
    before it.
    """
    window = engine.settings.decode.context - 1
    if window < 2:
        raise UserError(f"--score: needs a context of at least 3, got {window + 1}")
    overlap = window - window // 2
    starts = range(0, max(len(ids) - overlap, 1), window // 2)
    parts = []
    for start in tqdm(starts, unit="window", desc="score", disable=not sys.stderr.isatty()):
        piece = ids[start : start + window]
        [result] = engine.generate([piece], SamplingParams(max_tokens=1), echo=True)
        if result.error:
            raise UserError(result.error)
        parts.append(result.prompt_logprobs[overlap - 1 if start else 0 :])
    return np.concatenate(parts)


def compare(engine: Engine, prompt, params: SamplingParams, repeats: int) -> int:
    """AR, chain, tree and auto on one prompt, in turns: medians, and whether all bits are equal.

    The first turn warms up and keeps all logits, to compare bits; the timed ones keep ids only.
    """
    budget = engine.settings.draft.budget
    budget = min(FIXED, engine.settings.draft.limit) if budget == config.AUTO else budget
    modes = {"ar": ("ar", 1)}
    if engine.drafter is not None:
        modes |= {"chain": ("chain", 1), f"tree, {budget} nodes": ("tree", budget)}
        modes |= {"tree, auto": ("tree", config.AUTO)}
    params = params if params.greedy else params.with_seed()
    runs: dict[str, list[Result]] = {mode: [] for mode in modes}
    bits: dict[str, Result] = {}
    turns = [(r, mode) for r in range(repeats + 1) for mode in modes]
    for turn, mode in tqdm(turns, desc="compare", disable=not sys.stderr.isatty(), leave=False):
        engine.use(*modes[mode])
        [result] = engine.generate([prompt], params, keep_logits=not turn)
        if result.error:
            raise UserError(result.error)
        if turn:
            runs[mode].append(result)
        else:
            bits[mode] = result
    speed = {m: statistics.median(r.tok_per_s for r in runs[m]) for m in modes}
    print("| mode | tok/s | acceptance length | steps | ratio | identical |")
    print("|---|---|---|---|---|---|")
    same_everywhere = True
    for mode in modes:
        same = same_output(bits["ar"], bits[mode])
        same &= all(r.token_ids == bits["ar"].token_ids for r in runs[mode])
        same_everywhere &= same
        ratio = speed[mode] / speed["ar"] if speed["ar"] else 0.0
        r = runs[mode][-1]  # of auto, the one that has learned most
        print(
            f"| {mode} | {speed[mode]:.1f} | {r.acceptance_length:.2f} | {r.steps} "
            f"| {ratio:.2f} | {'yes' if same else 'NO'} |"
        )
    print(f"identical: {'yes' if same_everywhere else 'NO'}")
    return 0 if same_everywhere else 1


def same_output(a: Result, b: Result) -> bool:
    """Equal ids and equal logit bits."""
    if a.token_ids != b.token_ids or (a.logits is None) != (b.logits is None):
        return False
    return a.logits is None or np.array_equal(a.logits.view(np.int32), b.logits.view(np.int32))

"""The command line and the step loop: schedule, draft, verify, accept, commit.

    python engine.py --config nano.yaml --prompt "def fibonacci(n):"

`Engine` is also the library: load once, then `generate` or `stream`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

import config
import loader
import sampling
import spec_decode
from cache import CacheFull, LatentCache
from config import UserError
from drafter import Drafter
from model import Batch, Model
from reference import ReferenceOps
from sampling import SamplingParams, StopRule
from spec_decode import Speculator, Tree, Walk
from tokenizer import IncrementalDecoder, StopScanner, Tokenizer

MODES = ("ar", "chain", "tree")

@dataclass(frozen=True)
class Result:
    """What one request became.

    finish_reason  "stop" (a stop id or string), "length", or "error"
    token_ids      emitted ids; a stop id is not among them
    steps          verify steps; acceptance_length is the tokens they emitted per step
    logits         fp32 [tokens, V] of every emitted token, where asked for
    """

    id: object
    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int | None
    prompt_tokens: int
    steps: int
    prefill_s: float
    decode_s: float
    error: str | None = None
    logits: np.ndarray | None = None

    @property
    def acceptance_length(self) -> float:
        return max(len(self.token_ids) - 1, 0) / self.steps if self.steps else 0.0

    @property
    def tok_per_s(self) -> float:
        after_first = max(len(self.token_ids) - 1, 0)
        return after_first / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(eq=False)
class Sequence:
    """A request on its way: what it asked, where it stands, what it has said.

    tokens     prompt and emitted ids; of them `cache.lengths[slot]` are committed
    path       the counts that penalties see;  pieces: the text so far, as it became ready
    """

    id: object
    prompt: list[int]
    params: SamplingParams
    rule: StopRule
    tokens: list[int]
    path: sampling.Path
    keep_logits: bool = False
    slot: int = -1
    steps: int = 0
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logits: list[np.ndarray] = field(default_factory=list)
    decoder: IncrementalDecoder | None = None
    scanner: StopScanner | None = None
    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def emitted(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def read(self, ids: list[int]) -> str:
        """Text that these ids complete and no stop string can still claim."""
        if self.decoder is None:
            return ""
        text = self.decoder.feed(ids)
        return text if len(self.emitted) < self.params.min_tokens else self.scanner.feed(text)

    def read_rest(self) -> str:
        """What the end of the text sets free."""
        rest = self.decoder.flush() if self.decoder else ""
        return self.scanner.feed(rest) + self.scanner.flush()

    @property
    def to_prefill(self) -> int:
        """Tokens that have to be in the cache before decoding: all but the root."""
        return len(self.tokens) - (1 if len(self.tokens) > len(self.prompt) else 0)


@dataclass(frozen=True)
class Step:
    """The rows of one forward: which tree or prompt piece stands where."""

    batch: Batch
    trees: list[tuple[Sequence, Tree, int]]  # first row of each
    chunks: list[tuple[Sequence, int, int]]  # first row and number of rows
    logit_rows: np.ndarray


class Engine:
    """A loaded model that decodes requests, one or many together.

    Every request's tokens and logits are those of plain decoding alone, whatever the mode, the
    neighbours or the moment it was scheduled (see design: the lossless contract).
    """

    def __init__(self, settings: config.Config, device: str = "auto", progress: bool = False):
        checkpoint = loader.open_checkpoint(settings.model.path)
        self.dims = config.parse_model(
            checkpoint.config_json,
            source=str(checkpoint.directory / "config.json"),
            lora_norm_eps=settings.model.lora_norm_eps,
        )
        draft_checkpoint = draft_dims = None
        if settings.draft.path is not None:
            draft_checkpoint = loader.open_checkpoint(settings.draft.path)
            draft_dims = config.parse_drafter(
                draft_checkpoint.config_json,
                source=str(draft_checkpoint.directory / "config.json"),
            )
        self.settings = settings = config.validate(settings, self.dims, draft_dims)
        # A checkpoint without a vocabulary still decodes ids; one with a broken vocabulary does not.
        vocabulary = checkpoint.directory / "tiktoken.model"
        self.tokenizer = None
        if vocabulary.exists():
            self.tokenizer = Tokenizer(checkpoint.directory, self.dims.vocab_size)
        self.eos_ids = loader.generation_stop_ids(checkpoint)
        plan = loader.plan_target(checkpoint, self.dims)
        draft_plan = draft_checkpoint and loader.plan_drafter(
            draft_checkpoint, draft_dims, self.dims
        )
        # Everything that can be wrong with the files has been said by now.
        self.ops = make_ops(device, settings, self.dims)
        decode = settings.decode
        self.model = Model(
            self.dims,
            loader.load_target(plan, progress=progress),
            self.ops,
            context=decode.context,
            span=decode.span,
            taps=draft_dims.target_layer_ids if draft_dims else (),
        )
        self.drafter = draft_dims and Drafter(
            draft_dims,
            loader.load_drafter(draft_plan, progress=progress),
            self.ops,
            self.model,
            context=decode.context,
            span=decode.span,
        )
        self.use(settings.draft.mode, settings.draft.budget)
        self.cache = LatentCache(
            slots=decode.batch,
            n_pages=decode.batch * -(-decode.context // decode.leaf),
            leaf=decode.leaf,
            layers=self.dims.num_hidden_layers,
            width=self.model.cache_width,
            draft_layers=draft_dims.num_hidden_layers if draft_dims else 0,
            draft_width=self.drafter.cache_width if draft_dims else 0,
        )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def use(self, mode: str, budget: int) -> None:
        """Decode with "ar", "chain" or "tree" from now on."""
        self.mode = mode
        self.speculator = Speculator(self.drafter, self.ops, mode, budget)

    # -- the step loop

    def step(self) -> list[Sequence]:
        """One round for all live sequences; returns those that emitted or ended."""
        chunks = self.schedule()
        trees = self.draft()
        rows, forward = self.verify(trees, chunks)
        accepted = self.accept(rows, forward)
        return self.commit(rows, forward, accepted)

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Admit by arrival while a slot and pages are free; give each prompt its next piece.

        Pieces end at absolute multiples of prefill_chunk. Returns (sequence, rows of its piece).
        """
        while self.waiting and self.cache.free_slots:
            sequence = self.waiting[0]
            slot = self.cache.admit()
            try:
                self.cache.reserve(slot, len(sequence.tokens))
            except CacheFull:
                self.cache.free(slot)
                break
            self.waiting.popleft().slot = slot
            self.running.append(sequence)
        size = self.settings.decode.prefill_chunk
        chunks = []
        for sequence in self.running:
            done = int(self.cache.lengths[sequence.slot])
            end = min(sequence.to_prefill, (done // size + 1) * size)
            if end > done:
                chunks.append((sequence, end - done))
        return chunks

    def draft(self) -> list[tuple[Sequence, Tree]]:
        """A tree for every sequence whose prompt is in the cache."""
        ready = [
            s
            for s in self.running
            if s.emitted and int(self.cache.lengths[s.slot]) == len(s.tokens) - 1
        ]
        trees = self.speculator.propose(
            roots=[s.tokens[-1] for s in ready],
            slots=[s.slot for s in ready],
            params=[s.params for s in ready],
            limits=[s.rule.max_tokens - len(s.emitted) - 1 for s in ready],
            cache=self.cache,
        )
        return list(zip(ready, trees, strict=True))

    def verify(self, trees, chunks):
        """One forward over all trees and prompt pieces."""
        parts, placed, pieces, logit_rows = [], [], [], []
        row = 0
        for sequence, tree in trees:
            length = int(self.cache.lengths[sequence.slot])
            parts.append(spec_decode.tree_rows(tree, sequence.slot, length, row))
            placed.append((sequence, tree, row))
            logit_rows += range(row, row + len(tree))
            row += len(tree)
        for sequence, n in chunks:
            done = int(self.cache.lengths[sequence.slot])
            ids = sequence.tokens[done : done + n]
            parts.append(spec_decode.prompt_rows(ids, sequence.slot, done, row))
            pieces.append((sequence, row, n))
            row += n
            if not sequence.emitted and done + n == len(sequence.prompt):
                logit_rows.append(row - 1)
        batch = spec_decode.concatenate(parts)
        rows = Step(batch, placed, pieces, np.asarray(logit_rows, np.int32))
        return rows, self.model.forward(batch, self.cache, rows.logit_rows)

    def accept(self, rows: Step, forward) -> list[tuple[Sequence, Walk, np.ndarray]]:
        """The target's own tokens: a walk for every tree, the first token of a finished prompt.

        Returns (sequence, walk, its rows of the logits).
        """
        params, paths, positions, groups = [], [], [], []
        at = 0
        for sequence, tree, _ in rows.trees:
            for node in range(len(tree)):
                path = sequence.path
                if sequence.params.needs_path:
                    for token in spec_decode.path_of(tree, node):
                        path = path.then(token)
                paths.append(path)
            params += [sequence.params] * len(tree)
            groups.append((sequence, tree, at))
            at += len(tree)
        for sequence, row, n in rows.chunks:
            if at < len(rows.logit_rows) and row + n - 1 == rows.logit_rows[at]:
                params.append(sequence.params)
                paths.append(sequence.path)
                groups.append((sequence, None, at))
                at += 1
        positions = rows.batch.positions[rows.logit_rows] + 1
        choices = sampling.choose(forward.logits, positions, params, paths)
        accepted = []
        for sequence, tree, at in groups:
            if tree is None:
                walk, logit_rows = Walk([], [int(choices[at])]), [at]
            else:
                walk = spec_decode.walk(tree, choices[at : at + len(tree)])
                logit_rows = [at + r for r in walk.rows]
            accepted.append((sequence, walk, logit_rows))
        return accepted

    def commit(self, rows: Step, forward, accepted) -> list[Sequence]:
        """Move accepted rows into the cache, extend drafter and text, end what has ended."""
        moved = [(s, list(range(row, row + n))) for s, row, n in rows.chunks]
        first_rows = {id(s): row for s, _, row in rows.trees}
        changed = []
        for sequence, walk, logit_rows in accepted:
            kept = self.emit(sequence, walk.tokens, forward.logits, logit_rows)
            if walk.rows:
                sequence.steps += 1
                first = first_rows[id(sequence)]
                moved.append((sequence, [first + r for r in walk.rows[:kept]]))
            changed.append(sequence)
        self.store(moved, rows.batch, forward.taps)
        for sequence in changed:
            if sequence.finish_reason:
                self.retire(sequence)
        return changed

    def store(self, moved, batch: Batch, taps) -> None:
        """Commit rows of several sequences: target entries, then the drafter's context."""
        taken, pages, places = [], [], []
        for sequence, rows in moved:
            if not rows:
                continue
            begin = int(self.cache.lengths[sequence.slot])
            self.cache.commit(sequence.slot, rows)
            page, place = self.cache.slots_of(sequence.slot, begin, begin + len(rows))
            taken += rows
            pages.append(page)
            places.append(place)
        if self.drafter is not None and taken:
            self.drafter.extend(
                taps[taken],
                batch.positions[taken],
                np.concatenate(pages),
                np.concatenate(places),
                self.cache,
            )

    def emit(self, sequence: Sequence, tokens: list[int], logits, logit_rows) -> int:
        """Add a step's tokens to the text, up to whatever ends it; returns how many are kept."""
        if not sequence.first_token:
            sequence.first_token = time.perf_counter()
        failed = tokens[-1] == sampling.NO_TOKEN
        finish = sequence.rule.finish(tokens[:-1] if failed else tokens, len(sequence.emitted))
        reason = "error" if failed and finish.reason is None else finish.reason
        kept, piece = 0, ""
        for token in tokens[: finish.keep]:
            # One at a time: a stop string ends the text at the token that completes it, as it would
            # if each token came in a step of its own.
            kept += 1
            sequence.tokens.append(token)
            if sequence.params.needs_path:
                sequence.path = sequence.path.then(token)
            piece += sequence.read([token])
            if sequence.scanner.matched is not None:
                reason = "stop"
                break
        if sequence.keep_logits:
            sequence.logits += [logits[r].copy() for r in logit_rows[:kept]]
        if reason is not None:
            piece += sequence.read_rest()
        if reason == "error":
            sequence.error = "the model's logits are not finite; this request was ended"
        if piece:
            sequence.pieces.append(piece)
        sequence.finish_reason = reason
        return kept

    def retire(self, sequence: Sequence) -> None:
        """Give back what an ended sequence held."""
        sequence.finished = time.perf_counter()
        if sequence.slot >= 0:
            self.cache.free(sequence.slot)
            sequence.slot = -1
            self.running.remove(sequence)

    # -- requests

    def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        id: object = None,
        keep_logits: bool = False,
    ) -> Sequence:
        """Check a request and put it in line. Raises UserError; then nothing has changed."""
        params = params or default_params(self.settings)
        params.validate(self.dims.vocab_size)
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise UserError("prompt: expected at least one token, got none; give some text")
        for token in ids:
            if not 0 <= token < self.dims.vocab_size:
                raise UserError(
                    f"prompt: token id {token} is outside the vocabulary, 0 to "
                    f"{self.dims.vocab_size - 1}"
                )
        room = self.settings.decode.context - len(ids)
        if room < 1:
            raise UserError(
                f"prompt: {len(ids)} tokens do not fit; decode.context is "
                f"{self.settings.decode.context} and one must be left to emit; shorten the prompt "
                "or raise --context"
            )
        params = params if params.greedy else params.with_seed()
        limit = min(params.max_tokens or room, room)
        rule = dataclasses.replace(StopRule.of(params, self.eos_ids), max_tokens=limit)
        sequence = Sequence(
            id=id,
            prompt=ids,
            params=params,
            rule=rule,
            tokens=list(ids),
            path=sampling.Path.start(ids, rule.stop_ids),
            keep_logits=keep_logits,
            decoder=IncrementalDecoder(self.tokenizer) if self.tokenizer else None,
            scanner=StopScanner(params.stop),
            submitted=time.perf_counter(),
        )
        self.waiting.append(sequence)
        return sequence

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; control strings in it are text like any other."""
        if self.tokenizer is None:
            raise UserError(
                f"{self.settings.model.path}: has no tiktoken.model, so text cannot be read; give "
                "prompts as token ids"
            )
        return self.tokenizer.encode(text)

    def generate(self, prompts: Iterable, params=None, **options) -> list[Result]:
        """Decode prompts (texts or id lists) together; results in the order of the prompts."""
        sequences = [self.submit(p, params, **options) for p in prompts]
        while any(s.finish_reason is None for s in sequences):
            self.step()
        return [self.result(s) for s in sequences]

    def stream(self, sequence: Sequence) -> Iterator[str]:
        """Pieces of a submitted request's text as they are accepted."""
        sent = 0
        while True:
            ended = sequence.finish_reason is not None
            yield from sequence.pieces[sent:]
            sent = len(sequence.pieces)
            if ended:
                return
            self.step()

    def result(self, sequence: Sequence) -> Result:
        """The outcome of an ended request."""
        return Result(
            id=sequence.id,
            text="".join(sequence.pieces),
            token_ids=sequence.emitted,
            finish_reason=sequence.finish_reason,
            seed=sequence.params.seed,
            prompt_tokens=len(sequence.prompt),
            steps=sequence.steps,
            prefill_s=sequence.first_token - sequence.submitted,
            decode_s=sequence.finished - sequence.first_token,
            error=sequence.error,
            logits=np.stack(sequence.logits) if sequence.logits else None,
        )


def default_params(settings: config.Config) -> SamplingParams:
    """The sampling that the config's decode section asks for."""
    d = settings.decode
    return SamplingParams(
        temperature=d.temperature,
        top_p=d.top_p,
        top_k=d.top_k,
        seed=d.seed,
        max_tokens=d.max_tokens,
    )


def make_ops(device: str, settings: config.Config, dims: config.Model):
    """The operations of "cpu", "cuda", or the best there is ("auto")."""
    if device == "cuda":
        raise UserError("--device cuda: this build has no kernels yet; use --device cpu")
    # INT4 experts unpacked to fp32 once, where that leaves half of the free memory.
    moe_layers = sum(layer.kind == "moe" for layer in dims.layers)
    expert = 3 * dims.moe_intermediate_size * dims.hidden_size * 4
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unpack = moe_layers * dims.n_routed_experts * expert < free // 2
    return ReferenceOps(settings.kernels.activation, unpack=unpack)


# ---- the command line --------------------------------------------------------------------------


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="engine.py",
        description="Decode text with Kimi K2.6 or a model of its shape, by draft trees: the same "
        "tokens and the same logit bits as plain decoding, in fewer steps.",
        epilog="Tokens are counted as emitted: the first is the prefill's, the others the verify "
        "steps'. A stop id ends the text; it shows as finish_reason and is not in token_ids.",
    )
    add = parser.add_argument
    add("--config", default="nano.yaml", help="YAML file, also looked for in configs/ (%(default)s)")
    add("--model", metavar="DIR", help="checkpoint directory, instead of the config's model.path")
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks, instead of tp.size")
    add("--prompt", metavar="TEXT", help="the text to continue; else ask for it, or standard input")
    add("--mode", choices=MODES, help="plain decoding, a draft chain, or a draft tree")
    add("--budget", type=int, metavar="N", help="nodes of a tree, root included")
    add("--context", type=int, metavar="N", help="positions, prompt included")
    add("--max-tokens", type=int, metavar="N", help="emit at most so many tokens")
    add("--temperature", type=float, metavar="T", help="0: greedy")
    add("--top-p", type=float, metavar="P", help="above 0, at most 1 (1: off)")
    add("--top-k", type=int, metavar="K", help="0 or -1: off")
    add("--seed", type=int, metavar="S", help="of sampling; a fresh one is taken and reported")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", action="store_true", help="end with one line: a JSON object of text and figures")
    add("--logits", metavar="FILE.npz", help="save token_ids and the logits of every emitted token")
    add("--compare", action="store_true", help="run ar, chain and tree in turns: a Markdown table")
    add("--repeats", type=int, default=5, metavar="N", help="of --compare (%(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 (the request failed), 2 (user error)."""
    arguments = parse_arguments(argv)
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.INFO)
    try:
        return run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 141


def run(arguments: argparse.Namespace) -> int:
    if arguments.repeats < 1:
        raise UserError(f"--repeats: expected at least 1, got {arguments.repeats}")
    names = ("tp", "mode", "budget", "context", "max_tokens", "temperature", "top_p", "top_k", "seed")
    overrides = {name: getattr(arguments, name) for name in names}
    settings = config.load(arguments.config, model_path=arguments.model, **overrides)
    if arguments.logits and not Path(arguments.logits).absolute().parent.is_dir():
        raise UserError(f"--logits {arguments.logits}: its directory does not exist")
    engine = Engine(settings, arguments.device, progress=sys.stderr.isatty())
    if arguments.prompt is None and sys.stdin.isatty():
        return converse(engine, arguments)
    prompt = sys.stdin.read() if arguments.prompt is None else arguments.prompt
    if arguments.compare:
        return compare(engine, prompt, arguments.repeats)
    return answer(engine, prompt, arguments)


def converse(engine: Engine, arguments: argparse.Namespace) -> int:
    """Ask for prompts on a terminal until the end of input."""
    while True:
        try:
            prompt = input("prompt> ")
        except EOFError:
            print()
            return 0
        if prompt:
            try:
                answer(engine, prompt, arguments)
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)


def answer(engine: Engine, prompt: str, arguments: argparse.Namespace) -> int:
    """Stream one continuation; then the figures, on standard error or as JSON."""
    sequence = engine.submit(prompt, keep_logits=bool(arguments.logits))
    prefill(engine, sequence)
    for piece in engine.stream(sequence):
        print(piece, end="", flush=True)
    print()
    result = engine.result(sequence)
    if arguments.logits:
        logits = result.logits
        if logits is None:
            logits = np.zeros((0, engine.dims.vocab_size), np.float32)
        np.savez(arguments.logits, token_ids=np.asarray(result.token_ids, np.int32), logits=logits)
    if arguments.json:
        print(json.dumps(summary(engine, result), ensure_ascii=False))
    else:
        seed = "" if result.seed is None else f", seed {result.seed}"
        print(
            f"[{len(result.token_ids)} tokens, {result.tok_per_s:.1f} tok/s, acceptance length "
            f"{result.acceptance_length:.2f}, {result.finish_reason}, {engine.mode}{seed}]",
            file=sys.stderr,
        )
    if result.error:
        print(f"error: {result.error}", file=sys.stderr)
    return 1 if result.error else 0


def prefill(engine: Engine, sequence: Sequence) -> None:
    """Take in the prompt, with a bar on a terminal."""
    total = len(sequence.prompt)
    bar = tqdm(total=total, unit="tok", desc="prefill", disable=not sys.stderr.isatty(), leave=False)
    with bar:
        while not sequence.first_token:
            engine.step()
            bar.update(int(engine.cache.lengths[sequence.slot]) - bar.n if sequence.slot >= 0 else 0)


def summary(engine: Engine, result: Result) -> dict:
    """The object that --json prints."""
    return {
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
        **({"error": result.error} if result.error else {}),
    }


def compare(engine: Engine, prompt: str, repeats: int) -> int:
    """AR, chain and tree on one prompt, in turns: medians, and whether ids and bits are equal."""
    budget = engine.settings.draft.budget
    modes = MODES if engine.drafter is not None else MODES[:1]
    params = default_params(engine.settings)
    params = params if params.greedy else params.with_seed()
    runs: dict[str, list[Result]] = {mode: [] for mode in modes}
    turns = [(r, mode) for r in range(repeats + 1) for mode in modes]
    for turn, mode in tqdm(turns, desc="compare", disable=not sys.stderr.isatty(), leave=False):
        engine.use(mode, budget)
        [result] = engine.generate([prompt], params, keep_logits=True)
        if result.error:
            raise UserError(result.error)
        if turn:  # the first turn warms caches up
            runs[mode].append(result)
    plain = runs["ar"][0]
    speed = {m: statistics.median(r.tok_per_s for r in runs[m]) for m in modes}
    print("| mode | tok/s | acceptance length | steps | ratio | identical |")
    print("|---|---|---|---|---|---|")
    same_everywhere = True
    for mode in modes:
        same = all(same_output(plain, r) for r in runs[mode])
        same_everywhere &= same
        name = f"tree, {budget} nodes" if mode == "tree" else mode
        ratio = speed[mode] / speed["ar"] if speed["ar"] else 0.0
        r = runs[mode][0]
        print(
            f"| {name} | {speed[mode]:.1f} | {r.acceptance_length:.2f} | {r.steps} "
            f"| {ratio:.2f} | {'yes' if same else 'NO'} |"
        )
    return 0 if same_everywhere else 1


def same_output(a: Result, b: Result) -> bool:
    """Equal ids and equal logit bits."""
    if a.token_ids != b.token_ids or (a.logits is None) != (b.logits is None):
        return False
    return a.logits is None or np.array_equal(a.logits.view(np.int32), b.logits.view(np.int32))


if __name__ == "__main__":
    sys.exit(main())

"""A request on its way: what it asked, where it stands, what it has said, how it ended."""

from __future__ import annotations

import dataclasses
import difflib
import json
import time
from dataclasses import dataclass, field

import numpy as np

import sampling
from config import UserError
from sampling import SamplingParams, StopRule, TokenLogprobs
from spec_decode import Tree, Walk
from tokenizer import IncrementalDecoder, StopScanner, Tokenizer


@dataclass(frozen=True)
class Round:
    """One verify step of one sequence, for the pictures: the tree and the way through it."""

    tree: Tree
    walk: Walk


@dataclass(frozen=True)
class Result:
    """What one request became.

    finish_reason    "stop" (a stop id or string), "length", "cancelled", or "error" (then `error`
                     says why)
    token_ids        emitted ids; a stop id is not among them
    steps            verify steps; acceptance_length is the tokens that they emitted per step
    logits           fp32 [tokens, V] of every emitted token, where asked for and there is one
    prefill_s        seconds from submission to the first token, waiting in line included;
                     decode_s: from there to the end
    logprobs         of every emitted token, where asked for; prompt_logprobs: float32 [prompt - 1],
                     of every prompt token but the first, where asked for; NaN where not reached
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
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: np.ndarray | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify step (tau)."""
        return acceptance_length(len(self.token_ids), 1, self.steps)

    @property
    def tok_per_s(self) -> float:
        """Tokens after the first, per second of decoding."""
        after_first = max(len(self.token_ids) - 1, 0)
        return after_first / self.decode_s if self.decode_s > 0 else 0.0


def acceptance_length(tokens: int, texts: int, steps: int) -> float:
    """Tokens per verify step (tau); each text's first token is the prefill's and does not count."""
    return max(tokens - texts, 0) / steps if steps else 0.0


@dataclass(eq=False)
class Sequence:
    """The live state of a request.

    tokens   prompt and emitted ids; the cache holds a beginning of them
    path     the counts that penalties see;  pieces: the text so far, as it became ready
    slot     cache slot, -1 while waiting;  arrival: number in the line
    keep_logits, keep_rounds, echo: what to record: logits, trees, log-probabilities of the prompt
    """

    id: object
    prompt: list[int]
    params: SamplingParams
    rule: StopRule
    arrival: int
    tokens: list[int]
    path: sampling.Path
    decoder: IncrementalDecoder | None
    scanner: StopScanner
    keep_logits: bool = False
    keep_rounds: bool = False
    echo: bool = False
    slot: int = -1
    steps: int = 0
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    logits: list[np.ndarray] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: np.ndarray | None = None
    rounds: list[Round] = field(default_factory=list)
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    finished: float = 0.0

    @classmethod
    def start(cls, prompt, params, rule, arrival, tokenizer: Tokenizer | None, **options):
        """A request that has emitted nothing yet."""
        echo = options.get("echo", False)
        return cls(
            prompt=prompt,
            params=params,
            rule=rule,
            arrival=arrival,
            tokens=list(prompt),
            path=sampling.Path.start(prompt, rule.stop_ids),
            decoder=IncrementalDecoder(tokenizer) if tokenizer else None,
            scanner=StopScanner(params.stop),
            prompt_logprobs=np.full(len(prompt) - 1, np.nan, np.float32) if echo else None,
            **options,
        )

    @property
    def emitted(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def n_emitted(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def wants_logits(self) -> bool:
        """Whether logits have to come to the host."""
        return self.keep_logits or self.echo or self.params.logprobs is not None

    @property
    def to_prefill(self) -> int:
        """Tokens that must be in the cache before decoding: all, but the root once there is one."""
        return len(self.tokens) - (1 if self.n_emitted else 0)

    @property
    def longest(self) -> int:
        """Cache entries of the longest text that the request may become."""
        return len(self.prompt) + self.rule.max_tokens - 1

    def emit(self, tokens: list[int], logits: np.ndarray | None) -> int:
        """Take a step's tokens up to whatever ends the text; returns how many were taken.

        logits  fp32 [len(tokens), V], of each token; only where `wants_logits`
        A last token of NO_TOKEN ends the request with an error.
        """
        if not self.first_token:
            self.first_token = time.perf_counter()
        failed = tokens[-1] == sampling.NO_TOKEN
        finish = self.rule.finish(tokens[:-1] if failed else tokens, self.n_emitted)
        reason = "error" if failed and finish.reason is None else finish.reason
        taken, piece = 0, ""
        for token in tokens[: finish.keep]:
            # One at a time: a stop string ends the text at the token that completes it, as it would
            # if each token came in a step of its own.
            taken += 1
            self.tokens.append(token)
            if self.params.needs_path:
                self.path = self.path.then(token)
            piece += self._read(token)
            if self.scanner.matched is not None:
                reason = "stop"
                break
        if self.keep_logits:
            self.logits += [row.copy() for row in logits[:taken]]
        if self.params.logprobs is not None and taken:
            chosen = np.asarray(tokens[:taken])
            n = self.params.logprobs
            self.logprobs.append(sampling.log_softmax_top(logits[:taken], chosen, n))
        if reason is not None:
            piece += self.scanner.flush()  # of a character that the end cuts short, nothing
        if reason == "error":
            self.error = "the model's logits are not finite; this request was ended"
        if piece:
            self.pieces.append(piece)
        self.finish_reason = reason
        return taken

    def _read(self, token: int) -> str:
        """Text that the token completes and no stop string can still claim."""
        if self.decoder is None:
            return ""
        text = self.decoder.feed([token])
        return text if self.n_emitted < self.params.min_tokens else self.scanner.feed(text)

    def result(self) -> Result:
        """The outcome, once ended."""
        first_token = self.first_token or self.finished  # cancelled before there was one
        return Result(
            id=self.id,
            text="".join(self.pieces),
            token_ids=self.emitted,
            finish_reason=self.finish_reason,
            seed=self.params.seed,
            prompt_tokens=len(self.prompt),
            steps=self.steps,
            prefill_s=first_token - self.submitted,
            decode_s=self.finished - first_token,
            error=self.error,
            logits=np.stack(self.logits) if self.logits else None,
            logprobs=_joined(self.logprobs) if self.params.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs,
            rounds=tuple(self.rounds),
        )


def _joined(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    names = [f.name for f in dataclasses.fields(TokenLogprobs)]
    return TokenLogprobs(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


# ---- one request per line of JSON --------------------------------------------------------------

_CONTROLS = {f.name for f in dataclasses.fields(SamplingParams)}
_PROMPTS = ("prompt", "messages", "prompt_ids")


@dataclass(frozen=True)
class Line:
    """A request as a line of JSON: one of prompt, messages and prompt_ids, and its controls."""

    id: object
    prompt: str | list[int] | None
    messages: list[dict] | None
    thinking: bool
    params: SamplingParams


def parse_line(text: str, default_id: object, defaults: SamplingParams) -> Line:
    """Read one line of a prompts file; raises UserError without naming the line."""
    raw = _read_json(text)
    if not isinstance(raw, dict):
        raise UserError("expected a JSON object")
    known = {"id", "thinking", *_PROMPTS, *_CONTROLS}
    for key in raw:
        if key not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise UserError(f"{key}: unknown field; {hint}")
    try:
        json.dumps(raw.get("id"), allow_nan=False)
    except ValueError:  # 1e999, anywhere in it
        raise UserError(f"id: expected what JSON can hold, got {raw['id']}") from None
    given = [name for name in _PROMPTS if raw.get(name) is not None]
    if len(given) != 1:
        raise UserError(f"expected one of {', '.join(_PROMPTS)}, got {', '.join(given) or 'none'}")
    ids = raw.get("prompt_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
        raise UserError("prompt_ids: expected a list of token ids")
    if not isinstance(raw.get("prompt", ""), str | None):
        raise UserError("prompt: expected a text; ids go in prompt_ids")
    if not isinstance(raw.get("messages", []), list | None):
        raise UserError("messages: expected a list of messages")
    thinking = raw.get("thinking", True)
    if not isinstance(thinking, bool):
        raise UserError(f"thinking: expected true or false, got {thinking!r}")
    controls = {k: v for k, v in raw.items() if k in _CONTROLS and v is not None}
    return Line(
        id=raw.get("id", default_id),
        prompt=ids if ids is not None else raw.get("prompt"),
        messages=raw.get("messages"),
        thinking=thinking,
        params=dataclasses.replace(defaults, **read_controls(controls)),
    )


def _read_json(text: str) -> object:
    """One line as strict JSON: Python would take NaN, and the last of two equal names."""

    def unique(pairs: list[tuple[str, object]]) -> dict:
        if len(found := dict(pairs)) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)} is there twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}") from None


def line_id(text: str) -> dict:
    """{"id": ..} of a refused line, where it has one, as its result would carry it."""
    try:
        raw = json.loads(text)
        found = {"id": raw["id"]} if isinstance(raw, dict) and "id" in raw else {}
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return found


def read_controls(controls: dict) -> dict:
    """Sampling controls as JSON spells them -> as SamplingParams does: a lone stop string, lists,
    and logit_bias with its ids as strings."""
    controls = dict(controls)
    if isinstance(controls.get("stop"), str):
        controls["stop"] = (controls["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(controls.get(name), list):
            controls[name] = tuple(controls[name])
    bias = controls.get("logit_bias")
    if isinstance(bias, dict):
        try:
            controls["logit_bias"] = {int(k): v for k, v in bias.items()}
        except ValueError:
            raise UserError(f"logit_bias: expected token ids as keys, got {list(bias)}") from None
    return controls

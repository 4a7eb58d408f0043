"""The target's own choice of a token: penalties, filters, counter-based sampling, stop rules.

A row's token is a pure function of its logits, its request's parameters and seed, the absolute
position of the token it emits and its own path. Neighbours, batch, tree and run never enter (R6).

**Arithmetic, for the device twin.** Nothing below depends on a maths library or on the order of a
sum, so a kernel gives the same bits with IEEE operations that are not contracted (`--fmad=false`):

1. penalties, logit bias: float32, one rounding an operation, in the order of `penalised`
2. scaled = logit / temperature: float32 division
3. mass of a token = floor(exp(scaled - max) * 2^44 + 0.5) as uint64, exp by `portable_exp` in
   float64; sums of masses are integers (vocabularies up to 2^19 fit)
4. noise g = -log(-log(1 - v)), both by `portable_log` in float64, rounded to float32 once;
   v = (x + 0.5) * 2^-32 with x the first word of Philox4x32-10, key = seed (low word, high word),
   counter = (token id, position low word, position high word, 0). 1 - v is exact in float64, so
   log(1 - v) is R6's log1p(-v)
5. token = argmax(scaled + g), float32, the lowest id of equals
"""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from config import UserError

GREEDY_BELOW = 1e-5  # a temperature below this is 0: dividing by it would only overflow
MAX_LOGPROBS = 20
MASS_BITS = 44
NO_TOKEN = -1  # a row whose logits hold NaN or +inf, or nothing finite

_UINT32 = np.uint64(0xFFFFFFFF)
_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10

_LN2 = math.log(2.0)
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")  # 33 bits: k * _LN2_HIGH is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF = math.sqrt(0.5)
_LOG_TERMS = tuple(1.0 / n for n in range(21, 0, -2))
_EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(12, -1, -1))


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. `validate` checks it; the values are OpenAI's and vLLM's.

    temperature         0 to 100; below 1e-5 it is 0 and the choice is greedy
    top_p               above 0, at most 1; 1 is off
    top_k               0 or -1 is off
    min_p               0 to 1: keeps tokens of at least this part of the best one's probability
    seed                0 to 2^64 - 1; None: a fresh one (`with_seed`)
    frequency_penalty   -2 to 2, times how often the output holds the token
    presence_penalty    -2 to 2, once if the output holds the token
    repetition_penalty  0.01 to 100: divides a positive logit, multiplies a negative one, of tokens
                        in the prompt or the output; 1 is off
    logit_bias          {id: -100 to 100}, added after the penalties
    max_tokens          at least 1; None: as far as the context reaches
    min_tokens          stop ids are not chosen, stop strings not looked for, before so many
    stop                strings that end the text
    stop_token_ids      ids that end it, beside the model's own
    ignore_eos          the model's own end ids are tokens like others (stop_token_ids still end it)
    logprobs            None: none; n: log-probabilities of each token and of the n most likely
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the token is the argmax, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def needs_path(self) -> bool:
        """Whether the choice depends on the tokens before it, so that `choose` needs a Path."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or self.min_tokens > 0
        )

    def with_seed(self) -> SamplingParams:
        """These parameters with a seed that is fixed and can be reported."""
        return replace(self, seed=fresh_seed()) if self.seed is None else self

    def validate(self, vocab_size: int) -> None:
        """Raise UserError, naming the field, its range and the value, for the first one outside."""
        _check_number("temperature", self.temperature, 0, 100)
        _check_number("top_p", self.top_p, 0, 1, above_low=True)
        _check_integer("top_k", self.top_k, -1, None)
        _check_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100)
        if not isinstance(self.logit_bias, Mapping):
            raise UserError(f"logit_bias: expected ids with numbers, got {self.logit_bias!r}")
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias: a token id", token_id, 0, vocab_size - 1)
            _check_number(f"logit_bias[{token_id}]", bias, -100, 100)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, None)
        _check_integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if not _is_list(self.stop) or not all(isinstance(s, str) and s for s in self.stop):
            raise UserError(f"stop: expected a list of strings, none empty, got {self.stop!r}")
        if not _is_list(self.stop_token_ids):
            raise UserError(f"stop_token_ids: expected a list of ids, got {self.stop_token_ids!r}")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids: a token id", token_id, 0, vocab_size - 1)
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos: expected true or false, got {self.ignore_eos!r}")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)


@dataclass(frozen=True)
class Path:
    """The tokens before a row's own choice, as penalties see them.

    A tree node's path is the request's, then the node's ancestors and the node itself; a rejected
    draft is on no later path.

    prompt    int [U], the prompt's ids, each once
    output    {id: times emitted}
    length    tokens emitted
    stop_ids  ids that may not be chosen before min_tokens
    """

    prompt: np.ndarray
    output: Mapping[int, int]
    length: int
    stop_ids: frozenset[int] = frozenset()

    @classmethod
    def start(cls, prompt_ids: Sequence[int], stop_ids: Iterable[int] = ()) -> Path:
        """The path of a request that has emitted nothing yet."""
        return cls(np.unique(np.asarray(prompt_ids, np.int64)), {}, 0, frozenset(stop_ids))

    def then(self, token: int) -> Path:
        """This path with one more emitted token."""
        output = {**self.output, token: self.output.get(token, 0) + 1}
        return replace(self, output=output, length=self.length + 1)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of unpenalised, untempered logits.

    chosen   float32 [T], of each row's chosen token
    top_ids  int32 [T, n], by (logit descending, id ascending)
    top      float32 [T, n]
    """

    chosen: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class Finish:
    """How a step's tokens end a text.

    keep    how many of them are text
    reason  "stop", "length", or None: the text goes on
    """

    keep: int
    reason: str | None


@dataclass(frozen=True)
class StopRule:
    """Where token ids end a text. (Stop strings are found in the text: tokenizer.StopScanner.)

    Tokens are judged one by one, the stop id before the cap, so a step that emits many ends where
    one-by-one decoding does. A stop id is no text: it is neither kept nor counted. It ends the text
    with "stop" if at most max_tokens - 1 tokens of text came before it; after max_tokens tokens of
    text the reason is "length", whatever follows. Before min_tokens a stop id is text
    (`choose` does not choose one there).
    """

    stop_ids: frozenset[int]
    max_tokens: int | None
    min_tokens: int = 0

    @classmethod
    def of(cls, params: SamplingParams, eos_ids: Iterable[int]) -> StopRule:
        """A request's rule; eos_ids are the model's own (generation_config.json)."""
        own = () if params.ignore_eos else eos_ids
        return cls(frozenset(own) | {*params.stop_token_ids}, params.max_tokens, params.min_tokens)

    def finish(self, tokens: Sequence[int], emitted: int) -> Finish:
        """Judge the tokens of one step; `emitted` tokens of text came before them."""
        for keep, token in enumerate(tokens):
            if token in self.stop_ids and emitted + keep >= self.min_tokens:
                return Finish(keep, "stop")
            if self.max_tokens is not None and emitted + keep + 1 >= self.max_tokens:
                return Finish(keep + 1, "length")
        return Finish(len(tokens), None)


def fresh_seed() -> int:
    """A seed from the system's randomness; below 2^53, so that any JSON reader keeps it exact."""
    return secrets.randbits(53)


def choose(
    logits: np.ndarray,
    positions: Sequence[int] | np.ndarray,
    params: Sequence[SamplingParams],
    paths: Sequence[Path | None] | None = None,
) -> np.ndarray:
    """The target's token for each row -> int32 [T]; NO_TOKEN (-1) for a row that has none.

    logits     float32 [T, V]; not changed
    positions  int [T], absolute position of the token that the row emits
    params     [T], each row's request; a sampled one carries its seed
    paths      [T], needed where `needs_path`

    A row has no token if its logits hold NaN or +inf, or if nothing finite is left: its request
    ends with an error, the others go on.
    """
    tokens = np.argmax(logits, axis=1).astype(np.int32)  # the first of equals; any NaN wins
    tokens[~np.isfinite(np.take_along_axis(logits, tokens[:, None], axis=1)[:, 0])] = NO_TOKEN
    for row, asked in enumerate(params):
        if tokens[row] == NO_TOKEN or (asked.greedy and not (asked.needs_path or asked.logit_bias)):
            continue
        adjusted = penalised(logits[row], asked, paths[row] if paths is not None else None)
        best = int(np.argmax(adjusted))
        if not np.isfinite(adjusted[best]):
            tokens[row] = NO_TOKEN
        elif asked.greedy:
            tokens[row] = best
        else:
            tokens[row] = _sample(adjusted, int(positions[row]), asked)
    return tokens


def penalised(logits: np.ndarray, params: SamplingParams, path: Path | None) -> np.ndarray:
    """float32 [V] -> float32 [V]: repetition, frequency, presence, logit bias, min_tokens.

    Repetition looks at prompt and output, frequency and presence at the output only (vLLM's
    reading of Keskar et al. 2019 and of OpenAI's two).
    """
    if params.needs_path and path is None:
        raise ValueError("choose: these parameters need the row's path, got None")
    out = logits.copy()
    if params.repetition_penalty != 1:
        seen = np.union1d(path.prompt, np.fromiter(path.output, np.int64))
        penalty = np.float32(params.repetition_penalty)
        out[seen] = np.where(out[seen] > 0, out[seen] / penalty, out[seen] * penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        emitted = np.fromiter(path.output, np.int64)
        counts = np.fromiter(path.output.values(), np.float32)
        out[emitted] -= np.float32(params.frequency_penalty) * counts
        out[emitted] -= np.float32(params.presence_penalty)
    for token_id, bias in params.logit_bias.items():
        out[token_id] += np.float32(bias)
    if path is not None and path.length < params.min_tokens:
        out[list(path.stop_ids)] = -np.inf
    return out


def kept_ids(logits: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that top-k, then top-p, then min-p leave, ascending -> int64 [k]; None: all of them.

    logits  float32 [V], penalised, not yet divided by the temperature

    Candidates stand by (logit descending, id ascending), so exactly top_k are left also among
    equals. Top-p keeps the fewest of them whose masses sum to at least top_p of all candidates';
    the token that crosses is kept. A sum within 2^-22 of all mass counts as having arrived: float32
    logits say no more, and 0.5 of (0.5, 0.25, 0.25) is one token however they round.
    """
    with_top_k = 0 < params.top_k < len(logits)
    if not with_top_k and params.top_p == 1 and params.min_p == 0:
        return None
    ids = top_ids(logits, params.top_k) if with_top_k else np.arange(len(logits))
    scaled = logits[ids] / np.float32(params.temperature)
    masses = mass(scaled, scaled.max())
    if params.top_p < 1:
        total = int(masses.sum())
        target = ((total * int(math.ldexp(params.top_p, 64))) >> 64) - (total >> 22)
        for width in (256, len(ids)):  # the few best nearly always suffice: then no full sort
            order = top_ids(logits[ids], width)
            before = np.cumsum(masses[order]) - masses[order]
            n_kept = int(np.searchsorted(before, np.uint64(max(target, 1))))
            if n_kept < len(order):
                break
        ids, masses = ids[order[:n_kept]], masses[order[:n_kept]]
    ids = ids[masses >= np.uint64(math.ldexp(params.min_p, MASS_BITS))]
    return np.sort(ids)


def top_ids(values: np.ndarray, k: int) -> np.ndarray:
    """The k (at most V) places of the largest of float32 [V], by (value descending, id ascending).

    Values must not be NaN.
    """
    if k == 0:
        return np.empty(0, np.int64)
    if k < len(values):
        least = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > least)
        places = np.concatenate([above, np.flatnonzero(values == least)[: k - len(above)]])
        places.sort()
    else:
        places = np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")]


def log_softmax_top(logits: np.ndarray, chosen: np.ndarray, n: int) -> TokenLogprobs:
    """Log-probabilities of each row's chosen token and of its n most likely.

    logits  float32 [T, V], as the model gave them
    chosen  int [T]; n at most V; a row holds at least one finite logit, no NaN and no +inf

    log p = (logit - max) - log(sum of masses * 2^-44) in float64, rounded to float32 once; the sum
    is of integers (see `mass`), so it has no order and a row's bits do not depend on other rows.
    """
    count, n = len(logits), min(n, logits.shape[1])
    result = TokenLogprobs(
        chosen=np.empty(count, np.float32),
        top_ids=np.empty((count, n), np.int32),
        top=np.empty((count, n), np.float32),
    )
    for row, values in enumerate(logits):
        peak = values.max()
        total = np.float64(mass(values, peak).sum()) * 2.0**-MASS_BITS
        log_total = np.float64(peak) + portable_log(total)
        ids = top_ids(values, n)
        result.chosen[row] = np.float64(values[chosen[row]]) - log_total
        result.top_ids[row] = ids
        result.top[row] = values[ids].astype(np.float64) - log_total
    return result


@lru_cache(maxsize=64)
def gumbel(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """Gumbel noise of every token id at a position -> float32 [V], read-only; -3.2 < g < 23.

    Kept for a while: the nodes of a tree share few positions, and the next tree repeats some.
    """
    noise = gumbel_of(seed, position, np.arange(vocab_size))
    noise.flags.writeable = False
    return noise


def gumbel_of(seed: int, position, ids: np.ndarray) -> np.ndarray:
    """The noise of these ids at a position, or at one of each row [rows, 1] -> float32 as ids."""
    position = np.asarray(position, np.int64)
    counter = ids.astype(np.uint32), position & 0xFFFFFFFF, position >> 32, np.uint32(0)
    key = (np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32))
    v = (philox4x32_10(counter, key)[0].astype(np.float64) + 0.5) * 2.0**-32
    return (-portable_log(-portable_log(1.0 - v))).astype(np.float32)


def philox4x32_10(
    counter: Sequence[np.ndarray | np.uint32], key: Sequence[np.uint32]
) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four counter words, two key words -> four words.

    Words are uint32, arrays of one shape or scalars; the result is four uint32 arrays.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    for n in range(_PHILOX_ROUNDS):
        k0, k1 = (
            np.uint64((int(word) + n * step) & 0xFFFFFFFF)
            for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)
        )
        product0, product1 = _PHILOX_MULTIPLIERS[0] * c0, _PHILOX_MULTIPLIERS[1] * c2
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ k0, product1 & _UINT32
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ k1, product0 & _UINT32
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))


def portable_log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive normal float64, by + - * / only; 2e-15 relative.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); log m = 2 * atanh(s), s = (m - 1) / (m + 1), by its
    series to s^21 in Horner's order.
    """
    m, e = np.frexp(x)
    low = m < _SQRT_HALF
    m = np.where(low, m + m, m)
    e = e - low
    s = (m - 1.0) / (m + 1.0)
    squared = s * s
    series = _LOG_TERMS[0]
    for term in _LOG_TERMS[1:]:
        series = series * squared + term
    return e * _LN2 + (s + s) * series


def portable_exp(x: np.ndarray) -> np.ndarray:
    """Exponential of float64 from -700 to 0, by + - * and rint only; 1e-15 relative.

    x = k * ln 2 + r with |r| <= 0.35; exp r by its series to r^12 in Horner's order.
    """
    k = np.rint(x * (1.0 / _LN2))
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = _EXP_TERMS[0]
    for term in _EXP_TERMS[1:]:
        series = series * r + term
    return np.ldexp(series, k.astype(np.int32))


def mass(logits: np.ndarray, peak: np.float32) -> np.ndarray:
    """exp(logits - peak) in units of 2^-44, rounded to nearest -> uint64, the peak's is 2^44."""
    below = np.maximum(logits.astype(np.float64) - np.float64(peak), -64.0)  # less is 0 anyway
    return np.floor(portable_exp(below) * 2.0**MASS_BITS + 0.5).astype(np.uint64)


def _sample(logits: np.ndarray, position: int, params: SamplingParams) -> int:
    """argmax(logits / temperature + noise) over the kept ids."""
    if params.seed is None:
        raise ValueError("choose: a sampled request needs its seed (SamplingParams.with_seed)")
    noise = gumbel(params.seed, position, len(logits))
    ids = kept_ids(logits, params)
    if ids is None:
        return int(np.argmax(logits / np.float32(params.temperature) + noise))
    return int(ids[np.argmax(logits[ids] / np.float32(params.temperature) + noise[ids])])


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _check_number(
    name: str, value: object, low: float, high: float, *, above_low: bool = False
) -> None:
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and low <= value <= high
    if not fits or (above_low and value == low):  # a NaN is not between any two numbers
        lower = f"above {low}" if above_low else f"from {low}"
        raise UserError(f"{name}: expected a number {lower} to {high}, got {value!r}")


def _check_integer(name: str, value: object, low: int, high: int | None) -> None:
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= value
    if not fits or (high is not None and value > high):
        upper = f"to {high}" if high is not None else "up"
        raise UserError(f"{name}: expected a whole number from {low} {upper}, got {value!r}")

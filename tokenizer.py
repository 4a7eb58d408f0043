"""Text to ids and back: tiktoken vocabularies, chat templates, streamed text, stop strings.

Control strings (`<|im_end|>`, `[EOS]`, ...) in a prompt or a message are plain text, always; only
the control strings that a chat template itself writes become control ids.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tiktoken
from jinja2.sandbox import ImmutableSandboxedEnvironment

from config import UserError

# Kimi's split pattern (tokenization_kimi.py of the K2 checkpoints), in the syntax of tiktoken's
# regex engine: `&&` is set intersection, so a word never contains Han.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# tiktoken's regex engine overflows its stack on very long runs. Kimi's tokenizer therefore cuts the
# text at these lengths first; a cut is a token border, so the same numbers give the same ids.
CHUNK_CHARS = 400_000
RUN_CHARS = 25_000

DEFAULT_SPECIALS = 256
ROLES = ("system", "user", "assistant", "tool")


class Tokenizer:
    """The tokenizer of a checkpoint directory.

    directory   holds tiktoken.model; tokenizer_config.json and chat_template.jinja are read
                when present
    vocab_size  the model's vocabulary (config.json). Ids that no file names are called
                `<|reserved_token_ID|>`. Without it the vocabulary ends at the highest id in
                added_tokens_decoder, or 256 ids after the last rank where that lists none.

    Raises UserError for anything missing or unreadable.

    vocab_size   int; ids are 0 ... vocab_size - 1
    special_ids  {control string: id}, reserved ones included
    """

    def __init__(self, directory: str | Path, vocab_size: int | None = None) -> None:
        directory = Path(directory)
        ranks = _read_ranks(directory / "tiktoken.model")
        self._settings = _read_json(directory / "tokenizer_config.json")
        self.special_ids = _special_ids(
            self._settings, len(ranks), vocab_size, directory / "tokenizer_config.json"
        )
        self.vocab_size = len(ranks) + len(self.special_ids)
        self._encoding = tiktoken.Encoding(
            directory.name,
            pat_str=SPLIT_PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_ids,
        )
        self._bytes = [b""] * self.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for name, token_id in self.special_ids.items():
            self._bytes[token_id] = name.encode()
        # Longest first, so that no control string hides behind its own prefix.
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        never = "(?!)"
        self._special_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or never})")
        self._named_tokens = _named_tokens(self._settings, directory / "tokenizer_config.json")
        self._template_source = _template_source(directory, self._settings)
        self._template: jinja2.Template | None = None

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Control strings in it are plain text; no BOS is added."""
        return [i for chunk in _chunks(text) for i in self._encoding.encode_ordinary(chunk)]

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        thinking: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Ids of a conversation, by the checkpoint's own chat template.

        messages  OpenAI's shape: role (system, user, assistant, tool), content (text, or a list of
                  text parts), name, tool_calls, tool_call_id, reasoning_content
        tools     OpenAI's tool declarations
        thinking  False: the generation prompt ends in an empty thought (instant mode)

        Text of messages and tools reaches the prompt unchanged and as plain text, whatever control
        strings it holds: while the template runs, the characters with which a control string can
        begin or end are replaced in it by private ones, so only the template's own are found after.
        Raises UserError for a message that is no text, a missing template and a template's error.
        """
        messages = [_checked_message(message, n) for n, message in enumerate(messages)]
        if not messages:
            raise UserError("messages: expected at least one, got none")
        # Sorted keys are what Kimi's tokenizer hands its template.
        tools = _map_strings(list(tools), str, sort=True) if tools else None
        if self._template is None:
            self._template = self._compile_template()

        edges = {edge for name in self.special_ids for edge in (name[0], name[-1])}
        hide, restore = _hiding(edges, [messages, tools, self._template_source])
        try:
            rendered = self._template.render(
                messages=_map_strings(messages, hide),
                tools=_map_strings(tools, hide),
                add_generation_prompt=add_generation_prompt,
                thinking=thinking,
                **self._named_tokens,
            )
        except UserError:
            raise
        except Exception as error:  # a template may fail in any way; it is the checkpoint's code
            raise UserError(f"chat template: cannot render these messages: {error}") from error

        ids: list[int] = []
        for n, piece in enumerate(self._special_pattern.split(rendered)):
            # re.split puts the captured separators, here control strings, at odd places.
            ids += [self.special_ids[piece]] if n % 2 else self.encode(restore(piece))
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of some ids; a control id gives its name. UserError for an id out of range."""
        return b"".join([self._bytes[self._checked(i)] for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def token_piece(self, token_id: int) -> str:
        """One id as text of its own: controls as they are, stray bytes as \\xe4."""
        return self._bytes[self._checked(token_id)].decode("utf-8", errors="backslashreplace")

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise UserError(
                f"token id {token_id}: expected 0 to {self.vocab_size - 1}, this vocabulary's ids"
            )
        return token_id

    def _compile_template(self) -> jinja2.Template:
        if self._template_source is None:
            raise UserError(
                "chat template: the checkpoint has neither chat_template.jinja nor a chat_template "
                "in tokenizer_config.json; give a plain prompt instead"
            )
        # The options under which Hugging Face templates are written.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(self._template_source)
        except jinja2.TemplateError as error:
            raise UserError(f"chat template: line {error.lineno}: {error.message}") from error
        except Exception as error:  # of the Python that the template becomes: a break outside loops
            raise UserError(f"chat template: cannot be compiled: {error}") from error


class IncrementalDecoder:
    """Ids in, text out, without half characters.

    The pieces and the flush together are Tokenizer.decode of all ids, whatever the borders: a
    character is held back until its last byte has come, and U+FFFD stands only for bytes that can
    become no character (in a flush: for a character that the text's end cut short).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; may be empty."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character cut short, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Text pieces in, text that may be sent out; nothing of a stop string is ever sent.

    The stop string that is complete first, character by character, ends the text before its own
    first character; of several complete at the same character the longest. So what is sent depends
    on the text alone, not on how it was cut into pieces, and no decision waits for text that may
    never come. The longest end of the text with which a stop could begin is held back.

    matched  the stop string found, or None
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise UserError("stop: expected strings that are not empty, got ''")
        self._stops = tuple(stop_strings)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """The text that is now safe to send; nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = next(
            (n for n in range(self._longest_start(text), 0, -1) if self._may_begin(text[-n:])), 0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back when the text ended otherwise; nothing after a match."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self, text: str) -> int:
        return min(len(text), max((len(stop) for stop in self._stops), default=1) - 1)

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """{token bytes: rank} of a tiktoken.model: one `base64 rank` a line, ranks 0, 1, 2, ..."""
    raw = _read(path)
    if raw is None:
        raise UserError(f"{path}: cannot read the vocabulary: no such file")
    lines = raw.splitlines()
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(
                f"{path}: line {number}: expected `base64 rank`, got {line[:40]!r}; "
                "is this a tiktoken vocabulary?"
            ) from None
    n_lines = sum(map(bool, lines))
    if len(ranks) != n_lines or sorted(ranks.values()) != list(range(n_lines)):
        raise UserError(
            f"{path}: expected {n_lines} different tokens, each rank from 0 to {n_lines - 1} once; "
            "the file is damaged or no tiktoken vocabulary"
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise UserError(
            f"{path}: expected a token for each of the 256 bytes, {len(missing)} are missing, "
            f"first 0x{missing[0]:02x}; some text could not be encoded"
        )
    return ranks


def _special_ids(
    settings: dict[str, Any], n_ranks: int, vocab_size: int | None, source: Path
) -> dict[str, int]:
    """{control string: id} for every id from the last rank to the end of the vocabulary."""
    named: dict[int, str] = {}
    decoder = settings.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise UserError(f"{source}: added_tokens_decoder: expected an object of ids")
    for key, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not re.fullmatch("0|[1-9][0-9]{0,8}", key) or not _is_text(content):
            raise UserError(
                f"{source}: added_tokens_decoder: expected `id: {{content: text}}`, "
                f"got {key[:40]!r}: {str(entry)[:80]}"
            )
        named[int(key)] = content
    end = max(named) + 1 if named else n_ranks + DEFAULT_SPECIALS
    end = end if vocab_size is None else vocab_size
    outside = [i for i in named if not n_ranks <= i < end]
    if outside or end < n_ranks:
        what = f"control id {outside[0]}" if outside else f"{n_ranks} ranks"
        raise UserError(
            f"{source}: {what} does not fit: control ids follow the {n_ranks} ranks of "
            f"tiktoken.model and the vocabulary has {end} ids; "
            "are the tokenizer and the config.json of one checkpoint?"
        )
    special_ids = {named.get(i, f"<|reserved_token_{i}|>"): i for i in range(n_ranks, end)}
    if len(special_ids) != end - n_ranks:
        raise UserError(f"{source}: added_tokens_decoder: two ids have the same content")
    return special_ids


def _named_tokens(settings: dict[str, Any], source: Path) -> dict[str, str]:
    """The control strings that templates know by name; a file may hold them as objects."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise UserError(
                f"{source}: {name}: expected a text or `{{content: text}}`, got {str(value)[:80]}"
            )
        if text:
            found[name] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is no file."""
    raw = _read(path)
    if raw is None:
        return {}
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 errors
        raise UserError(f"{path}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _template_source(directory: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: its own file, else the (default) one in tokenizer_config.json."""
    path = directory / "chat_template.jinja"
    if (raw := _read(path)) is not None:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: cannot read the chat template: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [e for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = named[0].get("template") if named else None
    if template is not None and not _is_text(template):
        raise UserError(f"{directory / 'tokenizer_config.json'}: chat_template: expected a text")
    return template


def _is_text(value: object) -> bool:
    """A string, not empty, that UTF-8 can hold."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= c <= "\udfff" for c in value)


def _read(path: Path) -> bytes | None:
    """A file of the checkpoint, None where there is none. As in loader.py, a link may lead into the
    directory, or from a hub cache's `snapshots/X` to its `blobs`, and nowhere else."""
    if not os.path.lexists(path):
        return None
    home = path.parent.resolve()
    inside = {home}
    if home.parent.name == "snapshots":
        inside.add(home.parent.parent / "blobs")
    try:
        real = path.resolve(strict=True)
        if real.parent not in inside or not real.is_file():
            raise UserError(f"{path}: expected a file of this checkpoint, not a link out of it")
        return real.read_bytes()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or "links in a circle"
        raise UserError(f"{path}: cannot be read: {reason}") from None


def _chunks(text: str) -> Iterator[str]:
    """Cut a text as Kimi's tokenizer does: see CHUNK_CHARS and RUN_CHARS."""
    for start in range(0, len(text), CHUNK_CHARS):
        part = text[start : start + CHUNK_CHARS]
        done = 0
        for run in re.finditer(r"\s+|\S+", part) if len(part) > RUN_CHARS else ():
            for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                yield part[done:cut]
                done = cut
        yield part[done:]


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    """A message with its content present and known to be text."""
    name = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        got = message.get("role") if isinstance(message, dict) else message
        raise UserError(f"{name}: expected a role of {', '.join(ROLES)}, got {got!r}")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise UserError(
                    f"{name}: a part of type {kind!r}, but only text is served; "
                    "leave images, audio and video out"
                )
    elif not isinstance(content, str) and not (content is None and message["role"] == "assistant"):
        raise UserError(f"{name}: expected content as text or text parts, got {content!r}")
    return {"content": None, **message}


def _map_strings(value: Any, change: Callable[[str], str], *, sort: bool = False) -> Any:
    """A JSON value with every string in it, keys too, passed through `change`."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = sorted(value.items()) if sort else value.items()
        return {change(k): _map_strings(v, change, sort=sort) for k, v in items}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change, sort=sort) for item in value]
    return value


def _hiding(
    characters: set[str], texts: list[Any]
) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """(hide, restore): swap each character for a private one that occurs in none of the texts."""
    used: set[str] = set()

    def collect(text: str) -> str:
        used.update(text)
        return text

    _map_strings(texts, collect)
    private = (chr(code) for code in range(0x10FFFD, 0xF0000, -1) if chr(code) not in used)
    table = dict(zip(sorted(characters), private, strict=False))
    hidden = str.maketrans(table)
    shown = str.maketrans({stand_in: c for c, stand_in in table.items()})
    return lambda text: text.translate(hidden), lambda text: text.translate(shown)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: plain JSON, where jinja's own would escape < and > for HTML.

    `ensure_ascii` is taken and not followed: it would spell the private characters of `_hiding`.
    """
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise UserError(f"chat template: {message}")

"""Vocabulary files, Kimi's split, control strings, chat, streamed text and stop strings."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import UserError
from tokenizer import IncrementalDecoder, StopScanner, Tokenizer

BYTES = [bytes([byte]) for byte in range(256)]
CONTROLS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
]
# The facts of k26-format.md in a template of the same kind: macros, loop controls, compact JSON.
TEMPLATE = """\
{%- macro text(message) -%}
  {%- if message['content'] is string -%}{{ message['content'] }}
  {%- elif message['content'] is not none -%}
    {%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- set who = message.get('name') or message['role'] -%}
  {%- if message['role'] == 'nobody' -%}{%- break -%}{%- endif -%}
  {%- if message['role'] == 'user' -%}<|im_user|>
  {%- elif message['role'] == 'assistant' -%}<|im_assistant|>
  {%- else -%}<|im_system|>
  {%- endif -%}
  {{ who }}<|im_middle|>
  {%- if message['role'] == 'assistant' -%}<think></think>{%- endif -%}
  {%- if message['role'] == 'tool' -%}## Return of {{ message['tool_call_id'] }}
{% endif -%}
  {{ text(message) }}
  {%- if message.get('tool_calls') -%}
    <|tool_calls_section_begin|>
    {%- for call in message['tool_calls'] -%}
      <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
      {{- call['function']['arguments'] }}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
  <|im_assistant|>assistant<|im_middle|><think>
  {%- if thinking is false -%}</think>{%- endif -%}
{%- endif -%}
"""


def write(directory: Path, tokens: list[bytes], controls: dict[int, str], **more: object) -> Path:
    """A checkpoint's tokenizer files."""
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    decoder = {str(i): {"content": content, "special": True} for i, content in controls.items()}
    settings = {"added_tokens_decoder": decoder, "eos_token": "[EOS]", **more}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, a few words, and Kimi's control strings with gaps between their ids."""
    tokens = BYTES + [b"he", b"ll", b"hell", b"hello", b"user", "好".encode()]
    controls = {len(tokens) + 2 * n: control for n, control in enumerate(CONTROLS)}
    directory = tmp_path_factory.mktemp("toy")
    return Tokenizer(write(directory, tokens, controls, chat_template=TEMPLATE))


# ---------------------------------------------------------------- vocabulary


def test_ids_ranks_and_names(toy: Tokenizer) -> None:
    assert toy.vocab_size == 262 + 2 * len(CONTROLS) - 1
    assert toy.encode("hello user") == [259, ord(" "), *b"user"]  # " user" is one piece, no token
    assert toy.special_ids["[BOS]"] == 262
    assert toy.special_ids["<|reserved_token_263|>"] == 263
    assert toy.decode([259, 262, 261]) == "hello[BOS]好"
    assert toy.encode("") == []
    assert [toy.token_piece(i) for i in (259, 262, 10, 0xE4, 32)] == [
        "hello",
        "[BOS]",
        "\n",
        "\\xe4",
        " ",
    ]
    with pytest.raises(UserError, match="token id 999: expected 0 to 290"):
        toy.decode([999])


@pytest.mark.parametrize(
    ("named", "vocab_size", "expected"),
    [({}, None, 256 + 256), ({300: "[EOS]"}, None, 301), ({300: "[EOS]"}, 320, 320), ({}, 259, 259)]
    + [({}, 256, 256)],
)
def test_vocabulary_size(
    tmp_path: Path, named: dict[int, str], vocab_size: int | None, expected: int
) -> None:
    tokenizer = Tokenizer(write(tmp_path, BYTES, named), vocab_size)
    assert tokenizer.vocab_size == expected
    assert sorted(tokenizer.special_ids.values()) == list(range(256, expected))
    assert tokenizer.decode(tokenizer.encode("any text")) == "any text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the vocabulary"),
        (b"\x80\x04 binary\nrubbish", "line 1: expected `base64 rank`"),
        (b"IQ== 0\nIg== x\n", "line 2: expected `base64 rank`"),
        (b"!!!! 0\n", "line 1: expected `base64 rank`"),
        (b"IQ== 0\nIg== 2\n", "ranks? from 0 to 1 once"),
        (b"IQ== 0\nIQ== 1\n", "expected 2 different tokens"),
        (b"IQ== 0\nIg== 1\n", "254 are missing, first 0x00"),
        (b"", "256 are missing"),
    ],
)
def test_unreadable_vocabulary(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("settings_text", "message"),
    [
        ("{", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "expected `id: {content: text}`"),
        ('{"added_tokens_decoder": {"256": {}}}', "expected `id: {content: text}`"),
        ('{"added_tokens_decoder": {"7": {"content": "a"}}}', "control id 7 does not fit"),
        ('{"added_tokens_decoder": {"256": {"content": "a"}, "257": {"content": "a"}}}', "two ids"),
    ],
)
def test_unreadable_settings(tmp_path: Path, settings_text: str, message: str) -> None:
    write(tmp_path, BYTES, {})
    (tmp_path / "tokenizer_config.json").write_text(settings_text)
    with pytest.raises(UserError, match=message):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("vocab_size", [255, 300])
def test_vocabulary_larger_than_the_models(tmp_path: Path, vocab_size: int) -> None:
    write(tmp_path, BYTES, {300: "[EOS]"})
    with pytest.raises(UserError, match=f"the vocabulary has {vocab_size} ids"):
        Tokenizer(tmp_path, vocab_size)


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize(
    "pieces",
    [
        ["你好", "abc"],
        ["abc", "你好"],
        ["Hello", "World's", " END"],
        ["don't", " stop"],
        ["123", "456", "7"],
        ["a", "\n\n", "b"],
        ["x", " ", " y"],
        ["wow", "!!!\n", "ok"],
        [" (", "x", ")"],
        ["é", "1"],
        ["tail", "  "],
    ],
)
def test_kimi_split(tmp_path: Path, pieces: list[str]) -> None:
    # Every piece is a token, and so is every run of pieces: whoever does not split takes those.
    runs = {"".join(pieces[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)}
    tokens = BYTES + sorted(r.encode() for r in runs if len(r.encode()) > 1)
    tokenizer = Tokenizer(write(tmp_path, tokens, {}))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("".join(pieces))] == pieces


@pytest.mark.parametrize("character", ["a", " ", "\n", "好", "\x1c"])
def test_long_runs(toy: Tokenizer, character: str) -> None:
    text = "b " + character * 1_000_001 + "<|im_end|>"  # tiktoken alone panics on the spaces
    assert toy.decode(toy.encode(text)) == text


def test_long_runs_are_cut_where_kimi_cuts_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, [*BYTES, b"aa"], {}))
    # Cut after 25,000 characters of a run, whatever stands before it: the last of 25,001 is alone.
    ids = tokenizer.encode("b " + "a" * 25_001)
    assert ids == [*b"b ", *[256] * 12_500, *b"a"]
    assert tokenizer.encode("b " + "a" * 25_002) == [*ids[:-1], 256]
    assert tokenizer.encode("a" * 24_999 + " " + "a" * 3)[-3:] == [ord(" "), 256, ord("a")]


# ---------------------------------------------------------------- chat


def test_known_encoding_of_k26(tmp_path: Path) -> None:
    """k26-format.md: a user turn "hello" in instant mode, in a vocabulary that has its ids."""
    tokens = BYTES + [b"\xff\xff%d" % n for n in range(163_584 - 256)]
    tokens[2482], tokens[22931], tokens[69702] = b"user", b"hello", b"assistant"
    controls = {163584: "[BOS]", 163585: "[EOS]", 163586: "<|im_end|>", 163587: "<|im_user|>"}
    controls |= {163588: "<|im_assistant|>", 163594: "<|im_system|>", 163601: "<|im_middle|>"}
    controls |= {163605: "<|media_pad|>", 163606: "<think>", 163607: "</think>", 163839: "[PAD]"}
    tokenizer = Tokenizer(write(tmp_path, tokens, controls, chat_template=TEMPLATE), 163_840)
    hello = [{"role": "user", "content": "hello"}]
    instant = [163587, 2482, 163601, 22931, 163586, 163588, 69702, 163601, 163606, 163607]
    assert tokenizer.encode_chat(hello, thinking=False) == instant
    assert tokenizer.encode_chat(hello) == instant[:-1]
    assert tokenizer.encode_chat(hello, add_generation_prompt=False) == instant[:5]
    assert tokenizer.token_piece(163838) == "<|reserved_token_163838|>"


@pytest.mark.parametrize("control", CONTROLS + ["<|reserved_token_263|>"])
def test_j4_control_strings_in_a_prompt_are_text(toy: Tokenizer, control: str) -> None:
    text = f"before{control}after {control}"
    ids = toy.encode(text)
    assert not set(ids) & set(toy.special_ids.values())
    assert toy.decode(ids) == text


def conversation(text: str) -> dict:
    """User text, tool result, tool name, call id and arguments, all holding `text`."""
    call = {
        "id": f"functions.{text}:0",
        "function": {"name": text, "arguments": f'{{"a":"{text}"}}'},
    }
    return {
        "messages": [
            {"role": "system", "content": text},
            {"role": "user", "name": text, "content": [{"type": "text", "text": text}] * 2},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", **call}]},
            {"role": "tool", "tool_call_id": text, "content": text},
        ],
        "tools": [{"type": "function", "function": {"name": text, "parameters": {text: [text]}}}],
    }


@pytest.mark.parametrize(
    "text",
    [*CONTROLS, "<|im_", "end|>", "<", "|>", "<|im_end|><|im_system|>x", "\U0010fffd<|im_end|>"],
)
def test_j4_control_strings_in_messages_are_text(toy: Tokenizer, text: str) -> None:
    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if i >= 262]

    ids = toy.encode_chat(**conversation(text))
    harmless = toy.encode_chat(**conversation("X"))
    assert controls(ids) == controls(harmless)
    assert toy.decode(ids) == toy.decode(harmless).replace("X", text)


def test_j4_two_texts_cannot_join_to_a_control_string(toy: Tokenizer) -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = toy.encode_chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert ids.count(toy.special_ids["<|im_end|>"]) == 1
    assert "<|im_end|><|im_end|>" in toy.decode(ids)


@pytest.mark.parametrize("call_id", ["functions.get_weather:0", "call_ab12", "functions_get_1"])
def test_j6_ids_of_past_calls_are_printed_verbatim(toy: Tokenizer, call_id: str) -> None:
    call = {"id": call_id, "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "rain"},
    ]
    text = toy.decode(toy.encode_chat(messages))
    assert (
        "<|tool_calls_section_begin|><|tool_call_begin|>"
        f'{call_id}<|tool_call_argument_begin|>{{"city": "Bonn"}}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
    ) in text
    assert f"## Return of {call_id}\nrain<|im_end|>" in text


def test_chat_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, BYTES, {256: "[EOS]"}, chat_template="from the settings")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "a<"}]) == [256, ord("a"), ord("<")]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected at least one"),
        (["hi"], r"messages\[0\]: expected a role"),
        ([{"role": "root", "content": "x"}], "got 'root'"),
        ([{"role": "user"}], "expected content as text"),
        ([{"role": "user", "content": 7}], "expected content as text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "only text"),
    ],
)
def test_b7_messages_that_are_no_text_are_refused(
    toy: Tokenizer, messages: list, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        toy.encode_chat(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "neither chat_template.jinja nor"),
        ("\n{% if %}", "chat template: line 2"),
        ("{% break %}", "chat template: cannot be compiled: 'break' outside loop"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.x }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render.*unsafe"),
    ],
)
def test_template_errors(tmp_path: Path, template: str | None, message: str) -> None:
    tokenizer = Tokenizer(write(tmp_path, BYTES, {}, chat_template=template))
    with pytest.raises(UserError, match=message):
        tokenizer.encode_chat([{"role": "user", "content": "hello"}])


# ---------------------------------------------------------------- streamed text


def borders(draw: st.DrawFn, n: int) -> list[slice]:
    """Cut n things anywhere."""
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=6)))
    return [slice(a, b) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_incremental_decoding_equals_decoding(toy: Tokenizer, data: st.DataObject) -> None:
    valid = st.text("aé好😀\ufffd", max_size=8).map(str.encode)
    ids = list(data.draw(valid | st.binary(max_size=12)))
    decoder = IncrementalDecoder(toy)
    pieces = [decoder.feed(ids[piece]) for piece in borders(data.draw, len(ids))]
    assert "".join(pieces) + decoder.flush() == toy.decode(ids)


def test_no_replacement_character_at_a_border(toy: Tokenizer) -> None:
    decoder = IncrementalDecoder(toy)
    pieces = [decoder.feed([byte]) for byte in "a😀".encode()]
    assert pieces == ["a", "", "", "", "😀"]
    assert decoder.flush() == ""
    assert decoder.feed(list("好".encode()[:2])) == ""
    assert decoder.flush() == "\ufffd"  # the text ended inside a character


# ---------------------------------------------------------------- stop strings


def scan(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    sent = "".join(scanner.feed(piece) for piece in pieces)
    return sent + scanner.flush(), scanner.matched


@pytest.mark.parametrize("pieces", [["beta gamma x"], ["be", "ta ga", "mma x"], list("beta gamma")])
def test_f11_stop_string_across_pieces(pieces: list[str]) -> None:
    scanner = StopScanner(["beta gamma"])
    assert scanner.feed("alpha ") == "alpha "
    assert [scanner.feed(piece) for piece in pieces] == [""] * len(pieces)
    assert (scanner.matched, scanner.feed("more"), scanner.flush()) == ("beta gamma", "", "")


def test_f11_near_miss_is_sent_whole_and_once() -> None:
    scanner = StopScanner(["beta gamma"])
    pieces = [scanner.feed(piece) for piece in ("be", "ta ga", "s be")]
    assert pieces == ["", "", "beta gas "]
    assert (scanner.flush(), scanner.matched) == ("be", None)


def test_f11_which_stop_wins() -> None:
    assert scan(["bcde", "cd"], ["abcdef"]) == ("ab", "cd")  # complete first, though begun later
    assert scan(["cd", "bcd"], ["abcdef"]) == ("a", "bcd")  # both complete with d: the longest
    assert scan(["aab"], ["aaab"]) == ("a", "aab")
    assert scan([], ["any", "thing"]) == ("anything", None)
    with pytest.raises(UserError, match="not empty"):
        StopScanner(["x", ""])


@given(st.data())
@settings(max_examples=500, deadline=None)
def test_f11_stream_equals_whole_text(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", max_size=16))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
    pieces = [text[piece] for piece in borders(data.draw, len(text))]

    expected, matched = text, None  # the rule, character by character
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            matched = max(complete, key=len)
            expected = text[: end - len(matched)]
            break
    assert scan(stops, pieces) == (expected, matched)

    scanner = StopScanner(stops)
    sent = ""
    for piece in pieces:
        sent += scanner.feed(piece)
        assert expected.startswith(sent)  # nothing of a stop is ever sent, nothing twice


BYTES = [bytes([i]) for i in range(256)]


@pytest.mark.parametrize("file", ["tiktoken.model", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["outside", "dangling", "fifo", "circle"])
def test_b3_links_out_of_the_checkpoint_are_not_followed(tmp_path: Path, file: str, kind: str):
    (tmp_path / "model").mkdir()
    directory = write(tmp_path / "model", BYTES, {256: "[BOS]"})
    secret = tmp_path / "secret"
    secret.write_text("do not show")
    path = directory / file
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to({"outside": secret, "dangling": directory / "gone", "circle": path}[kind])
    with pytest.raises(UserError) as caught:
        Tokenizer(directory)
    assert file in str(caught.value) and "do not show" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        '{"added_tokens_decoder": null}',
        '{"added_tokens_decoder": ["a"]}',
        '{"added_tokens_decoder": {"%s": {"content": "x"}}}' % ("9" * 5000),
        '{"added_tokens_decoder": {"0262": {"content": "x"}}}',
        '{"added_tokens_decoder": {"262": {"content": "\\ud800"}}}',
        '{"chat_template": 5}',
        '{"bos_token": {"id": 1}}',
        '{"eos_token": {"content": 2}}',
        '{"pad_token": ["[PAD]"]}',
        '{"chat_template": [{"name": "default"}, 1]}',
        "[" * 100_000,
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, content: str) -> None:
    directory = write(tmp_path, BYTES, {256: "[BOS]"})
    (directory / "tokenizer_config.json").write_text(content)
    if "template" in content and "default" in content:
        Tokenizer(directory)  # a default without a text is no template
        return
    with pytest.raises(UserError) as caught:
        Tokenizer(directory)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)

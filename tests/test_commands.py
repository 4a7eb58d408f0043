"""--prompts, --chat and --score: requests from a file, a conversation, the measure of a text."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from toy import engine_of, feed, write_checkpoint

import commands
import engine as engine_module
from engine import Engine
from sampling import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models" / "nano"
YAML = """
model: {path: toy}
draft: {path: toy/drafter, mode: tree, budget: 8}
decode: {context: 512, batch: 2, max_tokens: 12, prefill_chunk: 32, leaf: 16}
"""
CONTROLS = ("<|im_end|>", "<|im_user|>", "<|im_system|>", "[EOS]", "</think>", "<|im_middle|>")


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A directory with toy.yaml and its checkpoint, which has the miniature's chat template."""
    directory = tmp_path_factory.mktemp("commands")
    longer = {"max_position_embeddings": 512}
    write_checkpoint(directory / "toy", drafter=longer, rope_scaling=None, **longer)
    shutil.copy(NANO / "chat_template.jinja", directory / "toy")
    (directory / "toy.yaml").write_text(YAML)
    return directory


@pytest.fixture
def call(capsys, house):
    """Run the command line -> (exit code, standard output, standard error)."""

    def run(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = engine_module.main(
            ["--device", "cpu", "--config", str(house / "toy.yaml"), *map(str, argv)]
        )
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def many(call, tmp_path):
    """Run --prompts over lines (objects, or text as it is) -> (exit code, objects, errors)."""

    def run(*lines: object, options=()) -> tuple[int, list[dict], str]:
        file = tmp_path / "requests.jsonl"
        text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
        file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        code, out, err = call("--prompts", file, *options)
        assert out == "" or out.endswith("\n")
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


class TestPrompts:
    def test_each_line_is_its_own_request(self, many, call):
        lines = [
            {"id": "text", "prompt": "hello", "max_tokens": 5},
            {"id": 7, "prompt_ids": [104, 105], "temperature": 1.0, "seed": 3, "top_k": 9},
            {"id": [1], "messages": [{"role": "user", "content": "hi"}], "thinking": False},
            {"prompt": "no id", "logprobs": 2, "stop": "e", "logit_bias": {"101": 5}},
        ]
        code, found, err = many(*lines)
        assert (code, len(found)) == (0, 4)
        tokens = sum(f["tokens"] for f in found)
        assert re.fullmatch(rf"\[4 prompts, {tokens} tokens, [\d.]+ tok/s, .*\]\n", err)
        by_id = {json.dumps(f.pop("id")): f for f in found}
        assert set(by_id) == {'"text"', "7", "[1]", "4"}
        for f in by_id.values():
            del f["prefill_s"], f["decode_s"], f["tok_per_s"]
        for line, key in zip(lines, ('"text"', "7", "[1]", "4"), strict=True):
            [one] = many(line)[1]  # the same alone
            del one["id"], one["prefill_s"], one["decode_s"], one["tok_per_s"]
            assert one == by_id[key]
        _, out, _ = call("--prompt", "hello", "--max-tokens", 5, "--json")
        assert json.loads(out.splitlines()[-1])["token_ids"] == by_id['"text"']["token_ids"]
        assert "e" not in by_id["4"]["text"] and len(by_id["4"]["logprobs"][0]["top"]) == 2

    def test_results_come_as_they_end(self, many):
        greedy = {"ignore_eos": True}
        lines = [
            {"id": "long", "prompt": "aa", "max_tokens": 90, **greedy},
            *({"id": i, "prompt": "b" * (i + 1), "max_tokens": 2, **greedy} for i in range(4)),
        ]
        assert [f["id"] for f in many(*lines, options=("--mode", "ar"))[1]] == [0, 1, 2, 3, "long"]

    def test_a_line_that_cannot_run_fails_alone(self, many):
        image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
        lines = [
            {"prompt": "good"},
            {"prompt": "x", "temprature": 1},
            '{"prompt": "x"',
            "",
            {"messages": [{"role": "user", "content": image}]},  # B7
            {"prompt": "x", "top_p": 0},
            {"prompt": "x", "prompt_ids": [1]},
            {"id": "none"},
            "[1]",
            {"prompt": "x" * 600},
            {"messages": []},
            "\ufeff",
            {"id": "also good", "prompt": "x"},
            '{"prompt": "x", "prompt": "y"}',
            '{"id": [NaN], "prompt": "x"}',
            '{"id": {"a": [1e999]}, "prompt": "x"}',
            '{"id": "kept", "top_p": NaN, "prompt": "x"}',
        ]
        code, found, err = many(*lines)
        errors = {f["line"]: f["error"] for f in found if "line" in f}
        assert code == 1 and "[2 prompts, " in err and f"{len(errors)} failed]" in err
        assert {f["id"] for f in found if "line" not in f} == {1, "also good"}
        for line, words in {
            2: "temprature: unknown field; did you mean temperature?",
            3: "not JSON",
            5: "messages[0]: a part of type 'image_url'",
            6: "top_p: expected a number above 0 to 1, got 0",
            7: "expected one of prompt, messages, prompt_ids, got prompt, prompt_ids",
            8: "got none",
            9: "expected a JSON object",
            10: "prompt: 600 tokens do not fit",
            11: "messages: expected at least one",
            12: "not JSON",
            14: "not JSON: prompt is there twice",
            15: "not JSON: NaN is no number of JSON",
            16: "id: expected what JSON can hold",
            17: "not JSON: NaN is no number of JSON",
        }.items():
            assert words in errors.pop(line)
        assert not errors
        assert [f["id"] for f in found if f.get("line") in (15, 16, 17) and "id" in f] == ["kept"]

    def test_lines_end_where_json_lines_do(self, many):
        # U+2028, U+0085 and a form feed are no ends of lines; CR LF is one.
        line = '{"id": "a\u2028b\u0085", "prompt": "x\u2028y\\fz"}\r'
        code, [found], _ = many(line, "\r", "")
        assert (code, found["id"]) == (0, "a\u2028b\u0085")
        assert found["prompt_tokens"] == len("x\u2028y\fz".encode())

    def test_text_that_utf8_cannot_hold(self, many):
        code, [found], _ = many('{"id": "\\ud800", "prompt": "x\\udfffy"}')
        assert (code, found["id"]) == (0, "\ud800")

    def test_messages_go_through_the_template(self, house, many, monkeypatch):
        asked = []
        check = Engine.check
        monkeypatch.setattr(
            Engine, "check", lambda self, ids, p: asked.append(ids) or check(self, ids, p)
        )
        said = [{"role": "user", "content": "one <|im_end|>"}]
        many({"messages": said}, {"messages": said, "thinking": False})
        tokenizer = engine_of(house / "toy").tokenizer
        assert asked == [tokenizer.encode_chat(said, thinking=t) for t in (True, False)]

    def test_an_interrupt_ends_it_between_lines(self, tmp_path):
        lines = [
            {"id": i, "prompt": f"def f{i}(", "max_tokens": 8 if i < 3 else 300, "ignore_eos": True}
            for i in range(12)
        ]
        (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, lines)))
        process = subprocess.Popen(
            [
                *(sys.executable, ROOT / "engine.py", "--device", "cpu", "--batch", "2"),
                *("--prompts", "r.jsonl"),
            ],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        found = [json.loads(line) for line in [first, *process.stdout]]
        err = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
        assert process.wait(60) == 130
        assert err.splitlines()[-1] == f"interrupted: {len(found)} of 12 prompts done"
        assert "Traceback" not in err and 1 <= len(found) < 12
        assert all(f["tokens"] == (8 if f["id"] < 3 else 300) for f in found)


@pytest.fixture
def converse(monkeypatch, call):
    """Type lines into a chat -> (exit code, output, errors, what was asked).

    Of each turn: the prompt's ids, and the position of the first row that was computed for it.
    """

    def run(*said: str, options=()) -> tuple[int, str, str, list[dict]]:
        turns: list[dict] = []
        submit, load = Engine.submit, Engine.load

        def noted(self, prompt, *args, **kwargs):
            turns.append({"ids": prompt})
            return submit(self, prompt, *args, **kwargs)

        def watched(self, **kwargs):
            load(self, **kwargs)
            forward = self.model.forward

            def first(batch, *args):
                turns[-1].setdefault("from", int(batch.positions[0]))
                return forward(batch, *args)

            self.model.forward = first

        monkeypatch.setattr(Engine, "submit", noted)
        monkeypatch.setattr(Engine, "load", watched)
        stdin = io.TextIOWrapper(io.BytesIO("".join(f"{s}\n" for s in said).encode()), "utf-8")
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)
        return *call("--chat", *options), turns

    return run


class TestChat:
    def test_the_second_turn_finds_the_first(self, converse):
        code, _, err, turns = converse("a" * 70, "and now?", options=("--instant",))
        first, second = (t["ids"] for t in turns)
        assert code == 0 and err.count("tokens,") == 2
        assert second[: len(first)] == first and len(second) > len(first) + 5
        assert turns[0]["from"] == 0
        assert turns[1]["from"] >= len(first) // 16 * 16 > 0

    def test_the_miniature(self, converse):
        # Its words are no bytes: the reply, read and written again, is the same tokens.
        options = ("--config", "nano.yaml", "--instant", "--max-tokens", "24")
        code, _, _, turns = converse("import os; " + "x = 1; " * 40, "go on", options=options)
        first, second = (t["ids"] for t in turns)
        assert code == 0 and second[: len(first)] == first
        assert turns[1]["from"] >= len(first) // 64 * 64 > 0

    def test_thinking_and_instant_end_the_prompt_as_the_template_says(self, house, converse):
        tokenizer = engine_of(house / "toy").tokenizer
        for options, thinking in (((), True), (("--instant",), False)):
            turns = converse("hi", options=options)[3]
            said = [{"role": "user", "content": "hi"}]
            assert turns[0]["ids"] == tokenizer.encode_chat(said, thinking=thinking)
        system = [{"role": "system", "content": "be <|im_end|> kind"}, *said]
        turns = converse("hi", options=("--system", "be <|im_end|> kind"))[3]
        assert turns[0]["ids"] == tokenizer.encode_chat(system)

    @pytest.mark.parametrize("control", CONTROLS)
    def test_j4_control_strings_stay_text(self, converse, control):
        options = ("--config", "nano.yaml", "--instant", "--max-tokens", "2")
        turns = converse(f"before {control} after", "before it after", options=options)[3]
        tokenizer = nano().tokenizer
        n_ranks = min(tokenizer.special_ids.values())
        for n, turn in enumerate(turns, start=1):
            assert control in tokenizer.decode(turn["ids"])
            one = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
            harmless = tokenizer.encode_chat([*one * n][: 2 * n - 1], thinking=False)
            controls = [[i for i in ids if i >= n_ranks] for ids in (turn["ids"], harmless)]
            assert controls[0] == controls[1]

    def test_a_turn_that_does_not_fit_is_refused_and_the_chat_goes_on(self, converse):
        code, out, err, turns = converse("x" * 600, "hi", "", options=("--instant",))
        assert code == 0 and len(turns) == 2
        assert "error: prompt:" in err and "do not fit" in err
        assert len(turns[1]["ids"]) < 100  # the refused turn is no part of the conversation

    def test_thoughts_are_kept_apart(self):
        assert commands.reply("so</think>yes", thinking=True) == {
            **{"role": "assistant", "content": "yes", "reasoning_content": "so"},
        }
        assert commands.reply("cut short", thinking=True)["content"] == "cut short"
        assert commands.reply("a</think>b", thinking=False)["content"] == "a</think>b"

    @pytest.mark.parametrize("call_id", ["functions.get_weather:0", "call_ab12"])
    def test_j6_a_history_of_calls(self, house, many, call_id):
        history = [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call_id, "function": {"name": "get_weather"}}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "functions_get_weather_1"},
        ]
        history[1]["tool_calls"][0]["function"]["arguments"] = "{}"
        code, [found], _ = many({"messages": history, "max_tokens": 2})
        prompt = engine_of(house / "toy").tokenizer.encode_chat(history)
        assert (code, found["prompt_tokens"]) == (0, len(prompt))
        assert bytes(i for i in prompt if i < 256).count(call_id.encode()) == 2  # as it came

    def test_on_a_terminal(self, house):
        """Through a pseudo-terminal: asked, answered, asked again, ended by Ctrl-D."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [
                *(sys.executable, ROOT / "engine.py", "--config", house / "toy.yaml"),
                *("--device", "cpu", "--chat", "--instant"),
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(theirs)
        seen = b""

        def until(words: bytes, times: int) -> None:
            nonlocal seen
            end = time.monotonic() + 60
            while seen.count(words) < times:
                assert select.select([ours], [], [], end - time.monotonic())[0], seen
                seen += os.read(ours, 4096)

        try:
            for turn in range(2):
                until(b"you> ", turn + 1)
                os.write(ours, b"hello\n")
                until(b"acceptance length", turn + 1)
            until(b"you> ", 3)
            os.write(ours, b"\x04")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        assert b"Traceback" not in seen


_NANO: list[Engine] = []


def nano() -> Engine:
    if not _NANO:
        _NANO.append(Engine(engine_module.config.load("nano.yaml"), "cpu", load=False))
    return _NANO[0]


class TestScore:
    @pytest.mark.parametrize("context", [3, 4, 17, 64, 256])
    @pytest.mark.parametrize("n", [2, 3, 40, 200])
    def test_each_token_once_by_what_its_window_shows(self, house, context, n):
        engine = engine_of(house / "toy", drafter=True, context=context, batch=2)
        engine.use("tree", 8)
        ids = np.random.default_rng(n).integers(0, 250, n).tolist()
        found = commands.text_logprobs(engine, ids)
        expected, window, known = [], context - 1, {}
        for i in range(1, n):
            # Of the windows that begin every half window, the first one that holds token i.
            start = 0 if i < window else ((i - window) // (window // 2) + 1) * (window // 2)
            if start not in known:
                known[start] = log_probabilities(engine, ids[start : start + window])
            expected.append(known[start][i - start - 1, ids[i]])
        assert found.shape == (n - 1,)
        # Float64 sums, rounded to fp32 once: half an ulp of a number below 32 is 9.6e-7.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)

    def test_table(self, house, call, tmp_path):
        text = "naïve text\r\nof two lines\n" * 20
        (tmp_path / "t.txt").write_bytes(text.encode())
        code, out, err = call("--score", tmp_path / "t.txt")
        row = [cell.strip() for cell in out.splitlines()[-1].strip("|").split("|")]
        raw = text.encode()
        assert (code, err) == (0, "")
        assert row[:3] == [str(len(raw) - 1), str(len(raw) - 1), "512"]
        engine = engine_of(house / "toy", context=512)
        lost = -float(commands.text_logprobs(engine, list(raw)).mean(dtype=np.float64))
        assert float(row[3]) == pytest.approx(np.exp(lost), rel=1e-6)
        assert float(row[4]) == pytest.approx(lost / np.log(2), abs=1e-4)

    def test_too_little(self, call, tmp_path):
        (tmp_path / "t.txt").write_text("a")
        assert call("--score", tmp_path / "t.txt")[0] == 2
        (tmp_path / "t.txt").write_text("abc")
        code, _, err = call("--score", tmp_path / "t.txt", "--context", 2)
        assert (code, err) == (2, "error: --score: needs a context of at least 3, got 2\n")


def log_probabilities(engine: Engine, ids: list[int]) -> np.ndarray:
    """From the model's own logits behind each of these ids -> float64 [len(ids), V]."""
    slot = engine.cache.admit()
    logits = feed(engine, slot, ids).astype(np.float64)
    engine.cache.free(slot)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def test_library_lines_of_the_readme():
    """The README's example runs as it stands."""
    text = (ROOT / "README.md").read_text()
    code = text.split("As a library")[1].split("```python")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 14
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("length") >= 1 and len(run.stdout) > 60


def test_params_default_to_the_configs():
    settings = engine_module.config.load("nano.yaml", temperature=0.5, seed=4, max_tokens=9)
    assert engine_module.default_params(settings) == SamplingParams(0.5, seed=4, max_tokens=9)

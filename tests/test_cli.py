"""The command line: what it prints, what it saves, and how it refuses what cannot be."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toy import same_bits, write_checkpoint

import config
import engine
import loader
import spec_decode
from reference import ReferenceOps

ROOT = Path(__file__).resolve().parent.parent
YAML = """
model: {path: toy}
draft: {path: toy/drafter, mode: tree, budget: 8}
decode: {context: 64, batch: 2, max_tokens: 12, prefill_chunk: 32, leaf: 16}
"""
KEYS = [
    *("text", "token_ids", "finish_reason", "mode", "device", "seed", "prompt_tokens", "tokens"),
    *("steps", "acceptance_length", "prefill_s", "decode_s", "tok_per_s"),
]


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A directory with toy.yaml, its checkpoint, and one of other weights; not to be changed."""
    directory = tmp_path_factory.mktemp("cli")
    write_checkpoint(directory / "toy", drafter={})
    write_checkpoint(directory / "other", seed=1)
    (directory / "toy.yaml").write_text(YAML)
    return directory


@pytest.fixture
def own(house, tmp_path) -> Path:
    """A copy of the house, to be broken."""
    return Path(shutil.copytree(house, tmp_path / "house"))


@pytest.fixture
def call(capsys, house):
    """Run the command line -> (exit code, standard output, standard error)."""

    def run(*argv: object, on: Path = house) -> tuple[int, str, str]:
        argv = ["--device", "cpu", *map(str, argv)]
        if "--config" not in argv:
            argv = ["--config", str(on / "toy.yaml"), *argv]
        capsys.readouterr()
        try:
            code = engine.main(argv)
        except SystemExit as leaving:  # argparse
            code = leaving.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def answer(call):
    """Run with --json -> its object, the run having gone well."""

    def run(*argv: object, **options) -> dict:
        code, out, err = call("--json", *argv, **options)
        assert (code, err) == (0, "")
        return json.loads(out.splitlines()[-1])

    return run


def type_in(monkeypatch, text: str | bytes, terminal: bool = False) -> None:
    """What standard input holds."""
    raw = io.BytesIO(text if isinstance(text, bytes) else text.encode())
    stdin = io.TextIOWrapper(raw, encoding="utf-8")
    stdin.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdin", stdin)


class TestJson:
    def test_last_line_is_one_object_with_the_listed_keys(self, call):
        code, out, err = call("--prompt", "hello", "--json")
        assert (code, err) == (0, "")
        found = json.loads(out.splitlines()[-1])
        assert list(found) == KEYS
        assert out.startswith(found["text"] + "\n")  # streamed, once
        assert found["tokens"] == len(found["token_ids"]) == 12
        assert (found["prompt_tokens"], found["mode"], found["device"]) == (5, "tree", "cpu")
        assert (found["finish_reason"], found["seed"]) == ("length", None)
        assert found["acceptance_length"] == pytest.approx(11 / found["steps"], abs=1e-4)
        # The figures are rounded to a microsecond and to 0.001 tok/s.
        assert found["tok_per_s"] == pytest.approx(11 / found["decode_s"], rel=0.01)
        assert found["prefill_s"] > 0

    def test_a_full_context_is_said(self, call):
        full = "the context of 64 tokens is full; the model has no more"
        assert full in call("--prompt", "hello", "--max-tokens", 10**6)[2]
        assert full not in call("--prompt", "hello", "--max-tokens", 4)[2]
        err = call("--prompt", "hello", "--max-tokens", 10**6, "--context", 32)[2]
        assert "32 tokens is full; --context may be up to 64" in err

    def test_without_json_the_text_alone_is_on_standard_output(self, call, answer):
        code, out, err = call("--prompt", "hello")
        assert code == 0
        assert out == answer("--prompt", "hello")["text"] + "\n"
        assert "12 tokens" in err and "length" in err and "tree" in err

    def test_seed_is_reported_and_gives_the_same_text(self, answer):
        first = answer("--prompt", "hello", "--temperature", 1)
        again = answer("--prompt", "hello", "--temperature", 1, "--seed", first["seed"])
        assert again["token_ids"] == first["token_ids"]
        plain = answer(
            *("--prompt", "hello", "--temperature", 1, "--seed", first["seed"]), "--mode", "ar"
        )
        assert plain["token_ids"] == first["token_ids"]

    def test_one_token(self, answer):
        found = answer("--prompt", "hello", "--max-tokens", 1)
        assert (found["tokens"], found["steps"], found["acceptance_length"]) == (1, 0, 0)
        assert found["tok_per_s"] == 0

    def test_a_failed_request_is_exit_code_1(self, call, own):
        def spoil(tensors):
            tensors["model.embed_tokens.weight"][ord("x")] = np.nan

        write_checkpoint(own / "toy", drafter={}, change=spoil)
        code, out, err = call("--prompt", "max", "--json", on=own)
        assert code == 1
        assert json.loads(out.splitlines()[-1])["finish_reason"] == "error"
        assert err.startswith("error: ") and err.count("\n") == 1


class TestPrompt:
    def test_from_standard_input(self, monkeypatch, answer):
        type_in(monkeypatch, "héllo")
        found = answer()
        assert found["prompt_tokens"] == 6
        assert found["token_ids"] == answer("--prompt", "héllo")["token_ids"]

    def test_asked_for_on_a_terminal(self, monkeypatch, call, answer):
        type_in(monkeypatch, "hello\n\n" + "x" * 64 + "\nhello\n", terminal=True)
        code, out, err = call()
        assert code == 0
        assert out.count(answer("--prompt", "hello")["text"]) == 2
        assert [line for line in err.splitlines() if line.startswith("error: ")] == [
            line for line in err.splitlines() if " 64 tokens do not fit" in line
        ]

    def test_bytes_on_a_terminal_that_are_no_text(self, monkeypatch, call):
        type_in(monkeypatch, b"hi\xff\n", terminal=True)
        code, _, err = call()
        assert (code, err) == (0, "error: what was typed: expected UTF-8 text; convert it first\n")

    def test_control_strings_are_text(self, answer):
        assert answer("--prompt", "[EOS][PAD]")["prompt_tokens"] == 10

    @pytest.mark.parametrize("mode", ["ar", "tree"])
    def test_characters_leave_whole(self, monkeypatch, call, mode):
        said = "é€😀中𝄞\n".encode()

        def choose(logits, positions, *_, **__):
            return np.array([said[p - 5] for p in positions], np.int32)

        pieces = []
        monkeypatch.setattr(ReferenceOps, "choose", staticmethod(choose))
        monkeypatch.setattr(
            sys.stdout, "write", lambda text, w=sys.stdout.write: (pieces.append(text), w(text))[1]
        )
        code, out, _ = call("--prompt", "hello", "--mode", mode, "--max-tokens", len(said))
        assert (code, out) == (0, said.decode() + "\n")
        assert "😀" in pieces and "\ufffd" not in out


class TestOverrides:
    def test_mode(self, answer):
        found = {mode: answer("--prompt", "hello", "--mode", mode) for mode in engine.MODES}
        assert [found[mode]["mode"] for mode in engine.MODES] == list(engine.MODES)
        assert len({tuple(f["token_ids"]) for f in found.values()}) == 1
        assert found["ar"]["steps"] == 11

    @pytest.mark.parametrize("budget", [1, 5])
    def test_budget(self, monkeypatch, answer, budget):
        budgets, build = [], spec_decode.build_tree

        def build_tree(root, ids, log_probs, n):
            budgets.append(n)
            return build(root, ids, log_probs, n)

        monkeypatch.setattr(spec_decode, "build_tree", build_tree)
        answer("--prompt", "hello", "--budget", budget)
        assert set(budgets) == {budget}

    def test_model(self, house, answer, monkeypatch):
        other = answer("--prompt", "hello", "--model", house / "other", "--mode", "ar")
        assert other["token_ids"] != answer("--prompt", "hello")["token_ids"]
        monkeypatch.chdir(house)  # --model is relative to the working directory
        again = answer("--prompt", "hello", "--model", "other", "--mode", "ar")
        assert again["token_ids"] == other["token_ids"]

    def test_context_ends_the_text(self, answer):
        found = answer("--prompt", "hello", "--context", 9, "--max-tokens", 100)
        assert (found["tokens"], found["finish_reason"]) == (4, "length")

    def test_config_by_name_from_configs(self, monkeypatch, tmp_path, house, answer):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(config, "CONFIGS", house)
        assert answer("--config", "toy.yaml", "--prompt", "hello")["tokens"] == 12

    def test_config_here_comes_before_configs(self, monkeypatch, tmp_path, house, answer):
        (tmp_path / "toy.yaml").write_text(
            YAML.replace("toy,", "x,").replace("toy", f"{house}/toy")
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(config, "CONFIGS", tmp_path / "none")
        assert answer("--config", "toy.yaml", "--prompt", "hello")["tokens"] == 12

    def test_help_says_how_tokens_are_counted(self, call):
        code, out, _ = call("--help")
        text = " ".join(out.split())
        assert code == 0
        assert "first is the prefill's" in text and "not in token_ids" in text

    def test_help_says_what_holds_without_an_option(self, call):
        """Of every option that takes a value and has one: the parser's, or the config's key."""
        _, out, _ = call("--help")
        text = " ".join(out.split())
        for said in (
            "(nano.yaml)", "checks (auto)", "(tp.size, else 1)", "(draft.mode, else ar)",
            "(draft.budget, else 16)", "(decode.context, else the model's limit)",
            "(decode.batch, else 1)", "(decode.max_tokens, else 256;", "--compare (5)",
            "(decode.temperature, else 0.0)", "(decode.top_p, else 1.0)", "(decode.top_k, else 0)",
        ):  # fmt: skip
            assert said in text


class TestLogits:
    def test_file_holds_ids_and_their_logits(self, tmp_path, answer):
        files = {}
        for mode in engine.MODES:
            file = tmp_path / f"{mode}.npz"
            found = answer("--prompt", "hello", "--mode", mode, "--logits", file)
            with np.load(file) as saved:
                assert sorted(saved) == ["logits", "token_ids"]
                files[mode] = saved["logits"]
                assert saved["token_ids"].tolist() == found["token_ids"]
            assert files[mode].dtype == np.float32 and files[mode].shape == (12, 272)
            assert files[mode].argmax(1).tolist() == found["token_ids"]
        assert same_bits(files["ar"], files["chain"]) and same_bits(files["ar"], files["tree"])


class TestCompare:
    def table(self, out: str) -> list[list[str]]:
        lines = [line for line in out.splitlines() if line.startswith("|")]
        head, rule, *rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
        assert head == ["mode", "tok/s", "acceptance length", "steps", "ratio", "identical"]
        assert rule == ["---"] * 6
        return rows

    @pytest.mark.parametrize("sampled", [(), ("--temperature", 0.8)])
    def test_says_yes(self, call, sampled):
        options = ("--compare", "--repeats", 2, "--budget", 6, "--max-tokens", 8, "--ignore-eos")
        code, out, err = call("--prompt", "hello", *options, *sampled)
        assert (code, err) == (0, "")
        rows = self.table(out)
        assert [row[0] for row in rows] == ["ar", "chain", "tree, 6 nodes", "tree, auto"]
        assert [row[-1] for row in rows] == ["yes"] * 4
        assert rows[0][2:5] == ["1.00", "7", "1.00"]
        assert "identical: yes" in out

    def test_a_difference_is_said_and_is_exit_code_1(self, monkeypatch, call):
        walk = spec_decode.walk

        def careless(tree, choices):  # takes a draft that the target did not choose
            if len(tree) > 1:
                choices = np.array([int(tree.token_ids[1]), *choices[1:].tolist()])
            return walk(tree, choices)

        monkeypatch.setattr(spec_decode, "walk", careless)
        code, out, _ = call("--prompt", "hello", "--compare", "--repeats", 1)
        assert code == 1
        assert [row[-1] for row in self.table(out)][:3] == ["yes", "NO", "NO"]
        assert "identical: yes" not in out

    def test_without_a_drafter_there_is_ar(self, call, own):
        (own / "toy.yaml").write_text("model: {path: toy}\ndecode: {max_tokens: 4}\n")
        code, out, _ = call("--prompt", "hello", "--compare", "--repeats", 1, on=own)
        assert code == 0
        assert [row[0] for row in self.table(out)] == ["ar"]


# ---- bad input ---------------------------------------------------------------------------------


def flags(*argv):
    return lambda house: argv


def prompt_of(text):
    return lambda house: ("--prompt", text)


def settings(text):
    """The config with this text instead of, or (starting with +) behind, its own."""

    def change(house: Path):
        old = (house / "toy.yaml").read_text()
        (house / "toy.yaml").write_text(old + text[1:] if text.startswith("+") else text)
        return ()

    return change


def stating(old, new):
    return lambda house: settings(YAML.replace(old, new))(house)


def file(name, content):
    """A file of the checkpoint with other content (None: gone)."""

    def change(house: Path):
        path = house / "toy" / name
        path.unlink() if content is None else path.write_bytes(content)
        return ()

    return change


def tensors(edit, name="model.safetensors"):
    def change(house: Path):
        path = house / "toy" / name
        held = load_file(path)
        edit(held)
        save_file(held, path)
        return ()

    return change


def truncated(house: Path):
    path = house / "toy" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    return ()


def json_of(name, **changes):
    def change(house: Path):
        path = house / "toy" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return ()

    return change


def taps(ids):
    inside = {"mask_token_id": 5, "target_layer_ids": ids}
    return json_of("drafter/config.json", dflash_config=inside)


def rope(**changes):
    def change(house: Path):
        raw = json.loads((house / "toy/config.json").read_text())
        return json_of("config.json", rope_scaling={**raw["rope_scaling"], **changes})(house)

    return change


def drop(*names):
    return tensors(lambda t: [t.pop(n) for n in names])


HEAD, NORM = "lm_head.weight", "model.norm.weight"
BAD = {  # what is wrong: (how, words that the line must hold)
    "logprobs that nobody prints": (flags("--logprobs", 2), ["--logprobs", "--json"]),
    "repeats of nothing": (flags("--repeats", 2), ["--repeats", "--compare"]),
    "budget of a word": (stating("budget: 8", "budget: some"), ["draft.budget", "some"]),
    "two commands": (flags("--profile", "--compare"), ["--compare and --profile"]),
    "nowhere for a profile's JSON": (flags("--profile", "--json"), ["--json", "--profile"]),
    "unknown key": (stating("context", "contxt"), ["decode.contxt", "context"]),
    "unknown section": (settings("+decoder: {}\n"), ["decoder", "decode"]),
    "value of a wrong type": (stating("12", "twelve"), ["decode.max_tokens", "twelve"]),
    "not YAML": (settings("model: {path: [\n"), ["toy.yaml"]),
    "empty YAML": (settings(""), ["toy.yaml"]),
    "tag of no boolean": (settings("+tp: {size: !!bool x}\n"), ["toy.yaml", "!!bool"]),
    "tag of no integer": (settings('+tp: {size: !!int ""}\n'), ["toy.yaml", "!!int"]),
    "tag of no time": (settings("+tp: {size: !!timestamp x}\n"), ["toy.yaml", "tag"]),
    "key of two lines": (settings('+"a\\nb": 1\n'), ["a\\nb: unknown key"]),
    "orders to a terminal": (settings('model: {path: "\\e[31m"}\n'), ["\\x1b[31m: no such dir"]),
    "no model path": (settings("decode: {batch: 1}\n"), ["model"]),
    "no such config": (flags("--config", "nowhere.yaml"), ["nowhere.yaml"]),
    "config is a directory": (flags("--config", "/"), ["/"]),
    "no such model": (flags("--model", "/nowhere"), ["/nowhere"]),
    "no such drafter": (stating("toy/drafter", "toy/nobody"), ["toy/nobody"]),
    "no config.json": (file("config.json", None), ["config.json"]),
    "config.json not JSON": (file("config.json", b"{"), ["config.json"]),
    "config.json not an object": (file("config.json", b"[]"), ["config.json", "object"]),
    "config.json not UTF-8": (file("config.json", b"\xff\xfe{}"), ["config.json"]),
    "config.json lacks a key": (file("config.json", b"{}"), ["config.json", "missing"]),
    "config contradicts": (stating("toy}", "toy, hidden_size: 65}"), ["hidden_size", "65", "64"]),
    "layers contradict": (
        settings('+layers: [{range: "0-1", kind: dense}]\n'),
        ["layers[0]", "layer 1", "moe"],
    ),
    "no weights": (file("model.safetensors", None), ["model.safetensors"]),
    "truncated weights": (truncated, ["model.safetensors", "truncated"]),
    "weights are no weights": (file("model.safetensors", b"hello, world"), ["model.safetensors"]),
    "missing tensors, all named": (drop(HEAD, NORM), [HEAD, NORM]),
    "unknown tensor": (tensors(lambda t: t.update(extra=t[NORM].copy())), ["extra"]),
    "wrong dtype": (
        tensors(lambda t: t.update({NORM: t[NORM].astype(np.float16)})),
        [NORM, "F16", "BF16"],
    ),
    "wrong shape": (tensors(lambda t: t.update({NORM: t[NORM][:-1].copy()})), [NORM, "63", "64"]),
    "drafter lacks a tensor": (
        tensors(lambda t: t.pop("fc.weight"), "drafter/model.safetensors"),
        ["fc.weight"],
    ),
    "drafter of another target": (json_of("drafter/config.json", vocab_size=273), ["vocab_size"]),
    "tap beyond the layers": (
        taps([2]),
        ["target_layer_ids", "2"],
    ),
    "tap named twice": (
        taps([1, 1]),
        ["target_layer_ids", "ascending", "[1, 1]"],
    ),
    "taps in another order": (
        taps([1, 0]),
        ["target_layer_ids", "ascending", "[1, 0]"],
    ),
    "rope beyond float64": (rope(beta_fast=1e308), ["beta_fast", "1e+09", "1e+308"]),
    "rope of a huge scale": (rope(mscale_all_dim=1e308), ["mscale_all_dim", "1e+09"]),
    "control string of no text": (
        file("tokenizer_config.json", b'{"bos_token": {"id": 1}}'),
        ["tokenizer_config.json", "bos_token", "content", "{'id': 1}"],
    ),
    "no vocabulary": (file("tiktoken.model", None), ["tiktoken.model"]),
    "unreadable vocabulary": (file("tiktoken.model", b"\x00\xff" * 9), ["tiktoken.model"]),
    "empty vocabulary": (file("tiktoken.model", b""), ["tiktoken.model"]),
    "unreadable tokenizer settings": (file("tokenizer_config.json", b"{"), ["tokenizer_config"]),
    "end id outside": (file("generation_config.json", b'{"eos_token_id": 272}'), ["eos_token_id"]),
    "end id no id": (file("generation_config.json", b'{"eos_token_id": "x"}'), ["eos_token_id"]),
    "prompt that does not fit": (prompt_of("x" * 64), ["64"]),
    "prompt far too long": (prompt_of("x" * 100_000), ["100000", "64"]),
    "empty prompt": (prompt_of(""), ["prompt"]),
    "temperature -1": (flags("--temperature=-1"), ["--temperature", "-1"]),
    "temperature NaN": (flags("--temperature", "nan"), ["--temperature", "nan"]),
    "temperature infinite": (flags("--temperature", "inf"), ["--temperature", "inf"]),
    "temperature 101": (flags("--temperature", "101"), ["temperature", "101", "100"]),
    "top_p 0": (flags("--top-p", "0"), ["--top-p", "0"]),
    "top_p 2": (flags("--top-p", "2"), ["--top-p", "2"]),
    "top_p NaN": (flags("--top-p", "nan"), ["--top-p", "nan"]),
    "top_k -2": (flags("--top-k=-2"), ["--top-k", "-2"]),
    "budget 0": (flags("--budget", "0"), ["--budget", "0"]),
    "budget -1": (flags("--budget=-1"), ["--budget", "-1"]),
    "max_tokens 0": (flags("--max-tokens", "0"), ["--max-tokens", "0"]),
    "seed -1": (flags("--seed=-1"), ["--seed", "-1"]),
    "seed of 65 bits": (flags("--seed", str(2**64)), ["--seed", str(2**64)]),
    "context 0": (flags("--context", "0"), ["--context", "0"]),
    "context beyond the model's": (flags("--context", "65"), ["context", "65", "64"]),
    "context and batch that no memory holds": (
        stating("batch: 2", "batch: 2, pages: 9999999999999"),
        ["GiB of memory", "the cache", "decode.pages"],
    ),
    "page tables that no memory holds": (flags("--batch", 65536), ["GiB", "decode.batch"]),
    "budget of plain decoding": (flags("--budget", 4, "--mode", "ar"), ["--budget 4", "mode tree"]),
    "budget of a chain": (
        flags("--budget", "auto", "--mode", "chain"),
        ["--budget auto", "mode tree", "the mode is chain", "--mode tree"],
    ),
    "mode of a comparison": (flags("--compare", "--mode", "ar"), ["--mode", "--compare"]),
    "repeats without end": (flags("--compare", "--repeats", 10**9), ["--repeats", "10000"]),
    "stop that is no text": (flags("--stop", os.fsdecode(b"\xff")), ["--stop", "UTF-8"]),
    "system that is no text": (
        flags("--chat", "--system", os.fsdecode(b"\xff")),
        ["--system", "UTF-8"],
    ),
    "repeats 0": (flags("--compare", "--repeats", "0"), ["--repeats", "0"]),
    "tp 3": (flags("--tp", "3"), ["--tp", "3"]),
    "tp that cuts a group": (flags("--tp", "8"), ["tp.size", "4"]),
    "tree without a drafter": (settings("model: {path: toy}\ndraft: {mode: tree}\n"), ["draft"]),
    "logits into no directory": (flags("--logits", "/nowhere/x.npz"), ["--logits", "/nowhere"]),
    "logits without a name": (flags("--logits", ""), ["--logits", "got none"]),
    "trace without a name": (flags("--trace", ""), ["--trace", "got none"]),
    "one file for two": (flags("--logits", "x.svg", "--trace", "x.svg"), ["--logits and --trace"]),
}
NO_TEXT = {  # how a file is made, and what --score and --prompts say of it
    "nothing there": (lambda path: None, *["no such file"] * 2),
    "a directory": (Path.mkdir, *["is a directory; name a file"] * 2),
    "a pipe": (os.mkfifo, *["is a pipe or a device; write it to a file first"] * 2),
    "no UTF-8": (lambda path: path.write_bytes(b"caf\xe9"), *["expected UTF-8 text"] * 2),
    "empty": (Path.touch, "expected at least two tokens, got 0", "in each line, found none"),
    "blank": (lambda path: path.write_text("\n"), "expected at least two", "found none"),
}


class TestBadInput:
    @pytest.mark.parametrize("what", BAD)
    def test_one_line_exit_code_2(self, monkeypatch, call, own, what):
        change, words = BAD[what]
        argv = change(own)

        def load(*_, **__):
            pytest.fail("weights were loaded before the mistake was said")

        monkeypatch.setattr(loader, "stream_target", load)
        prompt = () if "--prompt" in argv else ("--prompt", "hello")
        code, out, err = call(*argv, *prompt, on=own)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.endswith("\n")
        assert err.count("\n") == 1 and len(err) < 1000
        for word in words:
            assert word in err

    @pytest.mark.parametrize(
        "argv",
        [
            ["--mode", "forest"],
            ["--budget", "many"],
            ["--budget", "1.5"],
            ["--temperature", "warm"],
            ["--device", "abacus"],
            ["--nonsense"],
            ["--prompt"],
        ],
    )
    def test_usage(self, call, argv):
        code, out, err = call(*argv)
        assert (code, out) == (2, "")
        assert err.startswith("usage: ") and "error: " in err and "Traceback" not in err

    @pytest.mark.parametrize("text", ["", b"caf\xe9"], ids=["nothing", "not UTF-8"])
    def test_standard_input(self, monkeypatch, call, text):
        type_in(monkeypatch, text)
        code, out, err = call()
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1

    def test_prompt_that_is_no_text(self, call):
        # How Python spells bytes of an argument that are no UTF-8.
        code, out, err = call("--prompt", os.fsdecode(b"caf\xe9"))
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1

    @pytest.mark.parametrize("flag", ["--score", "--prompts"])
    @pytest.mark.parametrize("what", NO_TEXT)
    def test_a_file_of_no_text(self, call, tmp_path, what, flag):
        make, *words = NO_TEXT[what]
        make(tmp_path / "x")
        code, out, err = call(flag, tmp_path / "x")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"error: {flag} {tmp_path / 'x'}: ")
        assert words[flag == "--prompts"] in err
        assert call(flag, "")[::2] == (2, f"error: {flag}: expected the name of a file, got none\n")

    @pytest.mark.parametrize("flag", ["--logits", "--trace"])
    def test_no_permission_is_said_before_anything_is_decoded(
        self, monkeypatch, call, tmp_path, flag
    ):
        asked = []
        monkeypatch.setattr(os, "access", lambda path, how: asked.append(path) or False)
        monkeypatch.setattr(loader, "stream_target", None)  # not called
        code, out, err = call("--prompt", "hello", flag, tmp_path / "x.svg")
        assert (code, out) == (2, "") and err.startswith(f"error: {flag} {tmp_path / 'x.svg'}: ")
        assert "no permission" in err and asked == [tmp_path]

    def test_logits_that_cannot_be_written(self, call, tmp_path):
        (tmp_path / "taken.npz").mkdir()
        code, _, err = call("--prompt", "hello", "--logits", tmp_path / "taken.npz")
        assert code == 2
        assert err.startswith("error: ") and err.count("\n") == 1

    @pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
    def test_a_missing_gpu(self, capsys, house):
        argv = ["--config", str(house / "toy.yaml"), "--prompt", "hello"]
        assert engine.main([*argv, "--device", "cuda"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("error: ") and err.count("\n") == 1
        assert engine.main([*argv, "--device", "auto"]) == 0


class TestProcess:
    """The same through a shell's eyes, from another directory."""

    GOLDEN = ("--config", "golden.yaml", "--model", str(ROOT / "tests/goldens/nano-int4"))

    def start(self, cwd, *argv, **options):
        command = [sys.executable, str(ROOT / "engine.py"), *self.GOLDEN, "--device", "cpu", *argv]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
        return subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, **options
        )

    def test_piped_prompt(self, tmp_path):
        process = self.start(tmp_path, "--json", "--max-tokens", "8")
        out, err = process.communicate("héllo".encode(), timeout=60)
        assert process.returncode == 0
        assert b"vision tensors skipped" in err and err.count(b"\n") == 1
        found = json.loads(out.decode().splitlines()[-1])
        assert list(found) == KEYS
        assert (found["mode"], found["prompt_tokens"]) == ("ar", 6)

    def test_refused(self, tmp_path):
        process = self.start(tmp_path, "--prompt", "x", "--temperature", "nan")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, b"")
        assert err.startswith(b"error: --temperature") and err.count(b"\n") == 1

    @pytest.mark.parametrize("options", [(), ("--json",), ("--compare", "--repeats", "1")])
    def test_a_full_disk(self, tmp_path, options):
        command = [sys.executable, str(ROOT / "engine.py"), *self.GOLDEN, "--device", "cpu"]
        command += ["--prompt", "hello", "--max-tokens", "2", *options]
        with open("/dev/full", "w") as full:
            run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
        *_, line = run.stderr.decode().splitlines()
        assert run.returncode == 2 and b"Traceback" not in run.stderr
        assert line.startswith("error: the output cannot be written: No space left on device")

    @pytest.mark.parametrize(
        "module, status, said", [("tqdm", -signal.SIGINT, b""), ("cupy", 130, b"interrupted\n")]
    )
    def test_an_interrupt_while_modules_load(self, tmp_path, module, status, said):
        """Of the engine's own modules nothing but the end; of those that it loads later a word."""
        (tmp_path / f"{module}.py").write_text("import os\nos.kill(os.getpid(), 2)\n")
        command = [sys.executable, str(ROOT / "engine.py"), "--device", "cuda", "--prompt", "x"]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run(
            command, env=environment, capture_output=True, timeout=60,
            # As a terminal starts it: what a shell puts in the background ignores interrupts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert (run.returncode, run.stdout, run.stderr) == (status, b"", said)

    def test_a_reader_that_leaves(self, tmp_path):
        process = self.start(tmp_path, "--prompt", "hello", "--max-tokens", "60")
        process.stdout.close()
        process.stdin.close()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(60) not in (0, 1)
        assert b"Traceback" not in err and b"Exception" not in err

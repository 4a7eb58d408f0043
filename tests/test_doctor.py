"""--doctor: what it says of sound checkpoints, of broken ones, and where it cannot look."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import launcher
from test_make_checkpoint import SMALL, SMALL_DRAFTER, make_checkpoint, settings_of

import commands
import config
import doctor
import loader
from tokenizer import Tokenizer


@pytest.fixture
def made(tmp_path) -> Path:
    raw = make_checkpoint.write_target(tmp_path / "m", SMALL)
    make_checkpoint.write_drafter(tmp_path / "m" / "drafter", raw["text_config"], SMALL_DRAFTER)
    return tmp_path / "m"


def page(capsys, settings: config.Config, device: str = "cpu") -> tuple[int, dict[str, list]]:
    """Exit code, and {what: [(mark, text)]}."""
    code = doctor.run(settings, device)
    *lines, verdict = capsys.readouterr().out.splitlines()
    found: dict[str, list] = {}
    for line in lines:
        found.setdefault(line[6:16].strip(), []).append((line[:4].strip(), line[18:]))
    failed = sum(mark == "FAIL" for marks in found.values() for mark, _ in marks)
    fit = any(mark == "ok" for mark, _ in found["text"])
    verdict_of_sound = "fit to run" if fit else "nothing to mend, but not fit to run here"
    assert verdict == (f"{failed} of these must be mended" if failed else verdict_of_sound)
    assert code == (0 if fit and not failed else 1) and len(lines) < 40
    return code, found


def only(found: dict[str, list], what: str, mark: str) -> str:
    """The one line on `what`, which has this mark."""
    [(actual, text)] = found[what]
    assert actual == mark, text
    return text


def test_a_sound_checkpoint(made, capsys):
    code, found = page(capsys, settings_of(made))
    assert code == 0
    assert "tensors in 6 shards" in only(found, "files", "ok")
    assert "2 of vision skipped; drafter: 25 tensors" in only(found, "files", "ok")
    assert "1 rank(s)" in only(found, "plan", "ok")
    assert "operations, sums at this rank's shapes on cpu" in only(found, "operations", "ok")
    assert "GB/s" in only(found, "disk", "ok")
    assert "equal bits" in only(found, "text", "ok")
    assert "a turn `hello` is" in only(found, "chat", "skip")
    assert only(found, "links", "skip") == "no GPU"
    assert len(found["tensors"]) == 7 and all(mark == "ok" for mark, _ in found["tensors"])
    assert any("codes -8..7, 16 of 16 used" in text for _, text in found["tensors"])


def test_emulated_kernels_at_a_rank_s_shapes(made, capsys):
    if isinstance(launcher("emulate"), str):
        pytest.skip(launcher("emulate"))  # its text says what the emulator lacks
    settings = settings_of(
        made,
        kernels=config.Kernels(activation="bfloat16"),
        tp=config.TensorParallel(size=2, only_rank=0),
    )
    code, found = page(capsys, settings, "emulate")
    assert code == 0, found
    assert "on emulate, bfloat16" in only(found, "operations", "ok")
    assert "rank 0 of 2" in only(found, "plan", "ok")
    assert "cache" in only(found, "memory", "ok")


def test_weights_from_a_seed(made, capsys):
    for path in made.rglob("*.safetensors*"):
        path.unlink()
    (made / "tiktoken.model").unlink()
    code, found = page(capsys, settings_of(made, model={"load": "generate", "seed": 3}))
    assert code == 0
    assert "weights from seed 3" in only(found, "files", "ok")
    assert only(found, "disk", "skip") == "no files are read"
    assert only(found, "chat", "skip") == "the checkpoint has no tiktoken.model"
    assert "equal bits" in only(found, "text", "ok")


def damage(directory: Path, name: str, data: bytes) -> None:
    """Overwrite the first bytes of a tensor."""
    tensor = loader.open_checkpoint(directory).text_names[name]
    with (directory / tensor.file).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(data)


def test_not_a_number_in_a_tensor(made, capsys):
    damage(made, "lm_head.weight", np.array([np.nan], np.float32).tobytes()[2:])
    code, found = page(capsys, settings_of(made))
    bad = [text for mark, text in found["tensors"] if mark == "FAIL"]
    assert code == 1 and len(bad) == 1
    assert bad[0].startswith("language_model.lm_head.weight: holds NaN or infinity; download")


def test_zeros_in_a_tensor(made, capsys):
    damage(made, "model.layers.1.mlp.experts.0.down_proj.weight_scale", bytes(64 * 8 * 2))
    _, found = page(capsys, settings_of(made))
    [bad] = [text for mark, text in found["tensors"] if mark == "FAIL"]
    assert "experts.0.down_proj.weight_packed: its first rows are all zero" in bad


def test_a_missing_shard_stops_what_needs_it(made, capsys):
    (made / "model-00002-of-000006.safetensors").unlink()
    code, found = page(capsys, settings_of(made))
    assert code == 1
    assert "cannot be opened" in only(found, "files", "FAIL")
    for what in ("plan", "memory", "tensors", "chat", "operations", "text"):
        only(found, what, "skip")
    only(found, "machine", "ok")


def test_a_missing_tensor_fails_the_plan(made, capsys):
    raw = json.loads((made / "config.json").read_text())
    raw["text_config"]["n_routed_experts"] = 17
    (made / "config.json").write_text(json.dumps(raw))
    code, found = page(capsys, settings_of(made))
    assert code == 1 and "missing" in only(found, "plan", "FAIL")


def test_every_rank_is_planned(made, capsys, monkeypatch):
    monkeypatch.setattr(doctor.Engine, "host_bytes", lambda _: 1 << 60)
    settings = settings_of(made, tp=config.TensorParallel(size=2))
    code, found = page(capsys, settings)
    assert "2 rank(s)" in only(found, "plan", "ok")
    assert code == 1 and "use a machine with GPUs" in only(found, "memory", "FAIL")
    assert only(found, "text", "skip") == "the model does not fit here"
    if isinstance(launcher("cuda"), str):  # where a CPU was not asked for: not wrong, but not fit
        code, found = page(capsys, settings, "auto")
        assert code == 1 and "this CPU cannot hold it" in only(found, "memory", "skip")


def test_without_a_gpu(made, capsys):
    if not isinstance(launcher("cuda"), str):
        pytest.skip("a GPU is here, and this is what the doctor says without one")
    code, found = page(capsys, settings_of(made), "auto")
    assert code == 0 and "what follows looks at the CPU" in only(found, "gpus", "skip")
    assert "--device" not in only(found, "gpus", "skip")
    code, found = page(capsys, settings_of(made), "cuda")
    assert code == 1 and "--device cuda" in only(found, "gpus", "FAIL")


def test_the_known_encoding_of_the_published_vocabulary(tmp_path):
    make_checkpoint.write_vocabulary(tmp_path, doctor.KNOWN_VOCABULARY, [163585, 163586])
    made = Tokenizer(tmp_path, doctor.KNOWN_VOCABULARY)
    turn = [{"role": "user", "content": "hello"}]
    assert made.encode_chat(turn, thinking=False) == doctor.KNOWN


def test_an_operation_that_is_off_fails(made, capsys, monkeypatch):
    monkeypatch.setattr(
        doctor.ReferenceOps, "add", lambda self, x, y: self.round(x + y * np.float32(1.01))
    )
    code, found = page(capsys, settings_of(made))  # the fused one adds likewise
    [bad] = [text for mark, text in found["operations"] if mark == "FAIL"]
    assert code == 1 and bad.startswith("add_rms_norm (2, 64, None): off by")


def test_an_operation_with_other_bits_fails(made, capsys, monkeypatch):
    """What stands for two operations must have their bits, however near it is."""
    fused = doctor.ReferenceOps.add_rms_norm

    def near(self, *given):
        total, normed = fused(self, *given)
        return total, normed * np.float32(1 + 2.0**-22)

    monkeypatch.setattr(doctor.ReferenceOps, "add_rms_norm", near)
    code, found = page(capsys, settings_of(made))
    [bad] = [text for mark, text in found["operations"] if mark == "FAIL"]
    assert code == 1 and bad.startswith("add_rms_norm (2, 64, None): other bits than")


def test_the_command_line(made, tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(
        f"model: {{path: {made}}}\ndraft: {{path: {made / 'drafter'}, mode: tree}}\n"
        "decode: {context: 64, prefill_chunk: 64}\n"
    )
    assert commands.main(["--config", str(file), "--device", "cpu", "--doctor"]) == 0
    assert capsys.readouterr().out.endswith("fit to run\n")
    assert commands.main(["--config", str(file), "--doctor", "--compare"]) == 2
    assert "--doctor and --compare: expected one of them" in capsys.readouterr().err

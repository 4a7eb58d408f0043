"""Edit, save, know: what is said of a right, a wrong and a broken edit, with the engine kept."""

from __future__ import annotations

import re

import pytest

import engine
import ops
from config import UserError
from tests import toy
from watch import Watch

SUM = "__fadd_rn(to_float(x[i]), round_to_act(y[i]))"  # of kernel `add`


@pytest.mark.parametrize(
    "device", ("emulate", pytest.param("cuda", marks=pytest.mark.gpu)), indirect=True
)
def test_watch(device: str, tmp_path, monkeypatch, capsys) -> None:
    from tests.conftest import launcher

    for file in ops.FILES:
        (tmp_path / file).write_text((ops.HERE / file).read_text())
    source = tmp_path / "kernels.cu"
    text = source.read_text()
    directory = toy.write_checkpoint(tmp_path / "toy", drafter={})
    with monkeypatch.context() as patch:
        made = ops.CudaOps(launcher=launcher(device), directory=tmp_path)
        patch.setattr(engine, "make_ops", lambda *_: made)
        loaded = toy.engine_of(directory, drafter=True)
    watch = Watch(loaded, [7, 8, 9], 4)

    def saved(new: str) -> tuple[bool | None, str]:
        source.write_text(new)
        return watch.look(), capsys.readouterr().out

    assert watch.begin()
    said = capsys.readouterr().out
    assert re.search(r"(\d+) of \1 op tests agree with their twins\n", said)
    assert "tree against ar: 4 ids equal, bits equal\n" in said
    assert "against the NumPy twins: 4 ids equal" in said and "\n| linear | " in said
    assert watch.look() is None

    right, said = saved(text.replace(SUM, f"1.0f * {SUM}"))  # another kernel, the same bits
    assert right, said
    assert re.search(r"^elementwise: compiled, running [\d.]+ s after the save\n", said)
    assert "against the run before: 4 ids equal, bits equal\n" in said
    assert re.search(r"\ntake_rows_16, \d+ launches: [\d.]+ -> [\d.]+ (emulated ms|µs), ", said)
    assert "linear" not in said.split("\ntake_rows_16,")[1]  # only what has changed is timed

    right, said = saved(text.replace(SUM, SUM.replace("__fadd_rn", "__fsub_rn")))
    assert right is False and "  add-1-1, float32: 1 of 1 values; first at (0, 0)" in said

    moe = tmp_path / "kernels_moe.cu"  # of tensor cores, which this fp32 model does not use
    wrong = moe.read_text().replace("const float low = ", "const float low = 2.0f * ", 1)
    source.write_text(text)
    moe.write_text(wrong)
    assert watch.look() is False
    said = capsys.readouterr().out
    assert re.search(r"\n  moe-\S+, bfloat16: ", said) and "\nDIFFERENT, " in said
    assert "elementwise, experts_mma: compiled" in said
    moe.write_text((ops.HERE / "kernels_moe.cu").read_text())
    assert watch.look()
    capsys.readouterr()

    number = text[: text.index(SUM)].count("\n") + 1
    right, said = saved(text.replace(SUM, "nonsense"))
    assert right is False and "the old kernels stay" in said
    assert re.search(rf"kernels.cu[(:]{number}\b", said)

    gemm = tmp_path / "kernels_gemm.cu"
    gemm.write_text(gemm.read_text().replace("KERNEL read_all", "KERNEL nobody_reads"))
    right, said = saved(text.replace(SUM, f"1.0f * {SUM}"))
    assert "NOT CHECKED, no op test and no step uses it: read\n" in said and right
    gemm.write_text(gemm.read_text().replace("KERNEL nobody_reads", "KERNEL read_all"))
    assert watch.look() is False  # nothing at all was checked
    assert "NOT CHECKED" in capsys.readouterr().out

    right, said = saved(text)
    assert right and re.search(r"\nall right, [\d.]+ s after the save\n$", said), said


def test_watch_needs_kernels(tmp_path) -> None:
    with pytest.raises(UserError, match="--device emulate"):
        Watch(toy.toy_engine(tmp_path), [1])

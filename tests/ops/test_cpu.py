"""Which dtypes a CPU multiplies fast, told from what torch and oneDNN report of it."""

import platform
from dataclasses import dataclass

import pytest
import torch
from operands import doubled, make, plain_xuv
from tolerances import assert_close_to_oracle

from neuronmm_ops.ops import products
from neuronmm_ops.ops.backends import cpu
from neuronmm_ops.ops.definitions import xuv


@dataclass(frozen=True)
class Machine:
    machine: str
    onednn_bf16: bool
    onednn_fp16: bool = False
    avx512_bf16: bool = False
    amx: bool = False


AVX2 = Machine("x86_64", onednn_bf16=False)
AVX512 = Machine("x86_64", onednn_bf16=True)  # oneDNN emulates bf16
AVX512_BF16 = Machine("AMD64", onednn_bf16=True, avx512_bf16=True)
AMX = Machine("x86_64", onednn_bf16=True, onednn_fp16=True, avx512_bf16=True, amx=True)
CAPPED = Machine("x86_64", onednn_bf16=False, avx512_bf16=True, amx=True)  # ONEDNN_MAX_CPU_ISA
ARM = Machine("aarch64", onednn_bf16=True)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    def become(machine: Machine) -> None:
        monkeypatch.setattr(platform, "machine", lambda: machine.machine)
        for name, value in (
            ("_is_mkldnn_bf16_supported", machine.onednn_bf16),
            ("_is_mkldnn_fp16_supported", machine.onednn_fp16),
        ):
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda value=value: value)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: machine.avx512_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: machine.amx)
        monkeypatch.setattr(cpu, "multiplies_fast", cpu.multiplies_fast.__wrapped__)
        monkeypatch.setattr(cpu, "streams_by_mv", cpu.streams_by_mv.__wrapped__)

    return become


@pytest.mark.parametrize(
    ("machine", "bf16", "fp16", "mv"),
    [
        (AVX2, False, False, True),
        (AVX512, False, False, True),
        (AVX512_BF16, True, False, False),
        (AMX, True, True, True),
        (CAPPED, False, False, True),
        (ARM, True, False, True),
    ],
)
def test_what_a_cpu_multiplies_fast(on, machine, bf16, fp16, mv):
    on(machine)
    assert cpu.multiplies_fast(torch.bfloat16) == bf16
    assert cpu.multiplies_fast(torch.float16) == fp16
    assert cpu.multiplies_fast(torch.float32)
    assert cpu.compute_dtype(torch.bfloat16) == (torch.bfloat16 if bf16 else torch.float32)
    assert cpu.compute_dtype(torch.float16, "cuda") == torch.float16
    assert cpu.streams_by_mv(torch.bfloat16) == mv
    assert cpu.streams_by_mv(torch.float16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_one_row_by_mm_and_by_mv(monkeypatch, dtype, bias):
    x, u = make((1, 1, 300), dtype), make((300, 256), dtype, "transposed")
    v = make((256, 40), dtype, "transposed")
    operands = (x, u, v, make((40,), dtype) if bias else None)
    oracle, magnitude = (
        plain_xuv(*(t if t is None else f(t) for t in doubled(*operands)))
        for f in (lambda t: t, torch.abs)
    )
    for rows in (frozenset(), frozenset({dtype})):
        monkeypatch.setattr(products, "_MM_ROWS", rows)
        y = xuv.reference(*operands)
        assert y.shape == (1, 1, 40)
        assert_close_to_oracle(y, oracle, plain_xuv(*operands), magnitude)


@pytest.mark.parametrize("mm_rows", [frozenset(), frozenset({torch.bfloat16})])
def test_other_devices_are_not_asked_of_the_hosts_cpu(monkeypatch, mm_rows):
    monkeypatch.setattr(products, "_MM_ROWS", mm_rows)
    x, u = torch.empty(1, 8, dtype=torch.bfloat16), torch.empty(4, 8, dtype=torch.bfloat16).t()
    assert products.flat(x, u).dim() == (2 if mm_rows else 1)
    assert products.flat(x.to("meta"), u.to("meta")).dim() == 2

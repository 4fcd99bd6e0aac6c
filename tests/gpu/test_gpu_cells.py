"""Cells of the runtime's matrix on a GPU: any two settings meet, on the kernels of the device.

Flash attention is the real one where transformers finds it, and takes half precision alone. Half of
the cells are answered by torch's operations on the device, as where there is no Triton.
"""

import pytest
from cell_choice import covering_cells
from kernel_choice import kernel_choice
from other_attention import attention_on_cpu
from runtime_cells import FACTORS, answers_as_the_oracle
from transformers.utils import is_flash_attn_2_available

pytestmark = pytest.mark.gpu

ATTENTION, DTYPE, KERNEL = (list(FACTORS).index(n) for n in ("attention", "dtype", "kernel"))


def on_the_device(cell):
    """The same with the flash attention that the stand-in stands for."""
    if cell[ATTENTION] != "padding_only":
        return cell
    settings = list(cell)
    settings[ATTENTION] = "flash_attention_2"
    settings[DTYPE] = "bfloat16" if cell[DTYPE] == "float32" else cell[DTYPE]
    return tuple(settings)


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        cells = covering_cells()
        if metafunc.config.getoption("--gpu-device") != "cpu":
            cells = list(dict.fromkeys(map(on_the_device, cells)))
        metafunc.parametrize("cell", cells, ids=["-".join(cell) for cell in cells])


@pytest.fixture
def attention(cell, device):
    name = cell[ATTENTION]
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("needs the package flash-attn")
    if device != "cpu":
        yield name
        return
    with attention_on_cpu(name):
        yield name


def test_the_cache_answers_as_the_oracle(cell, attention, tmp_path):
    with kernel_choice(cell[KERNEL]):
        answers_as_the_oracle(cell, tmp_path)

"""Relative error after each residual pass on three kinds of data, to the printed digits.

The table is arithmetic on seeded numpy data: (x^ - x)^2 over x^2 with x^ the sum of both passes, half of
the channels by L2 norm, 2:4 on the quantized residual, or all of it.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4rl_jax import formats
from fp4rl_jax.quantizers import Quantizer, residual
from fp4rl_jax.quantizers.residual import Residual
from tests.formats.error_table_test import data
from tests.formats.oracle import relative_mse

VENDOR = Quantizer(formats.make("nvfp4", outer="tensor", outer_rounding="fp32"))
FORMATS = {
    "nvfp4": VENDOR,
    "hif4": Quantizer(formats.make("hif4")),
    "mxfp4": Quantizer(formats.make("mxfp4")),
}
NORMAL, OUTLIERS = 0, 2
#: (format, data): half of the channels, 2:4, dense
TABLE = {
    ("nvfp4", NORMAL): ("0.00441", "0.00106", "0.000075"),
    ("hif4", NORMAL): ("0.00338", "0.00138", "0.000036"),
    ("mxfp4", NORMAL): ("0.00648", "0.00167", "0.000220"),
    ("nvfp4", OUTLIERS): ("0.00156", "0.00143", "0.000079"),
    ("hif4", OUTLIERS): ("0.00121", "0.00192", "0.000057"),
    ("mxfp4", OUTLIERS): ("0.00274", "0.00333", "0.000569"),
}
PASSES = (
    ("channels", {"scope": "call"}, "select_first"),
    ("pattern_2_4", {}, "quantize_first"),
    ("dense", {}, "quantize_first"),
)


def error_after(quantizer: Quantizer, column: int, name: str, options: dict, order: str) -> float:
    x = data()[column]
    second = Residual(selection=residual.make(name, **options), quantizer=quantizer, order=order)  # pyright: ignore[reportArgumentType]
    parts = second.split(jnp.asarray(x), quantizer, dtype=jnp.float32)
    return relative_mse(
        x, sum(np.asarray(v if outer is None else v * outer, np.float64) for v, outer in parts)
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{('normal', '', 'outliers')[row[1]]}")
def test_relative_error_after_each_pass(row: tuple[str, int]) -> None:
    fmt, column = row
    for setting, printed in zip(PASSES, TABLE[row], strict=True):
        found = error_after(FORMATS[fmt], column, *setting)
        assert f"{found:.{len(printed) - 2}f}" == printed, setting


def test_whole_blocks_on_normal_data() -> None:
    found = error_after(VENDOR, NORMAL, "blocks", {"scope": "call"}, "select_first")
    assert f"{found:.5f}" == "0.00452"

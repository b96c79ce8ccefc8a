"""Rounding of numbers."""

from __future__ import annotations

import polars as pl

from .elementwise import ColumnStep


class Round(ColumnStep):
    """Round numbers to a number of decimal places, with ties to even; integers stay.

    Prices that differ by very little become equal, so that fewer codes are needed. A value x becomes the integer
    nearest to ``x * 10 ** decimals``, divided by ``10 ** decimals``. Nulls, NaN and infinities stay.

    Args:
        *columns: Names of columns of numbers.
        decimals: The number of decimal places, 0 to 15.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Examples:
        >>> import polars as pl
        >>> from nbdist.recsys.etl import Round, Workflow
        >>> rows = pl.DataFrame({"price": [1.26, 0.75, -2.0]})
        >>> Workflow(Round("price", decimals=1)).fit(rows).transform(rows).collect()["price"].to_list()
        [1.3, 0.8, -2.0]
    """

    kind = "round"
    options = ("decimals",)

    def __init__(self, *columns: str, decimals: int = 0) -> None:
        super().__init__(*columns)
        if isinstance(decimals, bool) or not isinstance(decimals, int) or not 0 <= decimals <= 15:
            raise ValueError(f"Round: decimals must be an integer from 0 to 15, got {decimals!r}")
        self.decimals = decimals

    def _expression(self, column: pl.Expr, dtype: pl.DataType) -> pl.Expr:
        if not dtype.is_float():
            return column
        return column.cast(pl.Float64).round(self.decimals, mode="half_to_even").cast(dtype)

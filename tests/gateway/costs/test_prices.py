"""Prices: what a file may have, and what happens when it changes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gpufn_gateway.costs.price_file import PriceFile
from gpufn_gateway.costs.prices import Prices
from gpufn_platform.process.settings import InvalidSetting


@pytest.mark.parametrize(
    "text",
    [
        "",
        "currency = 'euro'",
        "currency = 'EUR'\ngpu_hour = -1",
        "currency = 'EUR'\ngpu_hour = nan",
        "currency = 'EUR'\ngpu_hour = inf",
        "currency = 'EUR'\ngpu_hour = '1'",
        "currency = 'EUR'\ngpu_hours = 1.0",
        "currency = 'EUR'\n[gpus]\nL4 = -0.1",
        "currency = 'EUR'\n[nodes.'a']\ngpu = 1.0",
        "currency = 'EUR'\n[budgets.'search']\nmonth = 1.0",
        "currency = 'EUR'\n[budgets.'team:A b']\nmonth = 1.0",
        "currency = 'EUR'\n[budgets.'function:../x']\nmonth = 1.0",
        "currency = 'EUR'\n[budgets.'team:search']\nmonth = 1.0\nwarn = 2.0",
        "currency = 'EUR'\n[budgets.'team:search']\nwarn = 0.5",
        "currency",
        "\x00",
    ],
)
def test_a_wrong_file_is_refused(text: str) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        Prices.parse(text.encode())


def test_a_changed_file_is_read_again_and_a_wrong_one_leaves_the_prices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "prices.toml"

    def write(text: str, at: int) -> None:
        path.write_text(text)
        os.utime(path, (at, at))

    write("currency = 'EUR'\ngpu_hour = 1.0", 1)
    file = PriceFile(path)
    seen = []
    for number, text in enumerate(("gpu_hour = 2.0", "gpu_hour = 'free'", "gpu_hour = 3.0"), start=2):
        write(f"currency = 'EUR'\n{text}", number)
        for _ in range(2):
            prices = file.prices()
            assert prices is not None
            seen.append(prices.gpu_hour)
    path.unlink()
    prices = file.prices()
    assert prices is not None
    assert [*seen, prices.gpu_hour] == [2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 2


def test_a_gateway_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        PriceFile(tmp_path / "missing.toml")
    assert PriceFile(None).prices() is None

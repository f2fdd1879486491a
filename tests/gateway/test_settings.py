from __future__ import annotations

import pytest

from gpufn_gateway.settings import MAX_INLINE_BYTES, GatewaySettings, InvalidSetting


def test_defaults_are_for_one_machine() -> None:
    settings = GatewaySettings.from_env({})
    assert (settings.host, settings.port, settings.max_body_bytes) == ("127.0.0.1", 8090, 64 << 20)
    assert settings.max_call_bytes == MAX_INLINE_BYTES


def test_values_come_from_the_environment() -> None:
    environ = {"GPUFN_HOST": "::1", "GPUFN_PORT": "0", "GPUFN_MAX_BODY_BYTES": "1000", "GPUFN_LOG_LEVEL": "debug"}
    settings = GatewaySettings.from_env(environ)
    assert (settings.host, settings.port, settings.max_call_bytes, settings.log_level) == ("::1", 0, 1000, "DEBUG")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUFN_PORT", "eighty"),
        ("GPUFN_PORT", "70000"),
        ("GPUFN_MAX_BODY_BYTES", "0"),
        ("GPUFN_BODY_TIMEOUT_S", "inf"),
        ("GPUFN_BODY_TIMEOUT_S", "nan"),
        ("GPUFN_LOG_LEVEL", "LOUD"),
    ],
)
def test_an_error_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{variable}='{value}'"):
        GatewaySettings.from_env({variable: value})

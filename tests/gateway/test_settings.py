from __future__ import annotations

import msgspec
import pytest

from gpufn_core.protocol import limits
from gpufn_gateway.settings import GatewaySettings
from gpufn_platform.process.settings import InvalidSetting, Sync


def test_defaults_are_for_one_machine() -> None:
    settings = GatewaySettings.from_env({})
    assert (settings.host, settings.port, settings.max_body_bytes) == ("127.0.0.1", 8090, 64 << 20)
    assert [settings.max_call_bytes(each) for each in (limits.MESSAGE_BYTES, 64 << 20, 1 << 20, 4096)] == [
        limits.INLINE_BYTES,
        limits.INLINE_BYTES,
        512 << 10,
        2048,
    ]


def test_values_come_from_the_environment() -> None:
    environ = {"GPUFN_HOST": "::1", "GPUFN_PORT": "0", "GPUFN_MAX_BODY_BYTES": "1000", "GPUFN_LOG_LEVEL": "debug"}
    settings = GatewaySettings.from_env(environ)
    assert (settings.host, settings.port, settings.log_level) == ("::1", 0, "DEBUG")
    assert settings.max_call_bytes(limits.MESSAGE_BYTES) == 1000
    hosts = GatewaySettings.from_env({"GPUFN_ALLOWED_HOSTS": "GPU.example.org, [::1]"}).allowed_hosts
    assert hosts == ("gpu.example.org", "::1")


@pytest.mark.parametrize("field", msgspec.structs.fields(GatewaySettings), ids=lambda field: field.name)
def test_a_value_from_the_environment_has_the_type_of_its_default(field: msgspec.structs.FieldInfo) -> None:
    """Bug: GPUFN_MAX_SHARED_BODIES_BYTES was not parsed, so the size check of each large body failed."""
    text = {bool: "yes", tuple: "10.0.0.1", str: "info", Sync: "always"}.get(type(field.default), "7")
    text = "https://login.example.org" if field.name in ("oidc_issuer", "oidc_jwks_url") else text
    collectors = {"traces_url": "http://collector:4318/v1/traces", "logs_url": "https://collector/v1/logs"}
    text = (collectors | {"traces_ratio": "0.5"}).get(field.name, text)
    text = "s3://bucket/folder" if field.name == "volume_store" else text
    others = {"GPUFN_NATS_STORE": "/store", "GPUFN_TLS_CERT": "chain.pem", "GPUFN_TLS_KEY": "key.pem"}
    others |= {"GPUFN_OIDC_CLIENT_ID": "c", "GPUFN_OIDC_ROLES": "roles.toml"}
    environ = others | {f"GPUFN_{field.name.upper()}": text}
    read = getattr(GatewaySettings.from_env(environ), field.name)
    assert type(read) is type(field.default)


def test_the_settings_of_a_provider() -> None:
    complete = {
        "GPUFN_OIDC_ISSUER": "https://login.example.org/",
        "GPUFN_OIDC_CLIENT_ID": "c",
        "GPUFN_OIDC_ROLES": "roles.toml",
    }
    assert GatewaySettings.from_env(complete).oidc_issuer == "https://login.example.org/"
    for missing in ("GPUFN_OIDC_CLIENT_ID", "GPUFN_OIDC_ROLES"):
        with pytest.raises(InvalidSetting, match=missing):
            GatewaySettings.from_env({name: value for name, value in complete.items() if name != missing})
    wrong = {
        "GPUFN_OIDC_ISSUER": ("http://login.example.org", "https://a@x", "https://x?y", "x"),
        "GPUFN_TOKEN_TTL_S": ("43201", "0"),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidSetting, match=name):
                GatewaySettings.from_env(complete | {name: value})


@pytest.mark.parametrize("variable", ["GPUFN_TLS_CERT", "GPUFN_TLS_KEY"])
def test_a_certificate_needs_its_key(variable: str) -> None:
    with pytest.raises(InvalidSetting, match="GPUFN_TLS_CERT and GPUFN_TLS_KEY"):
        GatewaySettings.from_env({variable: "file.pem"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("GPUFN_PORT", "eighty"),
        ("GPUFN_PORT", "70000"),
        ("GPUFN_KEPT_REVISIONS", "0"),
        ("GPUFN_BODY_TIMEOUT_S", "inf"),
        ("GPUFN_BODY_TIMEOUT_S", "nan"),
        ("GPUFN_LOG_LEVEL", "LOUD"),
        ("GPUFN_ALLOWED_HOSTS", "gpu.example.org:8090"),
        ("GPUFN_ALLOWED_HOSTS", "a,,b"),
    ],
)
def test_an_error_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{variable}='{value}'"):
        GatewaySettings.from_env({variable: value})


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("GPUFN_PORT", "'eighty': a port must be a number from 0 to 65535"),
        ("GPUFN_KEPT_REVISIONS", "'eighty': it must be a positive integer"),
        ("GPUFN_BODY_TIMEOUT_S", "'eighty': it must be a positive number"),
    ],
)
def test_an_error_names_the_needed_setting(variable: str, said: str) -> None:
    with pytest.raises(InvalidSetting) as raised:
        GatewaySettings.from_env({variable: "eighty"})
    assert str(raised.value) == f"{variable}={said}"


def test_sizes_are_quantities_as_for_the_agent() -> None:
    given = {"GPUFN_MAX_BODY_BYTES": "64Mi", "GPUFN_MAX_MODEL_BYTES": "8Gi", "GPUFN_MAX_BODIES_BYTES": "1000"}
    settings = GatewaySettings.from_env(given)
    assert (settings.max_body_bytes, settings.max_model_bytes, settings.max_bodies_bytes) == (64 << 20, 8 << 30, 1000)
    for wrong in ("eighty", "0", "-1"):
        with pytest.raises(InvalidSetting, match=f"^GPUFN_MAX_BODY_BYTES: .*'{wrong}'"):
            GatewaySettings.from_env({"GPUFN_MAX_BODY_BYTES": wrong})


def test_networks_for_webhooks_are_checked_and_a_wrong_one_names_the_variable() -> None:
    given = GatewaySettings.from_env({"GPUFN_WEBHOOK_NETWORKS": "10.0.0.0/8, fd00::/8"})
    assert given.webhook_networks == ("10.0.0.0/8", "fd00::/8")
    for wrong in ("10.0.0.1/8", "intranet", "10.0.0.0/8,,"):
        with pytest.raises(InvalidSetting, match="GPUFN_WEBHOOK_NETWORKS="):
            GatewaySettings.from_env({"GPUFN_WEBHOOK_NETWORKS": wrong})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TRACES_RATIO", "1.5"),
        ("TRACES_RATIO", "-0.1"),
        ("TRACES_RATIO", "nan"),
        ("TRACES_SLOW_S", "-1"),
        ("TRACES_URL", "collector:4318"),
        ("TRACES_URL", "http://collector:4318"),  # without the path, every export would be a 404
        ("LOGS_URL", "http://collector:4318"),
        ("TRACES_URL", "grpc://collector:4317/v1/traces"),
    ],
)
def test_settings_of_traces_that_cannot_work(variable: str, text: str) -> None:
    with pytest.raises(InvalidSetting, match=f"GPUFN_{variable}"):
        GatewaySettings.from_env({f"GPUFN_{variable}": text})


def test_any_setting_of_traces_switches_them_on() -> None:
    assert not GatewaySettings.from_env({"GPUFN_TRACES_RATIO": "0"}).traces
    for variable, text in (("RATIO", "0.1"), ("SLOW_S", "2"), ("URL", "http://collector/v1/traces")):
        assert GatewaySettings.from_env({f"GPUFN_TRACES_{variable}": text}).traces

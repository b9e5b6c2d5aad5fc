"""Triton's options: what they become, which have no meaning here, which are of its past."""

from __future__ import annotations

import pytest

from tests.test_settings import serve
from tritium.errors import TritiumError
from tritium.frontends.grpc_transport import transport
from tritium.observability.tables import settings_table
from tritium.settings import DEPRECATED, NOTICES, NOTICES_WITH_VALUE, ServerSettings
from tritium.settings.parts import flag, groups, parts


def settings(*argv: str) -> ServerSettings:
    return serve(*argv).get(ServerSettings)


def test_options_as_start_scripts_write_them() -> None:
    found = settings(
        "--model-repository=/a",
        "--model-store=/b",
        "--model-control-mode=poll",
        "--repository-poll-secs=2",
        "--http-address=0.0.0.0",
        "--http-port=1",
        "--http-port=2",
        "--log-info=1",
        "--log-warning=false",
        "--log-verbose=1",
        "--log-format=ISO8601",
        "--cache-config=local,size=10",
        "--rate-limit=execution_count",
        "--rate-limit-resource=a:1",
        "--rate-limit-resource=b:2:0",
        "--allow-http=true",
        "--exit-on-error=0",
        "--id=name",
        "--http-restricted-api=health,metadata:key=a=b",
    )
    assert found.model_repository == ("/a", "/b") and found.http_port == 2
    assert (found.log_info, found.log_warning, found.log_verbose, found.log_format) == (True, False, 1, "ISO8601")
    assert found.cache_config == ("local,size=10",) and found.rate_limit_resource == ("a:1", "b:2:0")
    assert (found.exit_on_error, found.server_name, found.repository_poll_secs) == (False, "name", 2)
    assert found.http_restricted_api == ("health,metadata:key=a=b",)


def test_the_environment_parts_values_with_commas_at_semicolons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITIUM_TRACE_CONFIG", "triton,file=/x; level=TENSORS")
    monkeypatch.setenv("TRITIUM_LOAD_MODEL", "a, b")
    found = settings()
    assert found.trace_config == ("triton,file=/x", "level=TENSORS") and found.load_model == ("a", "b")


def test_deprecated_options_are_mapped_and_told() -> None:
    parsed = serve("--trace-file=/t", "--trace-level", "MAX", "--trace-rate=1", "--strict-model-config=true")
    found = parsed.get(ServerSettings)
    assert found.trace_config == ("triton,file=/t", "level=MAX", "rate=1") and found.disable_auto_complete_config
    assert "--trace-rate is deprecated, it was taken as --trace-config=rate=1" in parsed.notices
    assert len(parsed.notices) == 4
    with pytest.raises(TritiumError, match="--trace-file needs a value"):
        serve("--trace-file")
    for flag_of_today, _ in DEPRECATED.values():
        assert hasattr(ServerSettings, flag_of_today.replace("-", "_"))


@pytest.mark.parametrize("name", sorted(NOTICES_WITH_VALUE))
def test_options_without_meaning_take_their_value_along(name: str) -> None:
    for argv in ((f"--{name}=7",), (f"--{name}", "7")):
        parsed = serve(*argv)
        assert parsed.get(ServerSettings) == ServerSettings()
        assert parsed.notices == [f"--{name} changes nothing here: {NOTICES[name]}"]


def test_secrets_are_not_shown() -> None:
    parsed = serve("--http-restricted-api=health:key=hidden", "--grpc-restricted-protocol=health:key=hidden")
    shown = settings_table(parsed.effective)
    assert "hidden" not in shown and "health:key=***" in shown


def test_parts() -> None:
    assert groups("--o", ["a,k=v=w", "k=1", "a,l=2", "k=3"]) == {"a": {"k": "v=w", "l": "2"}, "": {"k": "3"}}
    assert [flag("--o", part) for part in parts("--o", ["a=TRUE", "a=0"])] == [True, False]
    for text in ("", "a", "a,b", "=", "a,=1"):
        with pytest.raises(TritiumError, match="--o"):
            parts("--o", [text])


def test_grpc_transport(tmp_path) -> None:
    found = transport(settings("--grpc-infer-response-compression-level=high", "--grpc-keepalive-time=5"))
    options = dict(found.options)
    assert options["grpc.default_compression_level"] == 3 and options["grpc.keepalive_time_ms"] == 5
    assert found.credentials is None and "grpc.default_compression_level" not in dict(transport(settings()).options)
    with pytest.raises(TritiumError, match="wants --grpc-server-cert FILE"):
        transport(settings("--grpc-use-ssl"))
    with pytest.raises(TritiumError, match=r"--grpc-server-cert .*: No such file"):
        transport(settings("--grpc-use-ssl", f"--grpc-server-cert={tmp_path}/none"))

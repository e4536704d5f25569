"""vLLM's flags for its own server: what a render server does with each."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess

import pytest

from helpers.certificates import write_certificate
from trivet.errors import TrivetError


@pytest.fixture(scope="module")
def listening(frontend):
    """``trivet.render.listening``; vLLM is loaded with ``frontend``."""
    import trivet.render.listening

    return trivet.render.listening


@pytest.fixture
def args_of(frontend, listening):
    return lambda *flags: frontend.parse_flags(["some/model", *listening.DEFAULTS, *flags])


@pytest.fixture
def config_of(listening, args_of):
    return lambda *flags: listening.config_of(object(), args_of(*flags))


@pytest.fixture
def refusal(listening, args_of):
    def told(*flags: str) -> TrivetError:
        with pytest.raises(TrivetError) as caught:
            listening.refuse_others(args_of(*flags))
        assert "\n" not in str(caught.value)
        return caught.value

    return told


@pytest.mark.parametrize(
    "flags",
    [
        ("--uds", "/tmp/x"),
        ("--headless",),
        ("--grpc",),
        ("--api-server-count", "2"),
        ("--h11-max-incomplete-event-size", "9"),
        ("--h11-max-header-count", "9"),
    ],
    ids=lambda flags: flags[0],
)
def test_what_cannot_be_is_refused_by_name(refusal, flags):
    error = refusal(*flags)
    assert error.problem.startswith(f"{flags[0]}: ")
    assert error.mend


def test_what_is_vllms_default_is_no_wish(listening, args_of):
    listening.refuse_others(args_of())
    listening.refuse_others(args_of("--api-server-count", "1"))


@pytest.mark.parametrize(
    ("flags", "level", "access"),
    [
        ((), "warning", False),
        (("--disable-uvicorn-access-log",), "warning", False),
        (("--uvicorn-log-level", "info"), "info", True),
        (("--uvicorn-log-level", "debug"), "debug", True),
        (("--uvicorn-log-level", "error"), "error", False),
        (("--uvicorn-log-level", "info", "--disable-uvicorn-access-log"), "info", False),
    ],
)
def test_requests_are_logged_where_that_is_asked_for(config_of, flags, level, access):
    config = config_of(*flags)
    assert (config.log_level, config.access_log) == (level, access)


def test_endpoints_can_be_left_out_of_the_log(config_of):
    assert "/health" in str(
        config_of("--uvicorn-log-level", "info", "--disable-access-log-for-endpoints", "/health").log_config
    )


@pytest.mark.filterwarnings("ignore:--log-config-file is deprecated")
def test_a_logging_file_is_used(config_of, tmp_path):
    file = tmp_path / "log.json"
    file.write_text('{"version": 1, "disable_existing_loggers": false, "loggers": {"x": {"level": "INFO"}}}')
    assert config_of("--log-config-file", str(file)).log_config["loggers"] == {"x": {"level": "INFO"}}


@pytest.mark.parametrize(("value", "seconds"), [(None, 75), ("5", 5), ("600", 600)])
def test_connections_are_kept_as_long_as_vllms_variable_says_if_it_is_set(config_of, monkeypatch, value, seconds):
    monkeypatch.delenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", value)
    assert config_of().timeout_keep_alive == seconds


def test_a_variable_that_is_no_number_is_one_line(config_of, monkeypatch):
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5s")
    with pytest.raises(TrivetError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        config_of()


def test_flags_that_vllm_refuses_are_looked_for_where_they_are(frontend):
    with pytest.raises(TrivetError) as caught:
        frontend.parse_flags(["some/model", "--no-such-flag"], "the flags behind the model")
    assert "vLLM refuses the render flags" in caught.value.problem
    assert caught.value.mend.startswith("look at the flags behind the model;")
    assert "topology" not in str(frontend.refused_flags(ValueError("x"), "the flags behind the model"))


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, str]:
    """Files by what is wrong with them."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = write_certificate(folder, "one")
    _, other = write_certificate(folder, "two")
    text, locked = folder / "text.pem", folder / "locked.key"
    text.write_text("no PEM")
    subprocess.run(
        ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:x", "-out", locked],
        check=True,
        capture_output=True,
    )
    both = folder / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    named = {"certificate": certificate, "key": key, "other": other, "text": text, "locked": locked, "both": both}
    return {"none": str(folder / "none"), "folder": str(folder), **{name: str(one) for name, one in named.items()}}


@pytest.mark.parametrize(
    ("certificate", "key", "told"),
    [
        ("certificate", "other", "is not the key of"),
        ("certificate", "none", "No such file"),
        ("none", "key", "No such file"),
        ("folder", "key", "Is a directory"),
        ("text", "key", "is no certificate in PEM"),
        ("certificate", "text", "has no private key in PEM"),
        ("certificate", None, "has no private key in PEM"),
        ("certificate", "locked", "is encrypted"),
        (None, "key", "means nothing without a certificate"),
    ],
)
def test_a_bad_pair_is_one_line(refusal, pairs, certificate, key, told):
    flags = ["--ssl-certfile", pairs[certificate]] if certificate else []
    flags += ["--ssl-keyfile", pairs[key]] if key else []
    error = refusal(*flags)
    assert told in error.problem
    assert error.problem.startswith(("--ssl-certfile", "--ssl-keyfile"))
    assert error.mend


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--ssl-ca-certs", "text"), "has no certificate that can be read"),
        (("--ssl-ca-certs", "none"), "No such file"),
        (("--ssl-ciphers", "nonsense"), "--ssl-ciphers: nonsense"),
    ],
)
def test_what_goes_with_a_pair_is_looked_at_too(refusal, pairs, flags, told):
    name, value = flags
    pair = ("--ssl-certfile", pairs["certificate"], "--ssl-keyfile", pairs["key"])
    assert told in refusal(*pair, name, pairs.get(value, value)).problem


@pytest.mark.parametrize("flags", [("--ssl-ca-certs", "certificate"), ("--enable-ssl-refresh",)])
def test_without_a_certificate_the_rest_means_nothing(refusal, pairs, flags):
    assert "means nothing without" in refusal(*(pairs.get(flag, flag) for flag in flags)).problem


def test_a_key_that_is_not_named_cannot_be_watched(refusal, pairs):
    assert "--ssl-keyfile" in refusal("--ssl-certfile", pairs["both"], "--enable-ssl-refresh").mend


@pytest.mark.parametrize("key", ["key", None])
def test_a_good_pair_is_served_with(listening, args_of, pairs, key):
    args = args_of(
        "--ssl-certfile", pairs["certificate" if key else "both"], *(("--ssl-keyfile", pairs["key"]) if key else ())
    )
    listening.refuse_others(args)
    assert listening.config_of(object(), args).ssl is not None


async def test_a_new_certificate_is_read_when_that_is_asked_for(listening, args_of, pairs, tmp_path, monkeypatch):
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    shutil.copy(pairs["certificate"], certificate)
    shutil.copy(pairs["key"], key)
    args = args_of("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--enable-ssl-refresh")
    config = listening.config_of(object(), args)
    read, loop = asyncio.Event(), asyncio.get_running_loop()
    refreshers = []
    theirs = listening.SSLCertRefresher

    class Watched(theirs):
        def __init__(self, *given):
            refreshers.append(given)
            super().__init__(*given)

    monkeypatch.setattr(listening, "SSLCertRefresher", Watched)
    load = config.ssl.load_cert_chain
    monkeypatch.setattr(
        type(config.ssl), "load_cert_chain", lambda self, *given: (load(*given), loop.call_soon_threadsafe(read.set))
    )
    with listening.refreshed(config, args):
        async with asyncio.timeout(30):
            while not read.is_set():  # the watch begins some time after it was asked for
                shutil.copy(pairs["certificate"], certificate)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(read.wait(), 0.5)
    assert refreshers == [(config.ssl, str(key), str(certificate), None)]


def test_without_it_nothing_is_watched(listening, args_of, pairs, monkeypatch):
    monkeypatch.setattr(listening, "SSLCertRefresher", None)  # would raise
    args = args_of("--ssl-certfile", pairs["certificate"], "--ssl-keyfile", pairs["key"])
    with listening.refreshed(listening.config_of(object(), args), args):
        pass

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trivet.topology import Engine, Gateway, Kv, Model, Tier, Tiers, Topology
from trivet.topology.model import OWN_FLAGS, RenderTier, Split, flag_list, flag_names, flag_value

WORD = st.from_regex(r"[a-z][a-z0-9]{0,7}", fullmatch=True)
NAME = st.lists(WORD, min_size=1, max_size=3)
"""The words of a flag's name: joined by dashes on a command line, by underscores in Python."""
VALUE = st.from_regex(r"[a-z0-9./:]{1,12}", fullmatch=True)


def problem(model, **fields) -> str:
    """Why these fields are refused."""
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    return caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    "url",
    ["collector:4318", "grpc://c", "http://", "http://a b", "http://c?x", "http://a:99999", "http://:4318/v1/traces"],
)
def test_a_collector_has_a_url(url):
    assert "a collector's URL looks like http://host:4318" in problem(Gateway, otlp=url)
    assert Gateway(otlp="http://collector:4318").otlp == "http://collector:4318"


def test_a_log_is_text_or_json():
    assert [Gateway().log_format, Gateway(log_format="json").log_format] == ["text", "json"]
    assert "'text' or 'json'" in problem(Gateway, log_format="xml")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, []),
        ([], []),
        (["--block-size", 64], ["--block-size", "64"]),
        ({"enforce-eager": True}, ["--enforce-eager"]),
        ({"enforce-eager": False}, ["--no-enforce-eager"]),
        ({"enforce-eager": None}, []),
        ({"block-size": 64}, ["--block-size", "64"]),
        ({"gpu_memory_utilization": 0.5}, ["--gpu-memory-utilization", "0.5"]),
        ({"--seed": 0}, ["--seed", "0"]),
        ({"middleware": ["a", "b"]}, ["--middleware", "a", "b"]),
        ({"hf-overrides": {"a": 1}}, ["--hf-overrides", '{"a": 1}']),
        ({"chat-template": ""}, ["--chat-template", ""]),
    ],
)
def test_flags_become_a_command_line(written, expected):
    assert flag_list(written) == expected


@pytest.mark.parametrize("written", ["--enforce-eager", 3, True])
def test_flags_that_are_neither_list_nor_mapping_are_refused(written):
    with pytest.raises(ValueError, match="flags are a list"):
        flag_list(written)


@given(st.dictionaries(NAME.map(tuple), VALUE, max_size=5), st.sampled_from("-_"))
def test_a_mapping_of_flags_is_read_back_from_its_command_line(settings, joint):
    flags = flag_list({joint.join(words): value for words, value in settings.items()})
    by_name = {"-".join(words): value for words, value in settings.items()}
    assert flag_names(flags) == list(by_name)
    assert {name: flag_value(flags, name) for name in by_name} == by_name


@given(NAME, VALUE, st.sampled_from("-_"), st.booleans())
def test_every_spelling_of_a_flag_has_the_same_name_and_value(words, value, joint, with_equals):
    written = "--" + joint.join(words)
    flags = [f"{written}={value}"] if with_equals else [written, value]
    name = "-".join(words)
    assert (flag_names(flags), flag_value(flags, name)) == ([name], value)


@given(st.lists(st.tuples(NAME, st.one_of(VALUE, st.booleans())), max_size=5))
def test_flags_written_as_a_list_are_taken_as_they_are(pairs):
    flags = [part for words, value in pairs for part in ("--" + "-".join(words), str(value))]
    assert flag_list(flags) == flags


@given(st.recursive(VALUE | st.integers(), lambda inner: st.dictionaries(WORD, inner, max_size=3), max_leaves=5))
def test_an_object_behind_a_flag_is_json(value):
    flags = flag_list({"hf-overrides": {"value": value}})
    assert json.loads(flags[1]) == {"value": value}


def test_the_last_of_repeated_flags_counts():
    assert flag_value(["--seed", "1", "--seed=2", "--other", "3"], "seed") == "2"


def test_a_flag_that_is_absent_has_no_value():
    assert flag_value(["--seeds", "1", "seed", "-seed"], "seed") is None


def test_a_flag_at_the_end_has_no_value():
    assert flag_value(["--seed"], "seed") is None


@pytest.mark.parametrize(("short", "name"), [("-tp", "tensor-parallel-size"), ("-dp", "data-parallel-size")])
@pytest.mark.parametrize("joint", [" ", "="])
def test_short_flags_are_known_by_their_long_name(short, name, joint):
    flags = f"{short}{joint}2".split()
    assert (flag_names(flags), flag_value(flags, name)) == ([name], "2")


@pytest.mark.parametrize("name", OWN_FLAGS)
@pytest.mark.parametrize("model", [Topology, Tier, Engine])
def test_flags_that_trivet_sets_are_refused_with_the_field_to_use(model, name):
    more = {"tiers": {"mixed": {}}} if model is Topology else {}
    expected = f"Value error, --{name} is set by Trivet: use {OWN_FLAGS[name]} instead"
    assert problem(model, flags=[f"--{name}=x"], **more) == expected
    assert problem(model, flags={name.replace("-", "_"): "x"}, **more) == expected


def test_flags_that_trivet_sets_are_refused_for_rendering_too():
    message = problem(Tiers, render={"flags": ["--port", "1"]}, mixed={})
    assert message == "Value error, --port is set by Trivet: use port instead"


@pytest.mark.parametrize(
    ("flag", "field"), [("-tp=2", "tensor_parallel"), ("--kv-transfer-config.kv_role=kv_both", "kv")]
)
def test_other_ways_to_write_such_a_flag_are_refused_too(flag, field):
    assert problem(Engine, flags=[flag]).endswith(f"use {field} instead")


@pytest.mark.parametrize(
    ("written", "expected"),
    [(True, "1"), (False, "0"), (3, "3"), (0.5, "0.5"), ("x", "x"), (None, "")],
)
def test_environment_values_become_text(written, expected):
    for model in (Tier, Engine):
        assert model(env={"A": written}).env == {"A": expected}
    assert Topology(tiers={"mixed": {}}, env={"A": written}).env == {"A": expected}


def test_one_served_name_may_be_written_without_a_list():
    assert Model(served_names="a").served_names == ["a"]


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        (
            Kv,
            {"connector": "MagicConnector"},
            "unknown connector 'MagicConnector'; Trivet speaks NixlConnector, TrivetConnector",
        ),
        (Tier, {"gpus": [1, 1]}, "the same GPU is named twice"),
        (Tier, {"replicas": 1, "engines": []}, "give replicas or a list of engines, not both"),
        (Engine, {"url": "10.0.0.7:8000"}, "an engine's url looks like http://host:port, with a port from 1 to 65535"),
        (Engine, {"url": "http://"}, "an engine's url looks like http://host:port, with a port from 1 to 65535"),
        *(
            (Engine, {"url": url}, "an engine's url looks like http://host:port, with a port from 1 to 65535")
            for url in ("http://a:99999", "http://a:0", "http://:8000", "http://a:b/v1", "http://[::1")
        ),
        (Engine, {"url": "http://a b"}, "an engine's url looks like http://host:port, with a port from 1 to 65535"),
        (
            Engine,
            {"url": "http://a:1", "port": 2, "gpus": [0]},
            "an engine with url is not started by Trivet, so gpus, port means nothing",
        ),
        (
            Engine,
            {"host": "node-2"},
            "an engine on another host needs a port, so that the gateway knows where it is",
        ),
    ],
)
def test_what_cannot_be_is_refused(model, fields, expected):
    assert problem(model, **fields) == f"Value error, {expected}"


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (Model, {"max_length": 1}),
        (Tier, {"gpus": [-1]}),
        (Tier, {"cores": [-1]}),
        (Tier, {"tensor_parallel": 0}),
        (Tier, {"gpu_memory_utilization": 0}),
        (Tier, {"gpu_memory_utilization": 1.1}),
        (Tier, {"cpu_kv_gib": 0}),
        (Tier, {"replicas": -1}),
        (Tier, {"device": "tpu"}),
        (Engine, {"name": "-a"}),
        (Engine, {"name": "a/b"}),
        (Engine, {"port": 0}),
        (Engine, {"kv_port": 65536}),
        (Gateway, {"port": 65536}),
        (Gateway, {"workers": 0}),
        (Gateway, {"drain_s": -1}),
        (Gateway, {"unknown": 1}),
    ],
)
def test_values_out_of_range_are_refused(model, fields):
    with pytest.raises(ValidationError) as caught:
        model(**fields)
    assert caught.value.errors()[0]["loc"][0] == next(iter(fields))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("http://a:1/", "http://a:1"),
        ("https://a", "https://a"),
        ("http://a:1/engine-0/", "http://a:1/engine-0"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_engine_url_loses_only_its_trailing_slash(written, expected):
    assert Engine(url=written).url == expected


def test_an_engine_with_url_may_have_what_the_gateway_needs():
    engine = Engine(url="http://a:1", name="a", api_key="k", device="cuda")
    assert (engine.name, engine.api_key, engine.device) == ("a", "k", "cuda")


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (Tier(), [Engine()]),
        (Tier(replicas=0), []),
        (Tier(replicas=2), [Engine(), Engine()]),
        (Tier(engines=[]), []),
        (Tier(engines=[Engine(name="a")]), [Engine(name="a")]),
    ],
)
def test_a_tier_lists_its_engines(tier, expected):
    assert tier.listed() == expected


def test_a_tier_with_nothing_behind_it_exists():
    tiers = Tiers.model_validate({"prefill": None, "decode": None})
    assert (tiers.prefill, tiers.decode, tiers.mixed) == (Tier(), Tier(), None)


def test_defaults_have_their_reasons():
    """Each field with a default that a person may wonder about says why it is so."""
    for model in (Model, Kv, Gateway, Split):
        unexplained = [name for name, field in model.model_fields.items() if not field.description]
        assert unexplained == []


def test_where_nothing_is_said_kv_moves_while_prefill_computes():
    assert Kv().connector == "TrivetConnector"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, ("auto", 256, 1.0)),
        ({"split": None}, ("auto", 256, 1.0)),
        ({"split": "always"}, ("always", 256, 1.0)),
        ({"split": "never"}, ("never", 256, 1.0)),
        ({"split": {"min_uncached_tokens": 64}}, ("auto", 64, 1.0)),
        ({"split": {"mode": "auto", "max_handover_s": 0.25}}, ("auto", 256, 0.25)),
        ({"split": {"mode": "never"}}, ("never", 256, 1.0)),
    ],
)
def test_when_requests_are_split(written, expected):
    split = Gateway(**written).split
    assert (split.mode, split.min_uncached_tokens, split.max_handover_s) == expected


@pytest.mark.parametrize(
    "wrong",
    [{"min_uncached_tokens": 1.5}, {"min_uncached_tokens": True}, {"max_handover_s": 0}, {"max_handover_s": "inf"}],
)
def test_thresholds_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError):
        Split(**wrong)


# TLS and CORS


def test_any_website_may_read_answers_unless_told_otherwise_as_with_vllm_serve():
    cors = Gateway().cors
    assert (cors.origins, cors.methods, cors.headers, cors.credentials) == (["*"], ["*"], ["*"], False)
    assert Gateway(cors={"origins": []}).cors.origins == []
    assert Gateway().tls is None


@pytest.mark.parametrize("origin", ["https://page.example", "http://localhost:3000", "null", "chrome-extension://abc"])
def test_an_origin_is_what_browsers_send(origin):
    assert Gateway(cors={"origins": [origin]}).cors.origins == [origin]


@pytest.mark.parametrize(
    ("cors", "words"),
    [
        ({"origins": ["page.example"]}, "'page.example' is no origin"),
        ({"origins": ["https://page.example/"]}, "is no origin"),
        ({"origins": ["https://a, https://b"]}, "is no origin"),
        ({"methods": ["GET, POST"]}, "'GET, POST' is no name"),
        ({"headers": [""]}, "'' is no name"),
        ({"credentials": True}, "with credentials any website could act as its visitor: name the origins"),
    ],
)
def test_what_browsers_could_not_mean_is_refused(cors, words):
    assert words in problem(Gateway, cors=cors)


def test_a_key_alone_is_no_tls():
    assert problem(Gateway, tls={"key": "a.pem"}) == "Field required"


@pytest.mark.parametrize(
    ("flag", "field"),
    [("ssl-keyfile", "gateway.tls"), ("ssl-certfile", "gateway.tls"), ("allowed-origins", "gateway.cors")],
)
def test_vllms_flags_for_them_name_the_field(flag, field):
    assert field in problem(Tier, flags=[f"--{flag}", "x"])


# render servers


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9000",
        "ftp://host:9000",
        "http://",
        "http://a b:9000",
        "http://host:0",
        "http://host:99999",
        "http://host:9000?a=b",
        "http://host:9000#a",
        "http://user:secret@host:9000",
        "",
    ],
)
def test_a_render_server_has_a_url_without_secrets(url):
    assert "is no render server: write http://host:port" in problem(RenderTier, servers=[url])


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/chat/completions/render", "/a/b", "//v1"])
def test_a_render_server_is_named_without_a_path(path):
    """Its endpoints are vLLM's, and known."""
    told = problem(RenderTier, servers=[f"http://host:9000{path}"])
    assert f"leave out {path.rstrip('/')}, as paths are vLLM's: write http://host:port" in told


@pytest.mark.parametrize("value", [False, "off"])
def test_off_is_off_in_quotes_and_without(value):
    """YAML reads it as false."""
    assert RenderTier(fast_tokenizer=value).fast_tokenizer == "off"


@pytest.mark.parametrize("value", [True, 0, None, "", "on"])
def test_what_else_yaml_may_make_of_a_word_is_no_tokenizer(value):
    assert "'auto', 'off'" in problem(RenderTier, fast_tokenizer=value)


def test_render_servers_are_known_without_a_slash_at_the_end():
    urls = ["http://127.0.0.1:9000/", "https://render.example/", "http://[::1]:9000"]
    assert RenderTier(servers=urls).servers == ["http://127.0.0.1:9000", "https://render.example", "http://[::1]:9000"]
    assert problem(RenderTier, servers=["http://a:1", "http://a:1/"]) == "Value error, the same server is named twice"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running", 8),
        ("queued", 8),
        ("queue_s", 8.0),
        ("timeout_s", 8.0),
        ("fallback", "refuse"),
        ("local_below_bytes", 8),
        ("api_key", "k"),
    ],
)
def test_what_is_for_render_servers_needs_some(name, value):
    given = {name: value}
    told = f"Value error, without servers, {name} means nothing: name servers, or leave it out"
    assert problem(RenderTier, **given) == told
    assert problem(RenderTier, servers=[], **given) == told
    assert getattr(RenderTier(servers=["http://a:1"], **given), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running", 0),
        ("running", 1.5),
        ("running", True),
        ("queued", -1),
        ("queue_s", 0),
        ("queue_s", "2"),
        ("timeout_s", 0),
        ("timeout_s", 3601),
        ("fallback", "never"),
        ("local_below_bytes", -1),
        ("api_key", ""),
    ],
)
def test_limits_of_render_servers_are_sensible(name, value):
    assert problem(RenderTier, servers=["http://a:1"], **{name: value})


def test_there_is_an_end_to_render_servers():
    assert problem(RenderTier, servers=[f"http://a:{port}" for port in range(1, 66)])


def test_render_servers_are_for_the_tokens_plane():
    fields = {"tiers": {"mixed": {}, "render": {"servers": ["http://a:1"]}}}
    assert Topology(**fields).tiers.render.servers == ["http://a:1"]
    assert problem(Topology, **fields, gateway={"plane": "text"}) == (
        "Value error, tiers.render.servers needs gateway.plane: tokens; on the text plane the engines render by "
        "themselves"
    )


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("gateway: {}", (60.0, 144)),
        ("gateway: {guard: }", (60.0, 144)),
        ("gateway: {guard: on}", (60.0, 144)),
        ("gateway: {guard: {every_s: 5}}", (5.0, 144)),
        ("gateway: {guard: {prompt_tokens: 600}}", (60.0, 600)),
        ("gateway: {guard: off}", None),
        ("gateway: {guard: 'off'}", None),
    ],
)
def test_how_pairs_are_watched(written, expected):
    guard = Gateway(**(yaml.safe_load(written)["gateway"])).guard
    assert (None if guard is None else (guard.every_s, guard.prompt_tokens)) == expected


@pytest.mark.parametrize("guard", ["often", {"every_s": 0.5}, {"prompt_tokens": 1}, {"every": 3}, 7])
def test_a_guard_that_cannot_be_is_refused(guard):
    with pytest.raises(ValidationError):
        Gateway(guard=guard)

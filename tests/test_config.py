"""The configuration: every key documented, every mistake named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edged import config
from edged.errors import ConfigError
from edged.machine import default_node
from edged.settings import Config, Cpu

EXAMPLE = Path(__file__).parent.parent / "configs" / "edged.toml"


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)


def written(folder: Path, text: str) -> Path:
    path = folder / "edged.toml"
    path.write_text(text, encoding="utf-8")
    return path


def value_of(loaded: Config, key: str) -> Any:
    for name in key.split("."):
        loaded = getattr(loaded, name)
    return loaded


def test_the_example_says_what_the_defaults_are() -> None:
    """configs/edged.toml loads, and loading it is the same as having no file."""
    assert config.load(EXAMPLE) == config.load()


def test_every_key_is_in_the_example_with_a_comment() -> None:
    """Each valid key is written out under its section, in a paragraph that explains it."""
    section, documented, explained = "", [], False
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"\[(\w+)\]", line):
            section, explained = match[1] + ".", False
        elif line.startswith("#"):
            explained = True
        elif match := re.match(r"(\w+) = ", line):
            assert explained, f"{section}{match[1]} has no comment above it"
            documented.append(section + match[1])
    assert documented == config.valid_keys()


@pytest.mark.parametrize(
    ("text", "unknown", "meant"),
    [
        ("[http]\nprot = 1", "http.prot", "http.port"),
        ("[mqtt]\nuser_name = 'x'", "mqtt.user_name", "mqtt.username"),
        ("port = 1", "port", "http.port"),
        ("[htpp]\nport = 1", "htpp", "http"),
        ("[engine]\nchain = ['cpu']", "engine", "engines"),
        ("statedir = '/x'", "statedir", "state_dir"),
    ],
)
def test_an_unknown_key_names_the_nearest(
    tmp_path: Path, text: str, unknown: str, meant: str
) -> None:
    """A misspelt key is an error that says which key was probably meant."""
    with pytest.raises(ConfigError) as error:
        config.load(written(tmp_path, text))
    assert f"unknown key {unknown}" in str(error.value)
    assert re.search(rf"did you mean {re.escape(meant)}\b", str(error.value)), error.value


def test_a_key_like_no_other_gets_no_guess(tmp_path: Path) -> None:
    """No suggestion is better than a silly one."""
    with pytest.raises(ConfigError) as error:
        config.load(written(tmp_path, "zzqqxx = 1"))
    assert str(error.value) == "unknown key zzqqxx"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("http.port=70000", "http.port"),
        ("http.port='8090'", "http.port"),
        ("http.port=true", "http.port"),
        ("cpu.slots=0", "cpu.slots"),
        ("cpu.dtype='int4'", "cpu.dtype"),
        ("generation.temperature=3", "generation.temperature"),
        ("generation.top_p=0", "generation.top_p"),
        ("http.write_timeout_s=0", "http.write_timeout_s"),
        ("drain_timeout_s=-1", "drain_timeout_s"),
        ("drain_timeout_s=inf", "drain_timeout_s"),
        ("queue.aging_s=nan", "queue.aging_s"),
        ("cpu.slots=1000", "cpu.slots"),
        ("cpu.prefill_chunk=100000000000000000000", "cpu.prefill_chunk"),
        ("queue.max_tokens=100000000000000000000", "queue.max_tokens"),
        ("engines.chain=['cpu', 'cpu']", "engines.chain"),
        ("npu.required=true", "npu.required"),
        ("npu.context_gears=[]", "npu.context_gears"),
        ("engines.chain=['npu']", "npu.model"),
        ("npu.context_gears=[0]", "npu.context_gears"),
        ("state_dir=~no-such-user/x", "state_dir"),
        ("engines.chain=[]", "engines.chain"),
        ("engines.chain=['gpu']", "engines.chain"),
        ("mqtt.reply_allow=[1]", "mqtt.reply_allow"),
        ("log.level='loud'", "log.level"),
        ("node='Board 1'", "node"),
        ("http=1", "http"),
        ("mqtt.url.host=1", "mqtt.url"),
    ],
)
def test_a_bad_value_names_its_key(override: str, key: str) -> None:
    """Wrong types and ranges are told with the key first."""
    with pytest.raises(ConfigError) as error:
        config.load(None, (override,))
    assert str(error.value).startswith(key), error.value


@pytest.mark.parametrize("item", ["http.port", "=1", "", " = 1"])
def test_an_override_without_a_key_or_value_is_refused(item: str) -> None:
    """--set wants key=value."""
    with pytest.raises(ConfigError, match="key=value"):
        config.load(None, (item,))


def test_precedence_is_default_then_file_then_set(tmp_path: Path) -> None:
    """The file beats the defaults, --set beats the file, the last --set beats the first."""
    path = written(tmp_path, "[http]\nport = 1000\nhost = '127.0.0.2'\n[log]\nlevel = 'error'")
    loaded = config.load(path, ("http.port=2000", "http.port=3000", "node=from-set"))
    assert (loaded.http.port, loaded.http.host, loaded.log.level, loaded.node) == (
        3000,
        "127.0.0.2",
        "error",
        "from-set",
    )
    assert loaded.cpu.slots == Cpu().slots


def test_set_takes_toml_or_plain_text() -> None:
    """Numbers, lists and booleans are TOML; what is not TOML is text, as a shell user expects."""
    loaded = config.load(
        None,
        (
            "mqtt.url=mqtt://broker.local:1883",
            "mqtt.plain_text=false",
            'http.allowed_hosts=["a", "b"]',
            "model.path=/models/a b.gguf",
        ),
    )
    assert loaded.mqtt.url == "mqtt://broker.local:1883"
    assert loaded.mqtt.plain_text is False
    assert loaded.http.allowed_hosts == ("a", "b")
    assert loaded.model.path == "/models/a b.gguf"


@pytest.mark.parametrize("text", ["42", "true", "1e5", "2024-01-01", "'42'", "board"])
def test_a_key_of_text_takes_text_that_looks_like_something_else(text: str) -> None:
    """A node named 42 needs no second layer of quotes in the shell."""
    assert config.load(None, (f"node={text}",)).node == text.strip("'")


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell leaves `~` alone after `=`, so we do not make a folder of that name."""
    monkeypatch.setenv("HOME", "/home/me")
    loaded = config.load(None, ("state_dir=~/s", "http.unix_socket=~/x.sock"))
    assert (loaded.state_dir, loaded.http.unix_socket) == ("/home/me/s", "/home/me/x.sock")


def test_the_state_folder_does_not_depend_on_who_asks() -> None:
    """A relative state_dir is made absolute once, where the daemon was started."""
    assert config.load(None, ("state_dir=here",)).state_dir == str(Path.cwd() / "here")


def test_a_file_from_windows_loads(tmp_path: Path) -> None:
    """A byte order mark and CRLF are no errors."""
    path = tmp_path / "edged.toml"
    path.write_bytes(b"\xef\xbb\xbf[http]\r\nport = 1234\r\n")
    assert config.load(path).http.port == 1234


@pytest.mark.parametrize(
    ("content", "said"), [(b"a = ", "TOML"), (b"\xff\xfe", "TOML"), (None, "cannot read")]
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    """Syntax, encoding and missing files are configuration errors that name the file."""
    path = tmp_path / "edged.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        config.load(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.168.1.5", "board.local"])
def test_anything_wider_than_loopback_needs_keys(host: str) -> None:
    """No address but loopback is opened without a file of API keys."""
    with pytest.raises(ConfigError, match=r"http\.host.*api_keys_file"):
        config.load(None, (f"http.host={host}",))
    assert config.load(None, (f"http.host={host}", "http.api_keys_file=/k")).http.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    """Loopback addresses work without a key."""
    assert config.load(None, (f"http.host={host}",)).http.host == host


@pytest.mark.parametrize(
    "url", ["mqtt://broker", "mqtts://broker:8883", "mqtt://[::1]:1883", "mqtt://b.example:1883/"]
)
def test_broker_urls_that_work(url: str) -> None:
    """Host, optional port, with or without TLS."""
    assert config.load(None, (f"mqtt.url={url}",)).mqtt.url == url


@pytest.mark.parametrize(
    "url", ["broker", "tcp://b", "mqtt://", "mqtt://b:port", "mqtt://user:pw@b", "mqtt://b/x"]
)
def test_broker_urls_that_do_not(url: str) -> None:
    """Anything else is refused with the two forms that work."""
    with pytest.raises(ConfigError, match=r"mqtt\.url.*mqtts://host"):
        config.load(None, (f"mqtt.url={url}",))


def test_the_default_node_is_stable_and_valid() -> None:
    """The same machine has the same name after every start, and one the broker accepts."""
    names = {config.load().node for _ in range(3)}
    assert len(names) == 1
    assert re.fullmatch(r"[a-z0-9_-]{1,32}", names.pop())


@pytest.mark.parametrize("host", ["Orange Pi!", "x" * 100, "", "böard", "a.example.com"])
def test_the_default_node_is_valid_for_any_host_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host names with odd characters or great length still give a valid node."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert re.fullmatch(r"[a-z0-9_-]{1,32}", default_node())


def test_places_follow_systemd_then_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StateDirectory and RuntimeDirectory win, then XDG_STATE_HOME; an explicit path beats all."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert config.load().state_dir == str(tmp_path / "edged")
    assert config.load().http.unix_socket == str(tmp_path / "edged" / "api.sock")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/edged:/other")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/edged")
    assert config.load().state_dir == "/var/lib/edged"
    assert config.load().http.unix_socket == "/run/edged/api.sock"
    assert config.load(None, ("state_dir=/x", "http.unix_socket=''")).state_dir == "/x"
    assert config.load(None, ("http.unix_socket=''",)).http.unix_socket == ""


LEAVES = st.sampled_from(config.valid_keys())
VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=20), st.just("[]")
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(LEAVES, VALUES), max_size=3))
def test_any_value_loads_or_is_refused_by_name(items: list[tuple[str, Any]]) -> None:
    """Whatever is set, the answer is a valid configuration or a ConfigError that names a key."""
    overrides = tuple(f"{key}={value}" for key, value in items)
    try:
        loaded = config.load(None, overrides)
    except ConfigError as error:
        assert any(key in str(error) for key, _ in items)
    else:
        assert isinstance(msgspec.to_builtins(loaded), dict)

"""Configuration: TOML -> typed, frozen structs; every key is documented in configs/edged.toml.

An unknown key is an error that names the nearest valid one; a bad value names its key.
Order of precedence: defaults < file < --set. Nothing here opens sockets or starts parts.
"""

from __future__ import annotations

import difflib
import hashlib
import ipaddress
import os
import re
import socket
import sys
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from edged.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Gears = Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)]
# Bounded, for inf is a float too: no time-out is longer than a year.
YEAR_S = 366 * 86400.0
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=YEAR_S)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=256)]
ChunkTokens = Annotated[int, msgspec.Meta(ge=1, le=4096)]
EngineName = Literal["npu", "cpu"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections."""


class Http(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Port = 8090
    unix_socket: str = "auto"
    api_keys_file: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: PositiveInt = 1 << 20
    body_timeout_s: PositiveSeconds = 30.0
    write_timeout_s: PositiveSeconds = 10.0
    ping_interval_s: PositiveSeconds = 15.0


class Mqtt(Section, frozen=True):
    url: str = ""
    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    client_id: str = ""
    base: str = "edged/v1"
    reply_allow: tuple[str, ...] = ("edged/v1/reply/#",)
    plain_text: bool = True
    max_request_bytes: PositiveInt = 256 * 1024
    max_inflight: PositiveInt = 64
    chunk_interval_s: PositiveSeconds = 0.15
    keepalive_s: PositiveInt = 30
    reconnect_max_s: PositiveSeconds = 60.0


class Model(Section, frozen=True):
    path: str = ""
    name: str = ""
    context_tokens: Count = 0


class Cpu(Section, frozen=True):
    slots: Slots = 8
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    prefill_chunk: ChunkTokens = 64
    dtype: Literal["auto", "int8", "fp32"] = "auto"


class Npu(Section, frozen=True):
    required: bool = False
    model: str = ""
    twin: str = ""
    slots: Slots = 8
    context_gears: Gears = (512, 2048)
    batch_gears: Gears = (1, 4, 8)
    prefill_chunk: ChunkTokens = 64
    dtype: Literal["fp16", "fp32"] = "fp16"


class Engines(Section, frozen=True):
    chain: tuple[EngineName, ...] = ("cpu",)
    restart_budget: PositiveInt = 5
    restart_window_s: PositiveSeconds = 300.0
    restart_backoff_s: PositiveSeconds = 0.5
    restart_backoff_max_s: PositiveSeconds = 60.0
    start_timeout_s: PositiveSeconds = 600.0


class Queue(Section, frozen=True):
    max_requests: PositiveInt = 64
    max_tokens: PositiveInt = 262_144
    aging_s: PositiveSeconds = 10.0


class Generation(Section, frozen=True):
    max_tokens: PositiveInt = 1024
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.7
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Log(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"


class Config(Section, frozen=True):
    node: str = ""
    state_dir: str = ""
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=YEAR_S)] = 20.0
    http: Http = Http()
    mqtt: Mqtt = Mqtt()
    model: Model = Model()
    engines: Engines = Engines()
    cpu: Cpu = Cpu()
    npu: Npu = Npu()
    queue: Queue = Queue()
    generation: Generation = Generation()
    log: Log = Log()


def load(path: Path | None = None, overrides: tuple[str, ...] = ()) -> Config:
    """Read, merge, check. Raises ConfigError naming the key."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # a BOM is no error
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; check --config") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for item in overrides:
        _override(data, item)
    _refuse_unknown_keys(data, Config, "")
    try:
        config = msgspec.convert(data, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_key(str(error))) from None
    return _resolve(_checked(config))


def _override(data: dict[str, Any], item: str) -> None:
    """Apply one `--set a.b=value`: value is TOML if it parses as such, else a plain string.

    A key that holds text takes `42` or `true` as text, too.
    """
    key, equals, text = item.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"--set {item!r} is not of the form key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    if not isinstance(value, str) and (key, str) in _leaves(Config, ""):
        value = text.strip()
    *tables, leaf = key.split(".")
    for name in tables:
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {key}: {name} is not a section")
    data[leaf] = value


def valid_keys() -> list[str]:
    """All dotted keys, in the order of their declaration."""
    return [name for name, _ in _leaves(Config, "")]


def _leaves(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every value, sections opened."""
    for info in msgspec.structs.fields(struct):
        section = _section_of(info.type)
        name = prefix + info.encode_name
        if section is not None:
            yield from _leaves(section, name + ".")
        else:
            yield name, info.type


def _section_of(annotation: Any) -> type[msgspec.Struct] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def _refuse_unknown_keys(data: dict[str, Any], struct: type[msgspec.Struct], prefix: str) -> None:
    known = {info.encode_name: info.type for info in msgspec.structs.fields(struct)}
    for name, value in data.items():
        key = prefix + name
        if name not in known:
            leaves = {k.rsplit(".", 1)[-1]: k for k in valid_keys()}
            close = difflib.get_close_matches(key, valid_keys(), n=1, cutoff=0.6)
            close = close or difflib.get_close_matches(name, leaves, n=1, cutoff=0.6)
            hint = f"; did you mean {leaves.get(close[0], close[0])}?" if close else ""
            raise ConfigError(f"unknown key {key}{hint}")
        section = _section_of(known[name])
        if section is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{key} is a section, not a value")
            _refuse_unknown_keys(value, section, key + ".")


def _with_key(message: str) -> str:
    """msgspec ends its messages with a path such as `$.http.port`: put the key in front."""
    text, _, path = message.rpartition(" - at `$")
    key = path.strip("`.").replace("[...]", "")
    text = text or message
    return f"{key}: {text[:1].lower()}{text[1:]}" if path else text


def _checked(config: Config) -> Config:
    if config.node and not re.fullmatch(r"[a-z0-9_-]{1,32}", config.node):
        raise ConfigError("node: use 1 to 32 characters of a-z, 0-9, _ and -")
    if not config.engines.chain:
        raise ConfigError("engines.chain: name at least one engine (cpu, npu)")
    if len(set(config.engines.chain)) < len(config.engines.chain):
        raise ConfigError("engines.chain: name each engine once")
    if config.npu.required and "npu" not in config.engines.chain:
        raise ConfigError("npu.required: is set, but engines.chain does not name npu")
    if "npu" in config.engines.chain and not (config.npu.model or config.npu.twin):
        raise ConfigError(
            "npu.model: name the folder that holds model.om (`edged export --target om` makes it), "
            "or set npu.twin to try the NPU path on a simulated board"
        )
    if not is_loopback(config.http.host) and not config.http.api_keys_file:
        raise ConfigError(
            f"http.host: {config.http.host} is not loopback; set http.api_keys_file first "
            "(one name:sha256 per line), or use 127.0.0.1 and the Unix socket"
        )
    if config.mqtt.url and not _is_broker_url(config.mqtt.url):
        raise ConfigError(
            "mqtt.url: use mqtt://host[:port] or mqtts://host[:port]; the user goes into "
            "mqtt.username, the password into mqtt.password_file"
        )
    return config


def _is_broker_url(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    bare = parts.path in ("", "/") and not parts.query and not parts.fragment
    named = bool(parts.hostname) and "@" not in parts.netloc and port != 0
    return parts.scheme in ("mqtt", "mqtts") and named and bare


def is_loopback(host: str) -> bool:
    """True for localhost and addresses of the loopback range; "" (all interfaces) is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _resolve(config: Config) -> Config:
    """Fill in what depends on the machine: node name, state folder, Unix socket."""
    try:
        state_dir = Path(config.state_dir).expanduser() if config.state_dir else default_state_dir()
        state_dir = state_dir.absolute()  # children have another working directory
        unix_socket = config.http.unix_socket
        if unix_socket == "auto":
            runtime = os.environ.get("RUNTIME_DIRECTORY") or str(state_dir)
            unix_socket = str(Path(runtime.split(":")[0]) / "api.sock")
        elif unix_socket:
            unix_socket = str(Path(unix_socket).expanduser())
    except RuntimeError:  # a user without a home
        raise ConfigError(
            "state_dir, http.unix_socket: the home folder is unknown; give full paths"
        ) from None
    return msgspec.structs.replace(
        config,
        node=config.node or default_node(),
        state_dir=str(state_dir),
        http=msgspec.structs.replace(config.http, unix_socket=unix_socket),
    )


def default_state_dir() -> Path:
    """systemd's StateDirectory, else $XDG_STATE_HOME/edged, else ~/.local/state/edged."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home) / "edged"


def default_node() -> str:
    """Host name + a stable suffix: all vendor images share one host name.

    The suffix comes from /etc/machine-id (hashed: the id itself should not be published).
    """
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    if machine in ("", "uninitialized"):  # the word systemd leaves there until the first boot ends
        machine = str(uuid.getnode())
    suffix = hashlib.sha256(b"edged" + machine.encode()).hexdigest()[:6]
    host = re.sub(r"[^a-z0-9_-]", "-", socket.gethostname().lower().split(".")[0])[:25] or "edged"
    return f"{host}-{suffix}"

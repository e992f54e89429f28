"""Configuration: TOML -> typed, frozen structs; every key is documented in configs/edged.toml.

An unknown key is an error that names the nearest valid one; a bad value names its key.
Order of precedence: defaults < file < --set. Nothing here opens sockets or starts parts.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from edged.errors import ConfigError
from edged.machine import default_node, default_state_dir
from edged.settings import Config, Levers, Section, Sensors

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_HOURS = r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d"


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
        raise ConfigError("engines.chain: name at least one engine (cpu, npu, openai)")
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
    _check_upstream(config)
    if config.mqtt.url and not _is_broker_url(config.mqtt.url):
        raise ConfigError(
            "mqtt.url: use mqtt://host[:port] or mqtts://host[:port]; the user goes into "
            "mqtt.username, the password into mqtt.password_file"
        )
    _check_levers(config.levers)
    _check_sensors(config.sensors)
    _check_guard(config)
    return config


def _check_guard(config: Config) -> None:
    guard = config.guard
    if guard.critical_c and guard.critical_c <= guard.limit_c:
        raise ConfigError(
            f"guard.critical_c: {guard.critical_c:g} is not above guard.limit_c ({guard.limit_c:g})"
        )
    if config.sensors.stale_s < 2 * guard.period_s:
        raise ConfigError(
            "guard.period_s: must be at most half of sensors.stale_s, or a source that is slow to "
            "answer would count as lost"
        )
    if guard.quiet_hours and not re.fullmatch(_HOURS, guard.quiet_hours):
        raise ConfigError('guard.quiet_hours: use "HH:MM-HH:MM" in local time, or ""')


def _check_sensors(sensors: Sensors) -> None:
    if sensors.good_reads > sensors.of_reads:
        raise ConfigError("sensors.good_reads: may not be more than sensors.of_reads")
    if sensors.stale_s < 2 * sensors.interval_s:
        raise ConfigError("sensors.stale_s: must be at least twice sensors.interval_s")
    if "auto" in sensors.sources and len(sensors.sources) > 1:
        raise ConfigError('sensors.sources: "auto" stands alone; or name each source in order')
    if len(set(sensors.sources)) < len(sensors.sources):
        raise ConfigError("sensors.sources: name each source once")
    if "command" in sensors.sources and not sensors.command:
        raise ConfigError("sensors.command: is empty, but sensors.sources names it")


def _check_levers(levers: Levers) -> None:
    pair = (levers.frequency_get, levers.frequency_set, levers.frequencies_mhz)
    if not any(pair):
        return
    if not all(pair):
        raise ConfigError(
            "levers.frequency_get: goes with frequency_set and frequencies_mhz; set all or none"
        )
    if not any("{mhz}" in word for word in levers.frequency_set):
        raise ConfigError('levers.frequency_set: has no "{mhz}", which stands for the new clock')
    gears = levers.frequencies_mhz
    if len(gears) < 2 or list(gears) != sorted(set(gears)):
        raise ConfigError("levers.frequencies_mhz: at least two clocks, ascending")


def _check_upstream(config: Config) -> None:
    if "openai" not in config.engines.chain:
        return
    if config.engines.chain == ("openai",):
        raise ConfigError(
            "engines.chain: name cpu or npu beside openai: their model counts the tokens, and "
            "serves when the other server does not"
        )
    if not _is_api_url(config.upstream.url):
        raise ConfigError(
            "upstream.url: use http[s]://host[:port][/v1], for engines.chain names openai; a key "
            "goes into upstream.api_key_file"
        )


def _is_api_url(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    named = bool(parts.hostname) and "@" not in parts.netloc and port != 0
    return parts.scheme in ("http", "https") and named and not parts.query and not parts.fragment


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
    engines, chain = config.engines, config.engines.chain
    if engines.fallback == "off" and "npu" in chain and "cpu" in chain[chain.index("npu") :]:
        chain = tuple(name for name in chain if name != "cpu")
    return msgspec.structs.replace(
        config,
        engines=msgspec.structs.replace(engines, chain=chain),
        node=config.node or default_node(),
        state_dir=str(state_dir),
        http=msgspec.structs.replace(config.http, unix_socket=unix_socket),
    )

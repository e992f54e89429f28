"""Settings: every section and key of the configuration, with its default and its bounds.

Structs only: config.py reads and checks them, configs/edged.toml documents each key.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Gears = Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)]
# Bounded, for inf is a float too: no time-out is longer than a year.
YEAR_S = 366 * 86400.0
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=YEAR_S)]
PositiveMhz = Annotated[float, msgspec.Meta(gt=0, le=1e5)]
Percent = Annotated[float, msgspec.Meta(gt=0, le=100)]
Slots = Annotated[int, msgspec.Meta(ge=1, le=256)]
ChunkTokens = Annotated[int, msgspec.Meta(ge=1, le=4096)]
EngineName = Literal["npu", "cpu", "openai"]
SensorName = Literal["auto", "dcmi", "npu-smi", "linux", "command"]


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
    model: str = ""
    slots: Slots = 8
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    prefill_chunk: ChunkTokens = 64
    dtype: Literal["auto", "int8", "fp32"] = "auto"


class Npu(Section, frozen=True):
    required: bool = False
    model: str = ""
    small_model: str = ""
    memory: Literal["shared", "own"] = "shared"
    twin: str = ""
    twin_pace: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    slots: Slots = 8
    context_gears: Gears = (512, 2048)
    batch_gears: Gears = (1, 4, 8)
    prefill_chunk: ChunkTokens = 64
    dtype: Literal["fp16", "fp32"] = "fp16"


class Upstream(Section, frozen=True):
    url: str = ""
    model: str = ""
    kind: Literal["auto", "openai", "vllm", "llama.cpp", "edged"] = "auto"
    api_key_file: str = ""
    ca_file: str = ""
    verify_tls: bool = True
    on_board: bool = False
    max_concurrent: Slots = 8
    connect_timeout_s: PositiveSeconds = 5.0
    first_token_timeout_s: PositiveSeconds = 60.0
    idle_timeout_s: PositiveSeconds = 30.0


class Engines(Section, frozen=True):
    chain: tuple[EngineName, ...] = ("cpu",)
    restart_budget: PositiveInt = 5
    restart_window_s: PositiveSeconds = 300.0
    restart_backoff_s: PositiveSeconds = 0.5
    restart_backoff_max_s: PositiveSeconds = 60.0
    start_timeout_s: PositiveSeconds = 600.0
    fallback: Literal["auto", "warm", "lazy", "off"] = "auto"
    fallback_idle_s: PositiveSeconds = 300.0


class Recover(Section, frozen=True):
    off_max_s: PositiveSeconds = 14_400.0
    climb_after_s: PositiveSeconds = 300.0
    climb_max_s: PositiveSeconds = 14_400.0
    memory_floor_mib: Count = 256
    pressure_some_percent: Percent = 40.0
    pressure_full_percent: Percent = 10.0
    proc: str = "/proc"
    reboot: Literal["never", "idle", "always"] = "never"
    reboot_command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("systemctl", "reboot")
    reboot_budget: PositiveInt = 1
    reboot_window_s: PositiveSeconds = 21_600.0


class Queue(Section, frozen=True):
    max_requests: PositiveInt = 64
    max_tokens: PositiveInt = 262_144
    aging_s: PositiveSeconds = 10.0


class Generation(Section, frozen=True):
    max_tokens: PositiveInt = 1024
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.7
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class Sensors(Section, frozen=True):
    sources: tuple[SensorName, ...] = ("auto",)
    interval_s: PositiveSeconds = 1.0
    standby_interval_s: PositiveSeconds = 15.0
    timeout_s: PositiveSeconds = 5.0
    stale_s: PositiveSeconds = 5.0
    good_reads: Annotated[int, msgspec.Meta(ge=1, le=100)] = 2
    of_reads: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    chip: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    dcmi_library: str = ""
    npu_smi: str = ""
    linux_root: str = "/sys"
    linux_name: str = ""
    command: tuple[str, ...] = ()


class Guard(Section, frozen=True):
    enabled: Literal["auto", "on", "off"] = "auto"
    policy: Literal["edged", "base"] = "edged"
    limit_c: Annotated[float, msgspec.Meta(ge=30, le=120)] = 80.0
    margin_c: Annotated[float, msgspec.Meta(ge=0, le=40)] = 2.0
    critical_c: Annotated[float, msgspec.Meta(ge=0, le=130)] = 0.0
    critical_wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    itl_slo_s: PositiveSeconds = 1.0
    period_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = 1.0
    hysteresis_c: Annotated[float, msgspec.Meta(ge=0, le=40)] = 4.0
    dwell_s: PositiveSeconds = 10.0
    recover_s: PositiveSeconds = 30.0
    grace_s: PositiveSeconds = 5.0
    quiet_hours: str = ""
    quiet_fan_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


class Levers(Section, frozen=True):
    helper_socket: str = "/run/edged-levers/levers.sock"
    frequency_get: tuple[str, ...] = ()
    frequency_set: tuple[str, ...] = ()
    frequencies_mhz: tuple[PositiveMhz, ...] = ()
    timeout_s: PositiveSeconds = 5.0


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
    recover: Recover = Recover()
    cpu: Cpu = Cpu()
    npu: Npu = Npu()
    upstream: Upstream = Upstream()
    queue: Queue = Queue()
    generation: Generation = Generation()
    guard: Guard = Guard()
    sensors: Sensors = Sensors()
    levers: Levers = Levers()
    log: Log = Log()

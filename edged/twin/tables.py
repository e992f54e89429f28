"""TOML files of the twin -> typed structs. An unknown key is an error that names it and the
nearest valid one; a bad value names its key. Used for boards and lab scenarios.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from edged.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Table = TypeVar("Table", bound=msgspec.Struct)


def read(path: Path, struct: type[Table]) -> Table:
    """Raises ConfigError that names the file and the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    return convert(data, struct, str(path))


def convert(data: dict[str, Any], struct: type[Table], where: str) -> Table:
    _refuse_unknown(data, struct, "", where)
    try:
        return msgspec.convert(data, struct, strict=True)
    except msgspec.ValidationError as error:
        text, _, at = str(error).rpartition(" - at `$")
        key = at.strip("`.").replace("[...]", "[]")
        text = text or str(error)
        message = f"{text[:1].lower()}{text[1:]}"
        raise ConfigError(f"{where}: {key + ': ' if key else ''}{message}") from None


def _refuse_unknown(data: object, annotation: Any, key: str, where: str) -> None:
    """Walk the table beside its type; the first key the type does not know is named."""
    struct = _struct_in(annotation)
    if struct is None:
        return
    if isinstance(data, list):
        for index, item in enumerate(data):
            _refuse_unknown(item, struct, f"{key}[{index}]", where)
        return
    if not isinstance(data, dict):
        return  # a wrong type; the conversion says so
    known = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for name, value in data.items():
        inner = f"{key}.{name}" if key else name
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]}?" if close else f"valid keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {inner}; {hint}")
        _refuse_unknown(value, known[name], inner, where)


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct inside `X`, `X | None` or `tuple[X, ...]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((s for a in get_args(annotation) if (s := _struct_in(a)) is not None), None)

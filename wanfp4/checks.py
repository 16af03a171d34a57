"""Checks that policies make of their fields. Each raises PolicyError with what was found and what there is."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

from wanfp4.errors import PolicyError

_T = TypeVar("_T")


def choose(owner: str, name: str, value: object, allowed: Iterable[object]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise PolicyError(f"{owner}.{name}={value!r} does not exist; choose from {', '.join(map(str, allowed))}")


def number(owner: str, name: str, value: object, low: float, high: float, *, whole: bool = False) -> None:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        raise PolicyError(f"{owner}.{name} must be {what} from {low:g} to {high:g}, not {value!r}")


def flag(owner: str, name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise PolicyError(f"{owner}.{name} must be true or false, not {value!r}")


def build(cls: type[_T], data: object, where: str) -> _T:
    """Make the dataclass `cls` from a JSON object; an unknown field is an error that lists the fields that exist."""
    if not isinstance(data, Mapping):
        raise PolicyError(f"{where} must be an object, not {data!r}")
    names = [f.name for f in dataclasses.fields(cast(Any, cls))]
    unknown = sorted(set(data) - set(names))
    if unknown:
        raise PolicyError(f"{where} has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(names)}")
    needed = [
        f.name for f in dataclasses.fields(cast(Any, cls)) if f.default is f.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in data]
    if missing:
        raise PolicyError(f"{where} needs the field {', '.join(map(repr, missing))}")
    return cls(**data)


def sequence(owner: str, name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise PolicyError(f"{owner}.{name} must be a list, not {value!r}")
    return tuple(value)

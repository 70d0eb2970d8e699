"""Transports by name: the built-in ones and plug-ins, and the choice that two agents make.

A plug-in is an entry point in the group `hawk.transports` whose name is the transport's and whose object is a
`Transport` class.  One that cannot be imported is not viable, with the reason; the others never notice.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hawk.errors import HawkError, InvalidArgument, NotViable
from hawk.transports.base import Transport, Viability

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GROUP = "hawk.transports"

_BUILT_IN = {
    "tcp": ("hawk.transports.tcp", "TcpTransport"),
    "shm": ("hawk.transports.shm", "ShmTransport"),
    "verbs": ("hawk.transports.verbs", "VerbsTransport"),
    "cuda": ("hawk.transports.cuda", "CudaTransport"),
    "nixl": ("hawk.transports.nixl", "NixlTransport"),
    "mooncake": ("hawk.transports.mooncake", "MooncakeTransport"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What two agents use between them: `name`, the `reason`, and why the others were `rejected`."""

    name: str
    reason: str
    rejected: dict[str, str]


def _plug_ins() -> dict[str, importlib.metadata.EntryPoint]:
    return {
        entry.name: entry
        for entry in importlib.metadata.entry_points(group=GROUP)
        if entry.name not in _BUILT_IN
    }


def names() -> tuple[str, ...]:
    """Every transport that is installed, usable here or not; the built-in ones first."""
    return (*_BUILT_IN, *sorted(_plug_ins()))


def transport_class(name: str) -> type[Transport]:
    """The class of a transport.

    Raises
    ------
    InvalidArgument
        no transport of that name is installed; the message gives the nearest known one.
    NotViable
        it is a plug-in that cannot be loaded; the message says why.
    """
    if name in _BUILT_IN:
        module, attribute = _BUILT_IN[name]
        found: Any = getattr(importlib.import_module(module), attribute)
        return found  # type: ignore[no-any-return]
    plug_ins = _plug_ins()
    if name not in plug_ins:
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
        raise InvalidArgument(
            "no such transport",
            field="transport",
            got=repr(name),
            expected="one of " + ", ".join(names()),
            hint=f"Did you mean {near[0]!r}?" if near else None,
        )
    try:
        found = plug_ins[name].load()
    except Exception as error:  # a stranger's module may raise anything
        raise NotViable(
            f"the plug-in {name!r} cannot be loaded", got=f"{type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise NotViable(f"the plug-in {name!r} is no Transport class", got=repr(found))
    return found


def viability(name: str) -> Viability:
    """Whether this machine can use a transport; raises `InvalidArgument` only for an unknown name."""
    try:
        return transport_class(name).probe()
    except NotViable as error:
        return Viability(False, str(error))
    except InvalidArgument:
        raise
    except Exception as error:  # noqa: BLE001 - a stranger's probe may raise anything
        return Viability(False, f"its probe failed: {type(error).__name__}: {error}")


def survey() -> dict[str, Viability]:
    """Every installed transport and whether it can be used here."""
    return {name: viability(name) for name in names()}


def configure(name: str, settings: Mapping[str, object]) -> object:
    """An instance of the transport's `Config` from settings by name.

    Raises `InvalidArgument` for an unknown setting, naming the nearest known one, and for a bad value.
    """
    config: Any = transport_class(name).Config
    known = [item.name for item in dataclasses.fields(config)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise InvalidArgument(
                "no such setting",
                field=f"{name}.{key}",
                expected="one of " + ", ".join(known),
                hint=f"Did you mean {near[0]!r}?" if near else None,
            )
    return config(**settings)


def make(name: str, config: object | None = None) -> Transport:
    """A transport, not started; `config` is an instance of its `Config`, or None for the defaults.

    Raises `InvalidArgument` for an unknown name or a config of another class, `NotViable` where it cannot be
    used on this machine.
    """
    cls = transport_class(name)
    if config is not None and not isinstance(config, cls.Config):
        raise InvalidArgument(
            "not this transport's settings",
            field=name,
            got=type(config).__name__,
            expected=cls.Config.__name__,
        )
    verdict = viability(name)
    if not verdict.ok:
        raise NotViable(f"{name} cannot be used here", got=verdict.reason)
    return cls(config)


def require(prefer: Sequence[str]) -> None:
    """Raises `NotViable` with every reason where none of `prefer` can be used on this machine."""
    said = {name: viability(name) for name in prefer}
    if not any(verdict.ok for verdict in said.values()):
        raise none_of({name: verdict.reason for name, verdict in said.items()})


def none_of(why: Mapping[str, str]) -> NotViable:
    """The error of an agent that has no transport at all; `why` not, by name."""
    return NotViable(
        "none of the transports can be used here",
        field="transport.prefer",
        got="; ".join(f"{name}: {reason}" for name, reason in why.items()),
        hint="`hawk doctor` says what each one lacks",
    )


def choose(
    prefer: Sequence[str], local: Mapping[str, Transport], remote: Mapping[str, Mapping[str, str]]
) -> Choice:
    """The first of `prefer` that both sides have and that reaches the peer.

    local   this agent's transports by name
    remote  the peer's endpoints by name, as its `Transport.endpoint` gave them

    Pure, for `Transport.reachable` is.  Raises `NotViable` with every reason where none can be used.
    """
    rejected: dict[str, str] = {}
    for name in dict.fromkeys(prefer):
        why = objection(name, local, remote)
        if why is None:
            reason = "the first choice" if not rejected else f"after {', '.join(rejected)} could not be used"
            return Choice(name, reason, rejected)
        rejected[name] = why
    spare = sorted((set(local) & set(remote)) - set(rejected))
    raise NotViable(
        "no transport can be used with this peer",
        got="; ".join(f"{name}: {why}" for name, why in rejected.items()) or "no preference at all",
        hint=f"Both sides also have {', '.join(spare)}, which the preference leaves out" if spare else None,
    )


def objection(
    name: str, local: Mapping[str, Transport], remote: Mapping[str, Mapping[str, str]]
) -> str | None:
    """Why `choose` would pass this one transport over; None where it is as good as its place in a preference."""
    if name not in local:
        return "not in use on this side"
    if name not in remote:
        return "not offered by the peer"
    reachable: Callable[[Mapping[str, str]], Viability] = local[name].reachable
    try:
        verdict = reachable(remote[name])
    except HawkError as error:
        return str(error)
    return None if verdict.ok else verdict.reason or "not reachable"

"""CURVE keys: one pair for each agent, and the list of the peers whose keys it accepts.

A pair is two small TOML files.  `NAME.key` holds both halves and stays on its machine, readable by its owner
only; `NAME.pub` holds the public half, whose line goes into every peer's peers file:

    [peers]
    d0 = "the public key of d0, 40 characters of Z85"
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from hawk.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY_CHARACTERS = 40
_MOST_BYTES = 1 << 20
"""No key or peers file is larger; whatever is, was named by mistake."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair; both halves are 40 characters of Z85.  The secret never shows in a repr."""

    name: str
    public: str
    secret: str = field(repr=False)


def new_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Writes `NAME.key` (mode 0600, both halves) and `NAME.pub` into `directory`; returns their paths.

    Raises `ConfigError` if the name is not one, if either file is there already, or if one cannot be written;
    in each case nothing new is left behind.
    """
    check_name(name, "name")
    key_path, pub_path = directory / f"{name}.key", directory / f"{name}.pub"
    public_raw, secret_raw = zmq.curve_keypair()
    public, secret = public_raw.decode("ascii"), secret_raw.decode("ascii")
    key_text = (
        f"# The CURVE key of {name}.  Keep it on its machine: whoever has it can pass for {name}.\n"
        f'[curve]\nname = "{name}"\npublic = "{public}"\nsecret = "{secret}"\n'
    )
    pub_text = (
        f"# The public key of {name}, as peers list it in their peers files.\n"
        f'[peers]\n{_toml_key(name)} = "{public}"\n'
    )
    write_new(key_path, key_text, 0o600)
    try:
        write_new(pub_path, pub_text, 0o644)
    except BaseException:
        key_path.unlink(missing_ok=True)
        raise
    return key_path, pub_path


def load_pair(path: Path) -> KeyPair:
    """Reads a `NAME.key` file.

    Raises `ConfigError`, with the file and a remedy, if it is missing, can be read or written by others, is
    not TOML, or holds two halves that do not belong together.
    """
    what = "the key file"
    text = _read(path, what, "Make one with `hawk keys new DIR --name NAME`", private=True)
    content = _parse(text, path, what)
    if "peers" in content and "curve" not in content:
        raise ConfigError(
            "this is a public key, as peers list it, and no key pair",
            field=str(path),
            expected=f"a file such as {path.with_suffix('.key').name}",
            hint="`hawk keys new` wrote both; security.key_file takes the .key file",
        )
    table = _table(content, "curve", path)
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError("the key file has no name", field=f"{path}: curve.name", expected="a string")
    check_name(name, f"{path}: curve.name")
    public = _check_key(table.get("public"), f"{path}: curve.public")
    secret = _check_key(table.get("secret"), f"{path}: curve.secret", secret=True)
    if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise ConfigError(
            "the two halves of the key do not belong together",
            field=f"{path}: curve.public",
            hint="Restore the file, or make a new pair with `hawk keys new DIR --name NAME`",
        )
    return KeyPair(name, public, secret)


def load_peers(path: Path, what: str = "the peers file") -> dict[str, str]:
    """Reads a peers file: the name of each peer and its public key (40 characters of Z85).

    Raises `ConfigError` that lists every line at fault: a name that is none, a key that is none, or two names
    with one key (a peer is told from another by its key alone).
    """
    hint = 'Write [peers] with one line NAME = "PUBLIC KEY" for each peer; `hawk keys peers` writes them'
    table = _table(_parse(_read(path, what, hint), path, what), "peers", path)
    problems: list[str] = []
    peers: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name, value in table.items():
        where = f"{path}: peers.{name}"
        try:
            check_name(name, where)
            key = _check_key(value, where)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if key in owner:
            problems.append(f"{where}: the same key as peers.{owner[key]}; each peer needs its own")
            continue
        peers[name], owner[key] = key, name
    if problems:
        raise ConfigError(f"{path} has {len(problems)} problem(s):", problems=tuple(problems))
    return peers


def merge_peers(path: Path, public: Iterable[Path]) -> dict[str, str]:
    """Adds the keys of `.pub` files (or other peers files) to the peers file `path`, which is made if need be.

    What stands there stays.  Returns the peers that are new.  Raises `ConfigError`, and changes nothing, if a name
    would get a second key, a key a second name, or a file cannot be read or written.
    """
    there = path.exists()
    old = load_peers(path) if there else {}
    text = path.read_text(encoding="utf-8") if there else ""
    peers, owner = dict(old), {key: name for name, key in old.items()}
    for source in public:
        for name, key in load_peers(source, f"the public key file {source.name}").items():
            clash = peers.get(name, key) != key
            if clash or owner.setdefault(key, name) != name:
                raise ConfigError(
                    "this name has another key already" if clash else "this key has another name already",
                    field=f"{source}: peers.{name}",
                    got=key,
                    expected=f"{peers[name]}, as before" if clash else owner[key],
                    hint=f"Remove the old line from {path} if it is out of date" if old else None,
                )
            peers[name] = key
    new = {name: key for name, key in peers.items() if name not in old}
    lines = "".join(f'{_toml_key(name)} = "{key}"\n' for name, key in new.items())
    text = (text.rstrip("\n") or "# Public keys of this agent's peers.\n[peers]") + "\n" + lines
    if _parse(text, path, "the peers file").get("peers") != peers:
        raise ConfigError(
            "lines cannot be added at the end",
            field=str(path),
            expected="[peers] as the last table of the file",
        )
    if new:
        _replace(path, text)
    return new


def is_public_key(value: object) -> bool:
    """Whether `value` is 40 characters of Z85, which is 32 bytes."""
    if not isinstance(value, str) or len(value) != _KEY_CHARACTERS or not value.isascii():
        return False
    # Z85 is base 85 with its own alphabet; a group of five may also overflow 32 bits.
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    for start in range(0, _KEY_CHARACTERS, 5):
        number = 0
        for character in value[start : start + 5]:
            digit = alphabet.find(character)
            if digit < 0:
                return False
            number = number * 85 + digit
        if number >= 1 << 32:
            return False
    return True


def _toml_key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def check_name(name: str, where: str) -> None:
    """Raises `ConfigError` unless an agent can be called that; `where` names the input."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "this is no name for an agent",
            field=where,
            got=repr(name),
            expected="up to 64 letters, digits, dots, dashes or underscores, the first a letter or digit",
        )


def _check_key(value: object, where: str, *, secret: bool = False) -> str:
    if not isinstance(value, str) or not is_public_key(value):
        raise ConfigError(
            "this is no CURVE key",
            field=where,
            # A damaged secret is still most of a secret, and errors end up in logs.
            got="something else" if secret else repr(value)[:80],
            expected="40 characters of Z85",
        )
    return value


def write_new(path: Path, text: str, mode: int) -> None:
    """A new file, whole or not at all; raises `ConfigError` where there is one already or none can be."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except FileExistsError:
        raise ConfigError(
            "there is a file of that name, and keys are never overwritten",
            field=str(path),
            hint="Choose another name or directory, or move the old pair away",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"the key cannot be written: {error.strerror}",
            field=str(path),
            hint="Make the directory, or choose one that you may write into",
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"the key cannot be written: {error.strerror}", field=str(path)) from error


def _replace(path: Path, text: str) -> None:
    """Writes a public file whole or not at all."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"the file cannot be written: {error.strerror}", field=str(path)) from error


def _read(path: Path, what: str, hint: str, *, private: bool = False) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
            if private:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                # A file that holds no pair was named by mistake; to hide it would be no remedy.
                if mode & 0o077 and b"curve" in data:
                    raise ConfigError(
                        f"{what} can be read or written by others",
                        field=str(path),
                        got=f"mode {mode:04o}",
                        expected="0600",
                        hint=f"Run `chmod 600 {path}`; make a new pair if others may have read it",
                    )
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}", field=str(path), hint=hint) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"this cannot be {what}: it is larger than a mebibyte", field=str(path), hint=hint)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what} is not text: {error.reason}", field=str(path), hint=hint) from None


def _parse(text: str, path: Path, what: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{what} is not TOML: {error}",
            field=str(path),
            hint="Correct that line, or make a new file with `hawk keys new`",
        ) from None


def _table(content: dict[str, object], name: str, path: Path) -> dict[str, object]:
    table = content.get(name)
    if not isinstance(table, dict):
        raise ConfigError(
            f"the file has no [{name}] table", field=str(path), expected=f"[{name}]", got=sorted(content)
        )
    return table

import os
from pathlib import Path

import pytest
import zmq

from hawk.control import keys
from hawk.errors import ConfigError


def test_a_pair_is_written_once_and_read_back(tmp_path: Path) -> None:
    key_path, pub_path = keys.new_pair(tmp_path, "d0.lab")
    assert key_path.stat().st_mode & 0o777 == 0o600
    pair = keys.load_pair(key_path)
    assert pair.name == "d0.lab"
    assert zmq.curve_public(pair.secret.encode()) == pair.public.encode()
    assert pair.secret not in repr(pair)
    # The .pub file is a peers file of one.
    assert keys.load_peers(pub_path) == {"d0.lab": pair.public}
    before = key_path.read_bytes(), pub_path.read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        keys.new_pair(tmp_path, "d0.lab")
    assert (key_path.read_bytes(), pub_path.read_bytes()) == before


def test_a_public_file_in_the_way_leaves_no_half_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "p0.pub").write_text("mine")
    with pytest.raises(ConfigError, match=r"p0\.pub"):
        keys.new_pair(tmp_path, "p0")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p0.pub"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b", "x" * 65, 'a"b', "ä"])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        keys.new_pair(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Make the directory"):
        keys.new_pair(tmp_path / "none", "d0")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path, _ = keys.new_pair(tmp_path, "d0")
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        keys.load_pair(path)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_public_key_in_its_place_is_called_that(tmp_path: Path, mode: int) -> None:
    _, path = keys.new_pair(tmp_path, "d0")
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=r"this is a public key.*d0\.key") as caught:
        keys.load_pair(path)
    assert "chmod" not in str(caught.value)


def test_public_keys_are_merged_into_a_peers_file(tmp_path: Path) -> None:
    pubs = [keys.new_pair(tmp_path, name)[1] for name in ("p0", "d0", "d.1")]
    made = tmp_path / "peers.toml"
    assert list(keys.merge_peers(made, pubs[:2])) == ["p0", "d0"]
    made.write_text("# ours\n" + made.read_text().rstrip("\n"))
    assert list(keys.merge_peers(made, pubs)) == ["d.1"]
    assert made.read_text().startswith("# ours\n")
    want = {name: keys.load_pair(tmp_path / f"{name}.key").public for name in ("p0", "d0", "d.1")}
    assert keys.load_peers(made) == want
    assert keys.merge_peers(made, pubs) == {}
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.suffix not in (".key", ".pub")) == [".toml"]


def test_a_merge_that_cannot_be_changes_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    _, pub = keys.new_pair(first, "p0")
    _, other = keys.new_pair(second, "p0")
    renamed = tmp_path / "zz.pub"
    renamed.write_text(pub.read_text().replace("p0 =", "zz ="))
    made = tmp_path / "peers.toml"
    with pytest.raises(ConfigError, match="another key already"):
        keys.merge_peers(made, [pub, other])
    assert not made.exists()
    keys.merge_peers(made, [pub])
    before = made.read_text()
    for bad, match in (
        (other, "another key already"),
        (renamed, "another name already"),
        (tmp_path / "none.pub", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=match):
            keys.merge_peers(made, [bad])
        assert made.read_text() == before
    made.write_text(before + "[more]\nx = 1\n")
    _, third = keys.new_pair(tmp_path, "d0")
    with pytest.raises(ConfigError, match="last table"):
        keys.merge_peers(made, [third])
    with pytest.raises(ConfigError, match=r"no/peers\.toml.*cannot be written"):
        keys.merge_peers(tmp_path / "no" / "peers.toml", [pub])


def test_halves_that_do_not_belong_together(tmp_path: Path) -> None:
    path, _ = keys.new_pair(tmp_path, "d0")
    other = keys.load_pair(keys.new_pair(tmp_path, "d1")[0])
    pair = keys.load_pair(path)
    path.write_text(path.read_text().replace(pair.public, other.public))
    with pytest.raises(ConfigError, match="do not belong together"):
        keys.load_pair(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"no \[curve\]"),
        ("[curve]\n", "no name"),
        ("[curve]\nname = 'd0'\npublic = 7\nsecret = 'x'\n", "curve.public"),
        ("[curve\n", "not TOML"),
        ("curve = 1\n", r"no \[curve\]"),
    ],
)
def test_a_file_that_holds_no_pair(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "d0.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=match) as caught:
        keys.load_pair(path)
    assert str(path) in str(caught.value)


def test_a_damaged_secret_does_not_show_in_the_error(tmp_path: Path) -> None:
    path, _ = keys.new_pair(tmp_path, "d0")
    pair = keys.load_pair(path)
    path.write_text(path.read_text().replace(pair.secret, pair.secret[:-1]))
    with pytest.raises(ConfigError) as caught:
        keys.load_pair(path)
    assert pair.secret[:20] not in str(caught.value)


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hawk keys new"):
        keys.load_pair(tmp_path / "none.key")
    with pytest.raises(ConfigError, match=r"\[peers\]"):
        keys.load_peers(tmp_path / "none.toml")


def test_every_bad_line_of_a_peers_file_is_told_at_once(tmp_path: Path) -> None:
    good = keys.load_pair(keys.new_pair(tmp_path, "d0")[0]).public
    path = tmp_path / "peers.toml"
    path.write_text(f'[peers]\na = "{good}"\nb = "short"\nc = 7\nd = "{good}"\n"e f" = "{good}"\n')
    with pytest.raises(ConfigError) as caught:
        keys.load_peers(path)
    assert len(caught.value.problems) == 4
    for part in ("peers.b", "peers.c", "the same key as peers.a", "peers.e f"):
        assert part in str(caught.value)


def test_z85_is_checked_as_libzmq_would() -> None:
    assert keys.is_public_key(zmq.curve_keypair()[0].decode())
    assert not keys.is_public_key("#####" * 8)  # five of the last digit overflow 32 bits
    assert not keys.is_public_key("~" * 40)
    assert not keys.is_public_key("é" * 40)

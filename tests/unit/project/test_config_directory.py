"""What is wrong with the settings of a directory is told with everything else."""

from pathlib import Path

import pytest

from hawk.config import load_config
from hawk.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[agent]\nadvertise = "tcp://0.0.0.0:7400"', "agent.advertise"),
        ('[agent]\nadvertise = "tcp://*:7400"', "agent.advertise"),
        ('[agent]\nadvertise = "tcp://host:0"', "agent.advertise"),
        ('[discovery]\netcd = ["127.0.0.1:2379"]', "discovery.etcd"),
        ('[discovery]\netcd_cert = "a.pem"', "goes with discovery.etcd_key"),
        ('[discovery]\netcd_password_file = "a"', "goes with discovery.etcd_user"),
        ('[discovery]\netcd_prefix = "hawk"', "discovery.etcd_prefix"),
        (
            '[agent]\ninsecure = true\ncontrol = "tcp://0.0.0.0:7400"\n[discovery]\netcd = ["http://e:1"]',
            "has to say where others reach it",
        ),
    ],
)
def test_what_a_directory_needs_is_told_with_the_rest(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text + "\n[arena]\nsize = 1\n")
    with pytest.raises(ConfigError) as error:
        load_config(file, {})
    problems = "\n".join(error.value.problems)
    assert "arena.size" in problems
    if "where others" not in told:
        assert told in problems
    else:
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_config(file, {})

"""The demo's checker against a third account of the same arrangement, and that it finds any wrong byte."""

import ast
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.demo import check
from tests.reference import tenstorrent as reference

MARK = 0xA5


class Device:
    """A small device cache with the right bytes in it, by the reference."""

    def __init__(self, codec: str, channels: int, tokens: int, blocks: int = 6) -> None:
        rng = np.random.default_rng(tokens)
        self.layers, self.heads, self.dim, self.block_size = 2, 2, 128, 64
        used = -(-tokens // self.block_size)
        table = rng.permutation(blocks)[:used]
        page = reference.PAGE_BYTES[codec]
        per_block = self.heads * (self.block_size // 32) * (self.dim // 32)
        tensor = -(-blocks * per_block // channels) * page
        bases = [[128 + (2 * layer + kv) * tensor for kv in range(2)] for layer in range(self.layers)]
        size = bases[-1][-1] + tensor + 64
        banks = [np.full(size, MARK, np.uint8) for _ in range(channels)]
        for layer in range(self.layers):
            for kv in range(2):
                cache = np.zeros((blocks, self.heads, self.block_size, self.dim), np.uint16)
                rows = np.zeros((used * self.block_size, self.heads, self.dim), np.uint16)
                rows[:tokens] = check.elements(layer, kv, 0, tokens, self.heads, self.dim)
                cache[table] = rows.reshape(used, self.block_size, self.heads, self.dim).transpose(0, 2, 1, 3)
                pages = reference.pages(cache, codec, interleave_dim=kv == 0).reshape(blocks, per_block, page)
                for block in table:
                    for i in range(per_block):
                        bank, at = reference.bank(int(block) * per_block + i, channels, page)
                        at += bases[layer][kv]
                        banks[bank][at : at + page] = pages[block, i]
        self.fds = []
        self.used_bytes = tensor * channels
        for bank in banks:
            fd = os.memfd_create("check-test", os.MFD_CLOEXEC)
            os.write(fd, bank.tobytes())
            self.fds.append(fd)
        self.job = check.Job(
            layers=self.layers,
            heads=self.heads,
            dim=self.dim,
            block_size=self.block_size,
            blocks=blocks,
            tokens=tokens,
            table=table.tolist(),
            codec=codec,
            align=64,
            bases=bases,
            fds=self.fds,
            channel_bytes=size,
            untouched=MARK,
        )
        self.tensors = [(base, tensor) for layer in bases for base in layer]
        self.pages, self.page = blocks * per_block, page

    def verdict(self) -> check.Verdict:
        return check.Checker(self.job).run(1)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b"])
@pytest.mark.parametrize("channels", [1, 7, 8, 12])
@pytest.mark.parametrize("tokens", [1, 128, 200])
def test_the_right_bytes_are_right(codec: str, channels: int, tokens: int) -> None:
    device = Device(codec, channels, tokens)
    verdict = device.verdict()
    device.close()
    assert verdict.mismatch == ""
    assert sum(verdict.checked) == len(device.tensors) * device.pages * device.page


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_wrong_bit_is_found_where_it_is(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(["bf16", "bfp8_b"]))
    device = Device(codec, data.draw(st.sampled_from([1, 7, 8])), data.draw(st.sampled_from([1, 100, 256])))
    count = len(device.fds)
    page = data.draw(st.integers(0, device.pages - 1))
    base, _ = data.draw(st.sampled_from(device.tensors))
    at = base + page // count * device.page + data.draw(st.integers(0, device.page - 1))
    fd = device.fds[page % count]
    byte = os.pread(fd, 1, at)[0] ^ 1 << data.draw(st.integers(0, 7))
    os.pwrite(fd, bytes([byte]), at)
    verdict = device.verdict()
    device.close()
    assert f"channel {page % count}, page {page} " in verdict.mismatch
    assert f", {at} of the channel: 0x{byte:02x} instead of" in verdict.mismatch


def test_swapped_channels_are_found() -> None:
    device = Device("bf16", 8, 200)
    job = device.job
    swapped = check.Job(**{**vars(job), "fds": [job.fds[1], job.fds[0], *job.fds[2:]]})
    verdict = check.Checker(swapped).run(2)
    device.close()
    assert "channel 0" in verdict.mismatch


def test_a_tensor_beyond_its_channel_is_told() -> None:
    device = Device("bf16", 2, 64)
    short = check.Job(**{**vars(device.job), "channel_bytes": device.job.channel_bytes // 2})
    verdict = check.Checker(short).run(1)
    device.close()
    assert "ends at byte" in verdict.mismatch


def test_rows_of_a_face_differ_from_all_others() -> None:
    """Otherwise an exchange of two of them would go unnoticed."""
    rows = np.concatenate(
        [check.elements(layer, kv, 0, 512, 8, 128).reshape(-1, 16) for layer in range(4) for kv in range(2)]
    )
    assert len(np.unique(rows, axis=0)) > 0.999 * len(rows)


def test_elements_do_not_depend_on_where_one_begins() -> None:
    whole = check.elements(3, 1, 0, 100, 8, 128)
    np.testing.assert_array_equal(check.elements(3, 1, 37, 20, 8, 128), whole[37:57])
    assert (whole >> 7 & 0xFF).min() >= 120
    assert (whole >> 7 & 0xFF).max() <= 127


def test_it_shares_nothing_with_hawk() -> None:
    tree = ast.parse(Path(check.__file__).read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported - {"numpy"} <= set(sys.stdlib_module_names)

"""What a decode loop does wrong with host tensors and a paged cache: refused by field, and nothing stays under way."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hawk.errors import InvalidArgument
from hawk.integrations.ttnn import HostTensors, PagedCache
from hawk.model_caches import load_cache
from tests import fake_ttnn

LLAMA = "tt_transformers/llama-3.1-8b"
LLAMA_CUT = load_cache(LLAMA).with_layers(2)


@pytest.fixture
def ttnn(monkeypatch):
    return fake_ttnn.install(monkeypatch)


def table(mesh, *rows):
    """A page table on the chips."""
    return fake_ttnn.Tensor(np.asarray(rows, np.int32), "int32", "rows").to(mesh, None)


def test_what_is_no_number_and_no_model_is_refused_by_field(ttnn):
    with HostTensors.for_request(LLAMA_CUT, 64) as held:
        for call, field in (
            (lambda: held.blocks("a"), "tokens"),
            (lambda: held.blocks(1.5), "tokens"),
            (lambda: held.blocks(-1), "tokens"),
            (lambda: held.tensor(None), "layer"),
            (lambda: held.tensor(0, "k"), "kv"),
            (lambda: HostTensors.for_request(LLAMA, 64), "model"),
            (lambda: PagedCache.alloc(fake_ttnn.Mesh(), LLAMA_CUT, 4).fill(None, None), "held"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                call()
            assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="closed"):
        held.zero()


def test_tensors_of_several_meshes_are_no_cache(ttnn):
    known = load_cache(LLAMA).with_layers(1)
    ours, theirs = (PagedCache.alloc(fake_ttnn.Mesh(chips=n), known, 4).tensors[0] for n in (1, 2))
    theirs[1].shape = list(ours[1].shape)
    with pytest.raises(InvalidArgument) as caught:
        PagedCache([[ours[0], theirs[1]]], known)
    assert (caught.value.field, caught.value.expected) == ("kv[0].v.device", "(0,)")


def test_a_row_that_the_page_table_has_not_is_refused(ttnn):
    mesh = fake_ttnn.Mesh()
    cache = PagedCache.alloc(mesh, LLAMA_CUT, 4)
    with HostTensors.for_request(LLAMA_CUT, 32) as held:
        for user in (1, -1, "0"):
            with pytest.raises(InvalidArgument) as caught:
                cache.fill(held, table(mesh, [0]), user=user)
            assert caught.value.field == "user"
        assert not mesh.queue


def test_a_fill_that_fails_has_read_the_host_tensors_for_the_last_time(ttnn, monkeypatch):
    mesh = fake_ttnn.Mesh()
    cache = PagedCache.alloc(mesh, LLAMA_CUT, 4)
    given = iter(range(3))
    plain = ttnn.copy_host_to_device_tensor

    def fails(host, device):
        if next(given) == 2:
            raise RuntimeError("the chip hangs")
        plain(host, device)

    monkeypatch.setattr(ttnn, "copy_host_to_device_tensor", fails)
    with HostTensors.for_request(LLAMA_CUT, 32) as held:
        with pytest.raises(RuntimeError, match="hangs"):
            cache.fill(held, table(mesh, [0]))
        assert not mesh.queue


def test_room_of_another_size_is_given_back_before_more_is_taken(ttnn, monkeypatch):
    mesh = fake_ttnn.Mesh()
    cache = PagedCache.alloc(mesh, LLAMA_CUT, 4)
    with HostTensors.for_request(LLAMA_CUT, 32) as held:
        cache.fill(held, table(mesh, [0]))
    before = [weakref.ref(tensor) for tensor in cache._staging]
    plain, alive = ttnn.allocate_tensor_on_device, []

    def allocate(*args):
        alive.append([ref() is not None for ref in before])
        return plain(*args)

    monkeypatch.setattr(ttnn, "allocate_tensor_on_device", allocate)
    with HostTensors.for_request(LLAMA_CUT, 128) as held:
        cache.fill(held, table(mesh, [0, 1]))
    assert alive == [[False, False]] * 2

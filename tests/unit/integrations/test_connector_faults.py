"""What a client's words, or a bug of our own, may cost: the request's transfer, and never the engine."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hawk.integrations.http import Server
from hawk.integrations.proxy import Prefill
from tests import fake_vllm
from tests.unit.integrations.test_connector import PROMPT, pair, prefill, rows, steps, vllm

__all__ = ["vllm"]


def fetched(side: fake_vllm.Engine, key: str, blocks: list[int]) -> None:
    """The request gets room, and its fetch begins."""
    request = side.requests[key]
    assert side.scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
    given = SimpleNamespace(get_block_ids=lambda: (blocks,))
    side.scheduler.update_state_after_alloc(request, given, 40)
    side.step()


def test_what_no_encoder_takes_costs_the_request_its_transfer_and_no_more(
    vllm: None, short_path: Path
) -> None:
    with pair(short_path) as (p, d):
        p.request("p", list(PROMPT), {"do_remote_decode": True, "transfer_id": "\ud800"})
        p.step(new={"p": (list(range(10)), 0, 40)})
        held, answer = p.finish("p", list(range(10)))
        assert held  # the workers will say that it is free, which ends an engine that holds nothing
        assert answer is not None
        for number, bad in enumerate(
            ({"remote_host": "\ud800"}, {"remote_num_tokens": 1 << 70}, {"transfer_id": "a\ud800"})
        ):
            request = d.request(f"d{number}", list(PROMPT), {**answer, "hawk_tickets": None, **bad})
            assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        counts = d.scheduler.get_kv_connector_stats().data
        assert (counts["bad_params"], counts["faults"]) == (3, 0)
        d.request("good", list(PROMPT), answer)
        d.finish("good", [], "FINISHED_ABORTED")
        d.step()
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}


def test_a_request_whose_end_goes_wrong_is_held_until_its_offer_has_ended(
    vllm: None, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(short_path) as (p, _):
        p.request("p", list(PROMPT), {"do_remote_decode": True})
        p.step(new={"p": (list(range(10)), 0, 40)})

        def broken(*args: Any, **more: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr("hawk.integrations.remote.write", broken)
        assert p.finish("p", list(range(10))) == (True, None)
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}


def test_an_order_that_goes_wrong_ends_and_costs_the_others_nothing(
    vllm: None, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(side: fake_vllm.Engine, name: str) -> None:
        whole, calls = getattr(side.worker._engine, name), []

        def first(*args: Any, **more: Any) -> Any:
            calls.append(args)
            if len(calls) == 1:
                raise RuntimeError("a bug")
            return whole(*args, **more)

        monkeypatch.setattr(side.worker._engine, name, first)

    with pair(short_path) as (p, d):
        spoil(p, "_say_written")
        tables = {"a": list(range(10)), "b": list(range(10, 20))}
        for key in tables:
            p.request(key, list(PROMPT), {"do_remote_decode": True})
        p.step(new={key: (blocks, 0, 40) for key, blocks in tables.items()})
        answers = {key: p.finish(key, blocks)[1] for key, blocks in tables.items()}
        assert steps(p, lambda r: "a" in r.finished_sending).finished_sending == {"a"}
        spoil(d, "_post")
        requests = {"c": [1, 2, 3], "d": [4, 5, 6]}
        for key, blocks in requests.items():
            request = d.request(key, list(PROMPT), dict(answers["b"]))
            d.scheduler.get_num_new_matched_tokens(request, 0)
            given = SimpleNamespace(get_block_ids=lambda blocks=blocks: (blocks,))
            d.scheduler.update_state_after_alloc(request, given, 40)
        assert d.step().finished_recving == {"c"}
        assert d.invalid == {1, 2, 3}
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"d"}
        assert d.invalid == set()
        assert np.array_equal(rows(d, [4, 5, 6])[:, :40], rows(p, tables["b"])[:, :40])
        assert p.worker.get_kv_connector_stats().data["faults"] == 1
        assert d.worker.get_kv_connector_stats().data["faults"] == 1


def test_a_prefill_with_another_adapter_is_another_prompts(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        answer = prefill(p, "p", list(range(10)))
        request = d.request("d", list(PROMPT), answer)
        request.lora_request = SimpleNamespace(lora_name="poems")
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        assert d.scheduler.get_kv_connector_stats().data["other_prompt"] == 1


def test_a_request_that_vllm_refused_frees_the_other_side(vllm: None, short_path: Path) -> None:
    """vLLM then says that it has ended, under another name and with a prompt of its own making."""
    with pair(short_path) as (p, d):
        answer = prefill(p, "p", list(range(10)))
        request = d.request("d", [0], answer)
        request.abort_immediately = True
        request.status = SimpleNamespace(name="FINISHED_ABORTED")
        assert d.scheduler.request_finished(request, []) == (False, None)
        d.step()
        assert steps(p, lambda r: r.finished_sending).finished_sending == {"p"}
        assert not d.scheduler._books.counts["other_prompt"]
        assert p.worker.get_kv_connector_stats().data["consumed"] == 1


@pytest.mark.parametrize("why", ["resumable", "no tokens"])
def test_what_is_not_handed_over_is_refused_by_name_on_either_side(
    why: str, vllm: None, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pair(short_path) as (p, d):
        where = prefill(p, "other", list(range(10)))
        early = {key: where[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
        d.request("early", list(PROMPT), {"do_remote_prefill": True, "transfer_id": "t", **early})
        fetched(d, "early", [1, 2, 3])

        def odd(side: fake_vllm.Engine, key: str, params: dict[str, Any]) -> Any:
            request = SimpleNamespace(
                request_id=key,
                prompt_token_ids=list(PROMPT) if why == "resumable" else None,
                kv_transfer_params=params,
                resumable=why == "resumable",
                status=SimpleNamespace(name="RUNNING"),
            )
            side.requests[key] = request
            side.scheduler.on_new_request(request)
            return request

        odd(p, "p", {"do_remote_decode": True, "transfer_id": "t"})
        p.step()
        assert steps(d, lambda r: r.finished_recving).finished_recving == {"early"}  # and not by its deadline
        assert d.invalid == {1, 2, 3}
        assert p.finish("p", []) == (False, None)
        request = odd(d, "d", dict(where))
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        d.step()
        if why == "resumable":
            assert "its input streams (resumable)" in caplog.text
            assert steps(p, lambda r: r.finished_sending).finished_sending == {"other"}
        assert p.scheduler.get_kv_connector_stats().data["bad_params"] == 1


def test_where_there_is_no_agent_nothing_is_handed_over(vllm: None, short_path: Path) -> None:
    with pair(short_path) as (p, d):
        answer = prefill(p, "before", list(range(10)))
        p.worker._engine.close()
        p.step()
        assert p.scheduler._books.gone == {0}
        p.request("p", list(PROMPT), {"do_remote_decode": True})
        p.step(new={"p": (list(range(10, 20)), 0, 40)})
        assert p.finish("p", list(range(10, 20))) == (True, None)  # the proxy has nothing to pass on
        assert "p" in steps(p, lambda r: "p" in r.finished_sending).finished_sending
        assert p.pool.used() == []
        d.worker._engine.close()
        d.step()
        request = d.request("d", list(PROMPT), answer)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_tiles_are_asked_for_where_attention_needs_them(vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose first step decodes what it fetched would otherwise die of an illegal instruction."""
    from hawk.integrations.vllm import api

    asked = []
    torch = ModuleType("torch")
    torch.cpu = SimpleNamespace(_init_amx=lambda: asked.append("amx") or True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    api.allow_tiles("vec")
    assert asked == []
    api.allow_tiles("amx")
    assert asked == ["amx"]


def test_engines_that_one_command_starts_get_names_and_places_of_their_own(
    vllm: None, short_path: Path
) -> None:
    from hawk.integrations.vllm import HawkConnector, api

    sides = []
    for index in range(2):
        more = {"control": "tcp://127.0.0.1:7400", "name": "p", "hawk": {"agent": {"insecure": True}}}
        side = fake_vllm.Engine(
            "kv_producer", engine_id=f"p_dp{index}", block=4, blocks=32, order="LBHNC", extra=more
        )
        side.config.parallel_config.data_parallel_index = index
        sides.append(HawkConnector(side.config, fake_vllm.Role.SCHEDULER, side.cache))
    assert [side._settings.control for side in sides] == ["tcp://127.0.0.1:7400", "tcp://127.0.0.1:7401"]
    assert [side._engine_name for side in sides] == ["p-dp0", "p-dp1"]
    assert not any(side._books.alone for side in sides)
    assert fake_vllm.Factory.known["HawkConnector"] == ("hawk.integrations.vllm", "HawkConnector")
    assert api.one_of_several(engine_config("p")) is None


def engine_config(engine_id: str) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine_id))


def test_who_is_one_of_several_is_not_fetched_from_early() -> None:
    prefill = Prefill(Server("127.0.0.1", 1))
    place = {"remote_engine_id": "p_dp1", "remote_host": "h", "remote_port": 7401}
    assert prefill.learn(place)
    assert prefill.place == place
    assert prefill.learn({**place, "hawk_early": False})
    assert prefill.place == {}

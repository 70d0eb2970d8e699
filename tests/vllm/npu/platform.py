"""The platform: vLLM's for CPUs, with an attention and a cache of its own."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class NpuPlatform(CpuPlatform):
    """What vLLM asks of a device."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Also tells HAWK's connector where the cache comes from, so that no user has to."""
        super().check_and_update_config(vllm_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is not None:
            transfer.kv_connector_extra_config.setdefault("cache", "tests.vllm.npu.device:provide")

    @classmethod
    def get_attn_backend_cls(cls, *arguments: Any, **named: Any) -> str:
        """One for all layers."""
        return "tests.vllm.npu.attention.NpuAttention"

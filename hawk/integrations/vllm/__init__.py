"""HAWK as vLLM's KV connector: `"kv_connector": "HawkConnector"`, its module path `hawk.integrations.vllm`."""

from hawk.integrations.vllm.connector import HawkConnector

__all__ = ["HawkConnector"]

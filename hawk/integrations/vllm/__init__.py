"""HAWK as vLLM's KV connector: `"kv_connector": "HawkConnector"`, its module path `hawk.integrations.vllm`."""

from hawk.integrations.vllm.api import make_known
from hawk.integrations.vllm.connector import HawkConnector

make_known("HawkConnector", __name__)

__all__ = ["HawkConnector"]

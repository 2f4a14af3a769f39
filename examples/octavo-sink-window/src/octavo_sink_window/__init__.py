"""Attention that reads the beginning of a text and its last tokens, and a KV cache that keeps no more than these."""

from octavo_sink_window.kv_cache import SinkWindowManager, SinkWindowSpec

__all__ = ["SinkWindowManager", "SinkWindowSpec"]

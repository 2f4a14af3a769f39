"""Octavo's own KV-cache managers, each registered under `octavo.kv_managers` like anybody's."""

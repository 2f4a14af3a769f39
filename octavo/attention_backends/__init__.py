"""Octavo's own attention backends, each registered under `octavo.attention_backends` like anybody's."""

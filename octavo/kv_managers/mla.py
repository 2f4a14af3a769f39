"""Multi-head latent attention: every latent is read by all later tokens, so every block stays."""

from typing import ClassVar

from octavo.core.interfaces import KVCacheSpec, MLASpec
from octavo.kv_managers.every_block import EveryBlockManager


class MLAManager(EveryBlockManager):
    """As for full attention. What differs is the page, which the spec tells of: one vector a token for all heads."""

    contract_version = 1

    serves: ClassVar[type[KVCacheSpec]] = MLASpec

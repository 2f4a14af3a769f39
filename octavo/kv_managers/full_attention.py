"""Full attention: every token is read by all later ones, so every block stays."""

from typing import ClassVar

from octavo.core.interfaces import FullAttentionSpec, KVCacheSpec
from octavo.kv_managers.every_block import EveryBlockManager


class FullAttentionManager(EveryBlockManager):
    """A block stays for as long as its request."""

    contract_version = 1

    serves: ClassVar[type[KVCacheSpec]] = FullAttentionSpec

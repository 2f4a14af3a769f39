from octavo.testing import AttentionBackendSuite


class TestEager(AttentionBackendSuite):
    backend = "eager"

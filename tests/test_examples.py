"""The examples run, and say what they should."""

import runpy
from pathlib import Path

from octavo.config import EngineConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_many_prompts_share_their_beginning(demo_gguf, capsys):
    runpy.run_path(str(EXAMPLES / "many_prompts.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("What is the capital of France? ")
    assert "Paris" in lines[0]
    assert lines[-1] == "32 of 109 prompt tokens came from the prefix cache"


def test_the_settings_file_is_a_config():
    assert EngineConfig.from_toml(EXAMPLES / "settings.toml").scheduler.max_num_seqs == 8

"""Writes docs/configuration.md from the docstrings of the config's fields.

    python scripts/configuration_page.py

A test compares the page with what this would write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from octavo.config import CacheConfig, EngineConfig, PluginChoice, SchedulerConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

INTRODUCTION = r"""<!-- Written by scripts/configuration_page.py from octavo/config.py. Change the docstrings there. -->

# Configuration

Every setting has one name. It is a keyword argument of `LLM`, a flag of the command line (`--block-size 32`, with
dashes for underscores), and a key of a TOML file.

Keyword arguments and flags are flat:

```python
from octavo import EngineConfig

config = EngineConfig.from_flat(block_size=32, max_num_seqs=8)
print(config.cache.block_size, config.scheduler.max_num_seqs)
```

<!-- output -->
```text
32 8
```

A file is nested, with a table for each section:

```toml
max_model_len = 2048

[cache]
block_size = 32
hash_function = "blake2b"

[scheduler]
max_num_seqs = 8
```

`EngineConfig.from_toml("octavo.toml")` reads it, and so does `octavo generate --config octavo.toml ...`. A flag beside
`--config` takes the place of what the file says. A config does not change once it is made, and `LLM(config=config)`
makes an engine from it.

`num_kv_blocks` and `kv_cache_memory_bytes` are two ways to say how large the KV cache is. Both together are an error;
a flag with one of them takes the place of the other one in a file.

A setting that names a part takes options for it too. Then it is a `PluginChoice` or a dict with a name and options, and
in a file or a flag a table:

```python
from octavo import PluginChoice

config = EngineConfig.from_flat(
    request_queue=PluginChoice("priority", {"ageing": 100}),
    hash_function="blake2b",
    kv_managers={"full_attention": {"name": "full_attention"}},
)
```

```toml
[cache]
hash_function = "blake2b"
kv_managers = { full_attention = { name = "full_attention" } }

[scheduler]
request_queue = { name = "priority", options = { ageing = 100 } }
```

```sh
octavo generate "Hello" --request-queue '{ name = "priority", options = { ageing = 100 } }' \
    --hash-function blake2b --kv-managers full_attention=full_attention
```

These parts are Octavo's own, so all three run as they stand. `octavo plugins` lists what is installed. Octavo has no
observers of its own: what `hooks` names comes from other packages. Suppose that one brings the observers `usage` and
`log_file`, and the hash function `keyed_blake2b`, two of them with options:

```toml
hooks = ["usage", { name = "log_file", options = { path = "octavo.log" } }]

[cache]
hash_function = { name = "keyed_blake2b", options = { key = "a secret of ours" } }
```

Which options there are is up to the part, which checks them: see [How parts are chosen](plugins/selection.md#options).

A name that does not exist is an error with the closest one that does:

```python
from octavo.errors import ConfigError

try:
    EngineConfig.from_flat(blok_size=32)
except ConfigError as error:
    print(error)
```

<!-- output -->
```text
There is no setting called 'blok_size'. Did you mean 'block_size'?
```
"""

SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The engine", "At the top of a file.", EngineConfig),
    ("`[cache]`", "The KV cache.", CacheConfig),
    ("`[scheduler]`", "Which requests run, and how much a step computes.", SchedulerConfig),
)


def page() -> str:
    """Return the whole page."""
    return "\n".join([INTRODUCTION, *(section(*named) for named in SECTIONS)])


def section(title: str, summary: str, model: type[BaseModel]) -> str:
    """Return one table of settings."""
    rows = [
        f"| `{name}` | {type_of(field)} | `{default_of(field)}` | {' '.join((field.description or '').split())} |"
        for name, field in model.model_fields.items()
        if not is_section(field)
    ]
    head = ["| setting | type | default | what it does |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", summary, "", *head, *rows, ""])


def is_section(field: FieldInfo) -> bool:
    """Say whether a field holds settings of its own."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def type_of(field: FieldInfo) -> str:
    """Return what values a setting takes, its limits included."""
    return ", ".join([type_name(field.annotation), *limits_of(field)])


def type_name(annotation: Any) -> str:
    """Return a type as a reader of a table wants it."""
    if annotation is type(None):
        return "none"
    if annotation is PluginChoice:
        return "name, or name and options"
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(members[0])
    if origin is Literal:
        return " or ".join(f'`"{member}"`' for member in members)
    if origin is dict:
        return f"table of text to {in_parentheses(members[1])}"
    if origin is tuple:
        name = in_parentheses(members[0])
        return f"list of {name if name.endswith(')') else name + 's'}"
    if members:
        return " or ".join(map(type_name, members))
    return {str: "text", int: "whole number", float: "number", bool: "true or false"}[annotation]


def in_parentheses(annotation: Any) -> str:
    """Return the type of a table's or a list's entries, set apart where it has a comma of its own."""
    name = type_name(annotation)
    return f"({name})" if "," in name else name


def limits_of(field: FieldInfo) -> list[str]:
    """Return a number's limits in words."""
    words = []
    for limit in field.metadata:
        match limit:
            case Ge(ge=value):
                words.append(f"at least {value}")
            case Gt(gt=value):
                words.append(f"above {value}")
            case Le(le=value):
                words.append(f"at most {'2^63 - 1' if value == 2**63 - 1 else value}")
            case Lt(lt=value):
                words.append(f"below {value}")
    return words


def default_of(field: FieldInfo) -> str:
    """Return the default as TOML would write it; "none" where leaving it out is the only way to have it."""
    match field.get_default(call_default_factory=True):
        case None:
            return "none"
        case bool(value):
            return str(value).lower()
        case str(value) | PluginChoice(name=value):
            return f'"{value}"'
        case tuple(values):
            return str(list(values))
        case value:
            return str(value)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")

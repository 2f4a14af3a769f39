"""`octavo backends`: which attention backends could serve a model here."""

import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.options import with_engine_options, with_model
from octavo.config import EngineConfig
from octavo.errors import PluginUnsuitable

if TYPE_CHECKING:
    from octavo.core.kv_cache_config import KVCacheGroup
    from octavo.plugins.registry import Registry
    from octavo.selection.backends import NamedBackends
    from octavo.selection.report import ModelNeeds

# What the command exits with when an engine with these settings would be refused.
EXIT_REFUSED = 1


@with_engine_options
def backends(
    *,
    model_argument: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As --model, or a config.json alone. Without it, the demo model."),
    ] = None,
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for a program to read.")] = False,
) -> None:
    """Say of each installed attention backend, for each KV-cache group of MODEL, whether it serves or every reason why
    not. No weight is read; the settings count as they would for an engine, and --device may name one that is not
    here."""
    config = with_model(config, model_argument)
    from octavo.plugins.registry import scan
    from octavo.selection.named import check_kinds
    from octavo.selection.select import model_needs_elsewhere, named_parts

    registry = scan()
    # What a package prints when it is imported or asked must not get between the lines of the answer.
    with redirect_stdout(sys.stderr):
        parts = named_parts(config, registry)
        needs = model_needs_elsewhere(config, registry)
        check_kinds("attention_backends", parts.backends.by_kind, needs.groups)
        check_kinds("kv_managers", parts.managers, needs.groups)
        groups = _equal_ones_together(
            [_group(config, registry, parts.backends, needs, group) for group in needs.groups]
        )
    kv_cache_dtype = needs.spec.attention_specs[0].kv_dtype
    if as_json:
        about = {"model": config.model, "device": needs.device, "dtype": needs.dtype, "kv_cache_dtype": kv_cache_dtype}
        print(json.dumps({**about, "model_class": needs.model.part.plugin.name, "groups": groups}))
    else:
        print(
            f"{config.model or 'demo model'} on {needs.device} in {needs.dtype}, KV cache in {kv_cache_dtype}, model "
            f"class {needs.model}"
        )
        for described in groups:
            _print_group(described)
    if any(described["refusal"] for described in groups):
        raise typer.Exit(EXIT_REFUSED)


def _group(
    config: EngineConfig, registry: "Registry", named: "NamedBackends", needs: "ModelNeeds", group: "KVCacheGroup"
) -> dict[str, Any]:
    """Return what there is to say of one KV-cache group."""
    from octavo.selection.backends import choose_backend, survey_backends

    specs, chosen, refusal = needs.attention_specs(group), None, None
    try:
        chosen, _ = choose_backend(config, registry, named, group.spec.kind, specs)
    except PluginUnsuitable as error:
        refusal = str(error)
    return {
        "kind": group.spec.kind,
        "layers": list(group.layers),
        "chosen": None if chosen is None else chosen.part.plugin.name,
        "because": None if chosen is None else chosen.why,
        "refusal": refusal,
        "backends": [
            {
                "name": plugin.name,
                "package": plugin.package,
                "version": plugin.version,
                "serves": not reasons,
                "reasons": list(reasons),
            }
            for plugin, reasons in survey_backends(registry, specs, named.of(group.spec.kind)).items()
        ],
    }


def _equal_ones_together(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one entry for groups of which there is the same to say, with the layers of all of them."""
    together: list[dict[str, Any]] = []
    for described in groups:
        for other in together:
            if described == other | {"layers": described["layers"]}:
                other["layers"] = sorted(other["layers"] + described["layers"])
                break
        else:
            together.append(described)
    return together


def _print_group(described: dict[str, Any]) -> None:
    from octavo.selection.report import describe_layers

    print(f"{described['kind']} ({describe_layers(described['layers'])})")
    for backend in described["backends"]:
        answer = "serves" if backend["serves"] else f"cannot serve: {' '.join(backend['reasons'])}"
        print(f"  {backend['name']} ({backend['package']} {backend['version']}) {answer}")
    if described["refusal"]:
        print(f"  refused: {described['refusal']}")
    else:
        print(f"  chosen: {described['chosen']}, {described['because']}")

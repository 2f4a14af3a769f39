"""`octavo backends`: which attention backends could serve a model here."""

import json
from typing import Annotated, Any

import typer

from octavo.cli.options import with_engine_options
from octavo.config import EngineConfig
from octavo.errors import ConfigError


@with_engine_options
def backends(
    *,
    model_argument: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="As --model. Without it, the demo model.")
    ] = None,
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects for a program to read.")] = False,
) -> None:
    """Say of each installed attention backend, for each KV-cache group of MODEL, whether it serves or every reason why
    not. No weight is read; the settings count as they would for an engine."""
    if model_argument is not None:
        if config.model is not None:
            raise ConfigError(f"The model is named twice: {model_argument!r} and {config.model!r}.")
        config = config.with_settings(model=model_argument)
    from octavo.plugins.registry import scan
    from octavo.selection.backends import survey_backends
    from octavo.selection.report import describe_layers
    from octavo.selection.select import model_needs

    registry = scan()
    needs = model_needs(config, registry)
    groups: list[dict[str, Any]] = []
    for group in needs.groups:
        answers = survey_backends(registry, needs.attention_specs(group))
        groups.append(
            {
                "kind": group.spec.kind,
                "layers": list(group.layers),
                "backends": [
                    {
                        "name": plugin.name,
                        "package": plugin.package,
                        "version": plugin.version,
                        "serves": not reasons,
                        "reasons": list(reasons),
                    }
                    for plugin, reasons in answers.items()
                ],
            }
        )
    if as_json:
        print(json.dumps(groups, indent=2))
        return
    print(f"{config.model or 'demo model'} on {needs.device} in {needs.dtype}, model class {needs.model}")
    for described in groups:
        print(f"{described['kind']} ({describe_layers(described['layers'])})")
        for backend in described["backends"]:
            answer = "serves" if backend["serves"] else f"cannot serve: {' '.join(backend['reasons'])}"
            print(f"  {backend['name']} ({backend['package']} {backend['version']}) {answer}")

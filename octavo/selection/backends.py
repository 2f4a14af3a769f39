"""Which attention backend serves a KV-cache group, and what each installed one says to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.config import EngineConfig, PluginChoice
from octavo.core.interfaces import AttentionSpec
from octavo.errors import OctavoError, PluginContractError, PluginUnsuitable
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import Part, choose
from octavo.plugins.registry import Plugin, Registry
from octavo.selection.named import named_by_kind, named_unless_auto
from octavo.selection.report import Chosen, Rejected

# Which of Octavo's own attention backends "auto" takes: the first that can serve.
AUTO_BACKENDS = ("torch_sdpa",)


@dataclass(frozen=True)
class NamedBackends:
    """The attention backends that a config names.

    Attributes:
        by_kind: By the kind of what layers keep.
        default: For every other kind; None for "auto".
    """

    by_kind: dict[str, Chosen]
    default: Chosen | None


def named_backends(config: EngineConfig, registry: Registry) -> NamedBackends:
    """Find and import what is named.

    Raises:
        PluginError: It cannot be had, or does not take its options.
    """
    return NamedBackends(
        named_by_kind(config, registry, ATTENTION_BACKENDS, "attention_backends", config.attention_backends),
        named_unless_auto(config, registry, ATTENTION_BACKENDS, config.attention_backend),
    )


def choose_backend(
    config: EngineConfig, registry: Registry, named: NamedBackends, kind: str, specs: Sequence[AttentionSpec]
) -> tuple[Chosen, tuple[Rejected, ...]]:
    """Return the backend of a KV-cache group, and why each other one that is installed is not it.

    Raises:
        PluginUnsuitable: The one that is named cannot serve, or with "auto" none of Octavo's own can. The message has
            every reason, and which installed ones could.
    """
    chosen = named.by_kind.get(kind, named.default)
    if chosen is None:
        return _first_that_serves(config, registry, specs)
    _check_serves(registry, chosen.part, specs)
    others = [plugin for plugin in registry.plugins(ATTENTION_BACKENDS) if plugin != chosen.part.plugin]
    return chosen, tuple(Rejected(plugin, ("Not asked for.",)) for plugin in others)


def _first_that_serves(
    config: EngineConfig, registry: Registry, specs: Sequence[AttentionSpec]
) -> tuple[Chosen, tuple[Rejected, ...]]:
    chosen: Part | None = None
    rejected: list[Rejected] = []
    for name in AUTO_BACKENDS:
        plugin = registry.find(ATTENTION_BACKENDS, name)
        if chosen is not None:
            rejected.append(Rejected(plugin, (f"'auto' asks {chosen.plugin.name} before it.",)))
            continue
        try:
            part = choose(registry, ATTENTION_BACKENDS, PluginChoice(name))
            reasons = reasons_against(part, specs)
        except OctavoError as error:
            reasons = (_as_sentence(error),)
        else:
            chosen = None if reasons else part
        if chosen is None:
            rejected.append(Rejected(plugin, reasons))
    if chosen is None:
        reasons_of_all = " ".join(f"{r.plugin.name}: {' '.join(r.reasons)}" for r in rejected)
        raise PluginUnsuitable(
            f"None of Octavo's own attention backends can serve this model here. {reasons_of_all} "
            f"{_who_could(registry, specs)}"
        )
    in_order = set(AUTO_BACKENDS)
    rejected += [
        Rejected(plugin, ("'auto' takes only Octavo's own.",))
        for plugin in registry.plugins(ATTENTION_BACKENDS)
        if not (plugin.is_built_in and plugin.name in in_order)
    ]
    reason = "'auto' takes the first of Octavo's own that can serve"
    return Chosen(chosen, config.source_of("attention_backend"), reason), tuple(rejected)


def _check_serves(registry: Registry, part: Part, specs: Sequence[AttentionSpec]) -> None:
    if reasons := reasons_against(part, specs):
        raise PluginUnsuitable(
            f"The attention backend {part.plugin} cannot serve this model here: {' '.join(reasons)} "
            f"{_who_could(registry, specs)}"
        )


def reasons_against(part: Part, specs: Sequence[AttentionSpec]) -> tuple[str, ...]:
    """Return every distinct reason why a backend cannot serve all of `specs`, in order of appearance.

    Raises:
        PluginError: The backend answers with something else than a list of sentences, or raises.
    """
    reasons: dict[str, None] = {}
    for spec in specs:
        with part.blamed("when it was asked what it can serve"):
            answer = part.loaded.cannot_serve(spec)
        if not isinstance(answer, (list, tuple)) or not all(isinstance(reason, str) for reason in answer):
            raise PluginContractError(
                f"The attention backend {part.plugin} answers cannot_serve with {answer!r}; it must be a list of "
                "sentences, empty when it can serve."
            )
        reasons |= dict.fromkeys(answer)
    return tuple(reasons)


def survey_backends(registry: Registry, specs: Sequence[AttentionSpec]) -> dict[Plugin, tuple[str, ...]]:
    """Import and ask every installed backend; return why each cannot serve, nothing where it can.

    It is the class that is asked, so it makes no difference which options it would be given.
    """
    answers: dict[Plugin, tuple[str, ...]] = {}
    for plugin in registry.plugins(ATTENTION_BACKENDS):
        try:
            answers[plugin] = reasons_against(Part(plugin, registry.load_plugin(plugin), None), specs)
        except OctavoError as error:
            answers[plugin] = (_as_sentence(error),)
    return answers


def _who_could(registry: Registry, specs: Sequence[AttentionSpec]) -> str:
    answers = survey_backends(registry, specs)
    able = [p.name if p.is_built_in else f"{p.package}:{p.name}" for p, reasons in answers.items() if not reasons]
    return f"Installed ones that could: {', '.join(able)}." if able else "No installed one could."


def _as_sentence(error: Exception) -> str:
    # Those that quote somebody else's error end as that does.
    text = str(error)
    return text if text.endswith(".") else f"{text}."

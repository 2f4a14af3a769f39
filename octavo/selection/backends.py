"""Which attention backend serves a KV-cache group, and what each installed one says to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.config import EngineConfig
from octavo.core.interfaces import AttentionSpec
from octavo.errors import OctavoError, PluginContractError, PluginUnsuitable
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import Part, load_part
from octavo.plugins.registry import Plugin, Registry
from octavo.selection.named import named_by_kind, named_unless_auto
from octavo.selection.report import Chosen, Rejected

# Which of Octavo's own attention backends "auto" takes, by the kind of device: the first that can serve.
AUTO_BACKENDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Kernels that others tuned, then ours, then what runs everywhere.
        "cuda": ("flash_attn", "triton", "torch_sdpa"),
        # Triton has only an interpreter there, which is for tests.
        "cpu": ("torch_sdpa",),
    }
)


@dataclass(frozen=True)
class NamedBackends:
    """The attention backends that a config names.

    Attributes:
        by_kind: By the kind of what layers keep.
        default: For every other kind; None for "auto".
    """

    by_kind: dict[str, Chosen]
    default: Chosen | None

    def of(self, kind: str) -> Chosen | None:
        """Return the one for layers that keep `kind`; None for "auto"."""
        return self.by_kind.get(kind, self.default)


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
    chosen = named.of(kind)
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
    for name in AUTO_BACKENDS.get(specs[0].device.partition(":")[0], AUTO_BACKENDS["cpu"]):
        plugin = registry.find(ATTENTION_BACKENDS, name)
        part, reasons = _asked(registry, plugin, specs)
        if chosen is None and part is not None and not reasons:
            chosen = part
        else:
            # What keeps it from serving is worth more than its place in the order.
            place = () if chosen is None else (f"'auto' asks {chosen.plugin.name} before it.",)
            rejected.append(Rejected(plugin, reasons or place))
    if chosen is None:
        reasons_of_all = " ".join(f"{r.plugin.name}: {' '.join(r.reasons)}" for r in rejected)
        raise PluginUnsuitable(
            f"None of Octavo's own attention backends can serve this model here. {reasons_of_all} "
            f"{_who_could(registry, specs)}"
        )
    asked = {chosen.plugin, *(each.plugin for each in rejected)}
    rejected += _never_asked(plugin for plugin in registry.plugins(ATTENTION_BACKENDS) if plugin not in asked)
    reason = "'auto' takes the first of Octavo's own that can serve"
    return Chosen(chosen, config.source_of("attention_backend"), reason), tuple(rejected)


def _asked(registry: Registry, plugin: Plugin, specs: Sequence[AttentionSpec]) -> tuple[Part | None, tuple[str, ...]]:
    """Return a backend with its default options, None if it cannot be had, and every reason why it cannot serve."""
    try:
        part = load_part(registry, plugin, {})
        return part, reasons_against(part, specs)
    except OctavoError as error:
        return None, (_as_sentence(error),)


def _never_asked(plugins: Iterable[Plugin]) -> Iterator[Rejected]:
    for plugin in plugins:
        kinds = [kind for kind, names in AUTO_BACKENDS.items() if plugin.is_built_in and plugin.name in names]
        reason = (
            f"'auto' takes it on {' and '.join(kinds)} devices only." if kinds else "'auto' takes only Octavo's own."
        )
        yield Rejected(plugin, (reason,))


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
            answer = part.loaded.cannot_serve(spec, **part.keywords_for(part.loaded.cannot_serve))
        if not isinstance(answer, (list, tuple)) or not all(isinstance(reason, str) for reason in answer):
            raise PluginContractError(
                f"The attention backend {part.plugin} answers cannot_serve with {answer!r}; it must be a list of "
                "sentences, empty when it can serve."
            )
        reasons |= dict.fromkeys(answer)
    return tuple(reasons)


def survey_backends(
    registry: Registry, specs: Sequence[AttentionSpec], named: Chosen | None = None
) -> dict[Plugin, tuple[str, ...]]:
    """Import and ask every installed backend; return why each cannot serve, nothing where it can.

    Args:
        registry: What is installed.
        specs: What the layers compute.
        named: The one that is asked with the options that it was given; the others, without any.
    """
    loaded = {} if named is None else {named.part.plugin: named.part}
    answers: dict[Plugin, tuple[str, ...]] = {}
    for plugin in registry.plugins(ATTENTION_BACKENDS):
        try:
            part = loaded.get(plugin) or Part(plugin, registry.load_plugin(plugin), None)
            answers[plugin] = reasons_against(part, specs)
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

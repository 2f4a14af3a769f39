"""Which parts an engine is made of, where each choice came from, and why it was not another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.core.interfaces import AttentionSpec, Checkpoint, KVCacheSpec, ModelSpec
from octavo.core.kv_cache_config import KVCacheGroup
from octavo.plugins.hooks import Observers
from octavo.plugins.part import Part
from octavo.plugins.registry import Plugin
from octavo.selection.kv_scales import UNSCALED, KVScales


@dataclass(frozen=True)
class Chosen:
    """A part, and how it came to be chosen.

    Attributes:
        part: The part.
        source: Where the choice was written: "default", "argument", a flag, or a file.
        reason: What made it this one, when that was not the name alone.
    """

    part: Part
    source: str
    reason: str = ""

    @property
    def why(self) -> str:
        """Where the choice comes from and what made it this one, such as "by default; 'auto' takes the first"."""
        return f"by {self.source}; {self.reason}" if self.reason else f"by {self.source}"

    def __str__(self) -> str:
        options = self.part.options
        # Defaults are nobody's choice.
        shown = f" with {options!r}" if options is not None and options.model_fields_set else ""
        return f"{self.part.plugin.name} ({self.part.plugin.origin}){shown}, {self.why}"


@dataclass(frozen=True)
class Rejected:
    """A plugin that was not chosen, and every reason why."""

    plugin: Plugin
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class GroupSelection:
    """What serves one KV-cache group.

    Attributes:
        group: The layers, and what each of them keeps.
        manager: Keeps their block tables.
        backend: Writes and reads their pages.
        other_backends: The rest of what is installed.
    """

    group: KVCacheGroup
    manager: Chosen
    backend: Chosen
    other_backends: tuple[Rejected, ...]


@dataclass(frozen=True)
class ModelNeeds:
    """What is known of a model before its weights are read.

    Attributes:
        checkpoint: Its files.
        model: The class that runs it.
        spec: What its layers compute and keep.
        stated: What each layer keeps as the model states it, before settings change it and groups get one page size.
        groups: The layers, sorted by what they keep.
        device: Where it runs, as torch names it.
        dtype: Of weights and activations, as torch names it.
        kv_scales: How what the layers keep is scaled.
    """

    checkpoint: Checkpoint
    model: Chosen
    spec: ModelSpec
    stated: tuple[KVCacheSpec, ...]
    groups: tuple[KVCacheGroup, ...]
    device: str
    dtype: str
    kv_scales: KVScales = UNSCALED

    def attention_specs(self, group: KVCacheGroup) -> list[AttentionSpec]:
        """Return the distinct attention specs of a group's layers."""
        return list(dict.fromkeys(self.spec.attention_specs[layer] for layer in group.layers))


@dataclass(frozen=True)
class Selection:
    """The parts of an engine.

    Attributes:
        needs: What the model asked for.
        groups: What serves each KV-cache group, by group id.
        request_queue: Orders waiting requests.
        hash_function: Makes the prefix cache's keys.
        observers: Told what the engine does, in this order.
        hooks: What tells them.
    """

    needs: ModelNeeds
    groups: tuple[GroupSelection, ...]
    request_queue: Chosen
    hash_function: Chosen
    observers: tuple[Chosen, ...]
    hooks: Observers

    def lines(self) -> list[str]:
        """Return the report: each part, where the choice came from, and why each other backend was not chosen."""
        report = [f"model class: {self.needs.model}"]
        if self.needs.kv_scales.origin:
            report.append(f"KV-cache scales: {self.needs.kv_scales.origin}")
        for selected in _equal_ones_together(self.groups):
            kind, layers = selected.group.spec.kind, describe_layers(selected.group.layers)
            report.append(f"attention backend of {kind} ({layers}): {selected.backend}")
            report += [
                f"  not {other.plugin.name} ({other.plugin.origin}): {' '.join(other.reasons)}"
                for other in selected.other_backends
            ]
            report.append(f"KV-cache manager of {kind} ({layers}): {selected.manager}")
        report.append(f"request queue: {self.request_queue}")
        report.append(f"hash function: {self.hash_function}")
        report += [f"observer: {observer}" for observer in self.observers]
        return report

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _equal_ones_together(groups: Sequence[GroupSelection]) -> list[GroupSelection]:
    """Return one entry for groups that differ in their layers only, with the layers of all of them."""
    together: list[GroupSelection] = []
    for selected in groups:
        for index, other in enumerate(together):
            if selected == replace(other, group=selected.group) and selected.group.spec == other.group.spec:
                layers = tuple(sorted(other.group.layers + selected.group.layers))
                together[index] = replace(other, group=replace(other.group, layers=layers))
                break
        else:
            together.append(selected)
    return together


def describe_layers(layers: Sequence[int]) -> str:
    """Return layer numbers as people write them: "layer 3", "layers 0-29", "layers 0, 2, 5-7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'layer' if len(layers) == 1 else 'layers'} {shown}"

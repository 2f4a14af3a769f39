"""What an attention backend says about itself: its contract version, and what it can serve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.core.interfaces.attention import AttentionBackend, AttentionSpec
from octavo.testing.attention.abilities import (
    ABILITIES,
    COMBINATIONS,
    IMPOSSIBLE,
    SIZES,
    are_independent,
    plain_specs,
    specs_of,
)
from octavo.testing.attention.exercise import AttentionExercise, over, own
from octavo.testing.attention.trial import Fault, Trial


@own
class DeclarationTests(AttentionExercise):
    """`contract_version` and `cannot_serve`."""

    def test_the_class_states_its_contract_version_as_a_number(self) -> None:
        backend = self.backend_class()
        own_classes = backend.__mro__[: backend.__mro__.index(AttentionBackend)]
        stated: Any = next((vars(c)["contract_version"] for c in own_classes if "contract_version" in vars(c)), None)
        if type(stated) is not int:
            raise Fault(
                f"contract_version: {backend.__name__} states {stated!r}; the class, or one that it inherits from "
                "other than AttentionBackend, must set contract_version to a plain number, the one that it was "
                "built for."
            )

    def test_something_plain_is_served(self) -> None:
        plain = self.find_plain()
        if reasons := self.reasons_against(plain):
            tried = sum(1 for _ in plain_specs(self.device, self.plain))
            raise Fault(
                f"plain: {self.backend_class().__name__} serves none of {tried} ordinary specs, so there is nothing to "
                f"try it with. About the first, {plain}, it says: {' '.join(reasons)} If it is made for something "
                "else, set `plain` in the suite to the fields that it needs."
            )

    def test_cannot_serve_returns_a_list_of_sentences(self) -> None:
        for spec in self._all_specs():
            self.reasons_against(spec)

    def test_cannot_serve_gives_the_same_answer_whenever_it_is_asked(self) -> None:
        specs = self._all_specs()
        answers = [list(self.reasons_against(spec)) for spec in specs]
        for spec, answer in reversed(list(zip(specs, answers, strict=True))):
            again = self.reasons_against(spec)
            if again != answer:
                raise Fault(
                    f"cannot_serve: {self.backend_class().__name__} answered {answer}, and later {again}, "
                    f"about the same spec, {spec}."
                )
            # A caller may do with its list what it wants.
            again.append("This is the caller's.")
            if again[-1] in self.reasons_against(spec):
                raise Fault(
                    f"cannot_serve: {self.backend_class().__name__} gives out a list that it keeps; what one caller "
                    "adds to it, the next one gets. Return a new list."
                )

    def test_cannot_serve_changes_nothing(self) -> None:
        before = _settings_of_torch()
        for spec in self._all_specs():
            self.reasons_against(spec)
            if changed := [name for name, value in _settings_of_torch().items() if value != before[name]]:
                raise Fault(
                    f"cannot_serve: {self.backend_class().__name__} changed torch's {', '.join(changed)} "
                    f"when it was asked about {spec}."
                )

    def test_all_reasons_are_given_at_once(self) -> None:
        """A spec that asks for two things that are refused is refused for both."""
        plain = self.find_plain()
        known = {**self.abilities(), **IMPOSSIBLE}
        refused = {}
        for ability in known:
            specs = specs_of(ability, plain, known)
            if specs and (reasons := self.reasons_against(specs[0])):
                refused[ability] = reasons
        pairs = [
            (first, second)
            for first in refused
            for second in refused
            if first < second and are_independent(first, second, known) and are_independent(second, first, known)
        ]
        if not pairs:
            pytest.skip(f"{self.backend_class().__name__} refuses no two independent things.")
        for first, second in pairs:
            spec = next(iter(specs_of(f"{first}+{second}", plain, known)), None)
            if spec is None:
                continue
            reasons = self.reasons_against(spec)
            each = list(dict.fromkeys([*refused[first], *refused[second]]))
            missing = [reason for reason in each if reason not in reasons]
            # Reasons may be worded by what else is asked for; but there must be as many.
            if missing and len(reasons) < len(each):
                raise Fault(
                    f"{first}+{second}: {self.backend_class().__name__} refuses each of the two, and for both at once "
                    f"gives {len(reasons)} of {len(each)} reasons: {reasons}. Missing: {missing}. cannot_serve must "
                    f"give every reason at once. It was asked about {spec}."
                )

    @over((*ABILITIES, *SIZES, *COMBINATIONS))
    def test_what_is_accepted_can_be_built(self, trial: Trial) -> None:
        backend = trial.make_backend(trial.spec)
        if not isinstance(backend, AttentionBackend):
            raise trial.fault(f"{type(backend).__name__} is not an AttentionBackend.")
        if backend.spec != trial.spec:
            raise trial.fault("the backend's `spec` is not the one that it was built for; call super().__init__(spec).")
        wanted = trial.rows([(1, 1)])
        shape = backend.kv_cache_shape(wanted.case.kv_cache_spec, 11)
        if not isinstance(shape, tuple) or shape[0] != 11:
            raise trial.fault(f"kv_cache_shape for 11 blocks is {shape!r}; dimension 0 must be the block.")

    def _all_specs(self) -> list[AttentionSpec]:
        plain = self.find_plain()
        known = {**self.abilities(), **IMPOSSIBLE}
        return [spec for ability in (*known, *COMBINATIONS) for spec in specs_of(ability, plain, known)]


def _settings_of_torch() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "random state": torch.get_rng_state().numpy().tobytes(),
    }

"""What the tests of an attention backend have in common: which backend, which specs, which seeds, and what is said.

    @over(RULES)
    def test_output_equals_the_definition(self, trial): ...

is a test method of one argument, `ability`. It runs once a seed, or is skipped with the backend's own reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from octavo.core.interfaces.attention import AttentionBackend, AttentionSpec
from octavo.errors import PluginOptionsError
from octavo.plugins.families import ATTENTION_BACKENDS
from octavo.plugins.part import checked_options, takes_options
from octavo.plugins.registry import scan
from octavo.testing.attention.abilities import ABILITIES, RULES, SIZES, Changes, find_plain, specs_of
from octavo.testing.attention.trial import Fault, Trial

# Overridden in a suite, these make it more than the name of a backend: then the suite itself is what to try again.
SETTINGS = ("device", "plain", "specs", "tolerances", "options", "make_backend")


class AttentionExercise:
    """A backend, and how it is tried. Plugin authors set `backend`, and the others where they need to.

    Attributes:
        backend: A registered name, or the class.
        device: Where the tensors are, as torch names it.
        plain: Fields of every spec, for a backend that serves none of the ordinary ones.
        specs: More abilities to try: what each changes in the plain spec.
        tolerances: Largest error of an output number, relative and absolute, by dtype.
        options: Options of the backend, by name, where its class has a model of them.
        seeds: What each test is repeated with.
    """

    backend: ClassVar[str | type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    plain: ClassVar[Changes] = {}
    specs: ClassVar[Mapping[str, Changes]] = {}
    tolerances: ClassVar[Mapping[str, float]] = {}
    options: ClassVar[Mapping[str, Any]] = {}
    seeds: ClassVar[Sequence[int]] = (0, 1)

    def make_backend(self, spec: AttentionSpec) -> AttentionBackend:
        """Build the backend for a layer, with `options`. Override it where that is not enough."""
        return self.backend_class()(spec, **self._option_keywords())

    def _option_keywords(self) -> dict[str, Any]:
        """Return what the backend's constructor gets besides the spec."""
        backend_class = self.backend_class()
        try:
            options = checked_options(f"the backend {backend_class.__name__}", backend_class, self.options)
        except PluginOptionsError as error:
            raise Fault(f"{type(self).__name__}.options: {error}") from None
        return {} if options is None else {"options": options}

    @classmethod
    def backend_class(cls) -> type[AttentionBackend]:
        """Return the class that is tried."""
        backend = getattr(cls, "backend", None)
        if isinstance(backend, str):
            loaded: type[AttentionBackend] = scan().load(ATTENTION_BACKENDS, backend)
            return loaded
        if isinstance(backend, type) and issubclass(backend, AttentionBackend):
            return backend
        raise Fault(
            f"{cls.__name__}.backend is {backend!r}; it must be the registered name of an attention backend, "
            "or a subclass of AttentionBackend."
        )

    @classmethod
    def abilities(cls) -> dict[str, tuple[Changes, ...]]:
        """Return the ways to ask for each ability, the suite's own included."""
        return {**ABILITIES, **SIZES, **{name: (changes,) for name, changes in cls.specs.items()}}

    def reasons_against(self, spec: AttentionSpec) -> list[str]:
        """Return the backend's reasons, after a look at whether they are a list of sentences."""
        name, cannot_serve = self.backend_class().__name__, self.backend_class().cannot_serve
        keywords = self._option_keywords() if takes_options(cannot_serve) else {}
        try:
            reasons = cannot_serve(spec, **keywords)
        except Exception as cause:
            raise Fault(
                f"{name}.cannot_serve raised {type(cause).__name__}: {cause}; it must return reasons, whatever is in "
                f"the spec. It was asked about {spec}."
            ) from cause
        if not isinstance(reasons, list):
            raise Fault(
                f"{name}.cannot_serve returned a {type(reasons).__name__}, {reasons!r}; it must return a list of "
                f"sentences, an empty one when the backend can serve. It was asked about {spec}."
            )
        for reason in reasons:
            if not isinstance(reason, str) or not reason.strip():
                raise Fault(
                    f"{name}.cannot_serve returned a list with {reason!r} in it; each reason must be a sentence. "
                    f"It was asked about {spec}."
                )
        return reasons

    def find_plain(self) -> AttentionSpec:
        """Return what all other specs are changes of."""
        return find_plain(lambda spec: not self.reasons_against(spec), self.device, self.plain)

    def served_spec(self, ability: str, plain: AttentionSpec) -> AttentionSpec | None:
        """Return the first spec that asks for the ability and is served, None when there is none."""
        specs = specs_of(ability, plain, self.abilities())
        return next((spec for spec in specs if not self.reasons_against(spec)), None)

    def require_declared(self, ability: str) -> AttentionSpec:
        """Return the spec that asks for the ability; skip the test when the backend does not serve it."""
        plain = self.find_plain()
        spec = self.served_spec(ability, plain)
        if spec is None:
            pytest.skip(self._why_not(ability, plain))
        return spec

    def exercise(self, test: str, ability: str, body: Callable[[Trial], None]) -> None:
        """Run the body of a test once a seed; skip it when the backend does not declare the ability."""
        __tracebackhide__ = True
        plain, spec = self.find_plain(), self.require_declared(ability)
        for seed in self.seeds:
            trial = Trial(
                test=test.removeprefix("test_").replace("_", " "),
                ability=ability,
                seed=seed,
                spec=spec,
                plain=plain,
                make_backend=self.make_backend,
                tolerances=self.tolerances,
                again=self._again(test, ability, seed),
            )
            try:
                body(trial)
            except Fault:
                raise
            except Exception as cause:
                raise trial.fault(
                    f"{type(cause).__name__}: {cause}\n  cannot_serve has no reason against this spec, so the backend "
                    "must be built and work."
                ) from cause

    def _why_not(self, ability: str, plain: AttentionSpec) -> str:
        name, specs = self.backend_class().__name__, specs_of(ability, plain, self.abilities())
        if not specs:
            return f"{ability!r} makes no sense beside {plain}."
        return f"{name} does not declare {ability!r}: {' '.join(self.reasons_against(specs[0]))}"

    def _again(self, test: str, ability: str, seed: int) -> str:
        suite = type(self)
        is_special = any(name in vars(c) for c in suite.__mro__ if c not in _OWN for name in SETTINGS)
        subject: Any = suite if is_special else suite.backend
        where, expression = "", f'"{subject}"'
        if isinstance(subject, type):
            expression = subject.__qualname__.rpartition("<locals>.")[2]
            if "." not in subject.__qualname__:
                where = f"from {subject.__module__} import {expression}; "
        call = f'reproduce({expression}, "{ability}", seed={seed}, test="{test}")'
        return f"python -c '{where}from octavo.testing.attention.suite import reproduce; {call}'"


# Classes that say nothing about a particular backend; the suite adds itself.
_OWN: list[type] = [object, AttentionExercise]

Suite = TypeVar("Suite", bound=AttentionExercise)


def own(suite: type[Suite]) -> type[Suite]:
    """Say that what the class sets are defaults, not an author's settings."""
    _OWN.append(suite)
    return suite


def over(abilities: Sequence[str]) -> Callable[[Callable[[Suite, Trial], None]], Callable[[Suite, str], None]]:
    """Make a test of one trial a test that takes the name of an ability, and is run with each of `abilities`."""

    def decorate(body: Callable[[Suite, Trial], None]) -> Callable[[Suite, str], None]:
        def test(self: Suite, ability: str) -> None:
            __tracebackhide__ = True
            self.exercise(body.__name__, ability, lambda trial: body(self, trial))

        # Not functools.wraps: pytest would look through it and take `trial` for a fixture.
        test.__name__, test.__qualname__, test.__doc__ = body.__name__, body.__qualname__, body.__doc__
        test.__module__ = body.__module__
        return with_abilities(abilities)(test)

    return decorate


Test = TypeVar("Test", bound=Callable[..., None])


def with_abilities(abilities: Sequence[str]) -> Callable[[Test], Test]:
    """Note which abilities a test is run with."""

    def note(test: Test) -> Test:
        test.abilities = tuple(abilities)  # type: ignore[attr-defined]
        return test

    return note


def abilities_of(suite: type[AttentionExercise], test: Callable[..., None]) -> tuple[str, ...] | None:
    """Return what a test is run with: its own abilities, and the suite's where all rules are tried; None for none."""
    abilities: tuple[str, ...] | None = getattr(test, "abilities", None)
    if abilities is not None and set(RULES) <= set(abilities):
        return (*abilities, *(name for name in suite.specs if name not in abilities))
    return abilities

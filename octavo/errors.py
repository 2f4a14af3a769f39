"""Every exception that Octavo raises on purpose.

OctavoError
├── InvalidRequestError (ValueError)     one request is wrong; the engine and its other requests go on
├── ConfigError (ValueError)             the engine was configured with something that cannot work
│   └── NotEnoughMemoryError             the KV cache that was asked for does not fit
├── ModelError                           a model cannot be found, read or served
│   ├── ModelNotFoundError               nothing is at the path, and the name cannot be fetched
│   ├── CheckpointError                  files are missing, truncated, or of an unreadable kind
│   └── UnsupportedModelError            the files are fine; nothing here can run this model
├── PluginError                          something is wrong with a plugin, or with the choice of one
│   ├── PluginNotFound                   nothing is registered under the name
│   ├── PluginBroken                     it is registered, and importing it failed
│   ├── PluginContractError              it is not what its family asks for, or gives back what attention reads
│   ├── PluginOptionsError               it was given options that it does not take
│   ├── PluginConflict                   two packages claim one name
│   ├── PluginUnsuitable                 it works, and cannot serve what it was chosen for
│   └── NotInstalled                     Octavo itself is on the path but not installed
├── MissingExtraError (ImportError)      an optional dependency is needed; the message names the extra
├── StepError (RuntimeError)             the model or a backend raised in the middle of a step, which was undone
├── EngineBusyError (RuntimeError)       the engine was called from its own thread, as by an observer
└── EngineClosedError (RuntimeError)     the engine was shut down, or has died

Each message names the thing, the value and the way out.
"""


def message_of(error: BaseException) -> str:
    """Return an exception's message; of one whose message cannot be made, a word about that."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be made)"


def describe(error: BaseException) -> str:
    """Return an exception's type and message."""
    message = message_of(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def describe_with_place(error: BaseException) -> str:
    """As `describe`, with its notes, or else the function that raised it. Octavo's own errors speak for themselves."""
    notes = [f"({note})" for note in getattr(error, "__notes__", ())]
    trace = error.__traceback__
    if notes or trace is None or isinstance(error, OctavoError):
        return " ".join([describe(error), *notes])
    while trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_globals.get('__name__')}.{trace.tb_frame.f_code.co_qualname}, line {trace.tb_lineno}"
    return f"{describe(error)} (raised in {place})"


class OctavoError(Exception):
    """Base of every exception that Octavo raises on purpose."""


class InvalidRequestError(OctavoError, ValueError):
    """One request cannot be served as asked. `parameter` names the field at fault."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class ConfigError(OctavoError, ValueError):
    """The configuration asks for something that cannot work."""


class NotEnoughMemoryError(ConfigError):
    """The KV cache does not fit.

    `max_model_len_that_fits` is the longest request, in tokens, that the memory could hold (0 when none).
    """

    def __init__(self, message: str, *, max_model_len_that_fits: int) -> None:
        super().__init__(message)
        self.max_model_len_that_fits = max_model_len_that_fits


class ModelError(OctavoError):
    """A model cannot be found, read or served."""


class ModelNotFoundError(ModelError):
    """Nothing is at the path, and the name is not one that can be fetched."""


class CheckpointError(ModelError):
    """The files of a model are missing, truncated, or of a kind that cannot be read."""


class UnsupportedModelError(ModelError):
    """The files can be read, and no model class here can run what they hold."""


class PluginError(OctavoError):
    """Something is wrong with a plugin or with the choice of one."""


class PluginNotFound(PluginError):
    """No installed package registers the name."""


class PluginBroken(PluginError):
    """The plugin is registered, and importing it raised."""


class PluginContractError(PluginError):
    """The plugin was imported, and does not meet its family's contract."""


class PluginOptionsError(PluginError):
    """The plugin's own schema refuses the options that it was given."""


class PluginConflict(PluginError):
    """Several packages register the same name."""


class PluginUnsuitable(PluginError):
    """The plugin was chosen by name and cannot serve the model, device or format."""


class NotInstalled(PluginError):
    """Octavo is importable but not installed, so none of its entry points exist."""


class MissingExtraError(OctavoError, ImportError):
    """An optional dependency is not installed."""


class StepError(OctavoError, RuntimeError):
    """The model or an attention backend raised in the middle of a step, which was undone. The cause is attached.

    `request_ids` are those of the step's requests, in order of arrival. They wait to be computed anew.
    """

    def __init__(self, message: str, *, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class EngineBusyError(OctavoError, RuntimeError):
    """The engine was called from inside of itself, and would wait for ever for its own answer."""


class EngineClosedError(OctavoError, RuntimeError):
    """The engine was used after `shutdown`, or after it died of a fault, which is attached."""

"""Watches one forward of a transformers model without weights, and says what each of its attention calls is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from octavo.errors import UnsupportedModelError
from octavo.models.hugging_face.hook import bind, mask_function_of
from octavo.models.hugging_face.host import summary, use_experts
from octavo.models.hugging_face.mask import MaskShape, shape_of

_NUM_TOKENS = 4
_ASSUMED_MAX_POSITION = 4096
# What may reach the attention function without a change to the result. The first group is read here, or has one value;
# the second says what other arguments say too, or asks for other outputs.
_READ_ARGUMENTS = frozenset({"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"})
_SILENT_ARGUMENTS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "layer_idx",
        "logits_to_keep",
        "deterministic",
    }
)


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward; the calls' order numbers the layers.

    Attributes:
        module_name: Of the module that makes it, in the causal language model.
        dtype: Of queries, keys, values and output, as torch names it.
        mask: Which positions a query sees.
        sinks: Whether sink logits come with it.
    """

    module_name: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    scale: float
    soft_cap: float | None
    sinks: bool
    dtype: str
    mask: MaskShape

    @property
    def stored_head_dim(self) -> int:
        """Numbers in a key, and in a value, as they are stored: the smaller of the two is filled up with zeros."""
        return max(self.head_dim, self.head_dim_v)


@dataclass(frozen=True)
class Traits:
    """What a forward of a causal language model consists of.

    Attributes:
        calls: Its attention calls, in order.
        decoder_name: Name of the submodule that makes hidden rows of token ids. What the model does besides is make
            logits of hidden rows.
        decoder_output_class: Of what it returns.
        vocab_size: Columns of the logits.
        num_embeddings: Rows of the input embedding; every token id is below it.
        max_position: Tokens in the longest sequence.
    """

    calls: tuple[AttentionCall, ...]
    decoder_name: str
    decoder_output_class: type[Any]
    vocab_size: int
    num_embeddings: int
    max_position: int


def record(model: Any, max_position: int | None) -> Traits:
    """Run a model that was built with the `RECORDING` attention on the meta device, and say what it did.

    The model cannot be used for anything else afterwards.

    Args:
        max_position: Tokens in the longest sequence; masks are looked at up to there. None where the config does not
            say, which is refused last: what else is wrong tells more.

    Raises:
        UnsupportedModelError: It does something that cannot be served, or cannot be run so.
    """
    name = type(model).__name__
    recording, output = _observed(model, _ASSUMED_MAX_POSITION if max_position is None else max_position)
    if not recording.calls:
        raise UnsupportedModelError(_no_calls(model))
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise UnsupportedModelError(f"{name} returns no logits [1, num_tokens, vocab_size]. Use another model.")
    num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", logits.shape[-1])
    if num_embeddings < logits.shape[-1]:
        raise refusal(name, f"can generate {logits.shape[-1]} token ids and reads {num_embeddings} of them only")
    if max_position is None:
        raise UnsupportedModelError(
            f"{name} does not say how long a sequence may be. Add max_position_embeddings to its config.json."
        )
    return Traits(
        calls=tuple(recording.calls),
        decoder_name=recording.decoder_name(),
        decoder_output_class=recording.output_classes[recording.decoder_name()],
        vocab_size=logits.shape[-1],
        num_embeddings=num_embeddings,
        max_position=max_position,
    )


class _Recording:
    """Takes down a forward's attention calls, and which direct part of the model each was made in."""

    def __init__(self, model: Any, max_position: int) -> None:
        self.calls: list[AttentionCall] = []
        # What each module returned, by its name; of one that ran several times, the last.
        self.output_classes: dict[str, type[Any]] = {}
        self._model = model
        self._max_position = max_position
        self._names = {id(module): name for name, module in model.named_modules()}
        # The modules whose forward is going on, outermost first; and the one right below the model, if it attended.
        self._running: list[nn.Module] = []
        self._attending_parts: list[str] = []
        # Modules on the way that have called attention already in their present forward.
        self._callers: set[int] = set()
        self._shapes: dict[Callable[..., Any], MaskShape] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as handles:
            for module in self._model.modules():
                handles.callback(module.register_forward_pre_hook(self._enter).remove)
                handles.callback(module.register_forward_hook(self._leave).remove)
            yield

    def decoder_name(self) -> str:
        parts = set(self._attending_parts)
        if len(parts) != 1 or "" in parts:
            raise self._refusal(
                f"attends in {len(parts)} separate parts of its forward, so that its hidden rows are in no one place"
            )
        return parts.pop()

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: Mapping[str, Any],
    ) -> Tensor:
        self._check_caller(module)
        self._check_shapes(query, key, value)
        self._check_arguments(module, arguments)
        scale, soft_cap = arguments.get("scaling"), arguments.get("softcap")
        self.calls.append(
            AttentionCall(
                module_name=self._names[id(module)],
                num_query_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=query.shape[3],
                head_dim_v=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                soft_cap=None if soft_cap is None else float(soft_cap),
                sinks=arguments.get("s_aux") is not None,
                dtype=str(query.dtype).removeprefix("torch."),
                mask=self._mask_shape(mask),
            )
        )
        self._attending_parts.append(self._names[id(self._running[1])] if len(self._running) > 1 else "")
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._running.append(module)
        self._callers.discard(id(module))

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._running.pop()
        self.output_classes[self._names[id(module)]] = type(output)

    def _check_caller(self, module: nn.Module) -> None:
        if id(module) in self._callers:
            raise self._refusal(
                f"calls attention more than once in one pass of {self._names[id(module)]!r}, and Octavo keeps one set "
                "of keys and values for each pass of a layer"
            )
        self._callers.add(id(module))

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if key.shape[2] != query.shape[2] or value.shape[2] != key.shape[2]:
            raise self._refusal(
                f"attends from {query.shape[2]} tokens to {key.shape[2]} keys where all keys are the tokens' own: that "
                "is cross attention, or keys that come from elsewhere"
            )
        if not query.shape[0] == key.shape[0] == value.shape[0] == 1:
            raise self._refusal("folds something else than requests into the batch of its attention")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            raise self._refusal(
                f"has {query.shape[1]} query heads, {key.shape[1]} key heads and {value.shape[1]} value heads, which "
                "are not groups of equal size"
            )
        if query.shape[3] != key.shape[3]:
            raise self._refusal(f"has queries of {query.shape[3]} and keys of {key.shape[3]} numbers a head")
        if not query.dtype == key.dtype == value.dtype:
            raise self._refusal(f"mixes {query.dtype}, {key.dtype} and {value.dtype} as queries, keys and values")

    def _check_arguments(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        if arguments.get("dropout"):
            raise self._refusal("drops attention weights at random while it infers")
        if arguments.get("is_causal") is False:
            raise self._refusal("attends to later tokens too (is_causal=False)")
        unknown = [
            key
            for key, value in arguments.items()
            if value is not None and value is not False and key not in _READ_ARGUMENTS | _SILENT_ARGUMENTS
        ]
        if unknown:
            raise self._refusal(
                f"gives its attention {unknown[0]!r}, which changes the scores or the keys in a way that is not paged"
            )

    def _mask_shape(self, mask: Tensor | None) -> MaskShape:
        if mask is None:
            raise self._refusal("attends without a causal mask")
        function = mask_function_of(mask)
        if function is None:
            raise self._refusal(
                "adds something to its attention scores through the mask (a bias such as ALiBi, or a pattern of its "
                "own), and Octavo's attention takes no such term"
            )
        if function not in self._shapes:
            shape = shape_of(function, self._max_position)
            if shape is None:
                raise self._refusal(
                    "uses a mask that is neither causal nor a causal window, nor one of aligned chunks, up to position "
                    f"{self._max_position - 1}"
                )
            self._shapes[function] = shape
        return self._shapes[function]

    def _refusal(self, what: str) -> UnsupportedModelError:
        return refusal(type(self._model).__name__, what)


def refusal(name: str, what: str) -> UnsupportedModelError:
    """Return the error that says what keeps an architecture from being served, and the way out."""
    return UnsupportedModelError(
        f"{name} {what}. It cannot be served through transformers; use another model, or install a package that "
        "registers a model for it, and name it in model_impl."
    )


def _observed(model: Any, max_position: int) -> tuple[_Recording, Any]:
    """Run a model on the meta device, or if it looks at numbers on zeros; return what it did and its output."""
    name = type(model).__name__
    try:
        # The one form of experts that neither looks at numbers nor asks for certain dtypes or strides.
        use_experts(model, "batched_mm")
        with _CountedOperations() as short:
            recording, output = _forward(model, max_position)
        # Without numbers the longest row costs no more than the shortest, unless a loop goes over tokens.
        with suppress(_TooManyOperations), _CountedOperations(at_most=4 * short.count + 1000):
            longest, _ = _forward(model, max_position, num_tokens=max_position)
            if longest.calls != recording.calls:
                raise refusal(name, "attends in another way once a sequence is long")
        return recording, output
    except UnsupportedModelError:
        raise
    except Exception:
        # Some forwards look at numbers, and on the meta device there are none.
        _fill_with_nothing(model)
        use_experts(model, "eager")
        try:
            with _ZeroProducts():
                return _forward(model, max_position)
        except UnsupportedModelError:
            raise
        except Exception as cause:
            raise UnsupportedModelError(
                f"{name} cannot be run by transformers {transformers.__version__} on token ids alone: {summary(cause)}."
                " Octavo serves models that need nothing else. Use another model, or a newer transformers."
            ) from cause


def _forward(model: Any, max_position: int, num_tokens: int = _NUM_TOKENS) -> tuple[_Recording, Any]:
    device = next(model.parameters()).device
    recording = _Recording(model, max_position)
    token_ids = torch.zeros((1, num_tokens), dtype=torch.long, device=device)
    slot = bind(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), slot.answered_by(recording), recording.watching():
        # With a mask of ones, as `generate` gives it: where there is none, transformers looks for packed sequences.
        output = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False)
    return recording, output


class _TooManyOperations(Exception):
    """A forward did more than it was given."""


class _CountedOperations(TorchFunctionMode):
    """Counts operations, and ends a forward with `_TooManyOperations` at the one past `at_most`."""

    def __init__(self, at_most: int | None = None) -> None:
        super().__init__()
        self.count = 0
        self._at_most = at_most

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self._at_most is not None and self.count > self._at_most:
            raise _TooManyOperations
        return func(*args, **(kwargs or {}))


class _ZeroProducts(TorchFunctionMode):
    """Makes products without multiplying: the weights are zeros, and reading them would take as long as a load."""

    _PRODUCTS = frozenset(
        {
            F.linear,
            torch.matmul,
            torch.mm,
            torch.bmm,
            torch.addmm,
            torch.baddbmm,
            torch.einsum,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.mm,
            Tensor.bmm,
        }
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._PRODUCTS:
            return func(*args, **kwargs)
        shaped = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        return torch.zeros(shaped.shape, dtype=shaped.dtype, device="cpu")


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _fill_with_nothing(model: nn.Module) -> None:
    """Move a model from the meta device to the CPU with zeros for weights, which take no memory."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                zeros = torch.zeros((), dtype=parameter.dtype, device="cpu").expand(parameter.shape)
                module._parameters[key] = nn.Parameter(zeros, requires_grad=False)
        # Buffers are small, and a forward may write to them.
        for store in (module._buffers, vars(module)):
            for key, value in list(store.items()):
                if isinstance(value, Tensor) and value.is_meta:
                    store[key] = torch.zeros(value.shape, dtype=value.dtype, device="cpu")


def _no_calls(model: nn.Module) -> str:
    name = type(model).__name__
    attends = any("attention" in type(module).__name__.lower() for module in model.modules())
    what = (
        "computes its attention itself (transformers' attention interface was never called), so Octavo cannot page "
        "its keys and values"
        if attends
        else "has no attention: what it remembers of earlier tokens is a state of its own, and Octavo keeps keys and "
        "values only"
    )
    return str(refusal(name, what))

"""What stands in for CUDA graphs on a CPU, and engines that use it."""

from collections import Counter
from dataclasses import dataclass, field

from gather_backend import GatherBackend
from torch.utils._pytree import tree_leaves

from octavo.assembly import build_engine
from octavo.config import EngineConfig
from octavo.core.device_inputs import DeviceInputs
from octavo.core.kv_cache_config import KVCacheConfig, make_groups
from octavo.core.model_runner import ModelRunner
from octavo.testing.attention.capture import CapturableOnly


class _Taping(CapturableOnly):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.operations.append((func, args, kwargs or {}, result))
        return result


class TapeRecorder:
    """Records torch's operations as a CUDA graph records kernels: a replay runs no Python of the step's.

    Each operation reads the tensors that it read then, and its result goes to where it went then. What a graph cannot
    hold is refused.
    """

    def record(self, step):
        step()
        with _Taping() as tape:
            step()

        def replay():
            for func, args, kwargs, result in tape.operations:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    # A view, or what was changed in place, is there already.
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay


class RerunRecorder:
    """Computes a step again, for kernels that do not go through torch. The step's host arrays cannot be read."""

    def record(self, step):
        step()
        return step


@dataclass
class Counting:
    """Counts what another recorder's replays do, in the order in which steps were recorded."""

    recorder: object
    num_recorded: int = 0
    replays: Counter = field(default_factory=Counter)

    def record(self, step):
        number, replay = self.num_recorded, self.recorder.record(step)
        self.num_recorded += 1

        def counted():
            self.replays[number] += 1
            replay()

        return counted


def make_engine(folder, *, sizes=(), recorder=None, backend_class=GatherBackend, fill_slots=None, **settings):
    """Return an engine on a CPU. With sizes its decode steps are captured, and its tensors made as for a GPU."""
    config = EngineConfig.from_flat(model=str(folder), device="cpu", dtype="float32", **settings)
    assembly = build_engine(config)
    engine, groups = assembly.engine, assembly.kv_cache_config.groups
    backends = {spec: backend_class(spec) for spec in assembly.selection.needs.spec.attention_specs}
    engine.runner = ModelRunner(
        engine.runner.model,
        [backends[spec] for spec in assembly.selection.needs.spec.attention_specs],
        assembly.kv_cache_config,
        "cpu",
        inputs=(
            DeviceInputs([group.spec.block_size for group in groups], "cpu", fill_slots=fill_slots) if sizes else None
        ),
    )
    if sizes:
        widths = [-(-engine.max_model_len // group.spec.block_size) for group in groups]
        engine.runner.capture_decode_steps(sizes, widths, recorder=recorder)
    return engine


def capture_a_step(model, spec, recorder):
    """Capture a decode step of two rows, whatever the model's class says."""
    backends = {attention: GatherBackend(attention) for attention in spec.attention_specs}
    groups = make_groups(spec.kv_cache_specs)
    inputs = DeviceInputs([group.spec.block_size for group in groups], "cpu")
    runner = ModelRunner(
        model,
        [backends[attention] for attention in spec.attention_specs],
        KVCacheConfig(8, groups),
        "cpu",
        inputs=inputs,
    )
    runner.capture_decode_steps([2], [4] * len(groups), recorder=recorder)

"""Where the layers of a model are: what the pipeline asks of a source, and the source in memory."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neuronmm_ops.compress import workers
from neuronmm_ops.compress.batches import Batch
from neuronmm_ops.compress.budget import shares_budget
from neuronmm_ops.compress.calibrate import Progress, moments_or_none
from neuronmm_ops.compress.config import SVDConfig
from neuronmm_ops.compress.factorization import Gradient, SecondMoment, Side
from neuronmm_ops.compress.gradients import collect_gradients
from neuronmm_ops.compress.layers import LayerStack
from neuronmm_ops.compress.prune import MLP, prune_to_
from neuronmm_ops.compress.running import fast_products
from neuronmm_ops.compress.side_by_side import SideBySide
from neuronmm_ops.errors import NonFiniteError
from neuronmm_ops.nn.dense_linear import DenseLinear
from neuronmm_ops.rank import pair_bytes
from neuronmm_ops.storages import factor_bytes


class Task(NamedTuple):
    """What is to be factored, and from what.

    Attributes:
        config: how.
        targets: every Linear that the config selects, by name, and a head that is stored.
        dtypes: of each while it is dense, as stored.
        limits: the largest rank of each that may get one.
        kinds: the gradient statistic of each that needs one.
        batches: of calibration; none where nothing is calibrated.
        stored: the storage of each that has one, as far as it is known before the ranks are.
        head: the name of an output head that is stored, and in no layer; else none.
        narrowed_bytes: that narrower MLPs have lost already.
    """

    config: SVDConfig
    targets: Mapping[str, DenseLinear]
    dtypes: Mapping[str, torch.dtype]
    limits: Mapping[str, int]
    kinds: Mapping[str, Gradient]
    batches: Sequence[Batch]
    stored: Mapping[str, str]
    head: Sequence[str]
    narrowed_bytes: int = 0

    @property
    def replaced(self) -> dict[str, DenseLinear]:
        """The Linears that have a result: those that may get a rank, and all in a storage."""
        wanted = self.limits.keys() | self.stored.keys()
        return {name: linear for name, linear in self.targets.items() if name in wanted}

    @property
    def linears(self) -> dict[str, DenseLinear]:
        """The Linears that may get a rank."""
        return {name: self.targets[name] for name in self.limits}

    def bytes_saved(self) -> int:
        """Return the least bytes that the checkpoint shrinks by; a budget of time promises none."""
        saved = self.narrowed_bytes
        for name in self.stored.keys() - self.limits.keys():
            linear, itemsize = self.targets[name], self.dtypes[name].itemsize
            size = linear.in_features, linear.out_features
            saved += pair_bytes(*size, None, itemsize, None)
            saved -= pair_bytes(*size, None, itemsize, self.stored[name])
        for name, linear in self.linears.items():
            K, N, itemsize = linear.in_features, linear.out_features, self.dtypes[name].itemsize
            if not shares_budget(self.config, name):
                one_byte = self.config.one_byte
                saved += K * N * itemsize - factor_bytes(
                    K, N, self.limits[name], itemsize, one_byte
                )
            elif self.config.budget != "time":
                saved += int(self.config.ratio * K * N * itemsize)
        return saved


class LayerSource(ABC):
    """A model whose layers are compressed, wherever their values are.

    Results are named sets of tensors, kept by stage: `factorize`, the fields of a `Nested`; and
    `measure`, those of a `Losses`; and `quantize`, those of a `Quantized` or a `QuantizedMatrix`;
    and `drift`, those, or u and v, with the relative `loss`.

    Args:
        model: dense; values may be on the meta device.
        progress: called with (stage, done, total).
        check_room: called with the bytes that the disk must hold beyond those of the dense model.

    Attributes:
        model: as given.
        progress: as given.
        dtypes: of Linears' weights, where they are stored in others than they are held in.
    """

    def __init__(
        self,
        model: nn.Module,
        progress: Progress | None,
        check_room: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.model, self.progress = model, progress
        self.dtypes: Mapping[str, torch.dtype] = {}
        self._check_room = check_room

    @abstractmethod
    def narrow(
        self, config: SVDConfig, batches: Sequence[Batch], mlps: Mapping[str, MLP], kept: int
    ) -> None:
        """Leave so many inner features in the model's MLPs, before there is a task.

        Args:
            config: of all that is to be done.
            batches: of calibration.
            mlps: all of the model's, as `mlps_of` finds them.
            kept: inner features of each.
        """

    @abstractmethod
    def prepare(self, task: Task) -> None:
        """Take on the task; raise where its values or the room for its results do not allow it."""

    @abstractmethod
    def gradients(self) -> Mapping[str, Tensor]:
        """Return the task's gradient statistics, as `collect_gradients` does."""

    @abstractmethod
    def measured(
        self, stage: str, sides: Mapping[str, Side], names: Collection[str]
    ) -> Iterator[tuple[str, Tensor, SecondMoment | None]]:
        """Yield name, weight `[N, K]` and moment of every Linear whose result this worker lacks.

        Call `keep` for each before taking the next one.

        Args:
            stage: told to `progress`.
            sides: of the moments; empty where none is needed.
            names: of the Linears that are wanted.
        """

    @abstractmethod
    def side_by_side(self, names: Collection[str]) -> Generator[SideBySide]:
        """Yield every layer up to the last that holds one of the Linears, if it is not done.

        Before taking the next one, replace its Linears in the copy, and call `keep` for each.
        Where the copy is left differs from the dense layer, what enters the next ones does.
        """

    @abstractmethod
    def keep(self, stage: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a Linear's result."""

    @abstractmethod
    def kept(self, stage: str) -> dict[str, dict[str, Tensor]]:
        """Return this worker's results by name; factors and scales may be on the meta device.

        Of stage `drift` every worker has all.
        """

    @abstractmethod
    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return u `[K, R]` and v `[R, N]` of stage `factorize`, on the weight's device."""


class LayersInMemory(LayerSource):
    """A model that is held whole, by every worker.

    Args:
        model: dense.
        progress: called with (stage, done, total).
        dtypes: of Linears' weights, where they will be stored in others than they are held in.
        check_room: as of `LayerSource`.
    """

    def __init__(
        self,
        model: nn.Module,
        progress: Progress | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        check_room: Callable[[int], object] = lambda _: None,
    ) -> None:
        super().__init__(model, progress, check_room)
        self.dtypes = dtypes or {}
        self._kept: dict[str, dict[str, dict[str, Tensor]]] = defaultdict(dict)

    def narrow(
        self, config: SVDConfig, batches: Sequence[Batch], mlps: Mapping[str, MLP], kept: int
    ) -> None:
        """Run the whole model, as `prune_` does."""
        prune_to_(self.model, mlps, kept, batches, self.progress)

    def prepare(self, task: Task) -> None:
        """Raise where a weight is on the meta device or not finite."""
        for name, linear in task.targets.items():
            if linear.weight.is_meta:
                raise ValueError(f"{name} is on the meta device; load the model's values first")
            if not torch.isfinite(linear.weight).all():
                raise NonFiniteError(
                    f"{name}: weight must be finite, got NaN or Inf; the checkpoint is damaged"
                )
        self._check_room(-task.bytes_saved())
        self._task, self._owners = task, workers.spread(task.replaced)

    def gradients(self) -> Mapping[str, Tensor]:
        """Run the whole model forward and backward."""
        task = self._task
        return collect_gradients(self.model, task.kinds, task.batches, self.progress)

    def measured(
        self, stage: str, sides: Mapping[str, Side], names: Collection[str]
    ) -> Iterator[tuple[str, Tensor, SecondMoment | None]]:
        """Run the whole model; yield the Linears that this worker owns."""
        batches, linears = self._task.batches, self._task.targets
        local = [name for name in names if self._owners[name] == workers.index()]
        for name, moment in moments_or_none(self.model, sides, names, batches, self.progress):
            if name in local:
                yield name, linears[name].weight, moment
                if self.progress:
                    self.progress(stage, len(self._kept[stage]), len(local))

    def side_by_side(self, names: Collection[str]) -> Generator[SideBySide]:
        """Run layer after layer over this worker's batches."""
        stack, batches = LayerStack(self.model), workers.share(self._task.batches)
        with fast_products(self.model):
            entering = [stack.first_input(batch) for batch in batches]
        states = [(hidden, hidden) for hidden in entering]
        count = stack.depth_of(names)
        for index in range(count):
            paths = [(batch, *both) for batch, both in zip(batches, states, strict=True)]
            layer = SideBySide(stack, index, lambda paths=paths: paths)
            yield layer
            states = list(layer.outputs()) if index + 1 < count else []
            if self.progress:
                self.progress("drift", index + 1, count)

    def keep(self, stage: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep a Linear's result in memory."""
        self._kept[stage][name] = dict(tensors)

    def kept(self, stage: str) -> dict[str, dict[str, Tensor]]:
        """Return this worker's results by name."""
        return self._kept[stage]

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """Return u and v of a Linear that this worker owns."""
        kept = self._kept["factorize"][name]
        return kept["u"], kept["v"]

"""Applies the user's overrides to the requests, in order, and checks that each has an effect."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from torch import fx

from fxqat.config.config import STATIC, PrepareConfig
from fxqat.config.overrides import Match, Override, TensorChange
from fxqat.custom_quantizer.legal_schemes import check_dynamic, check_legal
from fxqat.custom_quantizer.requests import RankedConfig, Request, layer_of_result, weight_of
from fxqat.custom_quantizer.spec import BackendSpec
from fxqat.errors import ConfigError
from fxqat.nn.recurrent import LAYER, WHOLE
from fxqat.ops.families import LOOKUP, RECURRENT, WEIGHTED, WITH_WEIGHT
from fxqat.ops.identify import identify
from fxqat.quantization.annotation import ValueQuant
from fxqat.quantization.split_ops import SPLITS
from fxqat.scheme import QConfig, TensorQConfig
from fxqat.utils.fx_graph import called_module
from fxqat.utils.node_meta import KEPT_WHOLE, NOT_SPLIT, PART_OF, SPLIT_FROM


class Overrides:
    """Applies overrides to the requests of nodes; the rank of an override is its place, from 1.

    Args:
        spec: the backend.
        overrides: in order, later wins.
    """

    def __init__(self, spec: BackendSpec, overrides: tuple[Override, ...]) -> None:
        self.spec = spec
        self.overrides = overrides
        self._effective: set[tuple[int, str]] = set()
        self._fixed_range_by: dict[str, str] = {}
        self._answers: dict[int, list[Override]] = {}

    def apply(self, node: fx.Node, request: Request) -> Request:
        """Change the request of a node; ``"value"`` waits for :meth:`value_config`."""
        for rank, override in enumerate(self.overrides, start=1):
            weight, activation = self.spec.weight_of(request.op.name), self.spec.activation
            defaults = {"weight": weight, "activation": activation, "output": activation}
            for tensor, change in self._changes(rank, override, node, request).items():
                is_dynamic = change is not None and change.dynamic
                if tensor == "value" or not can_change(request, tensor, node) or (is_dynamic and not request.weight):
                    continue
                config = getattr(request, tensor) or defaults[tensor]
                if tensor == "activation":
                    request.dynamic = is_dynamic
                if is_dynamic:
                    check_dynamic(self.spec, request.op.name, f"{override.match.where}: activation", node.name)
                    change = None
                setattr(request, tensor, None if change is None else self._changed(config, change, tensor, rank, node))
                setattr(request, f"{tensor}_rank", rank)
                self._note(node, request, rank, tensor, change)
        return request

    def _changes(
        self, rank: int, override: Override, node: fx.Node, request: Request
    ) -> dict[str, TensorChange | None]:
        """What an override changes of a node; the output of a recurrent layer is that of its results."""
        changes: dict[str, TensorChange | None] = {}
        layer = layer_of_result(node)
        for answer in self._answers.get(rank, [override]):
            if layer is not None and answer.match(layer) and "output" in answer.changes:
                changes["output"] = answer.changes["output"]
        idle = request.rule is None and request.weight is None
        if not override.match(node) or (override.function is not None and idle):
            return changes
        own = override.changes_of(node, QConfig(request.weight, request.activation, request.output))
        if override.function is not None and own:
            answer = Override(replace(override.match, node=node.name), own)
            self._answers.setdefault(rank, []).append(answer)
        return {**changes, **own}

    def value_config(self, node: fx.Node, request: Request, asked: RankedConfig) -> RankedConfig:
        """How a value that is quantized is quantized, after the later overrides of ``"value"``.

        Args:
            node: produces the value.
            request: of the node.
            asked: how the value is to be quantized, and who asks for it.
        """
        config, rank = asked
        layer = layer_of_result(node)
        for number, override in enumerate(self.overrides, start=1):
            for answer in self._answers.get(number, [override]):
                change = answer.changes.get("value")
                if change is None or not (answer.match(node) or (layer is not None and answer.match(layer))):
                    continue
                self._note(node, request, number, "value", change if number > rank else None)
                if number > rank:
                    config, rank = self._changed(config, change, "value", number, node), number
        return config, rank

    def applied(self) -> tuple[Override, ...]:
        """The overrides as they were applied: a function is replaced by an override for each node it answered for.

        Raises:
            ConfigError: an override matches nodes but has no effect on any.
        """
        found: list[Override] = []
        for rank, override in enumerate(self.overrides, start=1):
            where = override.match.where
            idle = [tensor for tensor in override.changes if (rank, tensor) not in self._effective]
            if override.function is not None and not any(number == rank for number, _ in self._effective):
                raise ConfigError(f"{where}: the function changes nothing; let it return a dict of changes")
            if idle:
                raise ConfigError(
                    f"{where}: {idle[0]} has no effect: the nodes it matches have no {idle[0]}, or it is float on "
                    f"{self.spec.name} or by your configuration. Add them with extra_quantizer_dict, or drop "
                    f"{idle[0]!r} from the rule."
                )
            found += self._answers.get(rank, [override])
        return tuple(found)

    def check_fixed_ranges(self, values: dict[fx.Node, ValueQuant]) -> None:
        """Check that every fixed range that the user asks for is in effect.

        Raises:
            ConfigError: the value shares its scale with others.
        """
        for node, value in values.items():
            where = self._fixed_range_by.get(node.name)
            if where is not None and value.config.scheme.fixed_range is None:
                raise ConfigError(
                    f"{where}: fixed_range for {node.name!r} has no effect: the value shares its scale with others "
                    "(see the groups of the report), or a later rule observes it. Drop it."
                )

    def _changed(
        self, config: TensorQConfig, change: TensorChange, tensor: str, rank: int, node: fx.Node
    ) -> TensorQConfig:
        """The changed configuration of a tensor, if the backend can run its scheme."""
        changed = change.applied_to(config)
        if change.scheme:
            where = f"{self.overrides[rank - 1].match.where}: {tensor}"
            check_legal(self.spec, tensor, changed.scheme, where, node.name)
        return changed

    def _note(self, node: fx.Node, request: Request, rank: int, tensor: str, change: TensorChange | None) -> None:
        """Remember that an override has an effect on a node."""
        where = self.overrides[rank - 1].match.where
        self._effective.add((rank, tensor))
        if where not in request.overridden_by:
            request.overridden_by.append(where)
        if change is not None and change.scheme.get("fixed_range") is not None:
            self._fixed_range_by[node.name] = where


def recurrent_form(spec: BackendSpec, config: PrepareConfig, node: fx.Node) -> str:
    """The form of a recurrent module: as the last override says, or else by the backend's table."""
    asked = [override.recurrent for override in config.overrides if override.recurrent and override.match(node)]
    if asked:
        return str(asked[-1])
    op = identify(node)
    wanted = spec.rule(op.name, op.family) is not None or any(match(node) for match in config.additional)
    at_run_time = op.name in spec.dynamic and config.asks_dynamic(node)
    return LAYER if wanted or at_run_time else WHOLE


def is_split(spec: BackendSpec, config: PrepareConfig, node: fx.Node) -> bool:
    """Whether several ops are to compute an op of ``SPLITS``: by the backend's table, or because an override asks."""
    asked = any(override.split and override.match(node) for override in config.overrides)
    return asked or identify(node).name in spec.split


def check_forms(nodes: Iterable[fx.Node], config: PrepareConfig) -> None:
    """Check that each override with ``recurrent`` or ``split`` has changed the form of a layer or op.

    Raises:
        ConfigError: it matches none, or one that cannot have this form.
    """
    for override in config.overrides:
        found = [node for node in nodes if override.match(node)] if override.split else []
        if override.split and not any(SPLIT_FROM in node.meta for node in found):
            others = f"only {', '.join(SPLITS)} can be"
            why = next((node.meta[NOT_SPLIT] for node in found if NOT_SPLIT in node.meta), others)
            raise ConfigError(f"{override.match.where}: {found[0].name!r} is not split: {why}")
        found = [node for node in nodes if override.match(node)] if override.recurrent else []
        if override.recurrent and not any(PART_OF in node.meta for node in found):
            why = next((node.meta[KEPT_WHOLE] for node in found if KEPT_WHOLE in node.meta), "no LSTM, GRU or RNN")
            raise ConfigError(f"{override.match.where}: recurrent has no effect on {found[0].name!r}: {why}")


def check_lists(requests: dict[fx.Node, Request], additional: tuple[Match, ...], exclude: tuple[Match, ...]) -> None:
    """Check that what ``extra_quantizer_dict`` adds can be quantized, and what it excludes can be left out.

    Raises:
        ConfigError: an addition has no rule all the same, or an exclusion means an input or parameter of the model.
    """
    for match in exclude:
        nodes = [node for node in requests if match(node)]
        if all(node.op in ("placeholder", "get_attr", "output") for node in nodes):
            raise ConfigError(
                f"{match.where}: {nodes[0].name!r} is not an operation, so excluding it has no effect. To have its "
                f"value read float, write overrides: [{{match: {{node: {nodes[0].name}}}, output: null}}]"
            )
    for match in additional:
        nodes = [node for node in requests if match(node)]
        if all(requests[node].rule is None and not requests[node].excluded for node in nodes):
            reason = requests[nodes[0]].why_float
            raise ConfigError(f"{match.where}: {nodes[0].name!r} cannot be quantized: {reason}. Drop it from the list.")


def check_additions(requests: dict[fx.Node, Request], values: Set[fx.Node], additional: tuple[Match, ...]) -> None:
    """Check that something is quantized because of each addition of ``extra_quantizer_dict``.

    Args:
        requests: of each node.
        values: the nodes whose values are quantized.
        additional: the additions; what is also excluded is not checked.

    Raises:
        ConfigError: of no node that it matches the weight, the value, or a value that it reads is quantized.
    """
    for match in additional:
        nodes = {node: request for node, request in requests.items() if match(node)}
        if not any(
            request.excluded or request.weight is not None or not values.isdisjoint((node, *request.operands))
            for node, request in nodes.items()
        ):
            raise ConfigError(
                f"{match.where}: {next(iter(nodes)).name!r} has no effect: neither its value nor a value that it reads "
                "is quantized, because overrides leave them float or nothing uses them. Drop it from the list."
            )


def check_defaults(config: PrepareConfig, requests: dict[fx.Node, Request], values: Set[fx.Node]) -> None:
    """Check that something is quantized by what ``extra_qconfig_dict`` says of weights and of activations.

    A model of which nothing is quantized has an error of its own, with the reason of each node.

    Args:
        config: the user's configuration.
        requests: of each node.
        values: the nodes whose values are quantized.

    Raises:
        ConfigError: it configures weights, or activations, and none is quantized with a scale in the file.
    """
    found = {"w": any(request.weight is not None for request in requests.values()), "a": bool(values)}
    for letter, what, change in (("w", "weight", config.weight), ("a", "activation", config.activation)):
        if (change.scheme or change.modules) and not found[letter] and any(found.values()):
            form = f" (activation is {config.activations!r})" if letter == "a" and config.activations != STATIC else ""
            raise ConfigError(
                f"extra_qconfig_dict: the {letter}_* entries have no effect: no {what} of the model has a scale in the "
                f"file{form}. Drop them."
            )


def check_shared_weights(requests: dict[fx.Node, Request]) -> None:
    """Check that all calls of a layer agree about its one weight.

    Raises:
        ConfigError: overrides change it for some of the calls only.
    """
    first: dict[int, fx.Node] = {}
    for node, request in requests.items():
        module = called_module(node)
        if module is None or request.op.family not in WITH_WEIGHT:
            continue
        other = first.setdefault(id(module), node)
        if requests[other].weight != request.weight and max(request.weight_rank, requests[other].weight_rank):
            raise ConfigError(
                f"overrides: {other.name!r} and {node.name!r} are calls of one layer, which has one weight; change it "
                f"for both with match: {{module: {node.target}}}"
            )


def check_dynamic_weights(requests: dict[fx.Node, Request]) -> None:
    """Check that the weights of layers that quantize their input at run time are stored in 8 bits, without blocks.

    Raises:
        ConfigError: one is stored in more or fewer, or has blocks.
    """
    for node, request in requests.items():
        scheme = request.weight.scheme if request.dynamic and request.weight is not None else None
        if scheme is not None and (not 5 <= scheme.bit_width <= 8 or scheme.block_size is not None):
            raise ConfigError(
                f"{node.name!r}: activation 'dynamic' needs a weight of 5 to 8 bits without blocks, the only ones that "
                f"MatMulInteger and ConvInteger take, got {scheme}. Change the weight, or its activation to null "
                "(weights only)."
            )


def tie_tables(requests: dict[fx.Node, Request]) -> None:
    """Quantize the table of an embedding that is also the weight of a layer as the layer does: they are one tensor.

    Raises:
        ConfigError: an override changes the weight of the embedding to something else.
    """
    layers = {id(weight_of(node)): node for node, request in requests.items() if request.op.family == WEIGHTED}
    for node, request in requests.items():
        layer = layers.get(id(weight_of(node))) if request.op.family == LOOKUP and request.weight is not None else None
        if layer is None or requests[layer].weight in (None, request.weight):
            continue
        if request.weight_rank:
            raise ConfigError(
                f"overrides: {node.name!r} and {layer.name!r} share one weight, and would quantize it differently; "
                f"change it for both with match: {{module: {node.target}}} and match: {{module: {layer.target}}}"
            )
        request.weight = requests[layer].weight


def can_change(request: Request, tensor: str, node: fx.Node) -> bool:
    """Whether a node has a tensor that an override can change."""
    if tensor == "weight":
        return request.weight is not None or (request.rule is not None and request.op.family in WITH_WEIGHT)
    if tensor == "activation" and request.op.family == LOOKUP:
        return False
    if tensor == "output" and node.op in ("placeholder", "get_attr"):
        return True
    if request.rule is None:
        return False
    is_layer = request.op.family == RECURRENT and request.op.gives_tuple  # its results are nodes of their own
    return tensor != "output" or not (request.moves_values or is_layer)

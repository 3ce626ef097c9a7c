"""All names of torch that are private or differ between versions, and nothing else."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from fxqat.utils.fold_parameters import fold_parameters

BatchNorm = nn.modules.batchnorm._BatchNorm
"""The common base of BatchNorm1d, 2d and 3d."""


CAUSAL_CHECK = (nn.modules.transformer, "_detect_is_causal_mask")
"""The function by which TransformerEncoder and TransformerDecoder check the values of a mask for a causal one."""


DISTRIBUTION_SIZE = (torch.distributions.Distribution, "_extended_shape")
"""The method by which distributions get the size of what they draw; it makes numbers of sizes."""


CDIST = torch.ops.aten._cdist_forward.default
ADAPTIVE_AVG_POOL2D = torch.ops.aten._adaptive_avg_pool2d.default
ADAPTIVE_AVG_POOL3D = torch.ops.aten._adaptive_avg_pool3d.default
"""The operators into which torch.export decomposes ``cdist`` and adaptive average pools."""

FUSED_RECURRENT = (torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten._cudnn_rnn)
"""Recurrent layers in one kernel. Both have the input first, then the weights."""
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
TRILINEAR = torch.ops.aten._trilinear
"""What ``scaled_dot_product_attention`` and ``nn.Bilinear`` become on a CPU."""

UNTRANSLATED = (operator.getitem, torch.ops.aten._assert_tensor_metadata.default)
"""What torch's exporter reads or removes without a translation."""

NUMBERS = {float: torch.float32, int: torch.int64, bool: torch.bool}
"""The type of a number among tensors in torch's exporter."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of ``*args`` and ``**kwargs``."""

OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""The types of ``torch.ops.aten.add.Tensor`` and of ``torch.ops.aten.add``."""


def operator_of(target: Any) -> torch._ops.OpOverload | None:
    """The operator that a target names: itself, the default overload of a packet, or that of a custom op; else None."""
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return target._opoverload
    if isinstance(target, torch._ops.OpOverloadPacket):
        return getattr(target, "default", None)
    return target if isinstance(target, torch._ops.OpOverload) else None


def operator_name(target: Any) -> str:
    """The name of an operator of ``torch.ops``, ``"mylib::wavy"``; empty for any other target."""
    found = operator_of(target)
    return "" if found is None else found.name().partition(".")[0]


def named_as_in_schema(operator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A translation into ONNX whose signature has the names of an operator's arguments, in place of other names.

    Torch 2.9's exporter takes a translation only if it has these names; without a word it takes torch's own for it.
    """
    signature = inspect.signature(function)
    wanted = [argument.name for argument in operator._schema.arguments]
    named = [name for name, parameter in signature.parameters.items() if parameter.kind not in VARIADIC]
    missing = (name for name in wanted if name not in signature.parameters)
    names = {name: next(missing, name) for name in named if name not in wanted}
    if not names:  # a function of onnxscript takes any arguments, and stays what it is
        return function
    renamed = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
    parameters = [parameter.replace(name=names.get(name, name)) for name, parameter in signature.parameters.items()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    hints = getattr(function, "__annotations__", {})
    renamed.__annotations__ = {names.get(name, name): hint for name, hint in hints.items()}
    return renamed


WEIGHT_NORM = torch._weight_norm
"""``weight_norm(direction, magnitude, dim)``, what weight normalization computes."""

PACK, PAD = torch._pack_padded_sequence, torch._pad_packed_sequence
"""What ``pack_padded_sequence`` and ``pad_packed_sequence`` call."""

ASSERT = torch._assert
"""``assert`` as a function, which can be traced: of a condition and a text."""

CHECK = torch._check
"""Demands a condition on sizes, which torch.export then assumes."""

WRAPPER = (torch.fx._symbolic_trace, "_create_wrapped_func")
"""The function that lets functions of ``math`` and of ``torch.fx.wrap`` take proxies while tracing."""


CHECKPOINTS = tuple(
    (torch.utils.checkpoint, name)
    for name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
    if hasattr(torch.utils.checkpoint, name)
)
"""The functions that ``torch.utils.checkpoint.checkpoint`` calls without reentrant autograd."""


def load_compiler() -> None:
    """Import torch's compiler, which records Python's builtins, before tracing replaces one of them."""
    import torch._dynamo  # noqa: F401
    import torch._dynamo.polyfills.loader  # noqa: F401


@contextmanager
def without_compiler() -> Iterator[None]:
    """Functions and modules compiled by ``torch.compile`` run in the block, and are traced, as the Python they are."""
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False), torch.compiler.set_stance("force_eager"):
        yield


def python_of_scripted(function: Any) -> Callable[..., Any] | None:
    """What ``torch.jit.script`` or ``torch.jit.trace`` made a ``ScriptFunction`` from; None if that is not known."""
    python: Callable[..., Any] | None = getattr(function, "_torchdynamo_inline", None)
    return python


_EXPORTING = threading.RLock()
_TRANSLATIONS: dict[Any, Any] = {}


@contextmanager
def shorter_export() -> Iterator[None]:
    """Let torch's exporter do in the block only what changes its result.

    * It copies its table of translations. It would read 500 functions for each export.
    * It decomposes a graph only if it cannot translate an operator of it. It would trace every graph once more, with
      torch's whole table of decompositions, which takes longer than the rest of the export of a small model.
    * What it cannot translate and the parameters alone determine becomes a constant.
    * It converts the arguments of operators to their common type only if there is one of another type. It would run
      every graph once more to find out.

    One thread at a time is in such a block.
    """
    from torch.onnx._internal.exporter import _dispatching, _fx_passes
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    def copied(*options: Any, **named: Any) -> Any:
        key = (options, tuple(named.items()))
        if key not in _TRANSLATIONS:
            _TRANSLATIONS[key] = read(*options, **named)
        result = copy.copy(_TRANSLATIONS[key])
        result.functions = {target: list(found) for target, found in result.functions.items()}
        return result

    def decomposed(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        def is_translatable(node: fx.Node) -> bool:
            is_operator = isinstance(node.target, torch._ops.OpOverload)  # not one of higher order, which has graphs
            needless = node.op != "call_function" or node.target in UNTRANSLATED
            return needless or (is_operator and _dispatching.dispatch(node, registry)[0] is not None)

        called = [node.target for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        if not any(target._schema.is_mutable for target in called):
            fold_parameters(program, is_translatable)
            if all(map(is_translatable, program.graph.nodes)):
                return program
        program = decompose(program, registry)
        fold_parameters(program, is_translatable)
        return program

    def promoted(graph_module: fx.GraphModule) -> None:
        graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
        if any(_takes_other_types(node) for graph in graphs for node in graph.nodes):
            promote(graph_module)

    with _EXPORTING, ExitStack() as stack:
        read, decompose = ONNXRegistry.from_torchlib, _fx_passes.decompose_with_registry
        promote = _fx_passes.insert_type_promotion_nodes
        for owner, name, value in (
            (ONNXRegistry, "from_torchlib", staticmethod(copied)),
            (_fx_passes, "decompose_with_registry", decomposed),
            (_fx_passes, "insert_type_promotion_nodes", promoted),
            (torch.fx.config, "do_not_emit_stack_traces", True),
        ):
            stack.callback(setattr, owner, name, vars(owner).get(name))
            setattr(owner, name, value)
        yield


@functools.cache
def _promotion_rules() -> Any:
    from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable

    return TypePromotionTable()


def _takes_other_types(node: fx.Node) -> bool:
    """Whether an operator of an exported graph has an argument of another type than it computes with."""
    from torch.onnx._internal.fx.passes.type_promotion import get_type_promotion_rule

    rule = get_type_promotion_rule(node, _promotion_rules())
    if rule is None:
        return False
    args: Any = fx.node.map_arg(node.args, lambda source: source.meta.get("val"))
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda source: source.meta.get("val"))
    found = rule.preview_type_promotion(args, kwargs)
    pairs = [(args[i], dtype) for i, dtype in found.args_dtypes.items() if i < len(args)]
    pairs += [(kwargs[name], dtype) for name, dtype in found.kwargs_dtypes.items() if name in kwargs]
    return any(dtype is not None and not _all_of_type(value, dtype) for value, dtype in pairs)


def _all_of_type(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_all_of_type(each, dtype) for each in value)
    return (value.dtype if isinstance(value, Tensor) else NUMBERS.get(type(value))) is dtype


def tensor_version(tensor: Tensor) -> tuple[int, int]:
    """Identity and in-place version of a tensor; they stay equal until something writes to it."""
    return id(tensor), tensor._version


def copy_tensor_hooks(source: Tensor, target: Tensor, memo: dict[int, Any] | None = None) -> None:
    """Register the hooks on the gradient of a tensor on its copy, too.

    Args:
        source: the tensor.
        target: its copy.
        memo: of the ``copy.deepcopy`` that made the copy: the hooks are copied with it.
    """
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook if memo is None else copy.deepcopy(hook, memo))


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks by ``register_post_accumulate_grad_hook``."""
    return bool(tensor._post_accumulate_grad_hooks)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process holds a part of a tensor: a DTensor, or one that FullyShardedDataParallel has flattened."""
    return hasattr(tensor, "full_tensor") or is_flattened(tensor)


def is_flattened(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter that FullyShardedDataParallel has flattened."""
    return hasattr(tensor, "_fsdp_flattened")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks, as torch's old weight_norm has, so that a call runs more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The forward hooks of a module and its forward pre-hooks, by the keys of their handles."""
    return module._forward_hooks, module._forward_pre_hooks


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks that run in the backward pass."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def run_forward_pre_hooks(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run the forward pre-hooks of a module as its call does; the arguments that its forward gets."""
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            both = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if both is None else both
        else:
            given = hook(module, args)
            args = args if given is None else given if isinstance(given, tuple) else (given,)
    return args, kwargs


def run_forward_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Run the forward hooks of a module as its call does; what the call returns."""
    for key, hook in module._forward_hooks.items():
        given = (args, kwargs) if key in module._forward_hooks_with_kwargs else (args,)
        changed = hook(module, *given, result)
        result = result if changed is None else changed
    return result


def drop_forward_hooks(module: nn.Module) -> None:
    """Give a module new, empty collections of forward hooks; those that it had may be of another module, too."""
    for name in FORWARD_HOOKS:
        setattr(module, name, OrderedDict())


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Calls of a module do not run its forward hooks in the block."""
    held = {name: getattr(module, name) for name in FORWARD_HOOKS}
    drop_forward_hooks(module)
    try:
        yield
    finally:
        for name, hooks in held.items():
            setattr(module, name, hooks)


def name_of_pruned(hook: Any) -> str:
    """The name of the parameter that a hook of ``torch.nn.utils.prune`` computes."""
    return str(hook._tensor_name)


FORWARD_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""The attributes of a module that hold its forward hooks."""

HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook")
"""The attributes of a module that hold its hooks; copying a GraphModule loses them."""


def keep_local_under_ddp(model: nn.Module, names: list[str]) -> None:
    """Keep DistributedDataParallel from overwriting these buffers with those of rank 0 before each forward."""
    model._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, AveragedModel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made this module or its forward, or ``module.compile()`` was called."""
    has_compiled_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    is_wrapper = hasattr(module, "_orig_mod")
    return is_wrapper or has_compiled_forward or getattr(module, "_compiled_call_impl", None) is not None


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor was made under ``FakeTensorMode``: it has a shape and no values."""
    return isinstance(tensor, FakeTensor)


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    plain = [torch.empty(0, device=device)]
    with torch.inference_mode():
        plain.append(torch.empty(0, device=device))
    return frozenset(torch._C._dispatch_keys(tensor).raw_repr() for tensor in plain)


_PLAIN_ON_CPU = _plain_keys("cpu")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is strided numbers in the memory of the CPU or of a GPU.

    Others are on another device, sparse, fake, functional, batched by ``vmap``, of a subclass with its own operators,
    or lazily negated.
    """
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    return keys in _PLAIN_ON_CPU or (tensor.is_cuda and keys in _plain_keys("cuda"))


def is_recorded() -> bool:
    """Whether a compiler, a tracer or a dispatch mode watches the operators that run."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


def is_compiling() -> bool:
    """Whether a compiler is tracing.

    Up to torch 2.11, ``torch.compiler.is_compiling`` is True in the first stage of compiling only.
    """
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def is_exporting() -> bool:
    """Whether torch.export is tracing.

    Up to torch 2.11, ``torch.compiler.is_exporting`` is True in all compiled code.
    """
    return torch.compiler._is_exporting_flag


def has_saving_hooks() -> bool:
    """Whether a checkpoint, an offload or another user of ``saved_tensors_hooks`` decides how tensors are saved.

    Or whether such hooks are forbidden.
    """
    hooks: Any = torch._C._autograd
    return not hooks._saved_tensors_hooks_is_enabled() or hooks._top_saved_tensors_default_hooks(True) is not None


class KeepsDtype(nn.Module):
    """A module whose tensors, with those of its submodules, keep their dtype under ``half()``, ``bfloat16()``, ...

    They still move to other devices.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsDtype:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        return super()._apply(moved, recurse)  # type: ignore[no-any-return,no-untyped-call]


class SeesConversion(nn.Module):
    """A module whose :meth:`convert` is called when ``half()``, ``bfloat16()``, ``to()``, ... convert its tensors."""

    def convert(self, move: Callable[[], None]) -> None:
        """Convert the tensors.

        Args:
            move: does it.
        """
        move()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SeesConversion:
        apply = super()._apply
        self.convert(lambda: apply(fn, recurse))  # type: ignore[no-untyped-call]
        return self


class SeesLoading(nn.Module):
    """A module that sees the state dict that it, or a module around it, is to load."""

    def take_names(self, state: dict[str, Any], prefix: str) -> None:
        """Rename tensors before they are loaded; overridden.

        Args:
            state: the state dict, a copy that may be changed.
            prefix: what the names of this module's tensors begin with.
        """

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.take_names(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


class EqualRandomNumbers(TorchDispatchMode):
    """Seeds the generators before each random operator: equal calls give equal numbers, in whatever order they run.

    Attributes:
        drawn: whether there was such an operator.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator."""
        # an operator of higher order (torch.cond), which calls functions, has no tags
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            torch.manual_seed(0)
            self.drawn = True
        if func is torch.ops.aten.native_dropout.default:  # on GPUs, which draw other numbers for dropout in place
            x, probability, training = args
            return _dropout(x, probability) if training is not False else func(*args)
        return func(*args, **(kwargs or {}))


def _dropout(x: Tensor, probability: float) -> tuple[Tensor, Tensor]:
    """Result and mask of dropout, from the numbers that dropout in place draws."""
    mask = torch.empty_like(x).bernoulli_(1.0 - probability)
    return x * mask.div(1.0 - probability), mask.bool()

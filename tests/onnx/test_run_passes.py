"""The runner: passes run in order, and an error names the pass that failed and those before it."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_ir.passes import common

from fxqat.errors import ExportError, ParityError
from fxqat.onnx.run_passes import run_passes


class Note(ir.passes.InPlacePass):
    """Write down that it ran."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        model.meta.setdefault("ran", []).append(type(self).__name__)
        return ir.passes.PassResult(model, modified=False)


class Again(Note):
    """The same under another name."""


class Fail(ir.passes.InPlacePass):
    """Raise an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        raise self.error


def identities() -> ir.Model:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    return ir.from_proto(helper.make_model(helper.make_graph(nodes, "graph", [x], [y])))


def test_passes_run_in_order_and_those_of_the_library_beside_ours() -> None:
    model = identities()
    result = run_passes(model, [Note(), common.IdentityEliminationPass(), Again(), Note()])
    assert result is model
    assert model.meta["ran"] == ["Note", "Again", "Note"]
    assert [node.op_type for node in model.graph] == ["Relu"]
    assert run_passes(model, []) is model


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ExportError("no"), ExportError), (ParityError("no"), ParityError), (KeyError("no"), ExportError)],
)
def test_a_failure_names_the_pass_and_those_before_it(error: Exception, kind: type[Exception]) -> None:
    model = identities()
    with pytest.raises(ExportError) as caught:
        run_passes(model, [Note(), Again(), Fail(error), Note()])
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert str(caught.value) == f"{error}\n(in the ONNX pass Fail, after Note, Again)"
    assert model.meta["ran"] == ["Note", "Again"]


def test_a_failure_of_the_first_pass_says_so() -> None:
    with pytest.raises(ExportError, match=r"^no\n\(in the ONNX pass Fail, the first\)$"):
        run_passes(identities(), [Fail(ExportError("no")), Note()])

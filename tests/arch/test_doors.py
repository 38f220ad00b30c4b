"""The two doors: outside them, nothing on the path of a step makes the host wait for the device.

Only the tree is looked at, so the rule is about spelling: calls that copy to the host or wait, moves between
devices, and results whose size depends on values (boolean indexing, nonzero and the like). Bodies of Triton
kernels are another language, and a torch reference beside one never runs on a GPU in a step.
"""

import ast
import re
from collections.abc import Iterator

import pytest
from sources import Function, Source, parse, sources

DOORS = ("slipstream/rows/", "slipstream/loading/", "slipstream/runner/warmup.py", "slipstream/runner_v1/")
WAITS = {"item", "tolist", "cpu", "cuda", "numpy", "synchronize", "pin_memory"}
SIZED_BY_VALUES = {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"}
SUFFIXED = re.compile(r"\w+_[A-Z0-9]+")  # tensors are named by their shape
BOOLEAN_CALLS = {"bool", "isfinite", "isnan", "isinf", "logical_and", "logical_or", "logical_not"}


def imports_torch(source: Source) -> bool:
    return any(name.split(".")[0] == "torch" for name in source.imports())


def is_boolean(node: ast.expr, names: set[str]) -> bool:
    """True where an expression looks like a tensor of booleans."""
    match node:
        case ast.Compare(ops=ops):
            return not any(isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot) for op in ops)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return is_boolean(operand, names)
        case ast.BinOp(left=left, op=ast.BitAnd() | ast.BitOr() | ast.BitXor(), right=right):
            return is_boolean(left, names) or is_boolean(right, names)
        case ast.Call(func=ast.Attribute(attr=attr)):
            return attr in BOOLEAN_CALLS
        case ast.Name(id=name):
            return name in names
        case ast.Tuple(elts=parts):
            return any(is_boolean(part, names) for part in parts)
        case _:
            return False


def boolean_names(tree: ast.Module) -> set[str]:
    """Names that are given a boolean tensor anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_boolean(node.value, names):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def is_dtype(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="torch" | "tl")):
            return True
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return "dtype" in name or name == "element_ty"
        case _:
            return False


def is_tensor_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and SUFFIXED.fullmatch(node.id) is not None


def forbidden_call(node: ast.Call) -> str | None:
    """Why a call may not stand outside the doors."""
    if not isinstance(node.func, ast.Attribute):
        return None
    name, owner, keywords = node.func.attr, node.func.value, {keyword.arg for keyword in node.keywords}
    if isinstance(owner, ast.Name) and owner.id == "np":
        return None
    if name in WAITS or "pin_memory" in keywords:
        return f"{name} waits for the device or pins memory"
    if name in SIZED_BY_VALUES or (name == "where" and len(node.args) == 1 and isinstance(owner, ast.Name)):
        return f"{name} has a size that depends on values"
    if name == "repeat_interleave" and "output_size" not in keywords and any(map(is_tensor_name, node.args)):
        return "repeat_interleave without output_size waits for its size"
    if name == "to" and not (all(map(is_dtype, node.args)) and keywords <= {"dtype", "copy"}):
        return "to() may move to another device"
    return None


def is_jit(node: ast.AST) -> bool:
    return isinstance(node, Function) and any("jit" in ast.unparse(d) for d in node.decorator_list)


def walk_step_code(source: Source) -> Iterator[ast.AST]:
    """Every node that may run in a step on a GPU."""
    has_kernel = any(map(is_jit, source.functions()))
    nodes: list[ast.AST] = [source.tree]
    while nodes:
        node = nodes.pop()
        reference = isinstance(node, Function) and node.name.endswith("_reference") and has_kernel
        if not reference and not is_jit(node):
            yield node
            nodes.extend(ast.iter_child_nodes(node))


def violations(source: Source) -> Iterator[str]:
    names = boolean_names(source.tree)
    for node in walk_step_code(source):
        if isinstance(node, ast.Call) and (why := forbidden_call(node)):
            yield f"{source.name}:{node.lineno} {why}"
        elif isinstance(node, ast.Subscript) and is_boolean(node.slice, names):
            yield f"{source.name}:{node.lineno} boolean indexing has a size that depends on values"


def test_only_the_doors_wait_for_the_device():
    looked_at = [
        source
        for source in sources("slipstream")
        if imports_torch(source) and not source.name.startswith(DOORS)
    ]
    assert len(looked_at) > 20
    found = [line for source in looked_at for line in violations(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "x.item()",
        "rows = x.tolist()",
        "x.cpu().numpy()",
        "torch.cuda.synchronize()",
        "torch.empty(3, pin_memory=True)",
        "x.to(device)",
        "x.to('cuda', non_blocking=True)",
        "x.to(device=other.device)",
        "x[x > 0]",
        "x[~(a == b)]",
        "x[(a > 0) & ok, :]",
        "alive = x != 0\ny[alive]",
        "torch.nonzero(x)",
        "torch.where(x)",
        "x.masked_select(y)",
        "x.repeat_interleave(count_L)",
        "def f_reference(x):\n    return x[x > 0]",
    ],
)
def test_the_rule_sees(line):
    assert list(violations(parse(f"import torch\n{line}\n")))


@pytest.mark.parametrize(
    "line",
    [
        "x.to(torch.float32)",
        "x.to(y.dtype)",
        "x.to(dtype=torch.int32)",
        "x[lane]",
        "x[:, 0]",
        "torch.where(x > 0, x, y)",
        "x.repeat_interleave(count_L, output_size=4)",
        "x.repeat_interleave(groups, 1)",
        "np.unique(x)",
        "mapping['a' in b]",
        "{}.items()",
        "@jit\ndef _kernel(x):\n    x.to(kind)\ndef f_reference(x):\n    return x[x > 0]",
    ],
)
def test_the_rule_lets_through(line):
    assert not list(violations(parse(f"import torch\n{line}\n")))

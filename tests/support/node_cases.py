"""What an autograd node must do right, for every operator that has one: run by tests/attention/test_nodes.py in one
process with nodes in C++ and in one with Python's, which must agree to the last bit and letter.

    ATTNJOURNEY_NODE=0 python -m tests.support.node_cases results.pt
"""

import sys
import warnings

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import attnjourney
from attnjourney import _node
from attnjourney.ops._registry.registration import OPERATORS
from tests.support.direct_calls import INPUTS, Maker

ops = torch.ops.attnjourney
FAMILIES = tuple(OPERATORS)
TWICE = tuple(name for name in FAMILIES if name != "linear_attention")  # which is differentiated once
CACHES = ("kv_cache_append", "kv_cache_truncate", "kv_cache_reorder")
CACHES += ("paged_cache_append", "paged_cache_truncate", "paged_cache_reorder")
INFERENCE = ("attention_fp8", "decode", "mla_decode", "paged_attention", *CACHES)


class Problem:
    """A call of an operator in small sizes: `self(*inputs)` with those of its tensors that have a gradient."""

    def __init__(self, family: str, seed: int = 0, dtype=torch.float64, operator: str | None = None):
        op = OPERATORS[family]
        self.operator = getattr(ops, operator or family).default
        taken = [a.name for a in self.operator._schema.arguments]
        while True:
            call = INPUTS[family](Maker(seed, dtype))
            first = call[op.forward.names[0]]
            if first.numel() > 8 and all(x.numel() for x in call.values() if isinstance(x, Tensor)):
                break
            seed += 100
        self.call = {name: x for name, x in call.items() if name in taken}
        if family == "mha":
            self.call |= {n: self.call["query"] for n in ("key", "value") if self.call[n] is None}
        having = [op.forward.names[i] for i in op.gradients]
        values = [(n, self.call.get(n)) for n in having]
        self.names = [n for n, x in values if isinstance(x, Tensor) and x.is_floating_point()]
        self.inputs = [self.call[n].detach().clone().requires_grad_() for n in self.names]

    def __call__(self, *inputs):
        torch.manual_seed(5)
        return self.operator(**{**self.call, **dict(zip(self.names, inputs or self.inputs))})


def grads_of(out, inputs, **options):
    generator = torch.Generator().manual_seed(9)
    given = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if x.requires_grad]
    cotangents = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in given]
    return torch.autograd.grad(given, inputs, cotangents, allow_unused=True, **options)


CASES: dict[str, tuple] = {}  # name: function, whether nodes in C++ take part


def case(families=("attention",), in_cpp=True):
    def add(function):
        for family in families:
            CASES[f"{function.__name__}[{family}]"] = (lambda family=family: function(family)), in_cpp
        return function

    return add


# ---- gradients


@case(FAMILIES)
def gradients(family):
    found = []
    for seed in range(6):
        for dtype in (torch.float32, torch.bfloat16):
            problem = Problem(family, seed, dtype)
            out = problem()
            found += [out, out.is_leaf, out.requires_grad, out.stride(), *grads_of(out, problem.inputs)]
    return found


@case(FAMILIES)
def one_input_at_a_time(family):
    problem = Problem(family, 1)
    found = []
    for i, x in enumerate(problem.inputs):
        inputs = [y.detach() for y in problem.inputs]
        inputs[i] = x
        found += grads_of(problem(*inputs), [x])
        found += grads_of(problem(), [x])  # the others require grad, but are not asked for
    return found


@case(FAMILIES)
def all_results(family):
    """op_forward: some results have no gradient, and any of the others may be left unused."""
    problem = Problem(family, 2, operator=f"{family}_forward")
    out = problem()
    found = [*out, [x.requires_grad for x in out], [x.grad_fn is None for x in out]]
    found += grads_of(out, problem.inputs, retain_graph=True)
    for x in (x for x in out if x.requires_grad):
        found += grads_of(x, problem.inputs, retain_graph=True)
    return found


@case()
def with_lse(family):
    problem = Problem(family, 3, operator="attention_with_lse")
    out = problem()
    found = [*out, *grads_of(out, problem.inputs, retain_graph=True), *grads_of(out[1], problem.inputs)]
    with torch.no_grad():
        found += problem()
    with torch.inference_mode():
        found += problem(*[x.detach() for x in problem.inputs])
    return found


@case(FAMILIES)
def gradients_in_other_layouts(family):
    problem = Problem(family, 4)
    found = []
    for change in (lambda y: y.sum(), lambda y: y.mT.contiguous().mT.sin().sum(), lambda y: y[..., ::2].exp().sum()):
        found += torch.autograd.grad(change(problem()), problem.inputs, allow_unused=True)
    return found


@case(FAMILIES)
def without_gradients(family):
    problem = Problem(family, 5)
    with torch.no_grad():
        found = [problem(), problem().requires_grad]
    with torch.inference_mode():
        out = problem(*[x.detach() for x in problem.inputs])
    return [*found, out, out.is_inference(), problem(*[x.detach() for x in problem.inputs]).requires_grad]


@case(("attention", "mha", "gpt_attention"))
def dropout(family):
    problem = Problem(family, 6)
    problem.call |= {"dropout_p": 0.5}
    problem.call.pop("dropout_seed", None)
    out = problem()
    return [out, problem(), *grads_of(out, problem.inputs), torch.random.get_rng_state()]


@case(("mha",))
def tensors_that_are_there_twice(family):
    problem = Problem(family, 7)
    x = problem.call["query"].clone().requires_grad_()
    found = []
    for key, value in ((x, x), (x, x.detach().clone()), (x * 1, x)):
        problem.call |= {"query": x, "key": key, "value": value}
        names = [n for n in problem.names if n not in ("query", "key", "value")]
        weights = [problem.call[n].clone().requires_grad_() for n in names]
        out = problem.operator(**{**problem.call, "attn_mask": None, "key_padding_mask": None, "dropout_p": 0.0,
                                  **{n: w for n, w in zip(names, weights) if "mask" not in n}})  # fmt: skip
        found += [out, *grads_of(out, [x, *weights])]
    y = x.detach().clone().requires_grad_()
    forward = Problem(family, 7, operator="mha_forward")
    forward.call |= {"query": x, "key": x, "value": y}
    forward.names = []  # op_forward takes them as they are
    return [*found, *grads_of(forward(), [x, y])]


@case(FAMILIES)
def from_backward(family):
    problem = Problem(family, 8)
    hooked = []
    out = problem()
    out.register_hook(lambda g: hooked.append(g) or 2 * g)
    out.retain_grad()
    out.grad_fn.register_prehook(lambda grads: tuple(3 * g for g in grads))
    out.grad_fn.register_hook(lambda inputs, outputs: hooked.extend([len(inputs) > 0, len(outputs)]))
    out.sum().backward()
    return [x.grad for x in (*problem.inputs, out)] + hooked[:2] + [out.grad_fn.name()]


@case(FAMILIES)
def anomaly_mode(family):
    problem = Problem(family, 9)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=False):
        return grads_of(problem(), problem.inputs)


# ---- what is saved


@case(FAMILIES)
def saved_tensors(family):
    problem = Problem(family, 10)
    packed, unpacked = [], []

    def pack(x):
        packed.append(tuple(x.shape))
        return x.detach().clone()

    def unpack(x):
        unpacked.append(tuple(x.shape))
        return x

    with saved_tensors_hooks(pack, unpack):
        out = problem()
    found = grads_of(out, problem.inputs)
    return [*found, sorted(packed), sorted(unpacked)]


@case(FAMILIES)
def recomputed(family):
    problem = Problem(family, 11)
    problem.call |= {"dropout_p": 0.25} if family in ("attention", "mha", "gpt_attention") else {}
    problem.call.pop("dropout_seed", None)
    found = []
    for reentrant in (False, True):
        for x in problem.inputs:
            x.grad = None
        checkpoint(lambda *x: problem(*x), *problem.inputs, use_reentrant=reentrant).sin().sum().backward()
        found += [x.grad for x in problem.inputs]
    return found


@case(FAMILIES)
def twice_through_a_graph(family):
    problem = Problem(family, 12)
    out = problem()
    found = [*grads_of(out, problem.inputs, retain_graph=True), *grads_of(out, problem.inputs)]
    return [*found, error(lambda: grads_of(out, problem.inputs))]


@case(FAMILIES)
def changed_in_place(family):
    found = []
    problem = Problem(family, 13)
    for i in range(len(problem.inputs)):
        moved = [x * 1 for x in problem.inputs]
        out = problem(*moved)
        moved[i].mul_(2)
        found.append(error(lambda out=out: grads_of(out, problem.inputs)))
    out = problem()

    def change():
        out.mul_(2)
        return grads_of(out, problem.inputs)

    return [*found, error(change)]


@case(FAMILIES)
def memory_is_given_back(family):
    import weakref

    problem = Problem(family, 14)
    moved = [x * 1 for x in problem.inputs]
    alive = [weakref.ref(x) for x in moved]
    out = problem(*moved)
    del moved
    grads_of(out, problem.inputs)
    kept = sum(x() is not None for x in alive)
    return [kept, type(out.grad_fn).__name__ != ""]


# ---- higher derivatives


@case(FAMILIES)
def second_derivatives(family):
    problem = Problem(family, 15)
    problem.call |= {"attn_mask": None} if family == "attention" else {}
    first = grads_of(problem(), problem.inputs, create_graph=True)
    first = [g for g in first if g is not None]
    found = [*first, [g.requires_grad for g in first]]
    second = error(lambda: grads_of(first, problem.inputs, create_graph=True))
    if isinstance(second, str):
        return [*found, second]
    second = [g for g in second if g is not None and g.requires_grad]
    return [*found, *second, error(lambda: grads_of(second, problem.inputs))] if second else found


@case(FAMILIES, in_cpp=False)
def forward_mode(family):
    problem = Problem(family, 16)

    def run():
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in problem.inputs]
            return list(forward_ad.unpack_dual(problem(*duals)))

    return [error(run)]


@case(FAMILIES)
def a_level_of_forward_mode_without_tangents(family):
    problem = Problem(family, 17, torch.float64)
    with forward_ad.dual_level():
        out = problem()
        return [x.shape for x in grads_of(out, problem.inputs) if x is not None]


@case(TWICE)
def forward_over_reverse(family):
    """The graph is there before the tangent of the cotangent."""
    problem = Problem(family, 18)
    out = problem()

    def run():
        with forward_ad.dual_level():
            cotangent = forward_ad.make_dual(torch.ones_like(out), torch.full_like(out, 0.5))
            grads = torch.autograd.grad(out, problem.inputs, cotangent, allow_unused=True)
            return [x for g in grads if g is not None for x in forward_ad.unpack_dual(g)]

    return [error(run)]


@case(FAMILIES)
def batches_of_cotangents(family):
    problem = Problem(family, 19)
    out = problem()
    many = torch.randn((3, *out.shape), generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [error(lambda: torch.autograd.grad(out, problem.inputs, many, is_grads_batched=True, allow_unused=True))]


# Some functions of torch.func come back as calls of plain tensors, some do not: both are counted together.
@case(TWICE, in_cpp=False)
def torch_func(family):
    problem = Problem(family, 20)
    inputs = [x.detach() for x in problem.inputs]
    problem.call |= {"dropout_p": 0.0} if "dropout_p" in problem.call else {}

    def loss(x):
        return problem(x, *inputs[1:]).sin().sum()

    batch = torch.stack([inputs[0], inputs[0].flip(0) * 0.5])
    func = torch.func
    makers = {
        "grad": lambda: func.grad(loss)(inputs[0]),
        "vmap": lambda: func.vmap(lambda x: problem(x, *inputs[1:]))(batch),
        "per sample": lambda: func.vmap(func.grad(loss))(batch),
        "jvp": lambda: func.jvp(loss, (inputs[0],), (inputs[0],)),
        "hvp": lambda: func.jvp(func.grad(loss), (inputs[0],), (inputs[0],)),
        "jacrev": lambda: func.jacrev(lambda x: problem(x, *inputs[1:]).sum(-1))(inputs[0]),
        "leaf": lambda: torch.autograd.grad(func.grad(loss)(problem.inputs[0]).sum(), problem.inputs[0]),
    }
    return [error(run) for run in makers.values()]


@case(in_cpp=False)
def hessian(family):
    x = torch.randn((1, 2, 3), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [torch.func.hessian(lambda x: attnjourney.attention(x, 2 * x, x.sin()).pow(2).sum())(x)]


# ---- surroundings


@case(FAMILIES)
def autocast(family):
    problem = Problem(family, 21, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = problem()
    return [out, *grads_of(out, problem.inputs)]


@case()
def autocast_with_lse(family):
    problem = Problem(family, 21, torch.float32, operator="attention_with_lse")
    with torch.autocast("cpu", torch.bfloat16):
        out = problem()
    return [*out, *grads_of(out, problem.inputs)]


@case(FAMILIES, in_cpp=False)
def a_mode(family):
    problem = Problem(family, 22)
    with FlopCounterMode(display=False) as mode:
        found = grads_of(problem(), problem.inputs)
    counts = {str(op): n for op, n in mode.get_flop_counts().get("Global", {}).items()}
    return [*found, sorted(counts.items())]


class Tagged(Tensor):
    """A subclass that says which operators it meets."""

    met: list = []

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace == "attnjourney":
            cls.met.append(function.name())
        plain = [x.plain if isinstance(x, Tagged) else x for x in args]
        named = {n: x.plain if isinstance(x, Tagged) else x for n, x in (kwargs or {}).items()}
        return function(*plain, **named)


@case(FAMILIES, in_cpp=False)
def a_subclass(family):
    problem = Problem(family, 23)
    x = problem.inputs[0]
    wrapped = Tensor._make_wrapper_subclass(Tagged, x.shape, strides=x.stride(), dtype=x.dtype, requires_grad=True)
    wrapped.plain = x.detach()
    Tagged.met = []
    out = problem(wrapped, *problem.inputs[1:])
    return [out, out.requires_grad, list(Tagged.met)]


@case(FAMILIES)
def views_that_are_negative(family):
    problem = Problem(family, 24)
    x = torch.complex(torch.zeros_like(problem.inputs[0]), problem.inputs[0]).detach()
    negative = x.conj().imag
    assert negative.is_neg()
    out = problem(negative, *problem.inputs[1:])
    return [out, *grads_of(out, problem.inputs[1:])]


@case(("attention", "varlen_attention"))
def results_in_place(family):
    """Of varlen_attention they are views."""
    problem = Problem(family, 25)
    out = problem()

    def change():
        with torch.no_grad():
            out.detach().zero_()
        return out.add_(1)

    return [out._is_view(), error(change), error(lambda: out[:1].unsqueeze(0).sum())]


@case(("attention", "gqa", "mha"), in_cpp=False)
def compiled(family):
    problem = Problem(family, 26, torch.float32)
    out = torch.compile(lambda *x: problem.operator(**{**problem.call, **dict(zip(problem.names, x))}),
                        fullgraph=True, backend="aot_eager")(*problem.inputs)  # fmt: skip
    return [out, *grads_of(out, problem.inputs)]


@case(("attention", "mha"))
def compiled_autograd(family):
    problem = Problem(family, 27, torch.float32)
    out = problem()
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.sin().sum().backward()
    return [x.grad for x in problem.inputs]


# ---- operators without a backward


@case(INFERENCE)
def of_caches(name):
    found = []
    for seed in range(8):
        call = INPUTS[name](Maker(seed, torch.float32))
        tensors = {n: x for n, x in call.items() if isinstance(x, Tensor)}
        operator = getattr(ops, name).default
        found.append(error(lambda c=call, o=operator: o(**c)))
        found += [x for x in tensors.values() if x.dtype.itemsize > 1]  # bytes of float8 cannot be compared
        found += [x._version for x in tensors.values()]
        for n, x in tensors.items():
            with torch.inference_mode():
                made_there = x.clone()
            others = [made_there, None, x.to("meta")]
            others += [x.clone().requires_grad_()] if x.is_floating_point() and x.dtype.itemsize > 1 else []
            for other in others:
                found.append(error(lambda c=call, o=operator, n=n, x=other: o(**{**c, n: x})))
        with torch.inference_mode():
            found.append(error(lambda c=call, o=operator: o(**c)))
    return found


# ---- errors


@case(FAMILIES, in_cpp=False)
def errors(family):
    problem = Problem(family, 28)
    op = OPERATORS[family]
    found = []
    for name in [n for n in op.public.names if isinstance(problem.call.get(n), Tensor)]:
        x = problem.call[name]
        fewer = x[:-1] if x.dim() else x.repeat(2)
        for spoilt in (None, x.unsqueeze(0), fewer, x.to(torch.int16), x.to("meta"), x.expand(3, *x.shape)):
            if spoilt is None and name in op.public.optional:
                continue
            torch.manual_seed(5)
            found.append(error(lambda n=name, s=spoilt: problem.operator(**{**problem.call, n: s})))
            torch.manual_seed(5)
            with torch.inference_mode():
                given = error(lambda n=name, s=spoilt: problem.operator(**{**problem.call, n: s}))
            found.append(given if spoilt is not None else "")
    for index in op.constants:
        name = op.forward.names[index]
        if isinstance(problem.call.get(name), Tensor) and problem.call[name].is_floating_point():
            x = problem.call[name].clone().requires_grad_()
            found.append(error(lambda n=name, x=x: problem.operator(**{**problem.call, n: x})))
    return found


def error(call):
    """What the call gives, or the text of its error."""
    try:
        return call()
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def served() -> int:
    return sum(x["recorded"] + x["without_node"] for x in _node.counts().values())


def main(path: str) -> None:
    torch.set_num_threads(1)
    results = {"node": attnjourney.cpu_info()["node"]}
    for name, (run, _) in CASES.items():
        before = served()
        torch.manual_seed(0)
        results[name] = (error(run), served() - before)
    torch.save(results, path)


if __name__ == "__main__":
    main(sys.argv[1])

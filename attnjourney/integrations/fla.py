"""flash-linear-attention's functions of the gated delta rule and of Kimi delta attention, on attnjourney's operator.

    from attnjourney.integrations import fla
    out, state = fla.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)  # (batch, length, heads, dim)

Names, arguments and results are those of `fla.ops.gated_delta_rule` and `fla.ops.kda` (0.6). `activate()` gives them to
transformers, whose Qwen3-Next, Qwen3.5, Kimi Linear and similar models look for the package `fla`.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..ops import gated_linear_attention


def _refuse(name: str, **given: Any) -> None:
    for argument, value in given.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: {argument} is not supported, got {value!r}")


def _heads_first(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.transpose(1, 2)


def _gate(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The logarithms of decays from what a layer has projected, (B, T, HV) or (B, T, HV, K), in float32 or float64."""
    wide = torch.promote_types(g.dtype, torch.float32)
    g = g.to(wide)
    shape = g.shape[2:] if g.dim() == 4 else g.shape[2:3]
    if dt_bias is not None:
        g = g + dt_bias.to(wide).view(shape)
    rate = None if a_log is None else a_log.to(wide).exp().view(-1, *[1] * (g.dim() - 3))
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(g if rate is None else rate * g)
    if rate is None:
        raise ValueError("A_log: expected a tensor with use_gate_in_kernel and without lower_bound, got None")
    return -rate * softplus(g)


def _call(
    name: str, update: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, *,
    scale: float | None, initial_state: Tensor | None, output_final_state: bool, qk_l2norm: bool, use_gate: bool,
    a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, use_beta_sigmoid: bool,
    allow_neg_eigval: bool, state_v_first: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if q.dim() != 4 or k.shape[:3] != q.shape[:3]:
        raise ValueError(f"{name}: expected q and k of shape (B, T, H, K), got {tuple(q.shape)} and {tuple(k.shape)}")
    if allow_neg_eigval and not use_beta_sigmoid:
        raise ValueError(f"{name}: allow_neg_eigval: expected use_beta_sigmoid_in_kernel with it")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if beta is None:
        beta = v.new_ones(v.shape[:3], dtype=wide)
    if use_beta_sigmoid:
        beta = beta.to(wide).sigmoid() * (2.0 if allow_neg_eigval else 1.0)
    if g is not None and use_gate:
        g = _gate(g, a_log, dt_bias, lower_bound)
    if g is None:
        update = "delta"
    if initial_state is not None:
        initial_state = initial_state.to(wide)
        if state_v_first:
            initial_state = initial_state.transpose(-1, -2)
    g, beta = (x if x is None or x.dtype == q.dtype else x.to(wide) for x in (g, beta))
    out, state = gated_linear_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        _heads_first(g),
        _heads_first(beta),
        update=update,
        scale=scale,
        qk_l2norm=qk_l2norm,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        return_state=True,
    )
    if state_v_first:
        state = state.transpose(-1, -2)
    return out.transpose(1, 2), state if output_final_state else None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.chunk_gated_delta_rule: q, k (B, T, H, K), v (B, T, HV, V), g and beta (B, T, HV).

    Differentiable by every tensor. `cu_seqlens_cpu`, `chunk_indices` and `chunk_size` change nothing here; float32 and
    float64 are served too.

    Returns:
        (B, T, HV, V) and the states (N, HV, K, V) in float32, None without `output_final_state`.

    Raises:
        NotImplementedError: cp_context. ValueError, RuntimeError: as attnjourney.gated_linear_attention.
    """
    _refuse("chunk_gated_delta_rule", cp_context=cp_context)
    return _call(
        "chunk_gated_delta_rule", "gated_delta", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, use_gate=use_gate_in_kernel,
        a_log=A_log, dt_bias=dt_bias, lower_bound=None, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule: as `chunk_gated_delta_rule`, and gates by channel, gk
    (B, T, HV, K), in place of g or beside it. It is differentiable here.

    Raises:
        NotImplementedError: gv, gates of values. ValueError, RuntimeError: as attnjourney.gated_linear_attention.
    """
    _refuse("fused_recurrent_gated_delta_rule", gv=gv)
    if use_gate_in_kernel and g is not None:
        g = _gate(g, A_log, dt_bias, None)
    if gk is not None:
        g = gk if g is None else gk + g[..., None]
    return _call(
        "fused_recurrent_gated_delta_rule", "gated_delta", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, use_gate=False, a_log=None,
        dt_bias=None, lower_bound=None, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.kda.chunk_kda: as `chunk_gated_delta_rule`, with a gate for every channel of the key: g (B, T, HV, K).

    `safe_gate`, `disable_recompute`, `cu_seqlens_cpu`, `chunk_size`, `use_graph` and `max_num_seqs` change nothing.

    Raises:
        NotImplementedError: cp_context, return_intermediate_states. ValueError, RuntimeError: as
        attnjourney.gated_linear_attention.
    """
    _refuse("chunk_kda", cp_context=cp_context, return_intermediate_states=return_intermediate_states)
    return _call(
        "chunk_kda", "kda", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, use_gate=use_gate_in_kernel,
        a_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """fla.ops.kda.fused_recurrent_kda: as `chunk_kda`, and differentiable here."""
    return _call(
        "fused_recurrent_kda", "kda", q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, qk_l2norm=use_qk_l2norm_in_kernel, use_gate=use_gate_in_kernel,
        a_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, use_beta_sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


# ---- transformers: models look up the package `fla` when they are imported

FUNCTIONS: dict[str, dict[str, Callable]] = {
    "fla.ops.gated_delta_rule": {
        "chunk_gated_delta_rule": chunk_gated_delta_rule,
        "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    },
    "fla.ops.kda": {"chunk_kda": chunk_kda, "fused_recurrent_kda": fused_recurrent_kda},
}
# what transformers calls its own forms of them in a model's module
FALLBACKS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "recurrent_kimi_delta_attention": fused_recurrent_kda,
}
_stand_ins: list[str] = []  # in sys.modules
_replaced: list[tuple[ModuleType, str, Callable]] = []


def activate() -> None:
    """From now on the models of transformers that ask for `fla` run here, unchanged: those whose modules are imported
    already and, where no package `fla` is installed, those that will be. Until `deactivate`.

    torch.export keeps transformers' own functions, as transformers does with `fla` itself.
    """
    if not _stand_ins and "fla" not in sys.modules and importlib.util.find_spec("fla") is None:
        _put_stand_ins()
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models.") or not isinstance(module, ModuleType):
            continue
        for fallback, function in FALLBACKS.items():
            own = vars(module).get(fallback)
            if callable(own) and not getattr(own, "_attnjourney", False):
                _replaced.append((module, fallback, own))
                setattr(module, fallback, _in_place_of(own, function))


def deactivate() -> None:
    """Undoes `activate`; models whose modules were imported in between keep what they have found."""
    while _replaced:
        module, name, own = _replaced.pop()
        setattr(module, name, own)
    while _stand_ins:
        sys.modules.pop(_stand_ins.pop(), None)


def _put_stand_ins() -> None:
    for name in ("fla", "fla.ops", *FUNCTIONS):
        module = ModuleType(name, "attnjourney.integrations.fla in place of a package that is not installed")
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        for function, ours in FUNCTIONS.get(name, {}).items():
            setattr(module, function, ours)
        sys.modules[name] = module
        _stand_ins.append(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _in_place_of(own: Callable, function: Callable) -> Callable:
    """`function` with the arguments it knows, as transformers calls a package's; `own` while a model is exported."""
    known = frozenset(inspect.signature(function).parameters)

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():
            return own(*args, **kwargs)
        return function(*args, **{name: x for name, x in kwargs.items() if name in known})

    call._attnjourney = True  # type: ignore[attr-defined]
    return call

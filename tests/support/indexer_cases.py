"""Calls of the lightning indexer, and what their results are compared with, for its kernels on CUDA and in the
emulator."""

import torch

from attnjourney import reference
from attnjourney.reference.sparse_attention import indexer_loss_and_gradient, indexer_scores, visible_indices
from tests.support.sparse_cases import make_indices
from tests.support.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference, random_tensor

# batch, heads, q_len, kv_len, topk, columns less than the kernel's, options; `blocks`: what a device runs at a time;
# `workspace`: bytes of lists; small numbers, whose scores are exact and often the same, where `whole`
TOPK_SHAPES = [
    (1, 16, 5, 300, 40, 0, dict(is_causal=True, bottom_right=True, whole=True)),
    (2, 20, 3, 200, 64, 8, dict(key_lengths=(200, 50), whole=True, rows_first=True)),
    (1, 4, 9, 150, 200, 24, dict(is_causal=True, workspace=1)),  # more than there are
    (1, 8, 2, 2500, 30, 0, dict(blocks=6, whole=True)),  # keys in parts; lists that are cut
    (2, 3, 2, 1400, 700, 8, dict(blocks=100, whole=True, is_causal=True, bottom_right=True)),
    (1, 40, 1, 700, 5, 0, dict(scale=-0.5)),
    (2, 2, 1, 0, 3, 0, dict()),
]


def topk_inputs(shape, dtype, dim):
    """query, key, weights, topk, options, and how they are run."""
    batch, heads, q_len, kv_len, topk, less, options = shape
    options = dict(options)
    dim -= less if dim % 8 == 0 else less % 8
    how = {name: options.pop(name) for name in ("blocks", "workspace", "rows_first") if name in options}
    shapes = ((batch, heads, q_len, dim), (batch, kv_len, dim), (batch, heads, q_len))
    if options.pop("whole", False):
        generator = torch.Generator().manual_seed(2)
        q, k, w = (torch.randint(-1, 2, s, generator=generator).to(dtype) for s in shapes)
    else:
        q, k, w = (random_tensor(s, dtype, seed=i, outliers=i < 2) for i, s in enumerate(shapes))
    lengths = options.pop("key_lengths", None)
    options["key_lengths"] = None if lengths is None else torch.tensor(lengths)
    options["causal_alignment"] = "bottom_right" if options.pop("bottom_right", False) else "top_left"
    return (q, k, w, topk), {"is_causal": False, **options}, how


def score_rounding(query, key, weights, scale, dtype):
    """What rounding costs a score, by the rule of plain.py: products and sums of `dtype`."""
    q, k, w = (x.double() for x in (query, key, weights))
    ulp = 2 * torch.finfo(dtype).eps
    products = torch.einsum("bhld,bsd->bhls", q, k) * scale
    squares = torch.einsum("bhld,bsd->bhls", q.square(), k.square()) * scale**2
    chains = [max(1.0, n / 4) for n in (q.shape[-1], q.shape[1])]
    of_product = chains[0] * squares + products.square()
    terms = w.square()[..., None] * (of_product + chains[1] * products.relu().square())
    return ulp * terms.sum(1).sqrt()


def compare_topk(indices, scores, inputs, options):
    """The keys of the highest scores, where scores that rounding cannot tell apart may stand for each other."""
    query, key, weights, topk = inputs
    scale, batch, q_len = options.get("scale", 1.0), query.shape[0], query.shape[2]
    expected, chosen = reference.lightning_indexer(
        query.double(), key.double(), weights.double(), topk, return_scores=True, **options
    )
    assert indices.dtype == torch.int32 and indices.shape == scores.shape == (batch, q_len, topk)
    there = expected >= 0
    assert torch.equal(indices >= 0, there) and (indices[~there] == -1).all() and (scores[~there] == -torch.inf).all()
    if not there.any():
        return
    following = there[..., 1:]
    assert (indices.diff(dim=-1)[following] > 0).all()
    exact = indexer_scores(query.double(), key.double(), weights.double(), scale=scale)
    plain = indexer_scores(*(x.to(scores.dtype) for x in (query, key, weights)), scale=scale)
    rounding = score_rounding(query, key, weights, scale, scores.dtype)
    at = indices.clamp(min=0).long()
    own, same_dtype, room = (x.gather(-1, at)[there] for x in (exact, plain, rounding))
    assert_close_to_reference(scores[there], same_dtype, own, OUTPUT_FACTOR, "scores", room)
    # as high as those of the reference, the lowest beside the lowest
    lowest = [x.masked_fill(~there, torch.inf).amin(-1) for x in (exact.gather(-1, at), chosen.double())]
    some = there.any(-1)
    assert (lowest[0] >= lowest[1] - 2 * rounding.amax(-1))[some].all()
    if (exact == exact.round()).all() and exact.abs().max() < 2**20:
        assert torch.equal(indices, expected)


# batch, heads, (query heads, key heads), q_len, kv_len, indices of a row, columns less than the kernels', what differs
LOSS_SHAPES = [
    (1, 4, (4, 1), 5, 90, 40, (0, 0), dict()),
    (2, 20, (6, 2), 3, 70, 33, (8, 8), dict(repeats=True, rows_first=True)),
    (1, 3, (20, 1), 2, 200, 130, (24, 16), dict(workspace=1)),
    (2, 16, (2, 2), 40, 37, 9, (0, 24), dict()),
]


def loss_inputs(shape, dtype, dim, target_dim):
    """index_query, index_key, weights, query, key, indices; grad_loss; how they are run."""
    batch, heads, (q_heads, kv_heads), q_len, kv_len, count, less, options = shape
    options = dict(options)
    dim, target_dim = (d - (n if d % 8 == 0 else n % 8) for d, n in zip((dim, target_dim), less))
    indices = make_indices(
        batch, 1, q_len, kv_len, count, per_head=False, wide=False, repeats=options.pop("repeats", False),
        empty_tiles=count > 128,
    )  # fmt: skip
    shapes = ((batch, heads, q_len, dim), (batch, kv_len, dim), (batch, heads, q_len))
    shapes += ((batch, q_heads, q_len, target_dim), (batch, kv_heads, kv_len, target_dim))
    tensors = [random_tensor(s, dtype, seed=i, outliers=False) for i, s in enumerate(shapes)]
    wide = torch.promote_types(dtype, torch.float32)
    return (*tensors, indices), random_tensor((batch, q_len), wide, seed=7), options


LOSS_SCALES = dict(index_scale=0.3, scale=0.2)
LOSS_NAMES = ("loss", "grad_scores", "grad_index_query", "grad_index_key", "grad_weights")


def loss_and_gradients(inputs, grad_loss, dtype):
    """By the reference in `dtype`, and autograd."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    rest = [x.to(dtype) for x in inputs[3:5]]
    loss, scores = indexer_loss_and_gradient(*leaves, *rest, inputs[5], **LOSS_SCALES)
    return [loss.detach(), scores, *torch.autograd.grad((loss * grad_loss.to(loss.dtype)).sum(), leaves)]


def loss_roundings(inputs, grad_loss, expected):
    """What rounding costs loss, grad_scores and the gradients, by the rule of plain.py. The errors of a row's scores
    are those of score_rounding, and of the attention's those of its products; both pass through a softmax."""
    q, k, w, query, key = (x.double() for x in inputs[:5])
    dtype, wide = inputs[0].dtype, grad_loss.dtype
    u, uw = (2 * torch.finfo(x).eps for x in (dtype, wide))
    (batch, _, q_len, dim), index_scale = q.shape, LOSS_SCALES["index_scale"]
    at, seen = (x.squeeze(1) for x in visible_indices(inputs[5], q_len, k.shape[1]))
    rows = torch.arange(batch)[:, None, None]

    def chosen(x):  # (B, ..., L, S) -> (B, ..., L, k)
        return x.gather(-1, at.reshape(batch, *(1,) * (x.dim() - 3), *at.shape[1:]).expand(*x.shape[:-1], -1))

    own = k[rows, at]  # (B, L, k, D)
    product = torch.einsum("bhld,blkd->bhlk", q, own) * index_scale
    of_score = chosen(score_rounding(*inputs[:3], index_scale, wide)).square()
    of_key = key[rows, :, at].movedim(3, 1).repeat_interleave(query.shape[1] // key.shape[1], 1)  # (B, H, L, k, D)
    scores = torch.einsum("bhld,bhlkd->bhlk", query, of_key) * LOSS_SCALES["scale"]
    squares = torch.einsum("bhld,bhlkd->bhlk", query.square(), of_key.square()) * LOSS_SCALES["scale"] ** 2
    of_attention = uw**2 * (query.shape[3] / 4 * squares + scores.square())
    hidden = ~seen[:, None]
    weights = scores.masked_fill(hidden, -1e300).softmax(-1).masked_fill(hidden, 0.0)

    def through_softmax(p, variance):
        shared = (p.square() * variance).sum(-1, keepdim=True)
        return p.square() * (variance + shared + (1 + p.shape[-1] / 4) * uw**2)

    of_target = through_softmax(weights, of_attention).mean(1)
    target = weights.mean(1)
    p = (expected[1] + target).masked_fill(~seen, 0.0)
    of_grad = through_softmax(p, of_score) + of_target + uw**2 * (p.square() + target.square())
    logs = (target.clamp_min(1e-300).log() - p.clamp_min(1e-300).log()).masked_fill(~seen, 0.0)
    of_loss = (of_target * (logs.abs() + 1).square() + target.square() * (of_score + uw**2 * (1 + logs.square()))).sum(
        -1
    )
    g = grad_loss.double()[..., None]
    d, of_d = (g * expected[1])[:, None], (g.square() * (of_grad + uw**2 * expected[1].square()))[:, None]
    above = (product > 0).double()
    of_product = uw**2 * (dim / 4 * torch.einsum("bhld,blkd->bhlk", q.square(), own.square()) * index_scale**2
                          + product.square())  # fmt: skip
    count = at.shape[-1] / 4
    of_weights = (above * (product.square() * (of_d + count * uw**2 * d.square()) + d.square() * of_product)).sum(-1)
    each = w.square()[..., None] * above * (of_d + (u**2 + count * uw**2) * d.square()) * index_scale**2
    of_query = torch.einsum("bhlk,blkd->bhld", each, own.square())
    of_keys = torch.zeros_like(k).index_put_((rows.expand_as(at), at), torch.einsum("bhlk,bhld->blkd", each, q.square())
                                             * seen[..., None], accumulate=True)  # fmt: skip
    variances = (of_loss, of_grad, of_query, of_keys, of_weights)
    last = (uw, uw, u, u, u)
    return [(x + (ulp * e.double()).square()).sqrt() for x, ulp, e in zip(variances, last, expected, strict=True)]


def compare_loss(results, inputs, grad_loss):
    """results in the order of LOSS_NAMES."""
    expected = loss_and_gradients(inputs, grad_loss, torch.float64)
    dtype = inputs[0].dtype
    narrow = torch.float32 if dtype == torch.float64 else dtype
    plain = loss_and_gradients([x.to(narrow) if x.is_floating_point() else x for x in inputs], grad_loss, narrow)
    if dtype == torch.float64:  # what plain float64 would do: the error of float32, in the proportion of the epsilons
        rounded = [x.float().double() if x.is_floating_point() else x for x in inputs]
        exact = loss_and_gradients(rounded, grad_loss.float().double(), torch.float64)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        plain = [e + (p.double() - x) * ratio for e, p, x in zip(expected, plain, exact)]
    roundings = loss_roundings(inputs, grad_loss, expected)
    for name, actual, p, e, room in zip(LOSS_NAMES, results, plain, expected, roundings, strict=True):
        factor = GRADIENT_FACTOR if name.startswith("grad") else OUTPUT_FACTOR
        assert_close_to_reference(actual, p, e, factor, name, room)

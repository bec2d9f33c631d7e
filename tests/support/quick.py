"""What `make test-quick` runs, and what its tests have to call between them.

The choice is a list, and what it covers is not believed but seen: while a quick test runs, every call of an operator is
recorded with its dtypes and options, and every cache and module that is built. tests/conftest.py adds up what all quick
tests of a run have called, and a run in which something is missing fails (`missing`).
"""

import functools
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

# file: {test: how many of its cases, spread evenly over them; None: all}
QUICK: dict[str, dict[str, int | None]] = {
    "options/test_options.py": {"test_values_and_gradients": None, "test_values_and_gradients_of_pairs": 24},
    "options/test_origin.py": {
        "test_positions_count_from_there": 2,
        "test_heads_of_packed_sequences": None,
        "test_blocks_of_the_whole": None,
    },
    "attention/test_attention_forward.py": {"test_values_and_gradients": 40, "test_longer_than_a_tile": 8},
    "attention/test_derivatives.py": {"test_values": 8, "test_values_at_lengths": 2, "test_gradcheck": 4},
    "attention/test_derivative_transforms.py": {"test_equals_the_reference": 9, "test_varlen": None},
    "attention/test_block_mask_object.py": {"test_both_ways_give_the_same_mask": 2, "test_autocast": None},
    "attention/test_attention_fp8.py": {
        "test_values": 6,
        "test_bad_input": 4,
        "test_error_on_numbers_with_outliers": None,
    },
    "attention/test_autograd.py": {"test_gradcheck_shapes": 3, "test_gradcheck_lse": None},
    "attention/test_nodes.py": {"test_the_library_is_built_and_used": None, "test_both_devices_have_them": None},
    "attention/test_torch_func.py": {"test_vmap_and_per_sample_gradients_equal_a_loop": 4},
    "attention/test_torch_integration.py": {"test_opcheck": 1, "test_compile_aot_eager": 1, "test_autocast": 2},
    "attention/test_dropout.py": {"test_values_and_gradients": 4, "test_keeps_what_the_counter_says": 4},
    "attention/test_empty_and_nan.py": {"test_rows_without_a_key": 4, "test_nan_in_a_mask_shows_in_its_row": 2},
    "attention/test_errors.py": {"test_wrong_argument": 24},
    "attention/test_varlen.py": {"test_equals_a_loop": None, "test_wrong_arguments": 4},
    "attention/test_block_mask.py": {"test_values_and_gradients": 20, "test_second_derivatives": 3, "test_weights": 1},
    "attention/test_weights.py": {"test_weights_with_every_option": None, "test_merging_parts_equals_the_whole": 4},
    "cache/test_paged_attention.py": {"test_values": 24, "test_bad_input": 4},
    "cache/test_decode.py": {"test_values": 12, "test_paged": 6, "test_ring": 1, "test_bad_input": 4},
    "cache/test_decode_options.py": {"test_values": 48, "test_latents": 16},
    "cache/test_mla_decode.py": {"test_dtypes": None, "test_paged": 2},
    "cache/test_quantized_cache.py": {
        "test_what_append_stores": 2,
        "test_values": 4,
        "test_scales_go_where_their_tokens_go": 3,
        "test_latents": 2,
    },
    "cache/test_tree_mask.py": {"test_each_token_equals_decoding_its_path_alone": 2},
    "cache/test_kv_cache.py": {
        "test_prefill_then_decode_equals_one_full_causal_pass": None,
        "test_a_shared_block_is_copied_by_who_writes_first": None,
        "test_latent_cache": None,
        "test_bad_input_leaves_the_cache_as_it_was": None,
    },
    "cache/test_prefix_sharing.py": {
        "test_a_shared_block_is_copied_and_only_that": None,
        "test_packed_tokens_and_rows": 1,
    },
    "cache/test_shared_prefix.py": {"test_values": 12, "test_latents": 4},
    "cache/test_paged_cache.py": {"test_a_rollback_gives_back_what_it_does_not_need": 3},
    "cache/test_cached_layers.py": {"test_prefill_then_decode_equals_one_full_pass": None},
    "layers/test_mha.py": {"test_values_and_gradients_beside_torch": 12, "test_true_is_blocked": None},
    "layers/test_gpt_attention.py": {"test_values_and_gradients_beside_torch": 12, "test_errors": 4},
    "layers/test_gqa.py": {"test_values_and_gradients": 12, "test_gradcheck": 1, "test_errors": 4},
    "layers/test_mla.py": {"test_values_and_gradients": 12, "test_gradcheck": 1, "test_errors": 4},
    "layers/test_derivative_layers.py": {"test_forward_mode": None},
    "layers/test_positions.py": {"test_rotation_and_its_gradient": None, "test_layouts": 1},
    "layers/test_layer_modules.py": {"test_right_padding_is_the_shorter_sequence": None},
    "layers/test_multihead_attention.py": {"test_results_and_gradients": 6},
    "layers/test_longformer_attention.py": {"test_equals_the_dense_formula": 4, "test_module_trains": None},
    "layers/test_accounting.py": {"test_a_layer": None},
    "linear/test_linear_attention.py": {"test_values_and_gradients": 24},
    "linear/test_linear_attention_integration.py": {"test_module_streams_and_trains": None},
    "linear/test_gated_linear_attention.py": {
        "test_values_and_gradients": 24,
        "test_packed_sequences_are_sequences": 2,
        "test_a_nan_shows_in_the_rows_that_see_it_and_in_no_other": 2,
    },
    "linear/test_infini_attention.py": {"test_values_and_gradients": 4, "test_module_streams_and_trains": 1},
    "sparse/test_sparse_attention.py": {
        "test_values_and_gradients": 12,
        "test_the_mean_of_large_values_is_finite": 1,
    },
    "sparse/test_lightning_indexer.py": {"test_the_keys_chosen": 6, "test_loss_and_gradients": 6},
    "emulator/test_faults.py": {"test_faults_find_their_places": None, "test_markers_are_used": None},
    "seeing/test_trace.py": {"test_every_option": 6},
    "seeing/test_trace_modules.py": {"test_stages_lead_to_the_result": 4},
    "seeing/test_capture.py": {"test_layers": 4},
    "seeing/test_states.py": {"test_gated_linear_attention": 4},
    "seeing/test_trace_state.py": {"test_every_stage": 2},
    "seeing/test_viz.py": {"test_summary_of_heads_that_do_one_thing": None},
    "package/test_papers.py": {"test_files_and_folders_exist": None, "test_targets_of_make_exist": None},
    "package/test_isa.py": {"test_the_best_isa_is_taken_and_a_forced_one_is_used": None},
    "package/test_quick_selection.py": {"test_what_is_missing_is_named": None, "test_the_list_names_tests": None},
    "package/test_threads.py": {"test_backward_is_deterministic_and_right_on_any_number_of_threads": 3},
}

# the main operators, whose every dtype and every option some quick test must call
MAIN = ("attention", "varlen_attention", "paged_attention", "block_attention", "decode", "mla_decode")
LAYERS = (
    "gated_linear_attention",
    "gpt_attention",
    "gqa",
    "linear_attention",
    "mha",
    "mla",
    "rope",
    "sparse_attention",
)
DTYPES = ("float64", "float32", "bfloat16", "float16")
# what no call on a CPU reaches: the CUDA library alone asks for it
UNREACHED = {"_deterministic_algorithms"}


def chosen(name: str, count: int) -> set[int]:
    """Which of the `count` cases of the test <file>::<test> are quick."""
    file, _, test = name.partition("::")
    if test not in QUICK.get(file, {}):
        return set()
    wanted = QUICK[file][test]
    return set(range(count)) if wanted is None else {i * count // wanted for i in range(wanted)}


# ---------------------------------------------------------------------------------------------------- what is wanted


def operators() -> list[str]:
    """All that attnjourney registers with torch; _toy is tests/package/test_registration.py's."""
    import attnjourney  # noqa: F401
    from attnjourney._names import operator_names

    return [name for name in operator_names() if not name.startswith("_toy")]


def _schema(operator: str):
    return getattr(torch.ops.attnjourney, operator).default._schema


def _classes() -> list[type]:
    import attnjourney

    caches = [attnjourney.KVCache, attnjourney.LatentCache, attnjourney.PagedKVCache, attnjourney.WindowCache]
    caches += [attnjourney.PagedLatentCache]
    public = [x for name, x in vars(attnjourney.nn).items() if not name.startswith("_") and isinstance(x, type)]
    return caches + [x for x in public if issubclass(x, torch.nn.Module)]


def required() -> set[str]:
    """Everything that the quick tests have to call."""
    wanted = {name for name in operators() if name not in UNREACHED}
    wanted |= {f"{name} in {dtype}" for name in (*MAIN, *LAYERS) for dtype in DTYPES}
    wanted |= {f"{name} with {a.name}" for name in MAIN for a in _schema(name).arguments if a.has_default_value()}
    return wanted | {cls.__name__ for cls in _classes()}


def missing(seen: set[str]) -> list[str]:
    return sorted(required() - seen)


# ---------------------------------------------------------------------------------------------------- what is seen


def _has_data(x) -> bool:
    return not isinstance(x, torch.Tensor) or (x.device.type == "cpu" and not isinstance(x, FakeTensor))


def _note(seen: set[str], name: str, args: tuple, kwargs: dict) -> None:
    """A call: the operator, the dtype of its first argument, the options that are not the default. Dtypes and options
    of `op_forward` and `op_with_lse` are those of `op`."""
    seen.add(name)
    family = name.removesuffix("_forward").removesuffix("_with_lse")
    arguments = _schema(name).arguments
    given = {**dict(zip((a.name for a in arguments), args)), **kwargs}
    for i, argument in enumerate(arguments):
        value = given.get(argument.name, argument.default_value)
        is_tensor = isinstance(value, torch.Tensor)
        if i == 0 and is_tensor:
            seen.add(f"{family} in {str(value.dtype).removeprefix('torch.')}")
        if is_tensor or value != argument.default_value:
            seen.add(f"{family} with {argument.name}")


def _noting(seen: set[str], call, name_of):
    @functools.wraps(call)
    def wrapper(self, /, *args, **kwargs):
        result = call(self, *args, **kwargs)
        namespace, _, name = name_of(self).partition("::")
        if namespace == "attnjourney" and all(map(_has_data, (*args, *kwargs.values()))):
            _note(seen, name.partition(".")[0], args, kwargs)
        return result

    return wrapper


def _building(seen: set[str], init):
    @functools.wraps(init)
    def wrapper(self, *args, **kwargs):
        init(self, *args, **kwargs)
        seen.add(type(self).__name__)

    return wrapper


@contextmanager
def recorded(seen: set[str]):
    """Adds to `seen` what is called with tensors that have data, and built, without an error, inside.

    Every call from Python, those of its autograd nodes too, goes through one of these methods. Nodes in C++ count.
    """
    from attnjourney import _node

    counted = _node.counts()
    packet, overload = torch._ops.OpOverloadPacket, torch._ops.OpOverload
    changes = [
        (packet, "__call__", _noting(seen, packet.__call__, lambda op: op._qualified_op_name)),
        (overload, "__call__", _noting(seen, overload.__call__, lambda op: op.name())),
    ]
    changes += [(cls, "__init__", _building(seen, cls.__init__)) for cls in _classes() if "__init__" in vars(cls)]
    before = [(cls, name, vars(cls)[name]) for cls, name, _ in changes]
    for cls, name, wrapper in changes:
        setattr(cls, name, wrapper)
    try:
        yield
    finally:
        for cls, name, method in before:
            setattr(cls, name, method)
        for name, now in _node.counts().items():
            then = counted.get(name, dict.fromkeys(now, 0))  # the library may be loaded inside
            seen.update(f"{name}_forward" for kind in ("recorded", "without_node") if now[kind] > then[kind])
            seen.update({f"{name}_backward"} if now["backwards"] > then["backwards"] else ())

// The schema of every operator. They are the CPU library's; that of another device registers its kernels beneath them.
// `need` is a bit set in the order of the gradients; a gradient not needed comes back with shape (0,).
#include <torch/csrc/stable/library.h>

#include <string>

// since torch 2.12; with 2.11 they are null, and attnjourney/_library.py sets the tag
extern "C" {
__attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle, const char* schema,
                                                                 const int32_t* tags, int32_t count);
__attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();
}

namespace attnjourney {
namespace {

using Text = std::string;

class Schemas {
 public:
  Schemas() {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_library_init_def("attnjourney", __FILE__, __LINE__, &library_));
  }
  ~Schemas() { aoti_torch_delete_library_object(library_); }
  Schemas(const Schemas&) = delete;
  Schemas& operator=(const Schemas&) = delete;

  void add(const Text& name, const Text& arguments, const Text& results) {
    const Text schema = name + "(" + arguments + ") -> " + results;
    if (!torch_library_def_with_tags) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_library_def(library_, schema.c_str()));
      return;
    }
    // Not nondeterministic_seeded: where dropout is on, a graph has the operator that draws the seed, and ours takes
    // it.
    const int32_t tag = torch_tag_pt2_compliant_tag();
    STABLE_TORCH_ERROR_CODE_CHECK(torch_library_def_with_tags(library_, schema.c_str(), &tag, 1));
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

// ---- attention: the same operators under three kinds of mask ----

struct Masks {
  Text operators;      // what their names begin with
  Text given, needed;  // the arguments of the mask, with and without a default
  bool packed;         // sequences have no lengths, and head counts are always grouped
  Text tangent;        // of a mask that has a gradient,
  Text gradient;       // which comes after those of query, key and value
  Text need;           // all gradients
};

// What changes the scores of a call (read_options in attention/options.cpp).
Text score_options(bool packed) {
  return Text(packed ? "float? scale=None, " : "float? scale=None, bool enable_gqa=False, ") +
         "int causal_alignment=0, SymInt[2] window_size=[-1, -1], SymInt prefix_length=0, " +
         (packed ? "" : "Tensor? key_lengths=None, Tensor? query_lengths=None, ") +
         "float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None";
}
Text options(bool packed) { return score_options(packed) + ", int[4] origin=[0, 0, 0, 0], Tensor? dropout_seed=None"; }

void add_attention(Schemas& schemas, const Masks& mask) {
  const Text inputs = "Tensor query, Tensor key, Tensor value, ", grads = "Tensor grad_out, Tensor? grad_lse, ";
  const Text results = "Tensor out, Tensor lse, Tensor stats, ",
             result_tangents = "Tensor out_tangent, Tensor lse_tangent, ";
  const Text call = "float dropout_p=0.0, bool is_causal=False, *, " + options(mask.packed);
  const Text need = ", int need=" + mask.need;
  const Text tangents = "Tensor? query_tangent=None, Tensor? key_tangent=None, Tensor? value_tangent=None, " +
                        mask.tangent + "Tensor? sinks_tangent=None, Tensor? alibi_slopes_tangent=None, ";
  const Text grad_tangents = "Tensor? grad_out_tangent=None, Tensor? grad_lse_tangent=None, ";
  const auto gradients = [&](const Text& suffix) {
    Text all = "(";
    for (const Text& name :
         {Text("query"), Text("key"), Text("value"), mask.gradient, Text("sinks"), Text("alibi_slopes")})
      if (!name.empty()) all += (all.size() > 1 ? ", Tensor grad_" : "Tensor grad_") + name + suffix;
    return all + ")";
  };
  const Text& name = mask.operators;
  schemas.add(name, inputs + mask.given + call, "Tensor");
  schemas.add(name + "_forward", inputs + mask.given + call, "(Tensor out, Tensor lse, Tensor stats)");
  schemas.add(name + "_backward", grads + inputs + mask.needed + results + call + need, gradients(""));
  schemas.add(name + "_jvp", inputs + mask.needed + results + tangents + call,
              "(Tensor out_tangent, Tensor lse_tangent)");
  schemas.add(name + "_backward_jvp",
              grads + inputs + mask.needed + results + result_tangents + grad_tangents + tangents + call + need,
              gradients("_tangent"));
}

void add_attention(Schemas& schemas) {
  const Text blocks = "Tensor block_offsets, Tensor block_index, Tensor block_partial, Tensor block_elements, ";
  const Text offsets = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, ";
  const Masks dense{.operators = "attention",
                    .given = "Tensor? attn_mask=None, ",
                    .needed = "Tensor? attn_mask, ",
                    .packed = false,
                    .tangent = "Tensor? attn_mask_tangent=None, ",
                    .gradient = "attn_mask",
                    .need = "63"};
  add_attention(schemas, dense);
  add_attention(schemas, {.operators = "varlen_attention",
                          .given = offsets,
                          .needed = offsets,
                          .packed = true,
                          .tangent = "",
                          .gradient = "",
                          .need = "31"});
  schemas.add("paged_attention",
              "Tensor query, Tensor key, Tensor value, " + offsets + "Tensor block_table, bool is_causal=False, *, " +
                  score_options(true),
              "(Tensor out, Tensor lse)");
  add_attention(schemas, {.operators = "block_attention",
                          .given = blocks,
                          .needed = blocks,
                          .packed = false,
                          .tangent = "",
                          .gradient = "",
                          .need = "31"});
  const Text inputs = "Tensor query, Tensor key, Tensor value, ", call = "bool is_causal=False, *, " + options(false);
  schemas.add("attention_fp8",
              inputs +
                  "Tensor query_scale, Tensor key_scale, Tensor value_scale, bool is_causal=False, *, "
                  "float? scale=None, bool enable_gqa=False, int causal_alignment=0, "
                  "SymInt[2] window_size=[-1, -1], SymInt prefix_length=0, Tensor? key_lengths=None, "
                  "float softcap=0.0, Tensor? sinks=None, int out_dtype=0",  // bfloat16, float16, float32
              "(Tensor out, Tensor lse)");
  schemas.add("attention_with_lse", inputs + dense.given + "float dropout_p=0.0, " + call, "(Tensor out, Tensor lse)");
  const Text chosen = "Tensor query, Tensor key, Tensor lse, Tensor? stats, Tensor rows, Tensor heads, ";
  schemas.add("_attention_weights", chosen + dense.given + call, "Tensor");
  schemas.add("_block_attention_weights", chosen + blocks + call, "Tensor");
  schemas.add("_explain",
              inputs + dense.given +
                  "Tensor? block_offsets=None, Tensor? block_index=None, Tensor? block_partial=None, "
                  "Tensor? block_elements=None, float dropout_p=0.0, " +
                  call,
              "Tensor");
  schemas.add("_cpu_info", "", "Tensor");
}

// ---- decoding and its caches ----

void add_decode(Schemas& schemas) {
  const Text options =
      "bool is_causal=True, SymInt[2] window_size=[-1, -1], float? scale=None, Tensor? attn_mask=None, "
      "SymInt prefix_length=0, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None";
  schemas.add("decode",
              "Tensor query, Tensor key, Tensor value, Tensor lengths, *, Tensor? block_table=None, bool ring=False, "
              "Tensor? key_scale=None, Tensor? value_scale=None, " +
                  options,
              "(Tensor out, Tensor lse)");
  schemas.add("mla_decode",
              "Tensor query, Tensor latent, Tensor lengths, Tensor kv_b_weight, *, Tensor? block_table=None, "
              "Tensor? latent_scale=None, " +
                  options,
              "(Tensor out, Tensor lse)");
}

void add_caches(Schemas& schemas) {
  schemas.add("kv_cache_append",
              "Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!) lengths, Tensor key, Tensor? value, "
              "*, Tensor? counts=None, bool ring=False, Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None",
              "()");
  schemas.add("kv_cache_truncate", "Tensor(a!) lengths, Tensor new_lengths, *, Tensor? lowest=None", "()");
  schemas.add("kv_cache_reorder",
              "Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!) lengths, Tensor batch_index, "
              "*, Tensor(d!)? key_scale=None, Tensor(e!)? value_scale=None",
              "()");
  const Text paged = "Tensor(a!) lengths, Tensor(b!) block_table, Tensor(c!) block_refs, ";
  schemas.add("paged_cache_append",
              "Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor(c!) lengths, Tensor(d!) block_table, "
              "Tensor(e!) block_refs, Tensor key, Tensor? value, *, Tensor? counts=None, "
              "Tensor(f!)? key_scale=None, Tensor(g!)? value_scale=None",
              "()");
  schemas.add("paged_cache_truncate", paged + "Tensor new_lengths, *, int block_size", "()");
  schemas.add("paged_cache_reorder", paged + "Tensor batch_index", "()");
}

// ---- linear attention: feature_map 0 identity, 1 relu, 2 elu+1 ----

void add_linear_attention(Schemas& schemas) {
  const Text inputs = "Tensor query, Tensor key, Tensor value, ";
  const Text given = "Tensor? key_padding_mask=None, Tensor? initial_state=None, Tensor? initial_normalizer=None, *, ";
  const Text options = "int feature_map=2, bool is_causal=True, float scale=1.0, bool normalize=True, float eps=1e-06";
  schemas.add("linear_attention", inputs + given + options, "Tensor");
  schemas.add("linear_attention_forward", inputs + given + options,
              "(Tensor out, Tensor denominator, Tensor state, Tensor normalizer)");
  schemas.add("linear_attention_backward",
              "Tensor grad_out, Tensor? grad_denominator, Tensor? grad_state, Tensor? grad_normalizer, " + inputs +
                  "Tensor? key_padding_mask, Tensor? initial_state, Tensor? initial_normalizer, Tensor out, "
                  "Tensor denominator, *, " +
                  options + ", int need",
              "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_initial_state, "
              "Tensor grad_initial_normalizer)");
}

// update: 0 linear, 1 gated, 2 delta, 3 gated_delta, 4 kda
void add_gated_linear_attention(Schemas& schemas) {
  const Text inputs = "Tensor query, Tensor key, Tensor value, ";
  const Text given = "Tensor? gate=None, Tensor? beta=None, Tensor? initial_state=None, Tensor? cu_seqlens=None, *, ";
  const Text options = "int update=3, float scale=1.0, bool qk_l2norm=False";
  schemas.add("gated_linear_attention", inputs + given + options, "Tensor");
  schemas.add("gated_linear_attention_forward", inputs + given + options, "(Tensor out, Tensor state)");
  schemas.add("gated_linear_attention_backward",
              "Tensor? grad_out, Tensor? grad_state, " + inputs +
                  "Tensor? gate, Tensor? beta, Tensor? initial_state, Tensor? cu_seqlens, *, " + options + ", int need",
              "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_gate, Tensor grad_beta, "
              "Tensor grad_initial_state)");
}

// ---- token-sparse attention and its indexer ----

void add_sparse_attention(Schemas& schemas) {
  const Text inputs = "Tensor query, Tensor key, Tensor value, Tensor indices, ";
  const Text options =
      "*, float? scale=None, bool enable_gqa=False, bool is_causal=False, int causal_alignment=0, "
      "Tensor? key_lengths=None, float softcap=0.0, Tensor? sinks=None, SymInt query_block_size=1";
  schemas.add("sparse_attention", inputs + options, "Tensor");
  schemas.add("sparse_attention_forward", inputs + options, "(Tensor out, Tensor lse, Tensor stats)");
  schemas.add("sparse_attention_backward",
              "Tensor grad_out, Tensor? grad_lse, " + inputs + "Tensor out, Tensor lse, Tensor stats, " + options +
                  ", int need=15",
              "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)");
}

void add_lightning_indexer(Schemas& schemas) {
  schemas.add("lightning_indexer",
              "Tensor query, Tensor key, Tensor weights, SymInt topk, *, bool is_causal=True, int causal_alignment=0, "
              "Tensor? key_lengths=None, float scale=1.0",
              "(Tensor indices, Tensor scores)");
  const Text index = "Tensor index_query, Tensor index_key, Tensor weights, ";
  const Text inputs = index + "Tensor query, Tensor key, Tensor indices, ";
  const Text options = "*, float index_scale=1.0, float? scale=None, bool enable_gqa=False";
  schemas.add("lightning_indexer_loss", inputs + options, "Tensor");
  schemas.add("lightning_indexer_loss_forward", inputs + options, "(Tensor loss, Tensor grad_scores)");
  schemas.add("lightning_indexer_loss_backward",
              "Tensor grad_loss, " + index + "Tensor indices, Tensor grad_scores, *, float index_scale=1.0, int need=7",
              "(Tensor grad_index_query, Tensor grad_index_key, Tensor grad_weights)");
}

// ---- layers ----

// rope is linear in x: its backward is rope with the other `inverse`, its forward derivative rope itself.
void add_rope(Schemas& schemas) {
  schemas.add("rope", "Tensor x, Tensor cos, Tensor sin, *, bool interleaved=False, bool inverse=False", "Tensor");
  schemas.add("rope_", "Tensor(a!) x, Tensor cos, Tensor sin, *, bool interleaved=False", "()");
}

void add_mha(Schemas& schemas) {
  const Text weights =
      "int num_heads, Tensor in_proj_weight, Tensor? in_proj_bias, Tensor out_proj_weight, Tensor? out_proj_bias, *, "
      "Tensor? attn_mask=None, Tensor? key_padding_mask=None, bool is_causal=False, float dropout_p=0.0";
  schemas.add("mha", "Tensor query, Tensor key, Tensor value, " + weights, "Tensor");
  schemas.add("mha_forward", "Tensor query, Tensor? key, Tensor? value, " + weights + ", Tensor? dropout_seed=None",
              "(Tensor out, Tensor attn, Tensor lse, Tensor stats, Tensor projected)");
  schemas.add(
      "mha_backward",
      "Tensor grad_out, Tensor query, Tensor? key, Tensor? value, int num_heads, Tensor in_proj_weight, "
      "Tensor out_proj_weight, Tensor? attn_mask, Tensor? key_padding_mask, Tensor attn, Tensor lse, Tensor stats, "
      "Tensor projected, *, bool is_causal=False, float dropout_p=0.0, Tensor? dropout_seed=None, "
      "int need=511",
      "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_in_proj_weight, "
      "Tensor grad_in_proj_bias, Tensor grad_out_proj_weight, Tensor grad_out_proj_bias, "
      "Tensor grad_attn_mask, Tensor grad_key_padding_mask)");
}

void add_gpt_attention(Schemas& schemas) {
  const Text call =
      "Tensor x, int num_heads, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, *, "
      "float dropout_p=0.0";
  schemas.add("gpt_attention", call, "Tensor");
  schemas.add("gpt_attention_forward", call + ", Tensor? dropout_seed=None",
              "(Tensor out, Tensor attn, Tensor lse, Tensor stats, Tensor qkv)");
  schemas.add("gpt_attention_backward",
              "Tensor grad_out, Tensor x, int num_heads, Tensor qkv_weight, Tensor out_weight, Tensor attn, "
              "Tensor lse, Tensor stats, Tensor qkv, *, float dropout_p=0.0, Tensor? dropout_seed=None, int need=31",
              "(Tensor grad_x, Tensor grad_qkv_weight, Tensor grad_qkv_bias, Tensor grad_out_weight, "
              "Tensor grad_out_bias)");
}

void add_gqa(Schemas& schemas) {
  const Text inputs =
      "Tensor x, int num_heads, int num_kv_heads, Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor o_weight, ";
  const Text biases = "Tensor? q_bias=None, Tensor? k_bias=None, Tensor? v_bias=None, Tensor? o_bias=None, *, ";
  const Text options = "Tensor? cos=None, Tensor? sin=None, bool is_causal=True";
  schemas.add("gqa", inputs + biases + options, "Tensor");
  schemas.add("gqa_forward", inputs + biases + options,
              "(Tensor out, Tensor query, Tensor key, Tensor value, Tensor attn, Tensor lse, Tensor stats)");
  schemas.add("gqa_backward",
              "Tensor grad_out, " + inputs +
                  "Tensor query, Tensor key, Tensor value, Tensor attn, Tensor lse, Tensor stats, *, " + options +
                  ", int need=511",
              "(Tensor grad_x, Tensor grad_q_weight, Tensor grad_k_weight, Tensor grad_v_weight, "
              "Tensor grad_o_weight, Tensor grad_q_bias, Tensor grad_k_bias, Tensor grad_v_bias, "
              "Tensor grad_o_bias)");
}

void add_mla(Schemas& schemas) {
  const Text inputs =
      "Tensor x, int num_heads, int qk_nope_head_dim, int qk_rope_head_dim, int v_head_dim, Tensor? q_a_weight, "
      "Tensor? q_a_norm_weight, Tensor q_b_weight, Tensor kv_a_weight, Tensor kv_a_norm_weight, Tensor kv_b_weight, "
      "Tensor o_weight, ";
  const Text options = "*, Tensor? cos=None, Tensor? sin=None, bool is_causal=True, float? scale=None, ";
  schemas.add("mla", inputs + options + "float eps=1e-6", "Tensor");
  schemas.add("mla_forward", inputs + options + "float eps=1e-6",
              "(Tensor out, Tensor query, Tensor kv, Tensor kv_a, Tensor kv_rstd, Tensor q_a, Tensor q_rstd, "
              "Tensor attn, Tensor lse, Tensor stats)");
  schemas.add("mla_backward",
              "Tensor grad_out, " + inputs +
                  "Tensor query, Tensor kv, Tensor kv_a, Tensor kv_rstd, Tensor q_a, Tensor q_rstd, Tensor attn, "
                  "Tensor lse, Tensor stats, " +
                  options + "int need=255",
              "(Tensor grad_x, Tensor grad_q_a_weight, Tensor grad_q_a_norm_weight, Tensor grad_q_b_weight, "
              "Tensor grad_kv_a_weight, Tensor grad_kv_a_norm_weight, Tensor grad_kv_b_weight, "
              "Tensor grad_o_weight)");
}

struct AllSchemas : Schemas {
  AllSchemas() {
    add_attention(*this);
    add_decode(*this);
    add_caches(*this);
    add_linear_attention(*this);
    add_gated_linear_attention(*this);
    add_sparse_attention(*this);
    add_lightning_indexer(*this);
    add_rope(*this);
    add_mha(*this);
    add_gpt_attention(*this);
    add_gqa(*this);
    add_mla(*this);
  }
};
const AllSchemas registered;  // as long as the library is loaded

}  // namespace
}  // namespace attnjourney

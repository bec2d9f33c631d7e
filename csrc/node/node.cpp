// Autograd in C++: what attnjourney/ops/_registry/nodes.py does, for calls of plain tensors, by torch's own headers and
// so for one torch alone. attnjourney/_node.py loads the library, cpp_nodes.py describes each operator to it.
//
// The kernels here are those of AutogradCPU and AutogradCUDA. They call op_forward below autograd and record a node,
// whose backward calls op_backward. Everything else they hand over to the kernel of the alias key Autograd, which is
// Python's: subclasses, fakes and functorch's wrappers, dual tensors, modes, autocast that is still to come, None for a
// tensor that is needed, gradients that do not exist. A backward that will be differentiated again goes through the
// autograd kernels of the operators it calls, that of a layer through Python's composite. The results must be those of
// Python's nodes to the last bit, errors included (tests/attention/test_nodes.py).
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// Which torch this is for, to be found in the file before anything is loaded (attnjourney/_node.py).
#define TEXT_OF_NUMBER(x) #x
#define TEXT_OF(x) TEXT_OF_NUMBER(x)
__attribute__((used)) static const char mark[] =
    "attnjourney autograd nodes for torch " ATTNJOURNEY_TORCH " cxx11 " TEXT_OF(_GLIBCXX_USE_CXX11_ABI);

namespace attnjourney {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::autograd::AutogradContext;
using torch::autograd::Edge;
using torch::autograd::variable_list;
using torch::jit::Stack;

// Calls since the library was loaded, for tests.
enum Count { recorded, without_node, handed_over, backwards, kinds_of_calls };
class Counts {
 public:
  void add(Count which) const { numbers_[which].fetch_add(1, std::memory_order_relaxed); }
  void write(int64_t* to) const {
    for (const auto& number : numbers_) *to++ = number.load();
  }

 private:
  mutable std::array<std::atomic<int64_t>, kinds_of_calls> numbers_{};
};

// An operator as `Operator` in attnjourney/ops/_registry/operator.py has read it. Indices count the arguments of
// op_forward and, where results are meant too, its results after them.
struct Table {
  std::string name;
  std::vector<int64_t> saved;           // tensors kept for the backward: arguments and results
  std::vector<int64_t> others;          // what else is kept: arguments
  std::vector<int64_t> gradients;       // the input of each result of op_backward
  std::vector<int64_t> differentiable;  // results, counted from 0
  std::vector<int64_t> backward;        // arguments of op_backward, in: gradients of results, saved, others, need
  std::vector<int64_t> again;           // the same for the operator of the backward's own derivative; may be empty
  std::vector<int64_t> required;        // pairs: a gradient that may not be missing, the saved result like it or -1
  std::vector<int64_t> constants;       // tensors without a gradient
  std::vector<int64_t> repeats;         // pairs i, j: argument i is left out where it is argument j
  std::vector<int64_t> dropout;         // of dropout_p and dropout_seed; empty where there is none
  std::vector<int64_t> written;         // of an operator without a backward: arguments that it writes to

  std::optional<OperatorHandle> forward_op, backward_op, again_op;  // forward_op: itself where there is no backward
  std::vector<char> needed, constant;  // by argument: whether a tensor must be there; whether it has no gradient
  int64_t index = 0;
  Counts counts;
};

std::vector<std::unique_ptr<Table>>& tables() {
  static auto* all = new std::vector<std::unique_ptr<Table>>;  // as long as the process: graphs may outlive statics
  return *all;
}

OperatorHandle find(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

// ---- which calls are served ----

// Keys that change nothing of what an autograd node does.
uint64_t plain_keys() {
  static const uint64_t keys =
      DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA,
                      DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect, DispatchKey::Conjugate,
                      DispatchKey::Negative, DispatchKey::ZeroTensor})
          .raw_repr();
  return keys;
}
// Those of autocast, which every tensor has: off while they are excluded.
uint64_t autocast_off() {
  static const uint64_t keys = DispatchKeySet({DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA}).raw_repr();
  return c10::impl::tls_local_dispatch_key_set().excluded_.raw_repr() & keys;
}

class Plain {
 public:
  Plain() : keys_(c10::impl::tls_local_dispatch_key_set().included_.raw_repr()) {}
  void add(const Tensor& t) {
    keys_ |= t.key_set().raw_repr();
    dual_ = dual_ || t._fw_grad(0).defined();
  }
  void add(const variable_list& tensors) {
    for (const Tensor& t : tensors)
      if (t.defined()) add(t);
  }
  bool dual() const { return dual_; }
  explicit operator bool() const { return (keys_ & ~plain_keys() & ~autocast_off()) == 0 && !dual_; }

 private:
  uint64_t keys_;
  bool dual_ = false;
};

// ---- the node ----

// None for a tensor that is not there
IValue as_argument(const Tensor& t) { return t.defined() ? IValue(t) : IValue(); }

constexpr const char* kept = "attnjourney";  // the key of: the table's index, then what is kept besides tensors

struct Formula {
  static constexpr bool is_traceable = false;

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const c10::List<IValue> others = context->saved_data.at(kept).toList();
    const Table& table = *tables()[static_cast<size_t>(others.get(0).toInt())];
    const variable_list saved = context->get_saved_variables();
    variable_list none(table.gradients.size());
    grads.resize(table.differentiable.size());
    for (size_t i = 0; i < table.required.size(); i += 2) {
      Tensor& grad = grads[static_cast<size_t>(table.required[i])];
      if (grad.defined()) continue;
      if (std::none_of(grads.begin(), grads.end(), [](const Tensor& g) { return g.defined(); })) return none;
      grad = at::zeros_like(saved[static_cast<size_t>(table.required[i + 1])]);
    }
    int64_t need = 0;
    for (size_t i = 0; i < none.size(); i++)
      if (context->needs_input_grad(i)) need |= int64_t{1} << i;

    table.counts.add(backwards);
    Plain plain;
    plain.add(grads), plain.add(saved);
    const bool higher = at::GradMode::is_enabled() || plain.dual();  // will be differentiated again
    const bool again = higher && table.again_op;
    Stack stack;
    for (const int64_t from : again ? table.again : table.backward) {
      auto i = static_cast<size_t>(from);
      if (i < grads.size())
        stack.push_back(as_argument(grads[i]));
      else if ((i -= grads.size()) < saved.size())
        stack.push_back(as_argument(saved[i]));
      else if ((i -= saved.size()) + 1 < others.size())
        stack.push_back(others.get(i + 1));
      else
        stack.emplace_back(need);
    }
    variable_list results;
    if (again) {  // in differentiable functions; None where the result does not depend on an input
      table.again_op->callBoxed(&stack);
      for (const IValue& result : stack.at(0).toList().vec())
        results.push_back(result.isNone() ? Tensor() : result.toTensor());
      return results;
    }
    if (!higher && plain) {
      const at::AutoDispatchBelowAutograd below;
      table.backward_op->callBoxed(&stack);
    } else {
      table.backward_op->callBoxed(&stack);  // has an autograd node, too
    }
    for (size_t i = 0; i < none.size(); i++) results.push_back(need >> i & 1 ? stack[i].toTensor() : Tensor());
    return results;
  }
};

struct Node : torch::autograd::CppNode<Formula> {
  explicit Node(const Table& of) : table(of) {}
  std::string name() const override { return "attnjourney_" + table.name + "Backward"; }
  const Table& table;
};

using NodePointer = decltype(Edge::function);  // std::shared_ptr before torch 2.13
template <class Pointer>
Pointer make_node(const Table& table) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return std::make_shared<Node>(table);
  else
    return c10::make_intrusive<Node>(table);
}

// ---- operators ----

// An operator whose results are the first ones of op_forward, and its arguments the first ones of op_forward's.
class Kernel : public c10::OperatorKernel {
 public:
  Kernel(const Table& table, const OperatorHandle& op, bool autograd)
      : table_(table),
        is_forward_(op.operator_name() == table.forward_op->operator_name()),
        given_(op.schema().arguments().size()),
        results_(op.schema().returns().size()),
        all_(table.forward_op->schema().arguments().size()),
        autograd_(autograd) {}

  void operator()(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    Stack call;
    call.reserve(std::max(all_, table_.forward_op->schema().returns().size()));
    const auto given = torch::jit::last(*stack, given_);
    call.assign(given.begin(), given.end());
    if (!autograd_) {
      for (size_t i = 0; i < given_; i++)
        TORCH_CHECK_TYPE(!lacks(call[i], i), op.schema().arguments()[i].name(), ": must be Tensor, not NoneType");
      complete(call);
      table_.forward_op->callBoxed(&call);
      return give(call, stack);
    }
    Plain plain;
    bool requires_grad = false, refused = false;
    for (size_t i = 0; i < given_; i++) {
      if (!call[i].isTensor()) continue;
      const Tensor& t = call[i].toTensor();
      if (!t.defined()) {
        refused = refused || table_.needed[i];
        continue;
      }
      plain.add(t);
      if (t.requires_grad()) requires_grad = true, refused = refused || table_.constant[i];
    }
    if (!plain || refused) {
      table_.counts.add(handed_over);
      return op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    }
    complete(call);
    if (requires_grad && at::GradMode::is_enabled()) {
      record(call);
    } else {
      table_.counts.add(without_node);
      const at::AutoDispatchBelowAutograd below;
      table_.forward_op->callBoxed(&call);
    }
    give(call, stack);
  }

 private:
  bool lacks(const IValue& x, size_t i) const { return table_.needed[i] && !(x.isTensor() && x.toTensor().defined()); }

  // Makes arguments of op_forward of the operator's: repeats left out, a seed where dropout is on.
  void complete(Stack& call) const {
    if (is_forward_) return;
    call.resize(all_);
    for (size_t i = 0; i < table_.repeats.size(); i += 2) {
      IValue& x = call[static_cast<size_t>(table_.repeats[i])];
      const IValue& like = call[static_cast<size_t>(table_.repeats[i + 1])];
      if (x.isTensor() && like.isTensor() && x.toTensor().is_same(like.toTensor())) x = IValue();
    }
    if (table_.dropout.empty()) return;
    IValue& seed = call[static_cast<size_t>(table_.dropout[1])];
    const double p = call[static_cast<size_t>(table_.dropout[0])].toDouble();
    if (p > 0 && seed.isNone()) seed = at::randint(int64_t{1} << 62, {}, call[0].toTensor().options().dtype(at::kLong));
  }

  // Calls op_forward and gives its results a node.
  void record(Stack& call) const {
    table_.counts.add(recorded);
    const int64_t arguments = static_cast<int64_t>(all_);
    const auto tensor = [&](int64_t i) {
      const IValue& x = call[static_cast<size_t>(i)];
      return x.isTensor() ? x.toTensor() : Tensor();
    };
    variable_list saved(table_.saved.size());
    for (size_t i = 0; i < saved.size(); i++)
      if (table_.saved[i] < arguments) saved[i] = tensor(table_.saved[i]);
    c10::impl::GenericList others(c10::AnyType::get());
    others.reserve(table_.others.size() + 1);
    others.push_back(table_.index);
    for (const int64_t i : table_.others) others.push_back(call[static_cast<size_t>(i)]);
    torch::autograd::edge_list edges;
    edges.reserve(table_.gradients.size());
    for (const int64_t i : table_.gradients) {
      const Tensor input = tensor(i);
      edges.push_back(input.defined() ? torch::autograd::impl::gradient_edge(input) : Edge());
    }
    {
      const at::AutoGradMode off(false);
      const at::AutoDispatchBelowAutograd below;
      table_.forward_op->callBoxed(&call);
    }
    const auto pointer = make_node<NodePointer>(table_);
    Node& node = static_cast<Node&>(*pointer);
    node.set_ctx_grad_fn(pointer);
    node.set_next_edges(std::move(edges));
    node.is_variable_input_.assign(table_.gradients.size(), true);
    for (const int64_t i : table_.differentiable) {
      if (i >= static_cast<int64_t>(results_)) break;
      Tensor result = call[static_cast<size_t>(i)].toTensor();
      torch::autograd::create_gradient_edge(result, pointer);
      if (auto* view = torch::autograd::impl::get_view_autograd_meta(result))  // as of any custom function
        view->set_creation_meta(torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
    }
    for (size_t i = 0; i < saved.size(); i++)
      if (table_.saved[i] >= arguments) saved[i] = tensor(table_.saved[i] - arguments);
    node.ctx_.saved_data[kept] = std::move(others);
    node.ctx_.set_materialize_grads(false);
    node.ctx_.save_for_backward(std::move(saved));
    node.save_variables_to_ctx();
  }

  void give(Stack& results, Stack* stack) const {
    torch::jit::drop(*stack, given_);
    for (size_t i = 0; i < results_; i++) stack->push_back(std::move(results[i]));
  }

  const Table& table_;
  const bool is_forward_;
  const size_t given_, results_, all_;
  const bool autograd_;
};

// An operator without a backward. Python refuses what cannot be.
class InferenceKernel : public c10::OperatorKernel {
 public:
  explicit InferenceKernel(const Table& table) : table_(table) {}

  void operator()(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    const auto given = torch::jit::last(*stack, table_.needed.size());
    Plain plain;
    bool refused = false;
    for (size_t i = 0; i < given.size(); i++) {
      if (!given[i].isTensor()) continue;
      const Tensor& t = given[i].toTensor();
      if (t.defined())
        plain.add(t), refused = refused || (t.requires_grad() && at::GradMode::is_enabled());
      else
        refused = refused || table_.needed[i];
    }
    c10::SmallVector<Tensor, 5> written;
    for (const int64_t i : table_.written) {
      const IValue& x = given[static_cast<size_t>(i)];
      if (!x.isTensor() || !x.toTensor().defined()) continue;
      written.push_back(x.toTensor());
      refused = refused || written.back().is_inference();
    }
    if (!plain || refused) {
      table_.counts.add(handed_over);
      return op.redispatchBoxed(DispatchKeySet(DispatchKey::AutogradOther), stack);
    }
    table_.counts.add(without_node);
    {
      const at::AutoDispatchBelowAutograd below;
      op.callBoxed(stack);
    }
    for (const Tensor& t : written) torch::autograd::impl::bump_version(t);
  }

 private:
  const Table& table_;
};

torch::Library& library(DispatchKey key) {
  static const auto make = [](DispatchKey k) {
    return torch::Library(torch::Library::IMPL, "attnjourney", k, __FILE__, __LINE__);
  };
  static torch::Library autograd_cpu = make(DispatchKey::AutogradCPU), autograd_cuda = make(DispatchKey::AutogradCUDA),
                        cpu = make(DispatchKey::CPU), cuda = make(DispatchKey::CUDA);
  switch (key) {
    case DispatchKey::AutogradCPU:
      return autograd_cpu;
    case DispatchKey::AutogradCUDA:
      return autograd_cuda;
    case DispatchKey::CPU:
      return cpu;
    default:
      return cuda;
  }
}

void add_kernel(const Table& table, const std::string& name, DispatchKey key, bool autograd) {
  const OperatorHandle op = find("attnjourney::" + name);
  library(key).impl(name.c_str(),
                    torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(table, op, autograd)));
}

// Lines of a word and what belongs to it: indices, or for `name` and `operators` names; without `operators` it is an
// operator without a backward.
void add(const char* description) {
  auto table = std::make_unique<Table>();
  std::vector<std::string> operators;
  std::string again;
  std::istringstream lines(description);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string key;
    words >> key;
    if (key == "name") {
      words >> table->name;
    } else if (key == "again_name") {
      words >> again;
    } else if (key == "operators") {
      for (std::string name; words >> name;) operators.push_back(name);
    } else {
      const std::pair<const char*, std::vector<int64_t>*> lists[] = {
          {"saved", &table->saved},         {"others", &table->others},
          {"gradients", &table->gradients}, {"differentiable", &table->differentiable},
          {"backward", &table->backward},   {"again", &table->again},
          {"required", &table->required},   {"constants", &table->constants},
          {"repeats", &table->repeats},     {"dropout", &table->dropout},
          {"written", &table->written},
      };
      std::vector<int64_t>* list = nullptr;
      for (const auto& [name, numbers] : lists)
        if (key == name) list = numbers;
      TORCH_CHECK(list, "attnjourney's node: unknown line ", line);
      for (int64_t number; words >> number;) list->push_back(number);
    }
  }
  const bool inference = operators.empty();
  table->forward_op = find("attnjourney::" + table->name + (inference ? "" : "_forward"));
  if (!inference) table->backward_op = find("attnjourney::" + table->name + "_backward");
  if (!again.empty()) table->again_op = find(again);
  for (const c10::Argument& argument : table->forward_op->schema().arguments())
    table->needed.push_back(argument.type()->kind() == c10::TypeKind::TensorType);
  table->constant.resize(table->needed.size());
  for (const int64_t i : table->constants) table->constant.at(static_cast<size_t>(i)) = 1;
  for (size_t i = 0; i < table->repeats.size(); i += 2) table->needed.at(static_cast<size_t>(table->repeats[i])) = 1;
  table->index = static_cast<int64_t>(tables().size());
  for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA})
    if (inference)
      library(key).impl(table->name.c_str(),
                        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<InferenceKernel>(*table)));
  for (const std::string& name : operators) {
    for (const DispatchKey key : {DispatchKey::AutogradCPU, DispatchKey::AutogradCUDA})
      add_kernel(*table, name, key, true);
    if (name != table->name + "_forward")  // which has kernels
      for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) add_kernel(*table, name, key, false);
  }
  tables().push_back(std::move(table));
}

}  // namespace
}  // namespace attnjourney

// Null, or what went wrong; for one thread at a time.
extern "C" __attribute__((visibility("default"))) const char* attnjourney_node_add(const char* description) {
  static std::string error;
  try {
    attnjourney::add(description);
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

// Of the operator that was the index-th to be added: calls that recorded a node, that needed none, that were handed
// over to Python, and backwards.
extern "C" __attribute__((visibility("default"))) void attnjourney_node_counts(int64_t index, int64_t* to) {
  attnjourney::tables().at(static_cast<size_t>(index))->counts.write(to);
}

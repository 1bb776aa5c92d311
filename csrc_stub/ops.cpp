// The ops for a process without Python: their schemas, argument rules and numerics are those of
// the Python package (src/neuronmm_ops/ops: spec.py and definitions/).
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace {

using at::Tensor;

// --- rules for arguments ------------------------------------------------------------------------

struct Named {
  const char* name;
  const Tensor& tensor;
};

std::string dtype_name(const Tensor& tensor) {
  return "torch." + std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

bool is_supported(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat ||
         dtype == at::kDouble;
}

void check_same(const char* op, const Tensor& x, const Named& other) {
  const auto& [name, tensor] = other;
  TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), op, ": x and ", name,
                   " must have the same dtype, got ", dtype_name(x), " and ", dtype_name(tensor),
                   "; cast one of them with .to(dtype)");
  TORCH_CHECK_TYPE(tensor.device() == x.device(), op, ": x and ", name,
                   " must be on the same device, got ", x.device(), " and ", tensor.device(),
                   "; move one of them with .to(device)");
}

void check_operands(const char* op, const Tensor& x, std::initializer_list<Named> matrices,
                    const std::optional<Tensor>& bias = std::nullopt) {
  TORCH_CHECK_VALUE(x.dim() > 0, op,
                    ": x must have at least one dimension [..., K], got a 0-D tensor");
  for (const auto& [name, matrix] : matrices)
    TORCH_CHECK_VALUE(matrix.dim() == 2, op, ": ", name, " must be a matrix, got shape ",
                      matrix.sizes());
  TORCH_CHECK_TYPE(is_supported(x.scalar_type()), op,
                   ": dtype must be bfloat16, float16, float32 or float64, got ", dtype_name(x),
                   "; cast x and the weights");
  for (const auto& matrix : matrices) check_same(op, x, matrix);
  if (bias) check_same(op, x, {"bias", *bias});
}

void check_contraction(const char* op, const Named& left, const Named& right) {
  TORCH_CHECK_VALUE(left.tensor.size(-1) == right.tensor.size(0), op, ": last dimension of ",
                    left.name, " must equal first dimension of ", right.name, ", got ", left.name,
                    " ", left.tensor.sizes(), " and ", right.name, " ", right.tensor.sizes());
}

void check_bias(const char* op, const Named& matrix, const std::optional<Tensor>& bias) {
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == matrix.tensor.size(1)), op,
                    ": bias must have shape [N] with N the columns of ", matrix.name, ", got bias ",
                    bias->sizes(), " and ", matrix.name, " ", matrix.tensor.sizes());
}

// --- matmuls ------------------------------------------------------------------------------------

// x [..., K] as rows [M, K], or as a vector [K] where mv is the faster matmul.
Tensor flat(const Tensor& x, const Tensor& w) {
  const bool is_vector = x.numel() > 0 && x.numel() == x.size(-1) && w.stride(0) == 1;
  if (is_vector) return x.reshape({-1});
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

// x @ w + bias for x [M, K] or [K].
Tensor affine(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias = std::nullopt) {
  if (x.dim() == 1) return bias ? at::addmv(*bias, w.t(), x) : at::mv(w.t(), x);
  return bias ? at::addmm(*bias, x, w) : at::mm(x, w);
}

// y as [..., N] for x [..., K].
Tensor in_shape_of(const Tensor& x, const Tensor& y) {
  auto shape = x.sizes().vec();
  shape.back() = y.size(-1);
  return y.view(shape);
}

Tensor activated(const std::string& name, const Tensor& x) {
  if (name == "silu") return at::silu(x);
  if (name == "relu") return at::relu(x);
  return at::gelu(x, name == "gelu_tanh" ? "tanh" : "none");
}

// --- ops ----------------------------------------------------------------------------------------

Tensor xw(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
  check_operands("xw", x, {{"w", w}}, bias);
  check_contraction("xw", {"x", x}, {"w", w});
  check_bias("xw", {"w", w}, bias);
  return in_shape_of(x, affine(flat(x, w), w, bias));
}

Tensor xuv(const Tensor& x, const Tensor& u, const Tensor& v, const std::optional<Tensor>& bias) {
  check_operands("xuv", x, {{"u", u}, {"v", v}}, bias);
  check_contraction("xuv", {"x", x}, {"u", u});
  check_contraction("xuv", {"u", u}, {"v", v});
  check_bias("xuv", {"v", v}, bias);
  return in_shape_of(x, affine(affine(flat(x, u), u), v, bias));
}

void check_svd_mlp(const Tensor& x, const Tensor& u_gate, const Tensor& v_gate, const Tensor& u_up,
                   const Tensor& v_up, const Tensor& u_down, const Tensor& v_down,
                   const std::string& activation) {
  constexpr auto op = "svd_mlp";
  const Named gate[] = {{"u_gate", u_gate}, {"v_gate", v_gate}};
  const Named up[] = {{"u_up", u_up}, {"v_up", v_up}};
  const Named down[] = {{"u_down", u_down}, {"v_down", v_down}};
  check_operands(op, x, {gate[0], gate[1], up[0], up[1], down[0], down[1]});
  check_contraction(op, {"x", x}, gate[0]);
  check_contraction(op, gate[0], gate[1]);
  check_contraction(op, {"x", x}, up[0]);
  check_contraction(op, up[0], up[1]);
  TORCH_CHECK_VALUE(v_gate.size(1) == v_up.size(1), op,
                    ": v_gate and v_up must have the same number of columns, got v_gate ",
                    v_gate.sizes(), " and v_up ", v_up.sizes());
  check_contraction(op, gate[1], down[0]);
  check_contraction(op, down[0], down[1]);
  TORCH_CHECK_VALUE(activation == "silu" || activation == "gelu" || activation == "gelu_tanh" ||
                        activation == "relu",
                    op, ": activation must be one of silu, gelu, gelu_tanh, relu; got '",
                    activation, "'");
}

Tensor svd_mlp(const Tensor& x, const Tensor& u_gate, const Tensor& v_gate, const Tensor& u_up,
               const Tensor& v_up, const Tensor& u_down, const Tensor& v_down,
               std::string activation) {
  check_svd_mlp(x, u_gate, v_gate, u_up, v_up, u_down, v_down, activation);
  const Tensor rows = flat(x, u_gate);
  Tensor hidden = activated(activation, affine(affine(rows, u_gate), v_gate));
  hidden.mul_(affine(affine(rows, u_up), v_up));
  return in_shape_of(x, affine(affine(hidden, u_down), v_down));
}

// --- registration -------------------------------------------------------------------------------

bool is_registered(const char* name) {
  return c10::Dispatcher::singleton().findSchema({name, ""}).has_value();
}

// The kernels are plain ATen, so they serve every device, as the Python package's do.
template <typename Kernel>
void define(torch::Library& library, const char* name, const char* schema, Kernel* kernel) {
  library.def(schema, {at::Tag::pt2_compliant_tag});
  library.impl(name, torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, kernel));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(neuronmm, library) {
  // This runs while the library is being loaded, where an exception would end the process.
  if (is_registered("neuronmm::xuv")) {
    TORCH_WARN("neuronmm ops are already registered in this process, by the Python package ",
               "neuronmm_ops or by another libneuronmm_ops; this one registers nothing: load one ",
               "of them");
    return;
  }
  define(library, "xuv", "xuv(Tensor x, Tensor u, Tensor v, Tensor? bias=None) -> Tensor", xuv);
  define(library, "xw", "xw(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", xw);
  define(library, "svd_mlp",
         "svd_mlp(Tensor x, Tensor u_gate, Tensor v_gate, Tensor u_up, Tensor v_up, "
         "Tensor u_down, Tensor v_down, str activation=\"silu\") -> Tensor",
         svd_mlp);
}

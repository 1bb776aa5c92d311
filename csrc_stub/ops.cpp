// The ops for a process without Python: their schemas, argument rules and numerics are those of
// the Python package (src/neuronmm_ops/ops: spec.py and definitions/).
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rules.h"

namespace {

using namespace rules;

// --- matmuls ------------------------------------------------------------------------------------

// Whether mm of one row in bfloat16 is faster than mv: with AVX512_BF16 alone, where only mm goes to
// oneDNN. As streams_by_mv of the Python package.
bool has_faster_mm() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1);
  const bool has_bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
  return at::hasMKLDNN() && has_bf16 && !has_amx;
#else
  return false;
#endif
}

// x [..., K] as rows [M, K], or as a vector [K] where mv is the CPU's faster matmul.
Tensor flat(const Tensor& x, const Tensor& w) {
  static const bool is_faster = has_faster_mm();
  const bool takes_mv = x.is_cpu() && !(is_faster && x.scalar_type() == at::kBFloat16);
  const bool is_vector = x.numel() > 0 && x.numel() == x.size(-1) && w.stride(0) == 1;
  if (is_vector && takes_mv) return x.reshape({-1});
  return x.dim() == 1 ? x.unsqueeze(0) : x.flatten(0, -2);
}

at::ScalarType wide(const Tensor& x) { return at::promote_types(x.scalar_type(), at::kFloat); }

// Each row of x as e4m3 times a power of two that gives it a root mean square of 1/2 to 1.
Tensor rounded_to_fp8(const Tensor& x) {
  const Tensor values = x.to(wide(x));
  const Tensor rms = values.square().mean(-1, /*keepdim=*/true).sqrt();
  const Tensor inverse = at::where(rms > 0, rms.reciprocal(), at::ones_like(rms));
  const Tensor exponent = std::get<1>(at::frexp(inverse)) - 1;
  const Tensor scaled = at::ldexp(values, exponent).clamp(-240, 240);
  const Tensor rounded = scaled.to(at::kFloat8_e4m3fn).to(values.scalar_type());
  return at::ldexp(rounded, -exponent).to(x.scalar_type());
}

// A one-byte matrix in a wider dtype, and what its values are to be multiplied by: the bits of e4m3,
// moved to the place of float16's exponent, are the value times 2^-8.
std::pair<Tensor, double> widened(const Tensor& strip, at::ScalarType dtype) {
  if (strip.scalar_type() == at::kChar) return {strip.to(dtype), 1.0};
  const Tensor bits = strip.view(at::kChar).to(at::kShort);
  bits.bitwise_left_shift_(7).bitwise_and_(~0x4000);
  return {bits.view(at::kHalf).to(dtype), 256.0};
}

// (a @ w) * scale + bias for a [M, K] and w in one byte, a strip of w at a time.
Tensor scaled_mm(const Tensor& a, const Tensor& w, const Tensor& scale,
                 const std::optional<Tensor>& bias) {
  const int64_t size = std::max<int64_t>((1 << 19) / std::max<int64_t>(w.size(0), 1), 128);
  // Entries of int8 are read past the end of rows that are no multiple of its step.
  const bool is_packed = w.is_cpu() && w.scalar_type() == at::kChar && w.t().is_contiguous() &&
                         a.scalar_type() == at::kBFloat16 && a.size(1) % 32 == 0;
  Tensor y = at::empty({a.size(0), w.size(1)}, a.options());
  const auto finish = [&](const Tensor& sums, double factor, int64_t start) {
    const int64_t end = std::min(start + sums.size(1), w.size(1));
    const Tensor own = scale.slice(0, start, end);
    Tensor result = sums.to(wide(sums)) * (factor == 1.0 ? own : own * factor);
    if (bias) result = result + bias->slice(0, start, end);
    y.slice(1, start, end).copy_(result);
  };
  if (is_packed && a.size(0) > 0 && a.size(0) <= 8) {
    const Tensor ones = at::ones({w.size(1)}, a.options());
    finish(at::_weight_int8pack_mm(a.contiguous(), w.t(), ones), 1.0, 0);
    return y;
  }
  // float16 would overflow before the scale is applied.
  const auto dtype = a.scalar_type() == at::kHalf ? at::kFloat : a.scalar_type();
  const Tensor given = a.to(dtype);
  for (int64_t start = 0; start < w.size(1); start += size) {
    const auto [matrix, factor] = widened(w.slice(1, start, start + size), dtype);
    finish(at::mm(given, matrix), factor, start);
  }
  return y;
}

// (x @ w) * scale + bias for x [M, K] or [K], where there is a scale.
Tensor affine(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias = std::nullopt,
              const std::optional<Tensor>& scale = std::nullopt, const std::string& compute = "x") {
  if (scale) {
    const Tensor given = compute == "fp8" ? rounded_to_fp8(x) : x;
    if (x.dim() == 2) return scaled_mm(given, w, *scale, bias);
    return scaled_mm(given.unsqueeze(0), w, *scale, bias).squeeze(0);
  }
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

using Scale = const std::optional<Tensor>&;

Tensor xw(const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias, Scale w_scale,
          std::string compute) {
  check_operands("xw", x, {{"w", w}}, bias);
  check_scales("xw", x, w, {{"w_scale", w_scale}});
  check_contraction("xw", {"x", x}, {"w", w});
  check_bias("xw", {"w", w}, bias);
  check_scale_size("xw", "N", {"w", w}, {"w_scale", w_scale});
  check_compute("xw", w, compute);
  return in_shape_of(x, affine(flat(x, w), w, bias, w_scale, compute));
}

Tensor xuv(const Tensor& x, const Tensor& u, const Tensor& v, const std::optional<Tensor>& bias,
           Scale u_scale, Scale v_scale, std::string compute) {
  check_operands("xuv", x, {{"u", u}, {"v", v}}, bias);
  check_scales("xuv", x, u, {{"u_scale", u_scale}, {"v_scale", v_scale}});
  check_contraction("xuv", {"x", x}, {"u", u});
  check_contraction("xuv", {"u", u}, {"v", v});
  check_bias("xuv", {"v", v}, bias);
  check_scale_size("xuv", "r", {"u", u}, {"u_scale", u_scale});
  check_scale_size("xuv", "N", {"v", v}, {"v_scale", v_scale});
  check_compute("xuv", u, compute);
  const Tensor inner = affine(flat(x, u), u, std::nullopt, u_scale, compute);
  return in_shape_of(x, affine(inner, v, bias, v_scale, compute));
}

Tensor mlp(const Tensor& x, const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
           const std::optional<Tensor>& x_up, std::string activation, Scale w_gate_scale,
           Scale w_up_scale, Scale w_down_scale, std::string compute) {
  constexpr auto op = "mlp";
  const Named gate{"w_gate", w_gate}, up{"w_up", w_up}, down{"w_down", w_down};
  check_operands(op, x, {gate, up, down});
  if (x_up) check_same(op, x, {"x", x}, {"x_up", *x_up});
  check_scales(op, x, w_gate,
               {{"w_gate_scale", w_gate_scale},
                {"w_up_scale", w_up_scale},
                {"w_down_scale", w_down_scale}});
  if (x_up) check_leading(op, x, {"x_up", *x_up});
  check_contraction(op, {"x", x}, gate);
  check_contraction(op, x_up ? Named{"x_up", *x_up} : Named{"x", x}, up);
  check_same_columns(op, gate, up);
  check_contraction(op, gate, down);
  check_scale_size(op, "I", gate, {"w_gate_scale", w_gate_scale});
  check_scale_size(op, "I", gate, {"w_up_scale", w_up_scale});
  check_scale_size(op, "N", down, {"w_down_scale", w_down_scale});
  check_activation(op, activation);
  check_compute(op, w_gate, compute);
  const auto product = [&](const Tensor& given, const Tensor& w, Scale scale) {
    return affine(given, w, std::nullopt, scale, compute);
  };
  const Tensor rows = flat(x, w_gate);
  Tensor up_rows = rows;
  if (x_up)
    up_rows = rows.dim() == 1 ? x_up->reshape({-1}) : x_up->reshape({rows.size(0), x_up->size(-1)});
  const Tensor hidden = activated(activation, product(rows, w_gate, w_gate_scale));
  return in_shape_of(x, product(hidden * product(up_rows, w_up, w_up_scale), w_down, w_down_scale));
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
  check_same_columns(op, gate[1], up[1]);
  check_contraction(op, gate[1], down[0]);
  check_contraction(op, down[0], down[1]);
  check_activation(op, activation);
}

Tensor svd_mlp(const Tensor& x, const Tensor& u_gate, const Tensor& v_gate, const Tensor& u_up,
               const Tensor& v_up, const Tensor& u_down, const Tensor& v_down,
               std::string activation, Scale u_gate_scale, Scale v_gate_scale, Scale u_up_scale,
               Scale v_up_scale, Scale u_down_scale, Scale v_down_scale, std::string compute) {
  check_svd_mlp(x, u_gate, v_gate, u_up, v_up, u_down, v_down, activation);
  const Named factors[] = {{"u_gate", u_gate}, {"v_gate", v_gate}, {"u_up", u_up},
                           {"v_gate", v_gate}, {"u_down", u_down}, {"v_down", v_down}};
  const NamedScale scales[] = {{"u_gate_scale", u_gate_scale}, {"v_gate_scale", v_gate_scale},
                               {"u_up_scale", u_up_scale},     {"v_up_scale", v_up_scale},
                               {"u_down_scale", u_down_scale}, {"v_down_scale", v_down_scale}};
  const char* const sizes[] = {"r_gate", "I", "r_up", "I", "r_down", "N"};
  for (const auto& scale : scales) check_scales("svd_mlp", x, u_gate, {scale});
  for (int i = 0; i < 6; ++i) check_scale_size("svd_mlp", sizes[i], factors[i], scales[i]);
  check_compute("svd_mlp", u_gate, compute);
  const auto pair = [&](const Tensor& given, const Tensor& u, Scale u_scale, const Tensor& v,
                        Scale v_scale) {
    return affine(affine(given, u, std::nullopt, u_scale, compute), v, std::nullopt, v_scale,
                  compute);
  };
  const Tensor rows = flat(x, u_gate);
  Tensor hidden = activated(activation, pair(rows, u_gate, u_gate_scale, v_gate, v_gate_scale));
  hidden.mul_(pair(rows, u_up, u_up_scale, v_up, v_up_scale));
  return in_shape_of(x, pair(hidden, u_down, u_down_scale, v_down, v_down_scale));
}

Tensor svd_qkv(const Tensor& x, const Tensor& u_query, const Tensor& v_query, const Tensor& u_key,
               const Tensor& v_key, const Tensor& u_value, const Tensor& v_value,
               const std::optional<Tensor>& bias_query, const std::optional<Tensor>& bias_key,
               const std::optional<Tensor>& bias_value, Scale u_query_scale, Scale v_query_scale,
               Scale u_key_scale, Scale v_key_scale, Scale u_value_scale, Scale v_value_scale,
               std::string compute) {
  constexpr auto op = "svd_qkv";
  struct Pair {
    Named u, v;
    const char *r, *N, *bias_name;
    const std::optional<Tensor>& bias;
    NamedScale u_scale, v_scale;
  };
  const Pair pairs[] = {
      {{"u_query", u_query}, {"v_query", v_query}, "r_query", "N_query", "bias_query", bias_query,
       {"u_query_scale", u_query_scale}, {"v_query_scale", v_query_scale}},
      {{"u_key", u_key}, {"v_key", v_key}, "r_key", "N_key", "bias_key", bias_key,
       {"u_key_scale", u_key_scale}, {"v_key_scale", v_key_scale}},
      {{"u_value", u_value}, {"v_value", v_value}, "r_value", "N_value", "bias_value", bias_value,
       {"u_value_scale", u_value_scale}, {"v_value_scale", v_value_scale}}};
  const auto& [query, key, value] = pairs;
  check_operands(op, x, {query.u, query.v, key.u, key.v, value.u, value.v});
  for (const auto& pair : pairs)
    if (pair.bias) check_same(op, x, {"x", x}, {pair.bias_name, *pair.bias});
  for (const auto& pair : pairs) check_scales(op, x, u_query, {pair.u_scale, pair.v_scale});
  for (const auto& pair : pairs) {
    check_contraction(op, {"x", x}, pair.u);
    check_contraction(op, pair.u, pair.v);
  }
  for (const auto& pair : pairs) check_bias(op, pair.v, pair.bias, pair.bias_name, pair.N);
  for (const auto& pair : pairs) {
    check_scale_size(op, pair.r, pair.u, pair.u_scale);
    check_scale_size(op, pair.N, pair.v, pair.v_scale);
  }
  check_compute(op, u_query, compute);
  const Tensor rows = flat(x, u_query);
  std::vector<Tensor> parts;
  for (const auto& [u, v, r, N, bias_name, bias, u_scale, v_scale] : pairs) {
    const Tensor inner = affine(rows, u.tensor, std::nullopt, u_scale.scale, compute);
    parts.push_back(affine(inner, v.tensor, bias, v_scale.scale, compute));
  }
  return in_shape_of(x, at::cat(parts, -1));
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
  define(library, "xuv",
         "xuv(Tensor x, Tensor u, Tensor v, Tensor? bias=None, Tensor? u_scale=None, "
         "Tensor? v_scale=None, str compute=\"x\") -> Tensor",
         xuv);
  define(library, "xw",
         "xw(Tensor x, Tensor w, Tensor? bias=None, Tensor? w_scale=None, str compute=\"x\") "
         "-> Tensor",
         xw);
  define(library, "mlp",
         "mlp(Tensor x, Tensor w_gate, Tensor w_up, Tensor w_down, Tensor? x_up=None, "
         "str activation=\"silu\", Tensor? w_gate_scale=None, Tensor? w_up_scale=None, "
         "Tensor? w_down_scale=None, str compute=\"x\") -> Tensor",
         mlp);
  define(library, "svd_mlp",
         "svd_mlp(Tensor x, Tensor u_gate, Tensor v_gate, Tensor u_up, Tensor v_up, "
         "Tensor u_down, Tensor v_down, str activation=\"silu\", Tensor? u_gate_scale=None, "
         "Tensor? v_gate_scale=None, Tensor? u_up_scale=None, Tensor? v_up_scale=None, "
         "Tensor? u_down_scale=None, Tensor? v_down_scale=None, str compute=\"x\") -> Tensor",
         svd_mlp);
  define(library, "svd_qkv",
         "svd_qkv(Tensor x, Tensor u_query, Tensor v_query, Tensor u_key, Tensor v_key, "
         "Tensor u_value, Tensor v_value, Tensor? bias_query=None, Tensor? bias_key=None, "
         "Tensor? bias_value=None, Tensor? u_query_scale=None, Tensor? v_query_scale=None, "
         "Tensor? u_key_scale=None, Tensor? v_key_scale=None, Tensor? u_value_scale=None, "
         "Tensor? v_value_scale=None, str compute=\"x\") -> Tensor",
         svd_qkv);
}

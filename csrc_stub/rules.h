// The rules for the arguments of the ops, with the texts of the Python package (ops/spec.py there).
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <optional>
#include <string>

namespace rules {

using at::Tensor;

struct Named {
  const char* name;
  const Tensor& tensor;
};

inline std::string dtype_name(const Tensor& tensor) {
  return "torch." + std::string(c10::getDtypeNames(tensor.scalar_type()).first);
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat ||
         dtype == at::kDouble;
}

inline bool is_one_byte(at::ScalarType dtype) {
  return dtype == at::kFloat8_e4m3fn || dtype == at::kChar;
}

inline void check_same(const char* op, const Tensor& x, const Named& like, const Named& other) {
  const auto& [name, tensor] = other;
  TORCH_CHECK_TYPE(tensor.scalar_type() == like.tensor.scalar_type(), op, ": ", like.name, " and ",
                   name, " must have the same dtype, got ", dtype_name(like.tensor), " and ",
                   dtype_name(tensor), "; cast one of them with .to(dtype)");
  TORCH_CHECK_TYPE(tensor.device() == x.device(), op, ": x and ", name,
                   " must be on the same device, got ", x.device(), " and ", tensor.device(),
                   "; move one of them with .to(device)");
}

inline void check_operands(const char* op, const Tensor& x, std::initializer_list<Named> matrices,
                    const std::optional<Tensor>& bias = std::nullopt) {
  TORCH_CHECK_VALUE(x.dim() > 0, op,
                    ": x must have at least one dimension [..., K], got a 0-D tensor");
  for (const auto& [name, matrix] : matrices)
    TORCH_CHECK_VALUE(matrix.dim() == 2, op, ": ", name, " must be a matrix, got shape ",
                      matrix.sizes());
  TORCH_CHECK_TYPE(is_supported(x.scalar_type()), op,
                   ": dtype must be bfloat16, float16, float32 or float64, got ", dtype_name(x),
                   "; cast x and the weights");
  const Named& first = *matrices.begin();
  const Named like = is_one_byte(first.tensor.scalar_type()) ? first : Named{"x", x};
  for (const auto& matrix : matrices) check_same(op, x, like, matrix);
  if (bias) check_same(op, x, {"x", x}, {"bias", *bias});
}

struct NamedScale {
  const char* name;
  const std::optional<Tensor>& scale;
};

inline void check_scales(const char* op, const Tensor& x, const Tensor& factor,
                  std::initializer_list<NamedScale> scales) {
  const bool needed = is_one_byte(factor.scalar_type());
  for (const auto& [name, scale] : scales) {
    TORCH_CHECK_VALUE(scale.has_value() == needed, op,
                      ": factors in torch.float8_e4m3fn or torch.int8 or torch.uint8 have scales, others have "
                      "none, got factors in ",
                      dtype_name(factor), " and ", needed ? "no " : "", name,
                      needed ? "; pass it" : "; leave it out");
    if (!scale) continue;
    TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat, op, ": ", name,
                     " must be torch.float32, got ", dtype_name(*scale), "; cast it");
    check_same(op, x, {name, *scale}, {name, *scale});
  }
}

inline void check_scale_size(const char* op, const char* size, const Named& matrix,
                      const NamedScale& scale) {
  const auto& given = scale.scale;
  TORCH_CHECK_VALUE(!given || (given->dim() == 1 && given->size(0) == matrix.tensor.size(1)), op,
                    ": ", scale.name, " must have shape [", size, "] with ", size,
                    " the columns of ", matrix.name, ", got ", scale.name, " ", given->sizes(),
                    " and ", matrix.name, " ", matrix.tensor.sizes());
}

inline void check_compute(const char* op, const Tensor& factor, const std::string& compute) {
  TORCH_CHECK_VALUE(compute == "x" || compute == "fp8", op, ": compute must be one of x, fp8; got '",
                    compute, "'");
  TORCH_CHECK_TYPE(compute == "x" || factor.scalar_type() == at::kFloat8_e4m3fn, op, ": compute='",
                   compute, "' needs factors in torch.float8_e4m3fn, got ", dtype_name(factor),
                   "; use compute='x'");
}

inline void check_contraction(const char* op, const Named& left, const Named& right) {
  TORCH_CHECK_VALUE(left.tensor.size(-1) == right.tensor.size(0), op, ": last dimension of ",
                    left.name, " must equal first dimension of ", right.name, ", got ", left.name,
                    " ", left.tensor.sizes(), " and ", right.name, " ", right.tensor.sizes());
}

inline void check_bias(const char* op, const Named& matrix, const std::optional<Tensor>& bias,
                const char* name = "bias", const char* size = "N") {
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->size(0) == matrix.tensor.size(1)), op,
                    ": ", name, " must have shape [", size, "] with ", size, " the columns of ",
                    matrix.name, ", got ", name, " ", bias->sizes(), " and ", matrix.name, " ",
                    matrix.tensor.sizes());
}

inline void check_same_columns(const char* op, const Named& left, const Named& right) {
  TORCH_CHECK_VALUE(left.tensor.size(1) == right.tensor.size(1), op, ": ", left.name, " and ",
                    right.name, " must have the same number of columns, got ", left.name, " ",
                    left.tensor.sizes(), " and ", right.name, " ", right.tensor.sizes());
}

inline void check_leading(const char* op, const Tensor& x, const Named& other) {
  const Tensor& tensor = other.tensor;
  const bool is_alike = tensor.dim() == x.dim() &&
                        tensor.sizes().slice(0, x.dim() - 1) == x.sizes().slice(0, x.dim() - 1);
  TORCH_CHECK_VALUE(is_alike, op, ": x and ", other.name,
                    " must have the same leading dimensions, got x ", x.sizes(), " and ",
                    other.name, " ", tensor.sizes());
}

inline void check_activation(const char* op, const std::string& name) {
  TORCH_CHECK_VALUE(name == "silu" || name == "gelu" || name == "gelu_tanh" || name == "relu", op,
                    ": activation must be one of silu, gelu, gelu_tanh, relu; got '", name, "'");
}

}  // namespace rules
